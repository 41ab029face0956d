"""Groups of dense or low-rank linears that share one input.

Legend: T tokens; I input width, O output width and R latent width of a group, all local to this process.
"""

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from boost.config import architecture
from boost.config.layouts import local_shape
from boost.config.schema import ModelConfig
from boost.config.storage import fused_weights
from boost.models.attention import Heads, own_head
from boost.models.fused import FusedModule, Identity, Sharding
from boost.models.kernels import StartCollective, UpProject, linear, projected, scale, select
from boost.models.latents import Mixer, act_of, math_of
from boost.models.recompute import RecomputePolicy, call

Latents = tuple[Tensor, ...]
"""What passes from block to block: latents, one tensor per group of linears, or outputs, one per linear."""
Outputs = tuple[Sequence[Tensor], Latents]
"""Outputs of a group of linears, one per slot, and what it carries to the next block, if anything."""


class LinearGroup:
    """Linears that share one input, with the layout's shards of their weights: `down` makes one tensor of latents u for all of
    them, `up` an output for each. Subclasses store the weights.

    Low-rank linears: u = A x, all slots side by side, then selected inputs; y = B act(u). What is between A and B is the family's
    (`model.math`). Linears of full rank have the identity as B.
    """

    inner: Tensor
    """Inner maps of all slots, [U, I]; or W of a dense linear that projects back to the residual stream."""
    index: Tensor | None
    """Selected inputs of all slots, int64, as numbered over all processes."""
    heads: Heads
    """For q, k, v: what turns their products into heads."""
    bias: Tensor
    """For o, if it `adds_bias`."""
    mixer: Mixer | None
    """What the family does to latents before act, if it `mixes` any, and to outputs, if it `finishes` them."""
    up_widths: list[int]
    """Local width of what each outer map reads."""

    def __init__(
        self, model: ModelConfig, shape: architecture.GroupSpec, layer: int, layout: Sharding, policy: RecomputePolicy
    ) -> None:
        model.require_implemented()
        self.shape, self.low_rank, slots = shape, model.low_rank, len(shape.slots)
        self.math = math_of(model)
        inner, selects = shape.maps("", "inner"), shape.maps("", "select")
        placed = [(part, layout.placement(part.role)) for part in (*inner, *selects)]
        self.down_widths = [local_shape(part, placement, layout.size)[0] for part, placement in placed]
        """Local width of each inner map's result, then of the selected inputs of each slot."""
        self.inner_widths = self.down_widths[: len(inner)]
        of_slot = [tuple(self.down_widths[slot::slots]) for slot in range(slots)]
        widths = tuple(map(sum, zip(*of_slot, strict=True))), *of_slot
        self.act, *self.slot_acts = [act_of(model, each) if shape.kind.outer else None for each in widths]
        """The activation of all slots side by side, and of each by itself."""
        self.input_shard = layout.rank if placed and placed[0][1].dim == 1 else 0
        """Which shard of the inputs this process has."""
        self.as_heads = [layout.crosses_as_heads(slot) for slot in shape.slots]
        """For each slot, whether this process computes all heads of its tokens, which are then exchanged."""
        taken = architecture.taken(model, layer)
        self.before = next((group for group in taken if group.name == shape.name), None)
        """This group of the previous block, if it carries its latents or its outputs to this one."""
        carried = self.before.kind.carries if self.before is not None else ""
        fed = [group.kind.carries for group in architecture.taken(model, layer + 1) if group.name == shape.name]
        self.takes_prev, self.takes_outputs = carried == "latents", slots * (carried == "outputs")
        """Whether it takes the previous block's latents, and how many of its outputs."""
        self.feeds_next, self.feeds_outputs = "latents" in fed, "outputs" in fed
        """Whether the next block uses these latents, or these outputs."""
        at_output = [extra.is_output for extra in shape.kind.extra]
        self.mixes = self.takes_prev or not all(at_output)
        """Whether the family's mathematics does more with the latents than act."""
        self.finishes = "outputs" in (carried, *fed) or any(at_output)
        """Whether it does something with the outputs."""
        self.adds_bias = shape.side == "leave" and shape.slots[0].bias
        dims = [layout.placement(shape.role(s, "outer" if model.low_rank else "weight")).dim for s in shape.slots]
        each_slot = zip(shape.slots, dims, self.as_heads, strict=True)
        is_copy = [slot.kv and dim is None and not heads for slot, dim, heads in each_slot]
        self.own_heads = [own_head(model, layout) if copied else None for copied in is_copy]
        """For each slot, the (first row, rows) of a replicated weight that this process uses; None: all rows."""
        full = zip(shape.slots if model.low_rank and not shape.kind.outer else (), dims, self.own_heads, strict=False)
        self.identities = [Identity.placed(slot.d_out, dim, own, layout) for slot, dim, own in full]
        """The outer maps of linears of full rank."""
        self.recompute(policy)

    def recompute(self, policy: RecomputePolicy) -> None:
        """Chooses the recomputation policy for later backward passes."""
        self.policy = policy
        self.is_hand_written = policy.block is call and not self.identities
        """Whether hand-written autograd nodes use weights. They do not if a whole block is recomputed, because
        recomputation stops before the last GEMM only if that GEMM is a separate node."""
        has_backward = self.act is None or self.act.backward is not None
        only_acts = not (self.mixes or self.feeds_next)
        self.is_one_node = self.low_rank and self.is_hand_written and has_backward and only_acts
        """Whether `up` is one autograd node that saves only the latents. This requires an activation with a backward, and latents
        that nothing else is mixed into and that do not pass to the next block."""
        self.up_runner = call if self.is_one_node else policy.local
        """Runs `up` as a segment of its own, unless it saves only the latents anyway."""

    def weights(self) -> Sequence[Tensor]:
        """The weights of `up` (B, or W of a dense group), one per slot, then further outer maps, as stored; none if `down` has them
        all."""
        raise NotImplementedError

    def down(self, x_TI: Tensor, gamma_I: Tensor | None = None) -> Tensor:
        """x -> u [T, U]. `gamma_I`: scales x."""
        u_TU = linear(x_TI, self.inner if gamma_I is None else (self.inner * gamma_I).to(x_TI.dtype))
        return u_TU if self.index is None else self.with_selected(u_TU, x_TI, self.index, gamma_I)

    def selected(self, x_TI: Tensor, index_K: Tensor | None, gamma_I: Tensor | None = None) -> Tensor | None:
        """Inputs that an index selects, if any."""
        return None if index_K is None else select(x_TI, index_K, self.input_shard * x_TI.shape[-1], gamma_I)

    def with_selected(
        self, u_TU: Tensor, x_TI: Tensor, index_K: Tensor | None, gamma_I: Tensor | None = None
    ) -> Tensor:
        """u, then the selected inputs."""
        selected_TK = self.selected(x_TI, index_K, gamma_I)
        return u_TU if selected_TK is None else torch.cat((u_TU, selected_TK), dim=-1)

    def by_slot(self, parts: Sequence[Tensor], dim: int = 0) -> Sequence[Tensor]:
        """Of parts that stand apart, the first of every slot, then the second: those of each slot together."""
        slots = len(self.shape.slots)
        return parts if len(parts) == slots else [torch.cat(list(parts[slot::slots]), dim) for slot in range(slots)]

    def inner_by_slot(self, inner_UI: Tensor) -> Iterable[tuple[Tensor, Tensor | None]]:
        """For each slot, its rows of `inner` and its part of `index`."""
        rows = self.by_slot(inner_UI.split(self.inner_widths))
        if self.index is None:
            return zip(rows, itertools.repeat(None), strict=False)
        return zip(rows, self.by_slot(self.index.split(self.down_widths[len(self.inner_widths) :])), strict=True)

    def outer_by_slot(self) -> Sequence[Sequence[Tensor] | Identity]:
        """The weights of `up` that belong to each slot."""
        if self.identities:
            return self.identities
        weights, slots = self.weights(), len(self.shape.slots)
        return [weights[slot::slots] for slot in range(slots)]

    def up(
        self,
        u_TR: Tensor,
        prev_TR: Tensor | None = None,
        scale_T1: Tensor | None = None,
        start_grad_sum: StartCollective | None = None,
    ) -> Outputs:
        """u -> (B act(c u), one [T, O] per slot; latents for the next block, if any).

        `prev_TR`: the previous block's latents. `scale_T1`: c, the inverse RMS; None: 1. `start_grad_sum`: starts summing the
        latents' gradient, if only the latents are saved (`UpProject`).
        """
        if self.is_one_node and torch.is_grad_enabled():
            return UpProject.apply(u_TR, scale_T1, self.act, start_grad_sum, len(self.shape.slots), *self.weights()), ()
        h_TR, kept = self.activate(u_TR if scale_T1 is None else scale(u_TR, scale_T1), prev_TR)
        return self.project(h_TR), kept

    def activate(self, u_TR: Tensor, prev_TR: Tensor | None = None, is_mixed: bool = False) -> tuple[Tensor, Latents]:
        """u -> (h = act(u), latents for the next block). Before act, u is mixed, unless it `is_mixed` already."""
        if self.mixer is not None and self.mixes and not is_mixed:
            u_TR = self.mixer(u_TR, prev_TR)
        h_TR = u_TR if self.act is None else self.act.forward(u_TR)
        return h_TR, (h_TR,) if self.feeds_next else ()

    def project(self, h_TR: Tensor) -> Sequence[Tensor]:
        """B h, one [T, O] per slot."""
        weights, widths = self.outer_by_slot(), self.up_widths
        parts = h_TR.split(widths, dim=-1) if len(widths) > 1 else (h_TR,)
        return list(map(projected, self.by_slot(parts, dim=-1), weights))

    def finish(self, y: Sequence[Tensor], kept: Latents, prev: Latents) -> Outputs:
        """Outputs as the rest of the block uses them, combined with those of the previous block; what is for the next block."""
        assert self.mixer is not None
        y = self.math.finish(y, prev, self.mixer)
        return y, (*kept, *y) if self.feeds_outputs else kept


class Dense(LinearGroup):
    """Linears without a bottleneck. Those that project back to the residual stream have all of W in `down`, the others in `up`."""

    def down(self, x_TI: Tensor, gamma_I: Tensor | None = None) -> Tensor:
        return x_TI if self.shape.side == "enter" else linear(x_TI, self.inner)

    def activate(self, u_TR: Tensor, prev_TR: Tensor | None = None, is_mixed: bool = False) -> tuple[Tensor, Latents]:
        return u_TR, ()

    def project(self, h_TR: Tensor) -> Sequence[Tensor]:
        """W x, one [T, O] per slot, by one GEMM."""
        if self.shape.side == "leave":
            return (h_TR,)
        weights = [w_OI.to(h_TR.dtype) for w_OI in self.weights()]
        return linear(h_TR, torch.cat(weights)).split([w_OI.shape[0] for w_OI in weights], dim=-1)


class FusedLinearGroup(LinearGroup, FusedModule):
    """The linears of one group in one block, stored in fused parameters.

    All slots' inner maps are one fused parameter [sum of widths, I], so they share one GEMM and one collective without
    a copy; their indices of selected inputs are one, too. Each outer map is a separate tensor. Dense weights are one tensor
    [sum of outputs, I], or two if key and value are placed differently from query.
    """

    def __init__(
        self, model: ModelConfig, shape: architecture.GroupSpec, layer: int, layout: Sharding, policy: RecomputePolicy
    ) -> None:
        FusedModule.__init__(self)
        LinearGroup.__init__(self, model, shape, layer, layout, policy)
        prefix, self._up = f"layers.{layer}", list[str]()
        tensors = list(fused_weights(model, shape, prefix, layout.placement))
        if self.low_rank or shape.side == "leave":
            self.add_fused_param("inner", tensors.pop(0), layout)
        if tensors and tensors[0][0].is_index:
            self.add_fused_param("index", tensors.pop(0), layout)
        else:
            self.index = None
        for parameters in tensors:
            slots, names = zip(*(parameter.name.split(".")[-2:] for parameter in parameters), strict=True)
            self._up.append("_".join((names[0], *slots)))
            self.add_fused_param(self._up[-1], parameters, layout)
        self.up_widths = [getattr(self, name).shape[1] for name in self._up] or self.down_widths
        self._uses_all_rows = not any(self.own_heads)
        self.mixer = Mixer(self.math, shape, self.before, prefix, layout) if self.mixes or self.finishes else None

    def weights(self) -> Sequence[Tensor]:
        stored = [getattr(self, name) for name in self._up]
        if len(stored) < len(self.shape.slots):
            stored = [part.view(w) for w, name in zip(stored, self._up, strict=True) for part in self.slices[name]]
        if self._uses_all_rows:
            return stored
        owned = itertools.cycle(self.own_heads)
        return [w if own is None else w.narrow(0, *own) for w, own in zip(stored, owned, strict=False)]


class FusedDense(Dense, FusedLinearGroup):
    """The same, without a bottleneck."""

    def project(self, h_TR: Tensor) -> Sequence[Tensor]:
        """Same as in `Dense`, but avoids a copy if the group is stored as one tensor."""
        if len(self._up) != 1 or not self._uses_all_rows:
            return super().project(h_TR)
        (name,) = self._up
        return linear(h_TR, getattr(self, name)).split([part.rows for part in self.slices[name]], dim=-1)
