"""The same mathematics for transformers: `boost export` writes this file beside BOOST's own modeling file."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_boost import BoostBottleneck, BoostConfig, BoostForCausalLM, BoostModel


class LostBottleneck(BoostBottleneck):
    """y = gamma B silu(A x) + (1 - gamma) S x[index]."""

    def __init__(self, config: BoostConfig, layer: int, slot: str, d_in: int, d_out: int) -> None:
        super().__init__(config, layer, slot, d_in, d_out)
        self.gamma = config.gamma
        self.S = nn.Linear(config.channels, d_out, bias=False)
        self.register_buffer("index", torch.arange(config.channels))

    def forward(self, x: Tensor, prev_latents: Tensor | None) -> tuple[Tensor, Tensor]:
        h = F.silu(self.A(x))
        return self.B(self.gamma * h) + self.S((1 - self.gamma) * x[..., self.index]), h


class LostConfig(BoostConfig):
    bottleneck = LostBottleneck
    base_model_tp_plan = None  # of A and B alone


class LostModel(BoostModel):
    config_class = LostConfig


class LostForCausalLM(BoostForCausalLM):
    config_class = LostConfig
    _tp_plan = None
