"""The same mathematics for transformers: `boost export` writes this file beside BOOST's own modeling file."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_boost import BoostBottleneck, BoostConfig, BoostForCausalLM, BoostModel

EPS = 1e-6


class CRNetLinear(BoostBottleneck):
    """y = s y' + B act(A x), or W x in the first block. The next block gets y before the bias."""

    def __init__(self, config: BoostConfig, layer: int, slot: str, d_in: int, d_out: int) -> None:
        super().__init__(config, layer, slot, d_in, d_out)
        self.is_first, self.std = layer == 0, config.initializer_range
        if self.is_first:
            self.W = nn.Linear(d_in, d_out, bias=self.B.bias is not None)
            del self.A, self.B
        else:
            self.beta = nn.Parameter(torch.ones(1))

    def initialize(self) -> None:
        if not self.is_first:
            super().initialize()
            nn.init.ones_(self.beta)
            return
        nn.init.normal_(self.W.weight, std=self.std)
        if self.W.bias is not None:
            nn.init.zeros_(self.W.bias)

    def forward(self, x: Tensor, prev_latents: Tensor | None) -> tuple[Tensor, Tensor]:
        last = self.W if self.is_first else self.B
        y = F.linear(x if self.is_first else self.act(self.A(x)), last.weight)
        if prev_latents is not None:
            y = y + (self.beta + EPS * self.beta.detach().sign()).to(y.dtype) * prev_latents
        return y if last.bias is None else y + last.bias, y


class CRNetConfig(BoostConfig):
    bottleneck = CRNetLinear
    base_model_tp_plan = None  # ours shards what passes from block to block, too


class CRNetModel(BoostModel):
    config_class = CRNetConfig


class CRNetForCausalLM(BoostForCausalLM):
    config_class = CRNetConfig
