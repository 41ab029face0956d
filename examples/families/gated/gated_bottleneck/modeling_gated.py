"""The same mathematics for transformers: `boost export` writes this file beside BOOST's own modeling file."""

import torch.nn.functional as F
from torch import Tensor, nn

from .modeling_boost import BoostBottleneck, BoostConfig, BoostForCausalLM, BoostModel


class GatedBottleneck(BoostBottleneck):
    """y = B (silu(A x) * (G x))."""

    def __init__(self, config: BoostConfig, layer: int, slot: str, d_in: int, d_out: int) -> None:
        super().__init__(config, layer, slot, d_in, d_out)
        self.G = nn.Linear(d_in, self.A.out_features, bias=False)

    def forward(self, x: Tensor, prev_latents: Tensor | None) -> tuple[Tensor, Tensor]:
        h = F.silu(self.A(x)) * self.G(x)
        return self.B(h), h


class GatedConfig(BoostConfig):
    bottleneck = GatedBottleneck
    base_model_tp_plan = None  # of A and B alone


class GatedModel(BoostModel):
    config_class = GatedConfig


class GatedForCausalLM(BoostForCausalLM):
    config_class = GatedConfig
    _tp_plan = None
