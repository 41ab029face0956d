"""LaX for transformers (arXiv 2505.21732): a block's latents are combined with those of the same linears in the previous block.

Legend: as in modeling_boost.py; r rank, a x b its most balanced factorization.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_boost import BoostBottleneck, BoostConfig, BoostForCausalLM, BoostModel

LATENT_EPS = 1e-6
"""Epsilon for the LayerNorm over latents."""


class LaXBottleneck(BoostBottleneck):
    """y = B h; h = act(LayerNorm(A x + G(h of the previous block))). The first block has neither gate nor norm."""

    def __init__(self, config: BoostConfig, layer: int, slot: str, d_in: int, d_out: int) -> None:
        super().__init__(config, layer, slot, d_in, d_out)
        rank, self.gate = self.A.out_features, config.gate if layer > 0 else "none"
        if self.gate != "none":
            self.norm_weight = nn.Parameter(torch.ones(rank))
            self.norm_bias = nn.Parameter(torch.zeros(rank))
        if self.gate == "dense":
            self.gate_weight = nn.Parameter(torch.empty(rank, rank))
            self.gate_bias = nn.Parameter(torch.empty(rank))
        elif self.gate == "tensor":
            a = next(a for a in range(math.isqrt(rank), 0, -1) if rank % a == 0)
            self.gate_rows = nn.Parameter(torch.empty(a, a))
            self.gate_columns = nn.Parameter(torch.empty(rank // a, rank // a))

    def initialize(self) -> None:
        super().initialize()
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("norm_"):
                nn.init.constant_(parameter, float(name == "norm_weight"))
            else:
                nn.init.uniform_(parameter, -(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5)

    def forward(self, x_BSI: Tensor, prev_latents_BSr: Tensor | None) -> tuple[Tensor, Tensor]:
        u_BSr = self.A(x_BSI)
        if self.gate != "none":
            u_BSr = u_BSr + self._gated(prev_latents_BSr)
            # Weight and bias are applied outside: on CPUs, layer_norm's backward would sum their gradients in u's dtype.
            u_BSr = F.layer_norm(u_BSr, u_BSr.shape[-1:], eps=LATENT_EPS)
            u_BSr = torch.addcmul(self.norm_bias.to(u_BSr.dtype), u_BSr, self.norm_weight.to(u_BSr.dtype))
        h_BSr = self.act(u_BSr)
        return self.B(h_BSr), h_BSr

    def _gated(self, h_BSr: Any) -> Tensor:
        if self.gate == "dense":
            return F.linear(h_BSr, self.gate_weight, self.gate_bias)
        if self.gate == "tensor":
            h_BSab = h_BSr.unflatten(-1, (self.gate_rows.shape[0], self.gate_columns.shape[0]))
            return (self.gate_rows @ h_BSab @ self.gate_columns.T).flatten(-2)
        return h_BSr


class LaXConfig(BoostConfig):
    """gate: identity, tensor or dense."""

    bottleneck = LaXBottleneck

    def __init__(self, gate: str = "identity", **kwargs: Any) -> None:
        if gate not in ("identity", "tensor", "dense"):
            raise ValueError(f"gate = {gate!r} is not supported")
        self.gate = gate
        super().__init__(**kwargs)
        if self.latent_act not in ("silu", "none"):
            raise ValueError(f"latent_act = {self.latent_act!r} is not supported")


class LaXModel(BoostModel):
    config_class = LaXConfig


class LaXForCausalLM(BoostForCausalLM):
    config_class = LaXConfig
