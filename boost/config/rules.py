"""Constraints between fields. The message of each rule names the field, its value and the nearest valid value."""

import itertools
import weakref
from collections.abc import Iterator, Sequence

from boost.config import layouts  # names are looked up when used: the layouts' specifications import this package
from boost.config.architecture import block_parameters, linears
from boost.config.linears import FACTORS, SPECTRAL
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.section import nearest
from boost.errors import ConfigError

_SOUND_MODELS: "weakref.WeakValueDictionary[int, ModelConfig]" = weakref.WeakValueDictionary()
"""Models that passed the checks of sizes, by identity. A plan checks thousands of configurations of one model."""


def check(config: Config) -> None:
    """Raises ConfigError for the first rule that the configuration violates."""
    config.model.require_implemented()
    sound = _SOUND_MODELS.get(id(config.model)) is config.model
    problems = itertools.chain(
        () if sound else _model_problems(config),
        config.model.problems(config),
        _parallel_problems(config),
        _sharding_problems(config),
        _train_problems(config),
        config.optim.problems(config),
        config.distill.problems(config),
        _pipeline_problems(config),
        _recovery_problems(config),
        graph_problems(config) if config.captures_passes else (),
    )
    for problem in problems:
        raise ConfigError(problem)
    _SOUND_MODELS[id(config.model)] = config.model


MAX_LAYERS = 10**4
"""A hundred times the deepest published models."""
MAX_PARAMETERS = 10**13
"""Ten times the largest published models. A larger model is a typo that would otherwise show up only as running out of memory."""
_USUAL = {"model.dim": 16384, "model.layers": 128, "model.vocab_size": 262144, "model.ffn_dim": 65536}
"""Dimensions of the largest models, used to find the one that is out of proportion."""


def out_of_proportion(model: ModelConfig) -> tuple[str, int]:
    """The field that is largest relative to the largest models, and its value."""
    values: dict[str, int] = {field: getattr(model, field.partition(".")[2]) for field in _USUAL}
    field = max(values, key=lambda name: values[name] / _USUAL[name])
    return field, values[field]


def _model_problems(config: Config) -> Iterator[str]:
    model = config.model
    if model.layers > MAX_LAYERS:  # before anything looks at each of them
        yield f"model.layers = {model.layers} exceeds {MAX_LAYERS}; set it to {_USUAL['model.layers']} or less"
    total = model.layers * sum(parameter.size for parameter in block_parameters(model, 0))
    total += 2 * model.vocab_size * model.dim
    if total > MAX_PARAMETERS:
        field, value = out_of_proportion(model)
        yield (
            f"{field} = {value} gives a model of {total:.1e} parameters, but the maximum is "
            f"{MAX_PARAMETERS:.0e}; set {field} to {_USUAL[field]} or less"
        )
    for slot in linears(model):
        maps = (*slot.linear.inner, *slot.linear.outer)
        drawn = [(part.name, part.width) for part in maps if part.initial == SPECTRAL]
        if drawn and drawn != [(name, drawn[0][1]) for name in FACTORS]:
            names = ", ".join(f"{part.name} ({part.width})" for part in maps)
            yield (
                f"model.factor_init = 'spectral' defines A and B of one rank, but {slot.name} of model.family = '{model.family}' "
                f"has {names}; use 'cola' or 'xavier'"
            )
    is_default = model.head_dim == max(model.dim // model.heads, 1)
    if model.dim % 2 and is_default:
        best = nearest(model.dim, model.dim + 2 * model.heads, lambda d: d % (2 * model.heads) == 0)
        yield f"model.dim = {model.dim} must be even, because rotary embeddings pair dimensions; nearest valid value: {best}"
    if model.dim % model.heads and is_default:
        best = _nearest_heads(config)
        yield (
            f"model.heads = {model.heads} must divide model.dim = {model.dim}, unless model.head_dim is set; nearest valid value: "
            f"{best}"
        )
    if model.head_dim % 2 and is_default:
        best = _nearest_heads(config)
        yield (
            f"model.heads = {model.heads} gives an odd head_dim of {model.head_dim}, but rotary embeddings pair dimensions; "
            f"nearest valid value: {best}"
        )
    elif model.head_dim % 2:
        yield (
            f"model.head_dim = {model.head_dim} must be even, because rotary embeddings pair dimensions; nearest valid value: "
            f"{model.head_dim + 1}"
        )
    if unknown := [layer for layer in model.nope_layers if layer >= model.layers]:
        yield (
            f"model.nope_layers = {list(model.nope_layers)} names block {unknown[0]}, but model.layers = {model.layers}; largest "
            f"valid value: {model.layers - 1}"
        )
    if model.rope_low_freq >= model.rope_high_freq:
        yield (
            f"model.rope_low_freq = {model.rope_low_freq} must be less than model.rope_high_freq = {model.rope_high_freq}; "
            "Llama 3.1 uses 1 and 4"
        )
    if model.heads % model.kv_heads:
        parts = layouts.num_shards(config.parallel)
        best = nearest(model.kv_heads, model.heads, lambda k: model.heads % k == 0 and _shares(k, parts))
        yield (
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}; nearest valid value: {best}"
        )


def _nearest_heads(config: Config) -> int:
    """Nearest number of heads that gives an even head_dim and fits kv_heads and TP; if there is none, only an even head_dim."""
    model, parts = config.model, layouts.num_shards(config.parallel)

    def fits(heads: int) -> bool:
        return model.dim % (2 * heads) == 0

    def suits(heads: int) -> bool:
        return fits(heads) and heads % model.kv_heads == 0 and heads % parts == 0

    best = nearest(model.heads, model.dim, suits)
    return best if suits(best) else nearest(model.heads, model.dim, fits)


def _parallel_problems(config: Config) -> Iterator[str]:
    model, parallel, seq_len, cp = config.model, config.parallel, config.train.seq_len, config.parallel.cp
    if cp > 1 and seq_len % (2 * cp):
        best = nearest(seq_len, 2 * max(seq_len, 2 * cp), lambda length: length % (2 * cp) == 0)
        yield (
            f"train.seq_len = {seq_len} must be divisible by 2 x parallel.cp = {2 * cp}, so that each process gets two equal "
            f"chunks of a sequence; nearest valid value: {best}"
        )
    if parallel.tp * cp > 1:
        yield from _overlap_problems(config)
    if parallel.tp == 1:
        return  # with one process, all layouts are equivalent
    spec = layouts.layout_spec(parallel.layout)
    if spec.single_process:
        yield (
            f"parallel.layout = '{spec.name}' keeps every weight in one process, but parallel.tp = {parallel.tp}; "
            f"use '{layouts.layouts_of(model)[0]}' or tp = 1"
        )
    elif not spec.suits(model):
        what = "low-rank factors" if spec.low_rank else "dense linears"
        has = "none" if model.low_rank else "dense linears only"
        families = [name for name, family in ModelConfig.choices.items() if family.low_rank != model.low_rank]
        yield (
            f"parallel.layout = '{spec.name}' shards {what}, but model.family = '{model.family}' has {has}; use "
            f"{_either(layouts.layouts_of(model))}, or model.family = {_either(families)}"
        )
    yield from _indivisible(config)
    yield from parallel.problems(config)


def _overlap_problems(config: Config) -> Iterator[str]:
    """Overlap: a micro-batch must split into two equal halves, by sequence or, if it has only one, by token."""
    parallel, train = config.parallel, config.train
    if parallel.overlap == "none":
        return
    if train.micro_batch > 1 and train.micro_batch % 2:
        yield (
            f"train.micro_batch = {train.micro_batch} must be 1 or even for parallel.overlap = '{parallel.overlap}'; nearest "
            f"valid value: {train.micro_batch + 1}, or set overlap = 'none'"
        )
    one, cp = train.micro_batch == 1, parallel.cp
    parts = (2 * parallel.tp if one else parallel.tp) * cp
    if (one or layouts.layout_spec(parallel.layout).residual == "tokens") and train.seq_len % parts:
        best = nearest(train.seq_len, 2 * max(train.seq_len, parts), lambda length: length % parts == 0)
        what = f"{'2 x ' * one}parallel.tp {'x cp ' * (cp > 1)}= {parts}"
        why = (
            "a sequence splits into two equal halves"
            if one
            else f"parallel.layout = '{parallel.layout}' can shard the tokens of each half"
        )
        yield (
            f"train.seq_len = {train.seq_len} must be divisible by {what}, so that {why} (parallel.overlap = "
            f"'{parallel.overlap}'); nearest valid value: {best}"
        )


def _either(names: Sequence[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _sharding_problems(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.shard_outer and parallel.shard == "none":
        yield (
            "parallel.shard_outer = true has no effect with parallel.shard = 'none'; set parallel.shard = 'full' or 'optimizer', "
            "or shard_outer = false"
        )
    if parallel.shard_outer and parallel.tp > 1 and not layouts.spec_of(parallel).has_whole_factors:
        holders = [name for name in layouts.layout_names() if layouts.layout_spec(name).has_whole_factors]
        yield (
            f"parallel.shard_outer = true shards factors that are replicated over TP, but parallel.layout = '{parallel.layout}' "
            f"replicates none; set shard_outer = false, or use parallel.layout = {_either(holders)}"
        )


MOST_GATHERED = 3
"""Largest number of stages per process whose weights stay gathered."""


def _pipeline_problems(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.layers
    if parallel.pp == 1 and parallel.virtual > 1:
        yield f"parallel.virtual = {parallel.virtual} requires parallel.pp > 1; nearest valid value: 1"
    if parallel.pp == 1 and parallel.split:
        yield f"parallel.split = {list(parallel.split)} requires parallel.pp > 1; remove it"
    if parallel.pp == 1:
        return
    if parallel.schedule in ("gpipe", "1f1b") and parallel.virtual > 1:
        yield (
            f"parallel.virtual = {parallel.virtual} requires parallel.schedule = 'interleaved-1f1b'; nearest "
            f"valid value with '{parallel.schedule}': 1"
        )
    if parallel.schedule == "interleaved-1f1b" and parallel.virtual == 1:
        yield "parallel.virtual = 1 is not enough for parallel.schedule = 'interleaved-1f1b'; set it to 2, or use '1f1b'"
    if parallel.stages > layers:
        way_out = f"parallel.pp: {layers // parallel.virtual}"
        if layers // parallel.virtual < 2:
            way_out = f"model.layers: {parallel.stages}"
        yield (
            f"parallel.pp x virtual = {parallel.pp} x {parallel.virtual} gives more stages than model.layers = {layers}; "
            f"nearest valid value of {way_out}"
        )
    split = list(parallel.split)
    if split and (len(split) != parallel.stages or sum(split) != layers):
        yield (
            f"parallel.split = {split} must have {parallel.stages} numbers (parallel.pp x virtual) that sum to "
            f"model.layers = {layers}; remove it for a balanced split"
        )
    if config.shards_weights and parallel.virtual > MOST_GATHERED:
        yield (
            f"parallel.virtual = {parallel.virtual} is too large with parallel.shard = '{parallel.shard}', because torch's "
            "schedules keep the gathered weights of at most three stages and re-gather all others; largest valid value: 3"
        )
    yield from _micro_batch_problems(config)


def _recovery_problems(config: Config) -> Iterator[str]:
    """Options that in-step recovery does not support."""
    parallel = config.parallel
    if config.run.recovery == "restart":
        return
    how = "run.recovery = 'in-step'"
    if parallel.dp == 1:
        yield f"{how} requires several replicas, but parallel.dp = 1; nearest valid value: 2"
    if parallel.shard == "full" or parallel.shard_outer:
        field = "parallel.shard = 'full'" if parallel.shard == "full" else "parallel.shard_outer = true"
        yield (
            f"{how} requires all weights on every replica, but {field} shards them over replicas; set parallel.shard = "
            "'optimizer' and shard_outer = false, or run.recovery = 'restart'"
        )
    if parallel.shard != "none" and config.optim.name != "adamw":
        yield (
            f"{how} can shard only the optimizer state of AdamW, but optim.name = '{config.optim.name}'; set parallel.shard = "
            "'none', or optim.name = 'adamw'"
        )
    if parallel.pp > 1 and parallel.schedule not in ("gpipe", "1f1b"):
        yield (
            f"{how} varies the number of micro-batches per replica, which parallel.schedule = '{parallel.schedule}' does not "
            "support; nearest valid value: '1f1b'"
        )


def graph_problems(config: Config) -> Iterator[str]:
    """Why the passes of a step cannot be one CUDA graph."""
    parallel, how = config.parallel, "train.cuda_graphs = 'on'"
    if parallel.pp > 1:
        yield f"{how} does not support pipelines, but parallel.pp = {parallel.pp}; set cuda_graphs = 'off', or pp = 1"
    if config.data.isolate_documents:
        yield (
            f"{how} needs the same shapes in every step, but data.isolate_documents = true makes them depend on the documents; "
            "set cuda_graphs = 'off', or isolate_documents = false"
        )
    if config.shards_weights:
        yield (
            f"{how} does not support gathered weights, but parallel.shard = '{parallel.shard}'; set cuda_graphs = 'off', or "
            "shard = 'none'"
        )
    if config.run.recovery == "in-step":
        yield (
            f"{how} needs the same collectives in every step, but run.recovery = 'in-step' lets replicas leave; set cuda_graphs = "
            "'off', or recovery = 'restart'"
        )


def _micro_batch_problems(config: Config) -> Iterator[str]:
    """Numbers of micro-batches that the schedules of torch.distributed.pipelining do not support."""
    parallel, train = config.parallel, config.train
    chunk = parallel.dp * train.micro_batch
    count = train.global_batch // chunk
    if not schedules(parallel, count):
        best = nearest(count, max(2 * count, parallel.pp), lambda n: schedules(parallel, n))
        how = f"n >= parallel.pp = {parallel.pp}"
        if parallel.schedule != "1f1b":
            how += f", and n divisible by n // {parallel.pp}"
        yield (
            f"train.global_batch = {train.global_batch} with parallel.dp = {parallel.dp} and train.micro_batch = "
            f"{train.micro_batch} gives n = {count} micro-batch{'es' * (count > 1)} per replica, but parallel.schedule = "
            f"'{parallel.schedule}' requires {how}; {_same_training(config)}nearest valid value: {best * chunk}"
        )


def schedules(parallel: ParallelConfig, n: int) -> bool:
    """Whether the pipeline schedule can run n micro-batches."""
    if parallel.pp == 1 or parallel.schedule == "gpipe":
        return True
    return n >= parallel.pp and (parallel.schedule == "1f1b" or n % (n // parallel.pp) == 0)


_MAX_MICRO_BATCH = 4096
"""Largest size to suggest."""


def _same_training(config: Config) -> str:
    """Advice to set train.micro_batch, which changes how a step is computed, but not what it learns; '' if no value fits."""
    train, parallel, tp = config.train, config.parallel, config.parallel.tp
    shards_tokens = tp > 1 and layouts.layout_spec(parallel.layout).residual == "tokens"

    def fits(micro: int) -> bool:
        count, left = divmod(train.global_batch, parallel.dp * micro)
        if left or not schedules(parallel, count) or (shards_tokens and micro * train.seq_len // parallel.cp % tp):
            return False
        return tp * parallel.cp == 1 or not any(_overlap_problems(config.changed(train={"micro_batch": micro})))

    now = min(train.micro_batch, _MAX_MICRO_BATCH)
    sizes = (*range(now, 0, -1), *range(now + 1, _MAX_MICRO_BATCH))  # first those that need less memory
    micro = next((micro for micro in sizes if fits(micro)), None)
    return "" if micro is None else f"set train.micro_batch = {micro}, which trains the same, or change the training: "


def _indivisible(config: Config) -> Iterator[str]:
    """Sizes that are not divisible by TP."""
    model, parallel, train = config.model, config.parallel, config.train
    spec, tp = layouts.layout_spec(parallel.layout), parallel.tp
    tokens = train.micro_batch * train.seq_len // parallel.cp
    shards_tokens = spec.residual == "tokens"
    sizes = {"model.dim": model.dim, "model.vocab_size": model.vocab_size}
    parts = layouts.num_shards(parallel)
    shards_heads = parts > 1
    if shards_heads:
        sizes |= {"model.heads": model.heads} | ({} if spec.mlp_token_local else {"model.ffn_dim": model.ffn_dim})
    sizes |= spec.rank_fields(model)

    def legal(p: int) -> bool:
        return (
            all(size % p == 0 for size in sizes.values())
            and (not shards_heads or _shares(model.kv_heads, p))
            and (not shards_tokens or tokens % p == 0)
        )

    if odd := [f"{field} = {size}" for field, size in sizes.items() if size % tp]:
        yield (
            f"parallel.tp = {tp} must divide {' and '.join(odd)}; nearest valid value: {nearest(tp, model.dim, legal)}"
        )
    if not _shares(model.kv_heads, parts):
        best = nearest(model.kv_heads, model.heads, lambda k: model.heads % k == 0 and _shares(k, parts))
        yield (
            f"model.kv_heads = {model.kv_heads} must be a divisor or a multiple of parallel.tp = {tp}; "
            f"nearest valid value: {best}"
        )
    if shards_tokens and tokens % tp:
        cp, chunks = parallel.cp, 2 * parallel.cp if parallel.cp > 1 else 1
        best = nearest(
            train.seq_len,
            2 * max(train.seq_len, tp * cp),
            lambda s: s % chunks == 0 and train.micro_batch * s // cp % tp == 0,
        )
        shared = f" and CP rank (parallel.cp = {cp})" if cp > 1 else ""
        yield (
            f"train.seq_len = {train.seq_len} with train.micro_batch = {train.micro_batch} gives {tokens} tokens per micro-batch"
            f"{shared}, which parallel.layout = '{spec.name}' cannot shard evenly over parallel.tp = {tp} processes; "
            f"{_same_training(config)}nearest valid value: {best}"
        )


def _shares(kv_heads: int, processes: int) -> bool:
    """Whether key/value heads divide evenly over processes, or processes over key/value heads."""
    return kv_heads % processes == 0 or processes % kv_heads == 0


def _train_problems(config: Config) -> Iterator[str]:
    train, parallel, data = config.train, config.parallel, config.data
    if data.mixture and data.store != type(data).model_fields["store"].default:
        yield f"data.store = '{data.store}' and data.mixture are both set; remove one, or move '{data.store}' into data.mixture"
    chunk = parallel.dp * train.micro_batch
    if train.global_batch % chunk:
        best = max(chunk, (2 * train.global_batch + chunk) // (2 * chunk) * chunk)
        yield (
            f"train.global_batch = {train.global_batch} must be divisible by {chunk}, the product of parallel.dp = {parallel.dp} "
            f"and train.micro_batch = {train.micro_batch}; {_same_training(config)}nearest valid value: {best}"
        )
    if train.profile and (len(train.profile) != 2 or train.profile[0] > train.profile[1]):
        first, last = min(train.profile), max(train.profile)
        yield f"train.profile = {list(train.profile)} must be [first step, last step]; nearest valid value: [{first}, {last}]"
    if train.keep_best and not train.eval_every:
        yield (
            "train.keep_best = true needs periodic evaluations, but train.eval_every = 0; "
            "set train.eval_every, for example to 100"
        )
    if train.sample_prompts and not train.sample_tokens:
        yield (
            f"train.sample_prompts = {list(train.sample_prompts)!r} has no effect with train.sample_tokens = 0; "
            "set train.sample_tokens, for example to 100"
        )
    if "" in train.sample_prompts:
        yield f"train.sample_prompts = {list(train.sample_prompts)!r} contains an empty prompt; remove it"
    gatherers = [name for name in layouts.layout_names() if layouts.layout_spec(name).gathers_latents]
    if train.recompute.startswith("low-rank") and not config.model.low_rank:
        yield (
            f"train.recompute = '{train.recompute}' saves the latents of low-rank bottlenecks, but model.family = 'dense' has "
            "none; use 'full-block' or 'none', or model.family = 'svd' or 'cola'"
        )
    if train.recompute == "low-rank-sharded" and parallel.layout not in gatherers:
        yield (
            "train.recompute = 'low-rank-sharded' saves latents before they are gathered, but parallel.layout = "
            f"'{parallel.layout}' does not gather latents; use 'low-rank', or parallel.layout = {_either(gatherers)}"
        )
    if train.recompute_every > config.model.layers:
        yield (
            f"train.recompute_every = {train.recompute_every} exceeds model.layers = {config.model.layers}; "
            f"largest valid value: {config.model.layers}"
        )
    gathers_once = parallel.shard == "optimizer" or (parallel.sharded and parallel.pp > 1)
    if train.reduce_dtype == "bfloat16" and gathers_once and not config.divides_moments:
        yield (
            "train.reduce_dtype = 'bfloat16' with weights that are gathered once per step (parallel.shard = "
            f"'{parallel.shard}'{', parallel.pp > 1' * (parallel.shard == 'full')}) would accumulate gradients in bf16 too; "
            "set train.reduce_dtype = 'param_dtype', or parallel.shard = 'none'"
        )
    widths = {"bfloat16": 16, "float32": 32, "float64": 64}
    if widths[train.param_dtype] < widths[train.compute_dtype]:
        yield (
            f"train.param_dtype = '{train.param_dtype}' is narrower than train.compute_dtype = '{train.compute_dtype}'; "
            f"nearest valid value: '{train.compute_dtype}'"
        )
