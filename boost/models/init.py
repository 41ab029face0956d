"""Initial weights: a function of (seed, parameter name) alone, so bitwise the same on every mesh and under every layout."""

import hashlib
import math

import torch
from torch import Tensor

from boost.config.architecture import Parameter, groups
from boost.config.schema import ModelConfig
from boost.models.decoder import Decoder
from boost.models.interface import local_slice
from boost.models.stored import storages


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> None:
    """Fills every weight of a decoder in place.

    Each whole parameter is drawn on the CPU in fp32 and cut afterwards: a draw per shard would depend on the mesh.
    """
    for storage in storages(decoder):
        for piece in storage.pieces():
            whole = initial_value(piece.parameter, decoder.model, seed)
            own = local_slice(piece.parameter, decoder.layout, whole)
            piece.view(storage.tensor).copy_(own.narrow(0, piece.offset, piece.rows))


def initial_value(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """The whole initial tensor of a parameter, fp32 on the CPU."""
    std = _standard_deviation(parameter, model)
    if std is None:
        return torch.ones(parameter.shape)
    digest = hashlib.sha256(f"{seed}:{parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(parameter.shape, generator=generator).mul_(std)


def _standard_deviation(parameter: Parameter, model: ModelConfig) -> float | None:
    """The standard deviation of a parameter's draw; None for norms, which start at one.

    cola: both factors s = r^(-1/4) (d_in + d_out)^(-1/4) of their linear (the official code's initialisation);
    svd: xavier, sqrt(2 / (fan_in + fan_out)) of each factor by itself; the rest: model.init_std.
    """
    factor = parameter.role.rpartition(".")[2]
    if parameter.role in ("norm", "final_norm"):
        return None
    if factor not in ("A", "B"):
        return model.init_std
    if model.family == "svd":
        return math.sqrt(2 / sum(parameter.shape))
    rank = parameter.shape[0 if factor == "A" else 1]
    return rank**-0.25 * _linear_width(parameter.name, model) ** -0.25


def _linear_width(name: str, model: ModelConfig) -> int:
    """d_in + d_out of the linear that a factor belongs to."""
    slot = name.split(".", 2)[2].rpartition(".")[0]
    return next(s.d_in + s.d_out for group in groups(model) for s in group.slots if s.name == slot)
