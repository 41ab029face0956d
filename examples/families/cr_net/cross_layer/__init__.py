"""`cr_net`: a linear's output is that of the same linear in the previous block, scaled, and a low-rank difference: y = s y' + B A x
with s = sign(b) (|b| + eps) (CR-Net, arXiv 2509.18993).

b is one number per linear. In the first block, linears have full rank, y = W x. Biases of attention are not carried.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

import boost
from boost.config.architecture import Parameter
from boost.config.families import LowRankConfig
from boost.config.linears import Extra, Linear, Map, Size
from boost.models.latents import Math, Mixer

EPS = 1e-6
"""eps, which keeps s away from zero."""


@boost.register_family
class CRNetConfig(LowRankConfig):
    """Low-rank linears beside the outputs of the previous block: y = s y' + B A x. The first block has full rank."""

    family: Literal["cr_net"] = "cr_net"
    math: ClassVar[str] = f"{__name__}:CRNet"
    modeling: ClassVar[str] = f"{__name__}:modeling_cr_net.py"

    carry_init: float = 1.0
    """Initial b."""

    def linear(self, layer: int, size: Size) -> Linear:
        """W [d_out, d_in] in the first block; then A [r, d_in], B [d_out, r] and b (`beta`) [1]."""
        if layer == 0:
            return Linear(inner=(Map("W", size.d_out, self.init_std),), carries="outputs")
        beta = Extra("beta", (1,), f"{__name__}:initial", is_output=True)
        return replace(super().linear(layer, size), extra=(beta,), carries="outputs")


def initial(parameter: Parameter, model: CRNetConfig, seed: int) -> Tensor:
    """Initial b."""
    return torch.full(parameter.shape, model.carry_init)


class CRNet(Math):
    """s y' + y, for every linear."""

    def finish(self, y: Sequence[Tensor], prev: Sequence[Tensor], mixer: Mixer) -> Sequence[Tensor]:
        if not prev:
            return y
        scales = [scale(mixer.of("beta", slot)) for slot in range(len(y))]
        return [y_k + s.to(y_k.dtype) * before for y_k, before, s in zip(y, prev, scales, strict=True)]


def scale(b: Tensor) -> Tensor:
    """s = sign(b) (|b| + eps), whose gradient by b is 1."""
    return b + EPS * b.detach().sign()


boost.elementwise_rule(torch.sign)
