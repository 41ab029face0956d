"""Linears with one input, dense or low-rank: the mathematics, on whatever shard the layout made of the weights.

Legend: T tokens; I input width, O output width, R latent width of the group, all of them as held by this process.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.models.crossing import Crossing
from boost.models.interface import Latents, Layout
from boost.models.stored import Stored


class Group(Stored):
    """The linears of one group of one block. Families differ by data: whether there is a bottleneck, and its activation.

    The factors A of all slots are one stored tensor [sum of ranks, I], so that they can share one GEMM and one
    collective without a copy; factors B have one tensor a slot; dense weights are one tensor [sum of outputs, I], or two
    where key and value are not cut like the query.
    """

    A: Tensor

    def __init__(self, model: ModelConfig, shape: architecture.Group, layer: int, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        prefix = f"layers.{layer}"
        self.low_rank = model.low_rank
        self.latent_act = model.latent_act
        if self.low_rank:
            self.store("A", shape.parameters(prefix, "A"), layout)
            self._outer = [self._store_outer("B", (parameter,), layout) for parameter in shape.parameters(prefix, "B")]
        else:
            alike = itertools.groupby(shape.parameters(prefix, "W"), lambda parameter: layout.cut(parameter.role))
            self._outer = [self._store_outer("W", tuple(parameters), layout) for _, parameters in alike]
        whole = [self.cuts[name].dim is None for name in self._outer for _ in self.parts[name]]
        self._own_heads = [
            _own_head(model, layout) if slot.kv and held_whole else None
            for slot, held_whole in zip(shape.slots, whole, strict=True)
        ]
        arrive = architecture.crossed(model, layer)
        self.crossing = Crossing(model, shape, prefix, layout) if arrive else None
        """What acts on latents where those of the block before arrive."""
        self.carries = model.crosses and layer + 1 < model.layers
        """Whether latents go on to the next block."""

    def down(self, x_TI: Tensor, grouped: bool) -> list[Tensor]:
        """A x, one [T, R] for the whole group or one a slot."""
        return [F.linear(x_TI, a_RI) for a_RI in self.down_weights(self.A.to(x_TI.dtype), grouped)]

    def dense(self, x_TI: Tensor, grouped: bool) -> list[Tensor]:
        """W x of a dense group, one [T, O] a slot, in one GEMM or one a slot."""
        if not grouped:
            return [F.linear(x_TI, w_OI) for w_OI in self.outer_weights(x_TI.dtype)]
        if len(self._outer) == 1 and self._own_heads == [None] * len(self._own_heads):
            rows = [part.rows for part in self.parts[self._outer[0]]]
            y_TO = F.linear(x_TI, getattr(self, self._outer[0]).to(x_TI.dtype))
            return (
                [y_TO] if len(rows) == 1 else list(y_TO.split(rows, dim=-1))
            )  # one part split off copies its gradient
        weights = self.outer_weights(x_TI.dtype)
        return list(F.linear(x_TI, torch.cat(weights)).split([w_OI.shape[0] for w_OI in weights], dim=-1))

    def down_weights(self, a_RI: Tensor, grouped: bool) -> Sequence[Tensor]:
        """A (or something of its shape) as one matrix for the whole group, or one a slot."""
        if grouped or len(self.shape.slots) == 1:
            return [a_RI]
        return a_RI.split([part.rows for part in self.parts["A"]])

    def bend_up(self, latents: Sequence[Tensor], carried: Latents) -> tuple[list[Tensor], Latents]:
        """Latents A x as one [T, R] or one a slot -> B act(A x), one [T, O] a slot, and the latents to carry on."""
        bent, carried = self.bend(latents, carried)
        return self.up(bent), carried

    def bend(self, latents: Sequence[Tensor], carried: Latents) -> tuple[list[Tensor], Latents]:
        """Latents A x as one [T, R] or one a slot -> act of each, and the latents that cross to the next block.

        `carried` is a queue over the four groups of a block: a crossing family takes its group's latents of the block
        before from the front and puts its own at the end. dense, svd and cola cross nothing and leave it as it is.
        """
        arrived, carried = self.arrive(latents, carried)
        if self.crossing is not None:
            latents = self.crossing(latents, arrived)
        bent = self.act(latents)
        return bent, self.carry_on(bent, carried)

    def arrive(self, latents: Sequence[Tensor], carried: Latents) -> tuple[Latents, Latents]:
        """The latents of the block before that meet these, and the rest of the queue."""
        count = 0 if self.crossing is None else len(latents)
        return carried[:count], carried[count:]

    def act(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """The activation of each latent."""
        return [F.silu(u) for u in latents] if self.latent_act == "silu" else list(latents)

    def carry_on(self, bent: Sequence[Tensor], carried: Latents) -> Latents:
        """The queue with these latents at its end, if the next block takes them."""
        return (*carried, *bent) if self.carries else carried

    def latent_shapes(self, layout: Layout, tokens: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the latents that `bend` takes from the queue and puts at its end, on one process."""
        rows, columns = layout.latent_shape(self, tokens)
        if layout.grouping or len(self.shape.slots) == 1:
            return ((rows, columns),)
        return tuple((rows, columns * rank // sum(self.shape.ranks)) for rank in self.shape.ranks)

    def up(self, latents: Sequence[Tensor]) -> list[Tensor]:
        """Bent latents -> one [T, O] a slot."""
        if len(latents) == 1 and len(self.shape.slots) > 1:
            latents = latents[0].split([part.rows for part in self.parts["A"]], dim=-1)
        return [F.linear(h, b) for h, b in zip(latents, self.outer_weights(latents[0].dtype), strict=True)]

    def outer_weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The weights that make this process's heads or channels (B, or W of a dense group), one a slot, in `dtype`."""
        whole = [
            part.view(getattr(self, name)).to(dtype) if len(self.parts[name]) > 1 else getattr(self, name).to(dtype)
            for name in self._outer
            for part in self.parts[name]
        ]
        return [w if own is None else w.narrow(0, *own) for w, own in zip(whole, self._own_heads, strict=True)]

    def _store_outer(self, factor: str, parameters: Sequence[Parameter], layout: Layout) -> str:
        """Stores parameters as `{factor}_{names of their slots}` and returns that name."""
        name = "_".join((factor, *(parameter.name.split(".")[-2] for parameter in parameters)))
        self.store(name, parameters, layout)
        return name


def _own_head(model: ModelConfig, layout: Layout) -> tuple[int, int] | None:
    """(first row, rows) of the one key/value head that this process uses of a weight that it holds whole; None: all rows.

    With fewer heads K than p processes, the query heads of process i all belong to head i K / p.
    """
    if model.kv_heads >= layout.wide:
        return None
    return layout.rank * model.kv_heads // layout.wide * model.head_dim, model.head_dim
