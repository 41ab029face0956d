"""Linears with one input, dense or low-rank: the math, on the layout's shards of the weights.

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
from boost.models.fused import FusedModule
from boost.models.interface import Latents, Layout, Saved, Stream
from boost.models.latent_gate import LatentGate
from boost.models.linear import linear
from boost.models.up_proj import Begin, up_project


class LinearGroup:
    """The linears of one group: what they compute, independent of how their weights are stored. Layouts call this.

    Families differ by data: whether there is a bottleneck, and its activation.
    """

    shape: architecture.GroupSpec
    low_rank: bool
    latent_act: str
    latent_gate: LatentGate | None
    """Combines these latents with those of the previous block."""
    feeds_next: bool
    """Whether the next block takes these latents."""
    A: Tensor
    """Factors A of all slots, [R, I]."""
    own_heads: Sequence[tuple[int, int] | None]
    """For each slot, the (first row, rows) that this process uses of a weight that it holds whole; None: all rows."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Latent width of each slot, as held by this process."""
        raise NotImplementedError

    def stored_outer(self) -> list[Tensor]:
        """B, or W of a dense group, one a slot, as this process holds them."""
        raise NotImplementedError

    # Low-rank linears: down_proj, activate, up_proj.

    def down_proj(self, x_TI: Tensor, grouped: bool) -> list[Tensor]:
        """A x, one [T, R] for the whole group or one a slot."""
        return [linear(x_TI, a_RI) for a_RI in self.down_weights(self.A.to(x_TI.dtype), grouped)]

    def down_weights(self, a_RI: Tensor, grouped: bool) -> Sequence[Tensor]:
        """A (or something of its shape) as one matrix for the whole group, or one a slot."""
        if grouped or len(self.shape.slots) == 1:
            return [a_RI]
        return a_RI.split(list(self.ranks_here))

    def activate(self, latents: Sequence[Tensor], prev_latents: Latents = ()) -> tuple[list[Tensor], Latents]:
        """Latents A x as one [T, R] or one a slot -> act of each, and those that the next block takes."""
        if self.latent_gate is not None:
            latents = self.latent_gate(latents, prev_latents)
        return self.act(latents)

    def act(self, latents: Sequence[Tensor]) -> tuple[list[Tensor], Latents]:
        """The activation of each latent, and what of it the next block takes."""
        h = [F.silu(u) for u in latents] if self.latent_act == "silu" else list(latents)
        return h, tuple(h) if self.feeds_next else ()

    def up_proj(self, h: Sequence[Tensor]) -> list[Tensor]:
        """Activated latents -> one [T, O] a slot."""
        if len(h) == 1 and len(self.shape.slots) > 1:
            h = h[0].split(list(self.ranks_here), dim=-1)
        return [linear(h_Tr, b) for h_Tr, b in zip(h, self.outer_weights(h[0].dtype), strict=True)]

    def project(self, h: Sequence[Tensor]) -> list[Tensor]:
        """B h of activated latents, one [T, O] a slot, by one node, which writes the gradients of the slots side by side."""
        if len(h) == 1:
            return up_project(h[0], None, False, self.outer_weights(None))
        return self.up_proj(h)

    def activate_and_project(
        self, latents: Sequence[Tensor], prev_latents: Latents = ()
    ) -> tuple[list[Tensor], Latents]:
        """Latents A x -> B act(A x), one [T, O] a slot, and those that the next block takes."""
        h, new_latents = self.activate(latents, prev_latents)
        return self.up_proj(h), new_latents

    @property
    def has_private_latents(self) -> bool:
        """Whether latents neither come from the previous block nor go to the next one, so that one node may take them."""
        return self.latent_gate is None and not self.feeds_next

    def scale_act_and_project(
        self, latents: Sequence[Tensor], scale_T1: Tensor | None, begin: Begin | None = None
    ) -> list[Tensor]:
        """B act(c u) of private latents, one [T, O] a slot, of which only u is kept (`boost.models.up_proj`)."""
        weights, silu = self.outer_weights(None), self.latent_act == "silu"
        if len(latents) == 1:
            return up_project(latents[0], scale_T1, silu, weights, begin)
        each = zip(latents, weights, strict=True)
        return [y for u, b in each for y in up_project(u, scale_T1, silu, [b], begin)]

    def take_latents(self, stream: Stream, grouped: bool) -> tuple[Latents, Stream]:
        """The previous block's latents for this group, and the stream without them."""
        if self.latent_gate is None:
            return (), stream
        return stream.take(1 if grouped else len(self.shape.slots))

    def latent_shapes(self, layout: Layout, tokens: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the latents that cross between blocks, on one process."""
        ranks = [sum(self.shape.ranks)] if layout.grouping else self.shape.ranks
        return tuple(layout.latent_shape(rank, tokens) for rank in ranks)

    # Dense linears.

    def dense(self, saved: Saved, grouped: bool) -> list[Tensor]:
        """W x of a dense group, one [T, O] a slot, in one GEMM or one a slot, of one x or one a slot."""
        x_TI = saved.tensors[0]
        if not grouped:
            inputs = saved.tensors if len(saved.tensors) > 1 else [x_TI] * len(self.shape.slots)
            return [linear(x, w_OI) for x, w_OI in zip(inputs, self.outer_weights(x_TI.dtype), strict=True)]
        weights = self.outer_weights(x_TI.dtype)
        return list(linear(x_TI, torch.cat(weights)).split([w_OI.shape[0] for w_OI in weights], dim=-1))

    def dense_out(self, hidden: Tensor) -> Tensor:
        """W x of a group with one slot."""
        (y_TO,) = self.dense(Saved((hidden,)), grouped=True)
        return y_TO

    def outer_weights(self, dtype: torch.dtype | None) -> list[Tensor]:
        """The weights that make this process's heads or channels (B, or W of a dense group), one a slot, in `dtype` (None: as
        they are stored)."""
        weights = self.stored_outer()
        weights = weights if dtype is None else [w.to(dtype) for w in weights]
        return [w if own is None else w.narrow(0, *own) for w, own in zip(weights, self.own_heads, strict=True)]


class FusedLinearGroup(LinearGroup, FusedModule):
    """The linears of one group of one block, in fused parameters.

    The factors A of all slots are one fused parameter [sum of ranks, I], so that they can share one GEMM and one
    collective without a copy; factors B have one tensor a slot; dense weights are one tensor [sum of outputs, I], or two
    where key and value are not sharded like the query.
    """

    def __init__(self, model: ModelConfig, shape: architecture.GroupSpec, layer: int, layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        prefix = f"layers.{layer}"
        self.low_rank = model.low_rank
        self.latent_act = model.latent_act
        if self.low_rank:
            self.add_fused_param("A", shape.parameters(prefix, "A"), layout)
            self._outer = [self._store_outer("B", (parameter,), layout) for parameter in shape.parameters(prefix, "B")]
        else:
            alike = itertools.groupby(shape.parameters(prefix, "W"), lambda each: layout.placement(each.role))
            self._outer = [self._store_outer("W", tuple(parameters), layout) for _, parameters in alike]
        whole = [self.placements[name].dim is None for name in self._outer for _ in self.slices[name]]
        self.own_heads = [
            own_head(model, layout) if slot.kv and held_whole and not layout.crosses_as_heads(slot) else None
            for slot, held_whole in zip(shape.slots, whole, strict=True)
        ]
        has_latent_gate = architecture.has_latent_gate(model, layer)
        self.latent_gate = LatentGate(model, shape, prefix, layout) if has_latent_gate else None
        self.feeds_next = model.has_latent_gates and layer + 1 < model.layers

    @property
    def ranks_here(self) -> Sequence[int]:
        return [param_slice.rows for param_slice in self.slices["A"]]

    def stored_outer(self) -> list[Tensor]:
        return [
            param_slice.view(getattr(self, name)) if len(self.slices[name]) > 1 else getattr(self, name)
            for name in self._outer
            for param_slice in self.slices[name]
        ]

    def dense(self, saved: Saved, grouped: bool) -> list[Tensor]:
        """As of `LinearGroup`; a group that is one tensor is multiplied without a copy."""
        if not grouped or len(self._outer) > 1 or any(self.own_heads):
            return super().dense(saved, grouped)
        rows = [param_slice.rows for param_slice in self.slices[self._outer[0]]]
        y_TO = linear(saved.tensors[0], getattr(self, self._outer[0]))
        # Split into one part, its gradient would be copied.
        return [y_TO] if len(rows) == 1 else list(y_TO.split(rows, dim=-1))

    def _store_outer(self, factor: str, parameters: Sequence[Parameter], layout: Layout) -> str:
        """Stores parameters as `{factor}_{names of their slots}` and returns that name."""
        name = "_".join((factor, *(parameter.name.split(".")[-2] for parameter in parameters)))
        self.add_fused_param(name, parameters, layout)
        return name


def own_head(model: ModelConfig, layout: Layout) -> tuple[int, int] | None:
    """(first row, rows) of the one key/value head that this process uses of a weight that it holds whole; None: all rows.

    With fewer heads K than p processes, the query heads of process i all belong to head i K / p.
    """
    if model.kv_heads >= layout.num_shards:
        return None
    return layout.rank * model.kv_heads // layout.num_shards * model.head_dim, model.head_dim
