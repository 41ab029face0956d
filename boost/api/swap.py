"""`lowrank` replaces linears of any PyTorch or transformers model with factors; `load_lowrank` and `merge_lowrank` use the result.

The config.json of a transformers model stores the ranks as `boost_lowrank`: `save_pretrained` writes them and `load_lowrank`
reads them.
"""

import fnmatch
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from boost.errors import ConfigError
from boost.format import format_count
from boost.nn.linear import LowRankLinear
from boost.nn.plain import attached
from boost.train.progress import progress

log = logging.getLogger(__name__)
SAVED = "boost_lowrank"
"""Key in config.json: {"ranks": {module: rank}, "activation": "none"}."""

PLACES = ("subfolder", "revision", "cache_dir", "force_download", "proxies", "local_files_only", "token")
"""Options of `from_pretrained` that say where a folder is, for its configuration as for its weights."""

_PEFT = {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}
"""peft's base classes of modules that hold an adapter or a trained copy, recognized without importing it."""


def lowrank(
    module: nn.Module,
    rank: int | float | Mapping[str, int | float] = 0.25,
    *,
    init: str = "svd",
    activation: str = "none",
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
) -> nn.Module:
    """Replaces linears inside `module` with `boost.nn.LowRankLinear`, in place, and returns it. The logger `boost.api.swap` reports
    how many at level INFO; `ranks_of` lists them.

    Left unchanged unless `include` or `rank` names them exactly: heads of transformers models (output embeddings, and what is
    outside the base model, such as `score` or `classifier`), and routers (one output per expert next to them: small errors choose
    other experts). Linears that share their weight with another module, such as a tied head, and linears whose factors would not
    have fewer parameters are also left unchanged. Fused experts are not linears, but one 3-D weight: they stay dense, and a warning
    counts them. Factors require gradients if their linear does.

    Factorize before you add adapters with peft, hooks, or another forward: such linears are refused. Linears with other parameters,
    buffers or submodules of their own, such as parametrizations, are left unchanged.

    Args:
        module: any model. Linears include transformers' `Conv1D` (GPT-2) and subclasses of `nn.Linear` with the same function.
        rank: rank of the factors; a float is a fraction of each linear's smaller width. A mapping has one rank for each pattern of
            module names: the first match wins, and linears without a match are left unchanged.
        init: "svd" approximates each weight by its truncated SVD; "random" draws new factors.
        activation: activation between the factors, "none" or "silu".
        include, exclude: patterns of module names, such as "*.mlp.*" (fnmatch).

    Raises ConfigError if no linear matches, a pattern matches nothing, an argument is invalid, DDP or FSDP wraps the module, a
    matching linear has an adapter, hooks, or a quantized or sharded weight, or `include` names a linear with a shared weight. An
    error leaves the module as it was.
    """
    _check_unwrapped(module)
    by_pattern = rank if isinstance(rank, Mapping) else {"*": rank}
    for of_pattern in by_pattern.values():
        _check_rank(of_pattern)
    included, excluded = _patterns("include", include), _patterns("exclude", exclude)
    unused = list(_patterns("rank", tuple(by_pattern)))
    before = sum(parameter.numel() for parameter in module.parameters())
    special = dict.fromkeys(_heads(module), "heads") | dict.fromkeys(_routers(module), "routers")
    left: dict[str, list[str]] = {}
    linears, chosen, matched = list(_linears(module, included, excluded)), [], False
    for name, linear in linears:
        pattern = next((pattern for pattern in by_pattern if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        if linear in special and name not in (*included, *by_pattern):
            left.setdefault(special[linear], []).append(name)
            continue
        matched, value = True, by_pattern[pattern]
        unused = [other for other in unused if other != pattern]
        rows, columns = linear.weight.shape
        r = value if isinstance(value, int) else max(int(value * min(rows, columns)), 1)
        if r * (rows + columns) < rows * columns:
            if what := attached(linear):
                raise ConfigError(
                    f"'{name}' {what}, which its factors would not have; attach it after boost.lowrank, or exclude the linear"
                )
            weight: Any = linear.weight
            dtype = weight.dtype
            is_wide = dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex)
            if is_traceable_wrapper_subclass(weight) or not is_wide:  # a wrapper holds other tensors
                raise ConfigError(
                    f"'{name}' has a weight of type {type(weight).__name__} ({dtype}); factorize before quantizing or sharding, or "
                    "exclude the linear"
                )
            if init == "svd" and not weight.is_meta and not weight.isfinite().all():
                raise ConfigError(f"'{name}' has NaN or infinite weights; repair them, or exclude the linear")
            chosen.append((name, linear, r))
    if not chosen:
        why = "no replaceable linear matches these patterns"
        if matched:
            why = "no factors would be smaller than the linear that they replace; use a lower rank"
        elif left:
            kinds = " and ".join(f"{', '.join(map(repr, names))} are {kind}" for kind, names in left.items())
            why = f"{kinds}, which stay dense unless include names them exactly"
        elif linears:
            why = f"no pattern in rank matches a linear, such as {linears[0][0]!r}"
        elif any(_matches(name, included) for name in ranks_of(module)):
            why = "the matching linears are already factorized"
        raise ConfigError(
            f"rank = {rank}, include = {included}: nothing to replace in {type(module).__name__}, because {why}"
        )
    if unused:
        raise ConfigError(f"rank: pattern {unused[0]!r} matches no linear that is left to it; fix or remove it")
    for name, linear, r in progress(chosen, "factorizing", enabled=init == "svd"):
        _replace(module, name, linear, r, init, activation)
    after = sum(parameter.numel() for parameter in module.parameters())
    log.info("linears factorized: %d; parameters: %s -> %s", len(chosen), format_count(before), format_count(after))
    for kind, names in left.items():
        log.info("%s left dense: %s", kind, ", ".join(names))
    fused = {
        name: parameter
        for name, parameter in module.named_parameters()
        if _matches(name, included) and not _matches(name, excluded) and _matches(name, tuple(by_pattern))
        and _is_fused(parameter, module.get_submodule(name.rpartition(".")[0]))
    }  # fmt: skip
    if fused:
        (name, first), count = next(iter(fused.items())), format_count(sum(weight.numel() for weight in fused.values()))
        log.warning(
            "%d fused weights with %s parameters stay dense, such as %s %s (experts): boost.lowrank replaces linears",
            len(fused), count, name, list(first.shape),
        )  # fmt: skip
    _record(module, activation)
    return module


def ranks_of(module: nn.Module) -> dict[str, int]:
    """The rank of every `LowRankLinear` in a module, by name."""
    return {name: part.rank for name, part in module.named_modules() if isinstance(part, LowRankLinear)}


def merge_lowrank(module: nn.Module) -> nn.Module:
    """Replaces every `LowRankLinear` inside `module` with the dense linear W = B A, in place, and returns it. Raises ConfigError if
    there is an activation, because no dense linear is equivalent, or if DDP or FSDP wraps the module."""
    _check_unwrapped(module)
    parts = module.named_modules(remove_duplicate=False)
    found = {name: part for name, part in parts if isinstance(part, LowRankLinear)}
    # All before the first replacement: an error leaves the module as it was.
    merged = {part: _of_class(part.merged(), getattr(part, "conv1d", nn.Linear)) for part in found.values()}
    for name, part in found.items():
        module.set_submodule(name, merged[part])
    _record(module, "none")
    return module


def load_lowrank(path: str | Path, **options: Any) -> Any:
    """Loads a transformers model that `save_pretrained` wrote after `lowrank`.

    transformers' own `from_pretrained` does not recognize the factors: it warns and initializes dense weights. `options`: passed
    to `from_pretrained`, such as dtype. Reads safetensors only, and runs no code from the folder. Raises ConfigError if the folder
    has no valid ranks or no intact safetensors weights, or its class is not a transformers model.
    """
    import transformers

    try:
        where = {name: options[name] for name in PLACES if name in options}
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **where)
    except (ValueError, OSError) as error:
        raise ConfigError(f"'{path}': its config.json cannot be read: {' '.join(str(error).split())}") from None
    saved = getattr(config, SAVED, None)
    ranks = saved.get("ranks") if isinstance(saved, dict) else None
    if not isinstance(saved, dict) or not isinstance(ranks, dict):
        raise ConfigError(
            f"'{path}': its config.json has no valid {SAVED} entry; save a model after boost.lowrank, or use from_pretrained"
        )
    if Path(path).is_dir() and not any(Path(path, options.get("subfolder") or "").glob("*.safetensors")):
        raise ConfigError(
            f"'{path}' has no safetensors weights; pickles are not read: save the model again with save_pretrained"
        )
    (name,) = (config.architectures or [""])[:1]
    base: Any = getattr(transformers, str(name), None)
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedModel)):
        raise ConfigError(f"'{path}': the architecture {name!r} in its config.json is not a transformers model")

    def build(model: Any, config: Any, *rest: Any, **more: Any) -> None:
        base.__init__(model, config, *rest, **more)  # type: ignore[misc]
        linears, prefix = dict(model.named_modules()), f"{getattr(base, 'base_model_prefix', '')}."
        for place, rank in ranks.items():
            # Names may be those of the base model, or the saved model may be the base of the one that was factorized.
            places = place, prefix + place, place.removeprefix(prefix)
            place = next((name for name in places if name in linears), place)
            linear = linears.get(place)
            if not (isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"):
                raise ConfigError(f"'{path}': {SAVED} names module {place!r}, which is not a linear of {name}")
            if type(rank) is not int:
                raise ConfigError(f"'{path}': {SAVED} has rank = {rank!r} for {place!r}; it must be a positive integer")
            _replace(model, place, linears[place], rank, "random", saved.get("activation", "none"))

    loader = type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
    options |= {"use_safetensors": True, "trust_remote_code": False}
    asked = options.pop("output_loading_info", False)
    try:
        model, info = loader.from_pretrained(path, output_loading_info=True, **options)  # type: ignore[attr-defined]
    except SafetensorError as error:
        raise ConfigError(f"'{path}' has a damaged safetensors file: {' '.join(str(error).split())}") from None
    # Modules may have been replaced after they were factorized, also by a load that does not know factors.
    for kind, what in (("unexpected_keys", "does not name"), ("missing_keys", "names a module without")):
        if lost := sorted(key for key in info[kind] if key.endswith((".A.weight", ".B.weight"))):
            raise ConfigError(f"'{path}': {SAVED} {what} {lost[0]!r}; factorize the whole model and save it again")
    model.__class__ = base
    return (model, info) if asked else model


def _check_unwrapped(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
            raise ConfigError(
                f"module is wrapped in {type(part).__name__}, which would not average the gradients of new parameters; wrap it "
                "afterwards"
            )


def _check_rank(rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise ConfigError(f"rank = {rank!r} is not a number; use a rank such as 64, or a fraction of each width (0.25)")
    if isinstance(rank, float) and not 0 < rank <= 1:
        raise ConfigError(
            f"rank = {rank} is not a fraction of a linear's width; nearest valid value: {min(max(rank, 0.01), 1.0)}"
        )
    if rank < 1 and isinstance(rank, int):
        raise ConfigError(f"rank = {rank} is too small; smallest valid value: 1")


def _record(module: nn.Module, activation: str) -> None:
    """Writes the ranks to the configuration of a transformers model, or of each in a wrapper, so that they are saved with it."""
    owners: list[str] = []
    for name, part in module.named_modules():
        if not hasattr(type(part), "base_model_prefix") or name.startswith(tuple(owners)):
            continue
        owners.append(f"{name}." if name else "")
        if hasattr(config := getattr(part, "config", None), "to_dict"):
            if ranks := ranks_of(part):
                setattr(config, SAVED, {"ranks": ranks, "activation": activation})
            elif hasattr(config, SAVED):
                delattr(config, SAVED)


def _linears(module: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yields (name, module) for each linear that may be replaced, heads included."""
    modules = dict(module.named_modules())
    places = [module, *(part for owner in modules.values() for part in owner._modules.values() if part is not None)]
    owners = Counter(id(parameter) for place in places for parameter in place.parameters(recurse=False))
    adapted = [name for name, part in modules.items() if _PEFT & {base.__name__ for base in type(part).__mro__}]
    # Factors are not factored again, and torch's attention reads the weight of its linear directly.
    kept = (LowRankLinear, nn.MultiheadAttention)
    inside = tuple(f"{name}." for name, part in modules.items() if isinstance(part, kept))
    linears = {name: part for name, part in modules.items() if _is_linear(part)}
    others = [name for name, part in modules.items() if isinstance(part, nn.Linear | LowRankLinear)]
    for what, patterns, names in (("include", include, [*linears, *others]), ("exclude", exclude, list(modules))):
        unused = [pattern for pattern in patterns if not any(_matches(name, (pattern,)) for name in names)]
        # If no pattern of include matches, the caller says more.
        if unused and (what == "exclude" or len(unused) < len(patterns)):
            raise ConfigError(f"{what}: pattern {unused[0]!r} matches no linear; fix or remove it")
    for name, linear in linears.items():
        if not name or name.startswith(inside) or not _matches(name, include) or _matches(name, exclude):
            continue
        if outer := next((outer for outer in adapted if name.startswith(f"{outer}.")), ""):
            raise ConfigError(
                f"'{outer}' has an adapter, which factors would detach from its weight; call boost.lowrank before get_peft_model, "
                "merge the adapter first (merge_and_unload), or exclude the linear"
            )
        if owners[id(linear.weight)] > 1:
            if name in include:
                raise ConfigError(
                    f"include = '{name}': this linear shares its weight with another module, and factorizing it would untie the "
                    "two; leave it out, or give it a separate weight (for a tied head, tie_word_embeddings = false)"
                )
        else:
            yield name, linear


def _heads(module: nn.Module) -> set[nn.Module]:
    """The output embeddings of a transformers model, and the modules outside its base model, also inside a peft model."""
    output = getattr(module, "get_output_embeddings", lambda: None)()
    heads: set[nn.Module] = set() if output is None else {output}
    for part in module.modules():
        prefix = getattr(type(part), "base_model_prefix", None)
        base = getattr(part, prefix, None) if isinstance(prefix, str) and prefix else None
        if isinstance(base, nn.Module) and base is not part:
            return heads | (set(part.modules()) - set(base.modules()))
    return heads


def _routers(module: nn.Module) -> set[nn.Module]:
    """Linears with one output for each expert next to them, that is, in the same module or in one that holds the linear."""
    routers: set[nn.Module] = set()
    for owner in module.modules():
        experts: dict[int, nn.Module] = {}  # by their number
        for part in (owner, *owner.children()):
            if isinstance(part, nn.ModuleList | nn.ModuleDict):
                kinds = Counter(type(child) for child in part.children() if any(True for _ in child.parameters()))
                experts |= {number: part for number in kinds.values() if number > 1}
            experts |= {weight.shape[0]: part for weight in part.parameters(recurse=False) if _is_fused(weight, part)}
        near = [(part, part) for part in owner.children()]
        near += [(part, child) for part, _ in near for child in part.children()]
        routers |= {
            linear for part, linear in near
            if isinstance(linear, nn.Linear) and experts.get(linear.out_features, part) is not part
        }  # fmt: skip
    return routers


def _is_fused(weight: nn.Parameter, owner: nn.Module) -> bool:
    """Whether a parameter holds the weights of all experts."""
    return weight.ndim == 3 and min(weight.shape) > 1 and "conv" not in type(owner).__name__.lower()


@torch.no_grad()
def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes x W^T + b from its own weight and bias. Recognizes transformers' Conv1D (transposed weight) without
    importing it."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_children())}
    if not {"weight"} <= own <= {"weight", "bias"}:
        return False  # such as LoRA in a subclass of nn.Linear, or a weight that is computed from others
    if type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return True
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point() or module.weight.is_meta:
        return False
    x = torch.eye(2, module.in_features).to(module.weight)  # consumes no random numbers
    try:  # float8 and fake quantization round more
        expected = F.linear(x, module.weight, module.bias)
        return torch.allclose(module(x), expected, 0, 4 * torch.finfo(x.dtype).eps * float(expected.abs().max()))
    except Exception:  # a subclass with another signature or other shapes
        return False


def _patterns(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise ConfigError(f"{name} = {wrong[0]!r} is not a pattern of module names, such as '*.mlp.*'")
    return patterns


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _replace(module: nn.Module, name: str, linear: nn.Linear, rank: int, init: str, activation: str) -> None:
    plain = _of_class(linear, nn.Linear)
    factors = LowRankLinear.from_linear(plain, rank, init=init, activation=activation)
    if plain is not linear:
        factors.conv1d = type(linear)  # type: ignore[assignment]  # the class that a merge restores
    module.set_submodule(name, factors)


def _of_class(linear: nn.Linear, kind: type) -> nn.Linear:
    """A linear as `nn.Linear` or as transformers' Conv1D, whose weight is transposed."""
    if isinstance(linear, kind):
        return linear
    weight = linear.weight
    with torch.device("meta"):
        made: nn.Linear = kind(*weight.shape)
    made.weight, made.bias = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad), linear.bias
    return made.train(linear.training)
