"""What several fields must agree on. Each rule names the field, its value and the nearest legal one."""

from collections.abc import Callable, Iterator

from boost.config.schema import Config
from boost.errors import ConfigError


def check(config: Config) -> None:
    """Raises ConfigError with the first rule that the configuration breaks; returns nothing otherwise."""
    for problem in _problems(config):
        raise ConfigError(problem)


def check_runnable(config: Config) -> None:
    """Raises ConfigError where a legal configuration asks for what this version cannot run yet."""
    if config.parallel.pp > 1:
        raise ConfigError(
            f"parallel.pp = {config.parallel.pp}: this version has no pipeline stages yet; the nearest legal value is 1"
        )


def nearest(value: int, largest: int, legal: Callable[[int], bool]) -> int:
    """The legal integer from 1 to `largest` that is closest to `value`, the larger of two at one distance.

    1 must be legal; fields are bounded, so the search is short.
    """
    for distance in range(max(value, largest)):
        for candidate in (value + distance, value - distance):
            if 1 <= candidate <= largest and legal(candidate):
                return candidate
    return 1


def _problems(config: Config) -> Iterator[str]:
    yield from _model_problems(config)
    yield from _parallel_problems(config)
    yield from _train_problems(config)


def _model_problems(config: Config) -> Iterator[str]:
    model = config.model
    if model.dim % 2:
        yield f"model.dim = {model.dim} must be even, for the pairs of rotary; the nearest legal value is {model.dim + 1}"
    if model.dim % model.heads:
        best = nearest(model.heads, model.dim, lambda h: model.dim % (2 * h) == 0)
        yield f"model.heads = {model.heads} must divide model.dim = {model.dim}; the nearest legal value is {best}"
    if model.head_dim % 2:
        best = nearest(model.heads, model.dim, lambda h: model.dim % (2 * h) == 0)
        yield (
            f"model.heads = {model.heads} makes heads of odd width {model.head_dim}, and rotary needs pairs; "
            f"the nearest legal value is {best}"
        )
    if model.heads % model.kv_heads:
        best = nearest(model.kv_heads, model.heads, lambda h: model.heads % h == 0)
        yield (
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}; the nearest legal value is {best}"
        )
    if model.family == "dense":
        if model.rank is not None:
            yield f"model.rank = {model.rank} has no meaning for model.family = 'dense'; remove it or take 'svd' or 'cola'"
        if model.latent_act != "none":
            yield f"model.latent_act = '{model.latent_act}' has no meaning for model.family = 'dense'; the legal value is 'none'"
    elif model.rank is None:
        yield f"model.rank is missing for model.family = '{model.family}'; the usual value is model.dim / 4 = {model.dim // 4}"
    elif model.rank > min(model.dim, model.ffn_dim):
        best = min(model.dim, model.ffn_dim)
        yield f"model.rank = {model.rank} is wider than the linears it factors; the largest legal value is {best}"


def _parallel_problems(config: Config) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tp = parallel.tp
    if parallel.layout == "single" and tp > 1:
        yield f"parallel.layout = 'single' holds every weight in one process, but parallel.tp = {tp}; take 'btp' or tp = 1"
    if tp > 1 and model.family == "dense":
        yield (
            f"parallel.layout = '{parallel.layout}' cuts a bottleneck, which model.family = 'dense' has not; "
            "take parallel.tp = 1, or model.family = 'svd' or 'cola'"
        )
    sizes = {f"model.{name}": getattr(model, name) for name in ("heads", "kv_heads", "dim", "ffn_dim", "vocab_size")}
    if odd := [f"{field} = {size}" for field, size in sizes.items() if size % tp]:
        best = nearest(tp, model.heads, lambda p: all(size % p == 0 for size in sizes.values()))
        yield f"parallel.tp = {tp} must divide {' and '.join(odd)}; the nearest legal value is {best}"


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
    widths = {"bfloat16": 16, "float32": 32, "float64": 64}
    if widths[train.param_dtype] < widths[train.compute_dtype]:
        yield (
            f"train.param_dtype = '{train.param_dtype}' is narrower than train.compute_dtype = '{train.compute_dtype}'; "
            f"the nearest legal value is '{train.compute_dtype}'"
        )
