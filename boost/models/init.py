"""Initial weights: a function of (seed, parameter name) alone, so bitwise the same on every mesh and under every layout."""

import contextlib
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from boost.config.architecture import Parameter, Slot, groups
from boost.config.schema import ModelConfig
from boost.models.decoder import Decoder
from boost.models.factorize import factorize
from boost.models.fused import FusedParam, fused_params
from boost.models.interface import local_slice


@torch.no_grad()
def initialize(decoder: Decoder, seed: int, over: Callable[[list[FusedParam]], Iterable[FusedParam]] = iter) -> None:
    """Fills every weight of a decoder in place. `over` iterates over the fused parameters and may show progress.

    Each whole parameter is drawn on the CPU in fp32 and sharded afterwards: a draw per shard would depend on the mesh.
    """
    fused_of_all = list(fused_params(decoder))
    with _spectral_ahead(decoder.model, fused_of_all, seed) as value:
        for fused in over(fused_of_all):
            for param_slice in fused.local_slices():
                whole = value(param_slice.parameter)
                own = local_slice(param_slice.parameter, decoder.layout, whole)
                param_slice.view(fused.tensor).copy_(own.narrow(0, param_slice.offset, param_slice.rows))


def initial_value(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """The whole initial tensor of a parameter, fp32 on the CPU."""
    kind = parameter.name.rpartition(".")[2]
    if kind == "norm_bias":
        return torch.zeros(parameter.shape)
    if parameter.role in ("norm", "final_norm") or kind == "norm_weight":
        return torch.ones(parameter.shape)
    if kind.startswith("gate_"):  # as torch.nn.Linear: kaiming-uniform of a fan-in
        bound = parameter.shape[-1] ** -0.5
        return torch.rand(parameter.shape, generator=_generator(parameter.name, seed)).mul_(2 * bound).sub_(bound)
    if _is_spectral(parameter, model):
        return spectral(parameter, model, seed)[kind]
    std = _standard_deviation(parameter, kind, model)
    return torch.randn(parameter.shape, generator=_generator(parameter.name, seed)).mul_(std)


def spectral(parameter: Parameter, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Factors A and B, fp32, of the linear that `parameter` is one of: the closest to the dense linear's own initial weight
    that their rank allows (spectral initialization: Khodak et al., arXiv 2105.01029)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _spectral(*_drawn(parameter, model), seed)
    finally:
        torch.set_num_threads(threads)


def _drawn(parameter: Parameter, model: ModelConfig) -> tuple[str, tuple[int, int], int, float]:
    """(name, shape, rank, standard deviation) of the dense linear that a factor is one of."""
    slot = _linear_of(parameter.name, model)
    assert slot.rank is not None
    return f"{parameter.name.rpartition('.')[0]}.W", (slot.d_out, slot.d_in), slot.rank, model.init_std


@contextlib.contextmanager
def _spectral_ahead(
    model: ModelConfig, fused_params: Sequence[FusedParam], seed: int
) -> Iterator[Callable[[Parameter], Tensor]]:
    """Yields `initial_value`; linears are factorized ahead, as many at once as this process has threads: those of a 7B model take a
    core six hours. Each by one thread, since more would show in the last bits, and there are not equally many on every mesh."""
    factors = [s.parameter for fused in fused_params for s in fused.local_slices() if _is_spectral(s.parameter, model)]
    threads = torch.get_num_threads()
    if not factors:
        yield lambda parameter: initial_value(parameter, model, seed)
        return
    wanted = Counter(_drawn(each, model) for each in factors)
    order = iter(list(dict.fromkeys(_drawn(each, model) for each in factors)))
    ahead: dict[Any, Future[dict[str, Tensor]]] = {}
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as pool:

        def begin(count: int) -> None:
            for each in itertools.islice(order, count):
                ahead[each] = pool.submit(_spectral, *each, seed)

        def value(parameter: Parameter) -> Tensor:
            if not _is_spectral(parameter, model):
                return initial_value(parameter, model, seed)
            key = _drawn(parameter, model)
            while key not in ahead:
                begin(1)
            found = ahead[key].result()[parameter.name.rpartition(".")[2]]
            wanted[key] -= 1
            if not wanted[key]:
                del ahead[key]  # few are in memory at a time
                begin(1)
            return found

        begin(threads + _UNFINISHED)
        try:
            yield value
        finally:
            torch.set_num_threads(threads)


_UNFINISHED = 2
"""Linears, but for one, of which the factors A are wanted before the factors B."""


def _is_spectral(parameter: Parameter, model: ModelConfig) -> bool:
    return parameter.name.rpartition(".")[2] in ("A", "B") and model.factor_init == "spectral"


def _spectral(name: str, shape: tuple[int, int], rank: int, std: float, seed: int) -> dict[str, Tensor]:
    factors = factorize(torch.randn(shape, generator=_generator(name, seed)).mul_(std), rank)
    a_RI, b_OR = factors.a_RI.float(), factors.b_OR.float()
    missing = rank - factors.rank
    if missing > 0:  # key/value heads may be fewer than the rank: B starts at 0 there, A may not
        extra = torch.randn((missing, shape[1]), generator=_generator(f"{name}.A", seed)).mul_(std)
        a_RI, b_OR = torch.cat((a_RI, extra)), torch.cat((b_OR, b_OR.new_zeros(shape[0], missing)), dim=1)
    return {"A": a_RI, "B": b_OR}


def _linear_of(name: str, model: ModelConfig) -> Slot:
    """The linear that the parameter of this name, `layers.{number}.{linear}.{kind}`, belongs to."""
    layer, rest = name.split(".", 2)[1:]
    slot = rest.rpartition(".")[0]
    return next(s for group in groups(model, int(layer)) for s in group.slots if s.name == slot)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _standard_deviation(parameter: Parameter, kind: str, model: ModelConfig) -> float:
    """The standard deviation of a parameter's draw.

    cola: both factors s = r^(-1/4) (d_in + d_out)^(-1/4) of their linear (the official code's initialization);
    xavier: sqrt(2 / (fan_in + fan_out)) of each factor by itself; the rest: model.init_std.
    """
    if kind not in ("A", "B"):
        return model.init_std
    if model.factor_init == "xavier":
        return math.sqrt(2 / sum(parameter.shape))
    slot = _linear_of(parameter.name, model)
    assert slot.rank is not None
    return slot.rank**-0.25 * (slot.d_in + slot.d_out) ** -0.25
