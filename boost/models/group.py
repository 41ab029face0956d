"""Linears with one input, dense or low-rank: the mathematics, on whatever shard the layout made of the weights.

Legend: T tokens; I input width, O output width, R latent width of the group, all of them as held by this process.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from boost.config import architecture
from boost.config.schema import ModelConfig
from boost.models.interface import Latents, Layout
from boost.models.stored import Stored


class Group(Stored):
    """The linears of one group of one block. Families differ by data: whether there is a bottleneck, and its activation.

    The factors A of all slots are one stored tensor [sum of ranks, I], so that they can share one GEMM and one
    collective without a copy; factors B have one tensor a slot; a dense group is one tensor W [sum of outputs, I].
    """

    A: Tensor
    W: Tensor

    def __init__(self, model: ModelConfig, shape: architecture.Group, prefix: str, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        self.low_rank = model.low_rank
        self.latent_act = model.latent_act
        if self.low_rank:
            self.store("A", shape.parameters(prefix, "A"), layout)
            for parameter in shape.parameters(prefix, "B"):
                self.store(self._up_name(parameter.name), (parameter,), layout)
            self._up_names = [name for name in self.parts if name != "A"]
        else:
            self.store("W", shape.parameters(prefix, "W"), layout)

    def forward(self, x_TI: Tensor, carried: Latents, grouped: bool) -> tuple[list[Tensor], Latents]:
        """Every linear of the group on one process: one [T, O] a slot, and the latents to carry on."""
        if not self.low_rank:
            weight_OI = self.W.to(x_TI.dtype)
            rows = [part.rows for part in self.parts["W"]]
            if grouped:
                return list(F.linear(x_TI, weight_OI).split(rows, dim=-1)), ()
            return [F.linear(x_TI, w) for w in weight_OI.split(rows)], ()
        latents = [F.linear(x_TI, a_RI) for a_RI in self.down_weights(self.A.to(x_TI.dtype), grouped)]
        bent, carried = self.bend(latents, carried)
        return self.up(bent), carried

    def down_weights(self, a_RI: Tensor, grouped: bool) -> Sequence[Tensor]:
        """A (or something of its shape) as one matrix for the whole group, or one a slot."""
        if grouped or len(self.shape.slots) == 1:
            return [a_RI]
        return a_RI.split([part.rows for part in self.parts["A"]])

    def bend(self, latents: Sequence[Tensor], carried: Latents) -> tuple[list[Tensor], Latents]:
        """Latents A x as one [T, R] or one a slot -> act of each, and the latents that cross to the next block.

        `carried` is a queue over the four groups of a block: a crossing family takes its group's latents of the block
        before from the front and puts its own at the end. dense, svd and cola cross nothing and leave it as it is.
        """
        if self.latent_act == "silu":
            return [F.silu(u) for u in latents], carried
        return list(latents), carried

    def up(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Bent latents -> one [T, O] a slot."""
        if len(latents) == 1 and len(self.shape.slots) > 1:
            latents = latents[0].split([part.rows for part in self.parts["A"]], dim=-1)
        weights = [getattr(self, name) for name in self._up_names]
        return [F.linear(h, b.to(h.dtype)) for h, b in zip(latents, weights, strict=True)]

    @staticmethod
    def _up_name(parameter_name: str) -> str:
        slot = parameter_name.split(".")[-2]
        return f"B_{slot}"
