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
from torch import nn

from boost.errors import ConfigError
from boost.format import format_count
from boost.nn.linear import LowRankLinear
from boost.train.progress import progress

log = logging.getLogger(__name__)
SAVED = "boost_lowrank"
"""Key in config.json: {"ranks": {module: rank}, "activation": "none"}."""

Rank = int | float
"""An integer rank, or a fraction of each linear's smaller width."""


def lowrank(
    module: nn.Module,
    rank: Rank | Mapping[str, Rank] = 0.25,
    *,
    init: str = "svd",
    activation: str = "none",
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
) -> nn.Module:
    """Replaces linears inside `module` with `boost.nn.LowRankLinear`, in place, and returns it. The logger `boost.api.swap` reports
    how many at level INFO; `ranks_of` lists them.

    The output embedding is left unchanged unless `include` names it exactly. Linears that share their weight with another module,
    such as a tied head, and linears whose factors would not have fewer parameters are also left unchanged.

    Args:
        module: any model. Linears include transformers' `Conv1D` (GPT-2) and subclasses of `nn.Linear` with the same function.
        rank: rank of the factors; a float is a fraction of each linear's smaller width. A mapping has one rank for each pattern of
            module names: the first match wins, and linears without a match are left unchanged.
        init: "svd" approximates each weight by its truncated SVD; "random" draws new factors.
        activation: activation between the factors, "none" or "silu".
        include, exclude: patterns of module names, such as "*.mlp.*" (fnmatch).

    Raises ConfigError if no linear matches, an argument is invalid, or `include` names a linear with a shared weight.
    """
    by_pattern = rank if isinstance(rank, Mapping) else {"*": rank}
    for of_pattern in by_pattern.values():
        _check_rank(of_pattern)
    included, excluded = _patterns(include), _patterns(exclude)
    before = sum(parameter.numel() for parameter in module.parameters())
    linears = list(_linears(module, included, excluded))
    chosen, matched = [], False
    for name, linear in linears:
        value = next((value for pattern, value in by_pattern.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if value is None:
            continue
        matched = True
        rows, columns = linear.weight.shape
        r = value if isinstance(value, int) else max(int(value * min(rows, columns)), 1)
        if r * (rows + columns) < rows * columns:
            chosen.append((name, linear, r))
    if not chosen:
        why = "no replaceable linear matches these patterns"
        if matched:
            why = "no factors would be smaller than the linear that they replace; use a lower rank"
        elif linears:
            why = f"no pattern in rank matches a linear, such as {linears[0][0]!r}"
        elif any(_matches(name, included) for name in ranks_of(module)):
            why = "the matching linears are already factorized"
        place = type(module).__name__
        raise ConfigError(f"rank = {rank}, include = {included}: nothing to replace in {place}, because {why}")
    for name, linear, r in progress(chosen, "factorizing", enabled=init == "svd"):
        _replace(module, name, linear, r, init, activation)
    after = sum(parameter.numel() for parameter in module.parameters())
    log.info("linears factorized: %d; parameters: %s -> %s", len(chosen), format_count(before), format_count(after))
    _record(module, activation)
    return module


def ranks_of(module: nn.Module) -> dict[str, int]:
    """The rank of every `LowRankLinear` in a module, by name."""
    return {name: part.rank for name, part in module.named_modules() if isinstance(part, LowRankLinear)}


def merge_lowrank(module: nn.Module) -> nn.Module:
    """Replaces every `LowRankLinear` inside `module` with the dense linear W = B A, in place, and returns it. Raises ConfigError if
    there is an activation, because no dense linear is equivalent."""
    for name in ranks_of(module):
        factors: Any = module.get_submodule(name)
        merged = factors.merged()
        if (conv1d := getattr(factors, "conv1d", None)) is not None:
            linear, merged = merged, conv1d(merged.out_features, merged.in_features).to(merged.weight)
            merged.weight.data.copy_(linear.weight.T)
            merged.bias.data.copy_(linear.bias)
        _set(module, name, merged)
    _record(module, "none")
    return module


def load_lowrank(path: str | Path, **options: Any) -> Any:
    """Loads a transformers model that `save_pretrained` wrote after `lowrank`.

    transformers' own `from_pretrained` does not recognize the factors: it warns and initializes dense weights. `options`: passed
    to `from_pretrained`, such as dtype. Raises ConfigError if the folder has no ranks or its class is not a transformers model.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    saved = getattr(config, SAVED, None)
    if not isinstance(saved, dict) or not isinstance(saved.get("ranks"), dict):
        raise ConfigError(
            f"'{path}': its config.json has no valid {SAVED} entry; save a model after boost.lowrank, or use from_pretrained"
        )
    (name,) = (config.architectures or [""])[:1]
    base: Any = getattr(transformers, name, None)
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedModel)):
        raise ConfigError(f"'{path}': the architecture {name!r} in its config.json is not a transformers model")

    def build(model: Any, config: Any, *rest: Any, **more: Any) -> None:
        base.__init__(model, config, *rest, **more)  # type: ignore[misc]
        linears = dict(model.named_modules())
        for place, rank in saved["ranks"].items():
            if place not in linears:
                raise ConfigError(f"'{path}': {SAVED} names module {place!r}, which {name} does not have")
            _check_rank(rank)
            _replace(model, place, linears[place], rank, "random", saved.get("activation", "none"))

    loader = type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
    model = loader.from_pretrained(path, **options)  # type: ignore[attr-defined]
    model.__class__ = base
    return model


def _check_rank(rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise ConfigError(f"rank = {rank!r} is not a number; use a rank such as 64, or a fraction of each width (0.25)")
    if isinstance(rank, float) and not 0 < rank <= 1:
        raise ConfigError(
            f"rank = {rank} is not a fraction of a linear's width; nearest valid value: {min(max(rank, 0.01), 1.0)}"
        )
    if rank < 1 and isinstance(rank, int):
        raise ConfigError(f"rank = {rank} is too small; smallest valid value: 1")


def _record(module: nn.Module, activation: str) -> None:
    """Writes the ranks to the configuration of a transformers model, so that they are saved with it."""
    if hasattr(config := getattr(module, "config", None), "to_dict"):
        if ranks := ranks_of(module):
            setattr(config, SAVED, {"ranks": ranks, "activation": activation})
        elif hasattr(config, SAVED):
            delattr(config, SAVED)


def _linears(module: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields (name, module) for each linear that may be replaced."""
    owners = Counter(id(parameter) for owner in module.modules() for parameter in owner.parameters(recurse=False))
    output = getattr(module, "get_output_embeddings", lambda: None)()
    # Factors are not factored again, and torch's attention reads the weight of its linear directly.
    kept = (LowRankLinear, nn.MultiheadAttention)
    inside = [name for name, part in module.named_modules() if isinstance(part, kept)]
    for name, linear in module.named_modules():
        if not _matches(name, include) or _matches(name, exclude):
            continue
        if not name or any(name.startswith(f"{outer}.") for outer in inside) or not _is_linear(linear):
            continue
        if owners[id(linear.weight)] > 1:
            if name in include:
                raise ConfigError(
                    f"include = '{name}': this linear shares its weight with another module, and factorizing it would untie the "
                    "two; leave it out, or give it a separate weight (for a tied head, tie_word_embeddings = false)"
                )
        elif linear is not output or name in include:
            yield name, linear


@torch.no_grad()
def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes x W^T + b. Recognizes transformers' Conv1D (transposed weight) without importing it."""
    if type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf")):
        return True
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point() or module.weight.is_meta:
        return False
    x = torch.eye(
        2, module.in_features, device=module.weight.device, dtype=module.weight.dtype
    )  # consumes no random numbers
    try:
        return torch.allclose(module(x), F.linear(x, module.weight, module.bias), rtol=1e-2, atol=1e-3)
    except Exception:  # a subclass with another signature or other shapes
        return False


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _replace(module: nn.Module, name: str, linear: Any, rank: int, init: str, activation: str) -> None:
    plain = linear
    if not isinstance(linear, nn.Linear):  # transformers' Conv1D, with a transposed weight
        weight = linear.weight.detach()
        rows, columns = weight.shape
        plain = nn.Linear(rows, columns, device=weight.device, dtype=weight.dtype).train(linear.training)
        with torch.no_grad():
            plain.weight.copy_(weight.T)
            plain.bias.copy_(linear.bias)
    factors = LowRankLinear.from_linear(plain, rank, init=init, activation=activation)
    if plain is not linear:
        factors.conv1d = type(linear)  # type: ignore[assignment]  # the class that a merge restores
    _set(module, name, factors)


def _set(module: nn.Module, name: str, replacement: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, replacement)
