"""A family whose linears have a gain beside their maps, and whose latents pass to the next block: no sums, no norm, unlike LaX."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from boost.config.families import ModelConfig
from boost.config.linears import Extra, Linear, Size
from boost.families import CoLAConfig
from boost.models.latents import Math, Mixer
from tests import references


class CrossedConfig(CoLAConfig):
    """h = silu(gain * A x + h of the block before); y = B h. The first block has no gain."""

    family: Literal["crossed"] = "crossed"  # type: ignore[assignment]
    math: ClassVar[str] = f"{__name__}:Crossed"

    def linear(self, layer: int, size: Size) -> Linear:
        pair = replace(super().linear(layer, size), carries="latents")
        gain = Extra("gain", (pair.up_width,), f"{__name__}:numbered")
        return replace(pair, extra=(gain,)) if layer else pair


ModelConfig.choices.pop("crossed")  # until a test asks for it


class Crossed(Math):
    def mix(self, u_TR: Tensor, prev: Sequence[Tensor], mixer: Mixer) -> Tensor:
        gains = [mixer.of("gain", slot) for slot in range(len(prev))]
        return u_TR * torch.cat(gains).to(u_TR.dtype) + torch.cat(list(prev), dim=-1)


def numbered(parameter: object, model: object, seed: int) -> Tensor:
    """Initial gains."""
    (width,) = parameter.shape  # type: ignore[attr-defined]
    return 1 + torch.arange(width, dtype=torch.float32) / width


def crossed(
    w: references.Weights, shape: references.Shape, tokens_BS: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """Reference."""
    before: dict[str, Tensor] = {}

    def linear(layer: int, name: str, x: Tensor) -> Tensor:
        own = references.weights_of(w, layer, name)
        u = x @ own["A"].T
        before[name] = silu(u * own["gain"] + before[name] if layer else u)
        return before[name] @ own["B"].T

    return references.llama(w, shape, tokens_BS, documents_BS, linear)
