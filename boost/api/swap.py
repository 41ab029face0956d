"""`lowrank`: swaps the linears of any PyTorch or transformers model for factors."""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from boost.errors import ConfigError
from boost.nn.linear import LowRankLinear
from boost.train.console import progress


def lowrank(
    module: nn.Module,
    rank: int | float = 0.25,
    *,
    init: str = "svd",
    activation: str = "none",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> nn.Module:
    """Replaces linears inside `module` by `boost.nn.LowRankLinear`, in place, and returns it.

    The output embedding and linears that share their weight with another module are left alone, unless `include` names them
    exactly. So is a linear whose factors would have as many parameters as it has.

    Args:
        module: any model. transformers' `Conv1D` (GPT-2) counts as a linear.
        rank: of the factors; a float is a fraction of each linear's smaller width.
        init: "svd" approximates each weight by its truncated SVD; "random" draws new factors.
        activation: between the factors: "none" or "silu".
        include, exclude: patterns of module names, such as "*.mlp.*" (fnmatch).

    Raises ConfigError if no linear matches, or an argument is not valid.
    """
    if isinstance(rank, float) and not 0 < rank <= 1:
        raise ConfigError(
            f"rank = {rank} is no fraction of a linear's width; nearest valid value: {min(max(rank, 0.01), 1.0)}"
        )
    linears: list[tuple[str, Any]] = list(_linears(module, include, exclude))
    chosen = []
    for name, linear in linears:
        rows, columns = linear.weight.shape
        r = rank if isinstance(rank, int) else max(int(rank * min(rows, columns)), 1)
        if r * (rows + columns) < rows * columns:
            chosen.append((name, linear, r))
    if not chosen:
        why = "its factors would not be smaller; use a lower rank" if linears else "no linear has such a name"
        raise ConfigError(
            f"rank = {rank}, include = {tuple(include)}: nothing to replace in {type(module).__name__}: {why}"
        )
    for name, linear, r in progress(chosen, "factorizing", enabled=init == "svd"):
        parent, _, child = name.rpartition(".")
        factors = LowRankLinear.from_linear(_as_linear(linear), r, init=init, activation=activation)
        setattr(module.get_submodule(parent), child, factors)
    return module


def _linears(module: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what may be replaced."""
    owners = Counter(id(parameter) for owner in module.modules() for parameter in owner.parameters(recurse=False))
    output = getattr(module, "get_output_embeddings", lambda: None)()
    inside = [name for name, part in module.named_modules() if isinstance(part, LowRankLinear)]
    for name, linear in module.named_modules():
        # transformers' Conv1D is a linear whose weight is transposed; found without importing transformers.
        is_conv1d = type(linear).__name__ == "Conv1D" and hasattr(linear, "nf")
        is_linear = type(linear) is nn.Linear or is_conv1d
        if not name or not is_linear or any(name.startswith(f"{outer}.") for outer in inside):
            continue
        special = linear is output or owners[id(linear.weight)] > 1
        if special and name not in include:
            continue
        if _matches(name, include) and not _matches(name, exclude):
            yield name, linear


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _as_linear(module: Any) -> nn.Linear:
    if isinstance(module, nn.Linear):
        return module
    weight = module.weight.detach()
    rows, columns = weight.shape
    linear = nn.Linear(rows, columns, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        linear.bias.copy_(module.bias)
    return linear.train(module.training)
