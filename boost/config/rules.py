"""What several fields must agree on. Each rule names the field, its value and the nearest legal one."""

from collections.abc import Iterator, Sequence

from boost.config.architecture import SLOTS
from boost.config.layouts import layout_names, layout_spec, layouts_of, num_shards, spec_of
from boost.config.numbers import nearest
from boost.config.optimizers import optimizer_problems
from boost.config.schema import Config
from boost.errors import ConfigError


def check(config: Config) -> None:
    """Raises ConfigError with the first rule that the configuration breaks; returns nothing otherwise."""
    for problem in _problems(config):
        raise ConfigError(problem)


def _problems(config: Config) -> Iterator[str]:
    yield from _model_problems(config)
    yield from _parallel_problems(config)
    yield from _sharding_problems(config)
    yield from _train_problems(config)
    yield from optimizer_problems(config)
    yield from _pipeline_problems(config)


def _model_problems(config: Config) -> Iterator[str]:
    model = config.model
    if model.dim % 2:
        best = nearest(model.dim, model.dim + 2 * model.heads, lambda d: d % (2 * model.heads) == 0)
        yield f"model.dim = {model.dim} must be even, for the pairs of rotary; the nearest legal value is {best}"
    if model.dim % model.heads:
        best = _nearest_heads(config)
        yield f"model.heads = {model.heads} must divide model.dim = {model.dim}; the nearest legal value is {best}"
    if model.head_dim % 2:
        best = _nearest_heads(config)
        yield (
            f"model.heads = {model.heads} makes heads of odd width {model.head_dim}, and rotary needs pairs; "
            f"the nearest legal value is {best}"
        )
    if model.heads % model.kv_heads:
        best = nearest(model.kv_heads, model.heads, lambda k: model.heads % k == 0 and _can_share(config, k))
        yield (
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}; the nearest legal value is {best}"
        )
    yield from _crossing_problems(config)
    if model.family == "dense":
        if model.rank is not None:
            yield f"model.rank = {model.rank} has no meaning for model.family = 'dense'; remove it or take 'svd' or 'cola'"
        for field in ("latent_act", "factor_init"):
            if (value := getattr(model, field)) != "none":
                yield f"model.{field} = '{value}' has no meaning for model.family = 'dense'; the legal value is 'none'"
    elif model.rank is None:
        yield f"model.rank is missing for model.family = '{model.family}'; the usual value is model.dim / 4 = {model.dim // 4}"
    elif model.rank > min(model.dim, model.ffn_dim):
        best = min(model.dim, model.ffn_dim)
        yield f"model.rank = {model.rank} is wider than the linears it factors; the largest legal value is {best}"
    elif model.factor_init == "none":
        yield "model.factor_init = 'none' is for model.family = 'dense'; take 'cola', 'xavier' or 'spectral'"
    yield from _rank_problems(config)


def _crossing_problems(config: Config) -> Iterator[str]:
    model = config.model
    for field, legal in (("over", "'cola' or 'svd'"), ("gate", "'identity', 'tensor' or 'dense'")):
        value = getattr(model, field)
        if model.crosses and value == "none":
            yield f"model.{field} = 'none' leaves model.family = 'lax' undefined; take {legal}"
        if not model.crosses and value != "none":
            yield (
                f"model.{field} = '{value}' is a choice of model.family = 'lax', not of '{model.family}'; the legal value is "
                "'none'"
            )
    if by_block := [name for name in model.ranks if name.startswith("layers.") and model.crosses]:
        yield (
            f"model.ranks.{by_block[0]}: under model.family = 'lax' latents cross to the same linear of the next block, so "
            f"that its rank is the same in all; write ranks.{by_block[0].partition('.')[2].partition('.')[2]}"
        )


def _rank_problems(config: Config) -> Iterator[str]:
    """Ranks of single linears."""
    model = config.model
    names, numbers = ("attn", "mlp", *SLOTS), {str(number) for number in range(model.layers)} if model.ranks else set()
    for name, rank in model.ranks.items():
        _, layer, slot = ("", "", name) if not name.startswith("layers.") else (*name.split(".", 2), "", "")[:3]
        if slot not in (SLOTS if layer else names) or (layer and layer not in numbers):
            example = f", or layers.0.{SLOTS[0]} to layers.{model.layers - 1}.{SLOTS[-1]} for one block"
            yield f"model.ranks.{name} is no linear of this model; the names are {', '.join(names)}{example}"
            continue
        if not model.low_rank:
            yield f"model.ranks.{name} = {rank} has no meaning for model.family = 'dense'; remove it or take 'svd' or 'cola'"
        # Not checked against key/value heads, which may be few: a bottleneck wider than those is no bottleneck, but legal.
        most = model.dim if slot.startswith("attn") else min(model.dim, model.ffn_dim)
        if rank > most:
            yield f"model.ranks.{name} = {rank} is wider than the linears it factors; the largest legal value is {most}"


def _nearest_heads(config: Config) -> int:
    """Heads that divide the width into pairs, for the key/value heads and processes there are, or at least for the width."""
    model, parts = config.model, num_shards(config.parallel)

    def fits(heads: int) -> bool:
        return model.dim % (2 * heads) == 0

    def suits(heads: int) -> bool:
        return fits(heads) and heads % model.kv_heads == 0 and heads % parts == 0

    best = nearest(model.heads, model.dim, suits)
    return best if suits(best) else nearest(model.heads, model.dim, fits)


def _can_share(config: Config, kv_heads: int) -> bool:
    parts = num_shards(config.parallel)
    return parts == 1 or _shares(kv_heads, parts)


def _parallel_problems(config: Config) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    if parallel.tp == 1:
        return  # one process is the whole function, whatever the layout
    spec = layout_spec(parallel.layout)
    if spec.single_process:
        yield (
            f"parallel.layout = '{spec.name}' holds every weight in one process, but parallel.tp = {parallel.tp}; "
            f"take '{layouts_of(model)[0]}' or tp = 1"
        )
    elif spec.low_rank != model.low_rank:
        what = "low-rank factors" if spec.low_rank else "dense linears"
        has = "none" if model.low_rank else "dense linears only"
        families = "'dense'" if model.low_rank else "'svd', 'cola' or 'lax'"
        yield (
            f"parallel.layout = '{spec.name}' shards {what}; model.family = '{model.family}' has {has}: take "
            f"{_either(layouts_of(model))}, or model.family = {families}"
        )
    yield from _misplaced_options(config)
    yield from _indivisible(config)
    yield from spec.problems(config)


def _misplaced_options(config: Config) -> Iterator[str]:
    """Options that the layout in effect does not read."""
    parallel = config.parallel
    own = layout_spec(parallel.layout).options
    owners: dict[str, list[str]] = {}
    for name in layout_names():
        for field in layout_spec(name).options:
            owners.setdefault(field, []).append(name)
    for field, names in owners.items():
        value, default = getattr(parallel, field), layout_spec(names[0]).options[field][0]
        if field not in own and value != default:
            yield (
                f"parallel.{field} = '{value}' belongs to parallel.layout = {_either(names)}, not to '{parallel.layout}'; the "
                f"valid value is '{default}'"
            )


def _either(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _sharding_problems(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.shard_outer and parallel.shard == "none":
        yield (
            "parallel.shard_outer = true says how weights are sharded, but parallel.shard = 'none'; take 'full' or 'optimizer', "
            "or shard_outer = false"
        )
    if parallel.shard_outer and parallel.tp > 1 and not spec_of(parallel).has_whole_factors:
        holders = [name for name in layout_names() if layout_spec(name).has_whole_factors]
        yield (
            f"parallel.shard_outer = true shards factors that parallel.layout = {_either(holders)} holds whole; "
            f"'{parallel.layout}' has none: take shard_outer = false, or that layout"
        )


def _pipeline_problems(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.layers
    if parallel.pp == 1 and parallel.virtual > 1:
        yield f"parallel.virtual = {parallel.virtual} stages a process make a pipeline only with parallel.pp > 1; take virtual = 1"
    if parallel.pp == 1 and parallel.split:
        yield f"parallel.split = {list(parallel.split)} is for parallel.pp > 1; leave it out"
    if parallel.pp == 1:
        return
    if parallel.schedule in ("gpipe", "1f1b") and parallel.virtual > 1:
        yield (
            f"parallel.virtual = {parallel.virtual} is for parallel.schedule = 'interleaved-1f1b' or 'zero-bubble'; under "
            f"'{parallel.schedule}' the legal value is 1"
        )
    if parallel.schedule == "interleaved-1f1b" and parallel.virtual == 1:
        yield "parallel.virtual = 1 leaves parallel.schedule = 'interleaved-1f1b' nothing to interleave; take 2, or '1f1b'"
    if parallel.stages > layers:
        way_out = f"parallel.pp is {layers // parallel.virtual}"
        if layers // parallel.virtual < 2:
            way_out = f"model.layers is {parallel.stages}"
        yield (
            f"parallel.pp x virtual = {parallel.pp} x {parallel.virtual} stages are more than model.layers = {layers}; the "
            f"nearest legal value of {way_out}"
        )
    split = list(parallel.split)
    if split and (len(split) != parallel.stages or sum(split) != layers):
        yield (
            f"parallel.split = {split} must be {parallel.stages} numbers (parallel.pp x virtual) that sum up to "
            f"model.layers = {layers}; leave it out for a balanced one"
        )
    recompute = config.train.recompute
    if parallel.schedule == "zero-bubble" and recompute != "none":
        yield (
            f"train.recompute = '{recompute}' computes a block again for each of the many passes that parallel.schedule = "
            "'zero-bubble' makes through it; take 'none', or 'interleaved-1f1b'"
        )
    if parallel.schedule == "zero-bubble" and parallel.shard == "full" and parallel.sharded:
        yield (
            "parallel.shard = 'full' lets go of weights between forward and backward pass, and the two backward passes of "
            "parallel.schedule = 'zero-bubble' do not find them again; take shard = 'optimizer', or 'interleaved-1f1b'"
        )
    if parallel.sharded and parallel.virtual > 3:
        yield (
            f"parallel.virtual = {parallel.virtual}: torch's schedules keep the shared weights of three stages, and gather "
            f"those of more again and again; with parallel.shard = '{parallel.shard}' the largest legal value is 3"
        )
    yield from _micro_batch_problems(config)


def _micro_batch_problems(config: Config) -> Iterator[str]:
    """Numbers of micro-batches that the schedules of torch.distributed.pipelining can order."""
    parallel, train = config.parallel, config.train
    chunk = parallel.dp * train.micro_batch
    count = train.global_batch // chunk

    def legal(n: int) -> bool:
        return n >= parallel.pp and (parallel.schedule == "1f1b" or n % (n // parallel.pp) == 0)

    if parallel.schedule != "gpipe" and not legal(count):
        best = nearest(count, max(2 * count, parallel.pp), legal)
        how = f"at least parallel.pp = {parallel.pp}"
        if parallel.schedule != "1f1b":
            how += f", and a multiple of their number of rounds of {parallel.pp}"
        yield (
            f"train.global_batch = {train.global_batch} makes {count} micro-batches of {train.micro_batch} for each of "
            f"{parallel.dp} replicas, and parallel.schedule = '{parallel.schedule}' needs {how}; the nearest legal value is "
            f"{best * chunk}"
        )


def _indivisible(config: Config) -> Iterator[str]:
    """Sizes that the TP processes cannot share equally."""
    model, parallel, train = config.model, config.parallel, config.train
    spec, tp = layout_spec(parallel.layout), parallel.tp
    tokens = train.micro_batch * train.seq_len
    shards_tokens = spec.residual == "tokens"
    sizes = {"model.dim": model.dim, "model.vocab_size": model.vocab_size}
    shards_heads = num_shards(parallel) > 1
    if shards_heads:
        sizes |= {"model.heads": model.heads, "model.ffn_dim": model.ffn_dim}
    sizes |= spec.rank_fields(model)

    def legal(p: int) -> bool:
        return (
            all(size % p == 0 for size in sizes.values())
            and (not shards_heads or _shares(model.kv_heads, p))
            and (not shards_tokens or tokens % p == 0)
        )

    if odd := [f"{field} = {size}" for field, size in sizes.items() if size % tp]:
        yield (
            f"parallel.tp = {tp} must divide {' and '.join(odd)}; the nearest legal value is {nearest(tp, model.dim, legal)}"
        )
    if not _can_share(config, model.kv_heads):
        best = nearest(model.kv_heads, model.heads, lambda k: model.heads % k == 0 and _can_share(config, k))
        yield (
            f"model.kv_heads = {model.kv_heads} and parallel.tp = {tp}: one must divide the other; "
            f"the nearest legal value of model.kv_heads is {best}"
        )
    if shards_tokens and tokens % tp:
        best = nearest(train.seq_len, 2 * max(train.seq_len, tp), lambda s: train.micro_batch * s % tp == 0)
        yield (
            f"train.micro_batch x train.seq_len = {train.micro_batch} x {train.seq_len} = {tokens} tokens, which "
            f"parallel.layout = '{spec.name}' shards, must be divisible by parallel.tp = {tp}; "
            f"the nearest legal value of train.seq_len is {best}"
        )


def _shares(kv_heads: int, processes: int) -> bool:
    """Whether each process can have equally many key/value heads, or each head equally many processes."""
    return kv_heads % processes == 0 or processes % kv_heads == 0


def _train_problems(config: Config) -> Iterator[str]:
    train, optim, dp = config.train, config.optim, config.parallel.dp
    chunk = dp * train.micro_batch
    if train.global_batch % chunk:
        best = max(chunk, (2 * train.global_batch + chunk) // (2 * chunk) * chunk)
        yield (
            f"train.global_batch = {train.global_batch} must be divisible by parallel.dp x train.micro_batch = "
            f"{dp} x {train.micro_batch} = {chunk}; the nearest legal value is {best}"
        )
    if optim.decay_steps and optim.schedule != "constant":
        yield (
            f"optim.decay_steps = {optim.decay_steps} belongs to optim.schedule = 'constant', not to "
            f"'{optim.schedule}'; the legal value is 0"
        )
    if optim.decay_steps and optim.warmup_steps + optim.decay_steps > train.steps:
        yield (
            f"optim.decay_steps = {optim.decay_steps} and optim.warmup_steps = {optim.warmup_steps} do not fit into "
            f"train.steps = {train.steps}; the largest legal value is {max(train.steps - optim.warmup_steps, 0)}"
        )
    yield from _recompute_problems(config)
    widths = {"bfloat16": 16, "float32": 32, "float64": 64}
    if widths[train.param_dtype] < widths[train.compute_dtype]:
        yield (
            f"train.param_dtype = '{train.param_dtype}' is narrower than train.compute_dtype = '{train.compute_dtype}'; "
            f"the nearest legal value is '{train.compute_dtype}'"
        )


def _recompute_problems(config: Config) -> Iterator[str]:
    train, layout = config.train, config.parallel.layout
    gatherers = [name for name in layout_names() if layout_spec(name).gathers_latents]
    if train.recompute.startswith("low-rank") and not config.model.low_rank:
        yield (
            f"train.recompute = '{train.recompute}' keeps the latents of a bottleneck, which model.family = 'dense' has "
            "not; take 'full-block' or 'none', or model.family = 'svd' or 'cola'"
        )
    if train.recompute == "low-rank-sharded" and layout not in gatherers:
        yield (
            f"train.recompute = 'low-rank-sharded' saves latents before parallel.layout = {_either(gatherers)} gathers them; "
            f"'{layout}' gathers none: take 'low-rank', or that layout"
        )
    if train.recompute_every > config.model.layers:
        yield (
            f"train.recompute_every = {train.recompute_every} is more than model.layers = {config.model.layers}; the "
            f"largest legal value is {config.model.layers}"
        )
