"""Initial weights: a function of (seed, parameter name) alone, so bitwise the same on every mesh and under every layout."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable

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
    for fused in over(list(fused_params(decoder))):
        for param_slice in fused.local_slices():
            whole = initial_value(param_slice.parameter, decoder.model, seed)
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
    if kind in ("A", "B") and model.factor_init == "spectral":
        return spectral(parameter, model, seed)[kind]
    std = _standard_deviation(parameter, kind, model)
    return torch.randn(parameter.shape, generator=_generator(parameter.name, seed)).mul_(std)


def spectral(parameter: Parameter, model: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Factors A and B, fp32, of the linear that `parameter` is one of: the closest to the dense linear's own initial weight
    that their rank allows (spectral initialization: Khodak et al., arXiv 2105.01029)."""
    slot = _linear_of(parameter.name, model)
    assert slot.rank is not None
    name = f"{parameter.name.rpartition('.')[0]}.W"
    return _spectral(name, (slot.d_out, slot.d_in), slot.rank, model.init_std, seed)


@functools.lru_cache(maxsize=3)  # the most linears of which the factors A are wanted before the factors B
def _spectral(name: str, shape: tuple[int, int], rank: int, std: float, seed: int) -> dict[str, Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # how many there are would show in the last bits, and they differ from mesh to mesh
    try:
        factors = factorize(torch.randn(shape, generator=_generator(name, seed)).mul_(std), rank)
    finally:
        torch.set_num_threads(threads)
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
