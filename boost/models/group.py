"""Linears that share one input, dense or low-rank: the math on the layout's shards of the weights.

Legend: T tokens; I input width, O output width, R latent width of the group, all of them local to this process.
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
from boost.models.linear import StartCollective, linear, up_project


class LinearGroup:
    """The math of one group of linears, independent of how their weights are stored. Layouts call this.

    Families differ by data: whether there is a bottleneck, and its activation.
    """

    shape: architecture.GroupSpec
    low_rank: bool
    latent_act: str
    latent_gate: LatentGate | None
    """Combines these latents with those of the previous block."""
    feeds_next: bool
    """Whether the next block uses these latents."""
    A: Tensor
    """Factors A of all slots, [R, I]."""
    own_heads: Sequence[tuple[int, int] | None]
    """For each slot, the (first row, rows) of a replicated weight that this process uses; None: all rows."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Local latent width of each slot."""
        raise NotImplementedError

    def stored_outer(self) -> Sequence[Tensor]:
        """Local B (or W of a dense group), one per slot."""
        raise NotImplementedError

    # Low-rank linears: down_proj, activate, up_proj.

    def down_proj(self, x_TI: Tensor, grouped: bool) -> list[Tensor]:
        """A x: one [T, R] for the whole group, or one per slot."""
        return [linear(x_TI, a_RI) for a_RI in self.down_weights(self.A.to(x_TI.dtype), grouped)]

    def down_weights(self, a_RI: Tensor, grouped: bool) -> Sequence[Tensor]:
        """A (or a tensor of its shape) as one matrix for the whole group, or one per slot."""
        if grouped or len(self.shape.slots) == 1:
            return [a_RI]
        return a_RI.split(list(self.ranks_here))

    def activate(self, latents: Sequence[Tensor], prev_latents: Latents = ()) -> tuple[list[Tensor], Latents]:
        """Latents A x, one [T, R] or one per slot -> (activated latents, latents for the next block)."""
        if self.latent_gate is not None:
            latents = self.latent_gate(latents, prev_latents)
        return self.act(latents)

    def act(self, latents: Sequence[Tensor]) -> tuple[list[Tensor], Latents]:
        """Applies the activation. Returns (activated latents, latents for the next block)."""
        h = [F.silu(u) for u in latents] if self.latent_act == "silu" else list(latents)
        return h, tuple(h) if self.feeds_next else ()

    def up_proj(self, h: Sequence[Tensor]) -> list[Tensor]:
        """Activated latents -> one [T, O] per slot."""
        if len(h) == 1 and len(self.shape.slots) > 1:
            h = h[0].split(list(self.ranks_here), dim=-1)
        return [linear(h_Tr, b) for h_Tr, b in zip(h, self.outer_weights(h[0].dtype), strict=True)]

    def project(self, h: Sequence[Tensor]) -> list[Tensor]:
        """B h of activated latents, one [T, O] per slot, in one autograd node that writes the slots' gradients side by side."""
        if len(h) == 1:
            return up_project(h[0], None, False, self.stored_weights())
        return self.up_proj(h)

    def activate_and_project(
        self, latents: Sequence[Tensor], prev_latents: Latents = ()
    ) -> tuple[list[Tensor], Latents]:
        """Latents A x -> (B act(A x), one [T, O] per slot; latents for the next block)."""
        h, new_latents = self.activate(latents, prev_latents)
        return self.up_proj(h), new_latents

    @property
    def has_private_latents(self) -> bool:
        """Whether latents neither come from the previous block nor go to the next one, so that one node may consume them."""
        return self.latent_gate is None and not self.feeds_next

    def scale_act_and_project(
        self, latents: Sequence[Tensor], scale_T1: Tensor | None, start_grad_sum: StartCollective | None = None
    ) -> list[Tensor]:
        """B act(c u) of private latents, one [T, O] per slot. Saves only u (`boost.models.linear`)."""
        weights, silu = self.stored_weights(), self.latent_act == "silu"
        if len(latents) == 1:
            return up_project(latents[0], scale_T1, silu, weights, start_grad_sum)
        slots = zip(latents, weights, strict=True)
        return [y for u, b in slots for y in up_project(u, scale_T1, silu, [b], start_grad_sum)]

    def take_latents(self, stream: Stream, grouped: bool) -> tuple[Latents, Stream]:
        """Takes the previous block's latents for this group from the stream. Returns (latents, remaining stream)."""
        if self.latent_gate is None:
            return (), stream
        return stream.take(1 if grouped else len(self.shape.slots))

    def latent_shapes(self, layout: Layout, tokens: int) -> tuple[tuple[int, int], ...]:
        """Local shapes of the latents that are passed between blocks."""
        ranks = [sum(self.shape.ranks)] if layout.grouping else self.shape.ranks
        return tuple(layout.latent_shape(rank, tokens) for rank in ranks)

    # Dense linears.

    def dense(self, saved: Saved, grouped: bool) -> list[Tensor]:
        """W x of a dense group, one [T, O] per slot: in one GEMM or one per slot, from one x or one per slot."""
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

    def outer_weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The weights that produce this process's heads or channels (B, or W of a dense group), one per slot, in `dtype`."""
        return [w.to(dtype) for w in self.stored_weights()]

    def stored_weights(self) -> list[Tensor]:
        """The same as they are stored."""
        outer = zip(self.stored_outer(), self.own_heads, strict=True)
        return [w if own is None else w.narrow(0, *own) for w, own in outer]


class FusedLinearGroup(LinearGroup, FusedModule):
    """The linears of one group of one block, in fused parameters.

    The A factors of all slots are one fused parameter [sum of ranks, I], so that they share one GEMM and one collective without
    a copy. B factors have one tensor per slot. Dense weights are one tensor [sum of outputs, I], or two if key and value have a
    different placement than query.
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
            alike = itertools.groupby(shape.parameters(prefix, "W"), lambda parameter: layout.placement(parameter.role))
            self._outer = [self._store_outer("W", tuple(parameters), layout) for _, parameters in alike]
        whole = [self.placements[name].dim is None for name in self._outer for _ in self.slices[name]]
        slots = zip(shape.slots, whole, strict=True)
        self.own_heads = [own_head(model, layout, slot, is_whole) for slot, is_whole in slots]
        has_latent_gate = architecture.has_latent_gate(model, layer)
        self.latent_gate = LatentGate(model, shape, prefix, layout) if has_latent_gate else None
        self.feeds_next = model.has_latent_gates and layer + 1 < model.layers

    @property
    def ranks_here(self) -> Sequence[int]:
        return [param_slice.rows for param_slice in self.slices["A"]]

    def stored_outer(self) -> Sequence[Tensor]:
        return [
            param_slice.view(getattr(self, name)) if len(self.slices[name]) > 1 else getattr(self, name)
            for name in self._outer
            for param_slice in self.slices[name]
        ]

    def dense(self, saved: Saved, grouped: bool) -> list[Tensor]:
        """Same as in `LinearGroup`, but avoids a copy if the group is stored as one tensor."""
        if not grouped or len(self._outer) > 1 or any(self.own_heads):
            return super().dense(saved, grouped)
        rows = [param_slice.rows for param_slice in self.slices[self._outer[0]]]
        y_TO = linear(saved.tensors[0], getattr(self, self._outer[0]))
        # Splitting into a single part would copy its gradient.
        return [y_TO] if len(rows) == 1 else list(y_TO.split(rows, dim=-1))

    def _store_outer(self, factor: str, parameters: Sequence[Parameter], layout: Layout) -> str:
        """Stores parameters as `{factor}_{slot names}` and returns that name."""
        name = "_".join((factor, *(parameter.name.split(".")[-2] for parameter in parameters)))
        self.add_fused_param(name, parameters, layout)
        return name


def own_head(model: ModelConfig, layout: Layout, slot: architecture.Slot, replicated: bool) -> tuple[int, int] | None:
    """(first row, rows) of the one key/value head that this process uses of a replicated weight; None: all rows.

    With fewer heads K than p processes, all query heads of process i belong to head i K / p.
    """
    if not (slot.kv and replicated) or layout.crosses_as_heads(slot) or model.kv_heads >= layout.num_shards:
        return None
    return layout.rank * model.kv_heads // layout.num_shards * model.head_dim, model.head_dim
