"""The data that flows through the blocks, and groups of dense or low-rank linears that share one input.

Legend: T tokens; I input width, O output width and R latent width of a group, all local to this process.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.models.attention import Heads, own_head
from boost.models.fused import FusedModule, Sharding
from boost.models.kernels import StartCollective, UpProject, linear, scale
from boost.models.latent_gate import LatentGate

Latents = tuple[Tensor, ...]
"""Latents, one tensor per group of linears or one per slot; empty for families that pass none from block to block."""


class Stream(NamedTuple):
    """The data that one block passes to the next. It is a tuple so that torch finds its tensors."""

    x: Tensor
    """The residual stream, in the layout's shape."""
    latents: Latents = ()
    """Latents of the block's groups in forward order."""


class Flow:
    """One part of a micro-batch as it passes through the blocks: the residual stream, and the results of the last collective."""

    def __init__(self, x: Tensor, prev_latents: Latents = (), first_half: "Flow | None" = None) -> None:
        """`first_half`: for a sequence's second half, the flow of its first half, whose keys it attends to."""
        self.x = x
        """The residual stream; before the blocks, the tokens."""
        self.prev_latents = prev_latents
        """Queue from which each group in turn takes the latents of the same group in the previous block."""
        self.latents: Latents = ()
        """Latents of this block's groups so far, for the next block."""
        self.arrived: Latents = ()
        """Results of the last collective: the inputs of `Layout.project_in`, or of attention."""
        self.to_combine: Latents = ()
        """Latents of the previous block that `Layout.project_in` still has to combine with the ones in `arrived`."""
        self.first_half = first_half
        self.keys_values: list[tuple[Tensor, Tensor]] = []
        """Rotated keys and values [B, K, S, E] of a first half, one entry per block, which the second half takes."""

    def take(self, count: int) -> Latents:
        """Takes the next `count` tensors from the queue of the previous block's latents."""
        taken, self.prev_latents = self.prev_latents[:count], self.prev_latents[count:]
        return taken

    def add(self, update: Tensor) -> None:
        """Adds an update to the residual stream."""
        self.x = self.x + update

    def next_block(self) -> None:
        """Moves to the next block: this block's latents become the previous block's."""
        self.prev_latents, self.latents = self.latents, ()


class SegmentRunner(Protocol):
    """Calls a function and decides which tensors are saved for the backward pass.

    The function may be called again later with the same arguments, so anything else that it reads must not change.
    """

    def __call__(self, function: Callable[..., Any], /, *arguments: Any) -> Any: ...


def call(function: Callable[..., Any], /, *arguments: Any) -> Any:
    """Calls the function directly; autograd decides which tensors are saved."""
    return function(*arguments)


@dataclass(frozen=True)
class RecomputePolicy:
    """Which tensors the blocks save in the forward pass and recompute in the backward pass."""

    block: SegmentRunner = call
    """Runs the whole block."""
    local: SegmentRunner = call
    """Runs each segment except attention's."""
    attention: SegmentRunner = call
    """Runs the segment from the latents of q, k, v to the output of attention."""
    sharded_latents: bool = False
    """Saves latents before they are all-gathered, which takes the least memory but repeats the all-gather."""


NO_RECOMPUTE = RecomputePolicy()


class LinearGroup:
    """Dense or low-rank linears that share one input, with the layout's shards of their weights. Subclasses store the weights.

    `inner` comes before the bottleneck (A x), `outer` after it (B act(u)). A dense group has no bottleneck:
    its W is `outer` if the group projects in, and `inner` if it projects out; the other method does nothing.

    Families differ only in whether they have a bottleneck and in its activation and latent gates.
    """

    A: Tensor
    """Factors A of all slots, [R, I]."""
    heads: Heads
    """For q, k, v: what turns their products into heads."""
    bias: Tensor
    """For o, if it `adds_bias`."""
    latent_gate: LatentGate | None
    """Combines this group's latents with those of the previous block."""

    def describe(self, model: ModelConfig, shape: architecture.GroupSpec, layer: int, layout: Sharding) -> None:
        """Sets the attributes that follow from the configuration."""
        self.shape, self.low_rank, self.silu = shape, model.low_rank, model.latent_act == "silu"
        self.head_dim = model.head_dim
        self.grouping = layout.grouping
        """Whether several slots share one GEMM, one collective and one tensor of latents."""
        self.is_one_tensor = layout.grouping or len(shape.slots) == 1
        self.as_heads = [layout.crosses_as_heads(slot) for slot in shape.slots]
        """For each slot, whether this process computes all heads of its tokens, which are then exchanged."""
        self.feeds_next = model.has_latent_gates and layer + 1 < model.layers
        """Whether the next block uses these latents."""
        self.adds_bias = shape.side == "leave" and shape.slots[0].bias
        roles = [weight.role for weight in shape.parameters("", "B" if model.low_rank else "W")]
        each = zip(shape.slots, roles, self.as_heads, strict=True)
        is_copy = [slot.kv and layout.placement(role).dim is None and not as_heads for slot, role, as_heads in each]
        self.own_heads = [own_head(model, layout) if copied else None for copied in is_copy]
        """For each slot, the (first row, rows) of a replicated weight that this process uses; None: all rows."""

    def recompute(self, policy: RecomputePolicy) -> None:
        """Chooses the recomputation policy for later backward passes and sets the attributes that depend on it. Call it last."""
        self.policy = policy
        self.is_hand_written = policy.block is call
        """Whether hand-written autograd nodes use weights. They do not if a whole block is recomputed, because
        recomputation stops before the last GEMM only if that GEMM is a separate node."""
        is_private = self.latent_gate is None and not self.feeds_next
        self.saves_latents_only = self.low_rank and self.is_hand_written and is_private
        """Whether act and B are one autograd node that saves only the latents. This requires latents that neither depend on the
        previous block's latents nor pass to the next block."""
        self.taken = 0 if self.latent_gate is None else 1 if self.is_one_tensor else len(self.shape.slots)
        """Number of tensors of the previous block's latents that this group uses."""

    @property
    def ranks_here(self) -> Sequence[int]:
        """Local latent width of each slot."""
        raise NotImplementedError

    def weights(self) -> Sequence[Tensor]:
        """The weights that produce this process's heads or channels (B, or W of a dense group), one per slot, as stored."""
        raise NotImplementedError

    def inner(self, x_TI: Tensor) -> list[Tensor]:
        """A x: one [T, R] for the whole group, or one per slot."""
        if self.low_rank and self.is_one_tensor:
            return [linear(x_TI, self.A)]
        if self.low_rank:
            return [linear(x_TI, a_RI) for a_RI in self.inner_weights(self.A)]
        return [x_TI] if self.shape.side == "enter" else self.dense([x_TI])

    def inner_weights(self, a_RI: Tensor) -> Sequence[Tensor]:
        """A (or a tensor of its shape) as one matrix for the whole group, or one per slot."""
        return [a_RI] if self.is_one_tensor else a_RI.split(list(self.ranks_here))

    def outer(
        self,
        latents: Sequence[Tensor],
        prev: Latents = (),
        scale_T1: Tensor | None = None,
        start_grad_sum: StartCollective | None = None,
    ) -> tuple[list[Tensor], Latents]:
        """Latents u -> (B act(c u), one [T, O] per slot; latents for the next block).

        `prev`: the previous block's latents. `scale_T1`: c, the inverse RMS; None: 1. `start_grad_sum`: starts summing the
        latents' gradient, if only the latents are saved (`UpProject`).
        """
        if not self.low_rank:
            return self.dense(latents) if self.shape.side == "enter" else list(latents), ()
        if self.saves_latents_only and torch.is_grad_enabled():
            weights = self.weights()
            if len(latents) == 1:
                return list(UpProject.apply(latents[0], scale_T1, self.silu, start_grad_sum, *weights)), ()
            slots = zip(latents, weights, strict=True)
            return [y for u, b in slots for y in UpProject.apply(u, scale_T1, self.silu, start_grad_sum, b)], ()
        if scale_T1 is not None:
            latents = [scale(u_TR, scale_T1) for u_TR in latents]
        h, new = self.activate(latents, prev)
        return self.project(h), new

    def outer_segment(self, latents: Sequence[Tensor], prev: Latents = ()) -> tuple[list[Tensor], Latents]:
        """`outer` as a separate segment, unless it is a single node, which saves only the latents."""
        made: tuple[list[Tensor], Latents]
        made = self.outer(latents) if self.saves_latents_only else self.policy.local(self.outer, latents, prev)
        return made

    def update(self, flow: Flow, u_TR: Tensor, start_grad_sum: StartCollective | None = None) -> None:
        """Adds B act(u), the update of a group that projects out, to the residual stream."""
        if self.saves_latents_only:
            (update,), latents = self.outer((u_TR,), (), None, start_grad_sum)
        else:
            (update,), latents = self.policy.local(self.outer, (u_TR,), flow.take(self.taken) if self.taken else ())
        flow.latents += latents
        flow.add(update)

    def activate(self, latents: Sequence[Tensor], prev: Latents = ()) -> tuple[list[Tensor], Latents]:
        """Latents A x, one [T, R] or one per slot -> (activated latents, latents for the next block)."""
        if self.latent_gate is not None:
            latents = self.latent_gate(latents, prev)
        return self.act(latents)

    def activate_segment(self, latents: Sequence[Tensor], prev: Latents) -> tuple[list[Tensor], Latents]:
        """`activate`, as a separate segment if there is a latent gate."""
        if self.latent_gate is None:
            return self.act(latents)
        made: tuple[list[Tensor], Latents] = self.policy.local(self.activate, latents, prev)
        return made

    def act(self, latents: Sequence[Tensor]) -> tuple[list[Tensor], Latents]:
        """Applies the activation. Returns (activated latents, latents for the next block)."""
        h = [F.silu(u) for u in latents] if self.silu else list(latents)
        return h, tuple(h) if self.feeds_next else ()

    def project(self, h: Sequence[Tensor]) -> list[Tensor]:
        """B h for activated latents h: one [T, O] per slot."""
        if len(h) == 1 and len(self.shape.slots) > 1:
            h = h[0].split(list(self.ranks_here), dim=-1)
        return [linear(h_Tr, b_Or) for h_Tr, b_Or in zip(h, self.weights(), strict=True)]

    def project_in_one_node(self, h: Sequence[Tensor]) -> list[Tensor]:
        """The product of `project`, if possible as one autograd node that writes the slots' gradients side by side."""
        if self.is_hand_written and len(h) == 1 and torch.is_grad_enabled():
            return list(UpProject.apply(h[0], None, False, None, *self.weights()))
        return self.project(h)

    def dense(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """W x for a dense group, one [T, O] per slot. `inputs`: one x for all slots, or one per slot."""
        if not self.is_one_tensor:
            x_TI = inputs if len(inputs) > 1 else [inputs[0]] * len(self.shape.slots)
            return [linear(x, w_OI) for x, w_OI in zip(x_TI, self.weights(), strict=True)]
        weights = [w_OI.to(inputs[0].dtype) for w_OI in self.weights()]
        return list(linear(inputs[0], torch.cat(weights)).split([w_OI.shape[0] for w_OI in weights], dim=-1))

    def latent_shapes(self, layout: Sharding, tokens: int) -> tuple[tuple[int, int], ...]:
        """Local shapes of the latents that are passed between blocks."""
        ranks = [sum(self.shape.ranks)] if self.grouping else self.shape.ranks
        return tuple(layout.latent_shape(rank, tokens) for rank in ranks)


class FusedLinearGroup(LinearGroup, FusedModule):
    """The linears of one group in one block, stored in fused parameters.

    All slots' A factors are one fused parameter [sum of ranks, I], so they share one GEMM and one collective without
    a copy. Each slot's B factor is a separate tensor. Dense weights are one tensor [sum of outputs, I], or two if key and
    value are placed differently from query.
    """

    def __init__(self, model: ModelConfig, shape: architecture.GroupSpec, layer: int, layout: Sharding) -> None:
        FusedModule.__init__(self)
        self.describe(model, shape, layer, layout)
        prefix = f"layers.{layer}"
        if self.low_rank:
            self.add_fused_param("A", shape.parameters(prefix, "A"), layout)
            self._outer = [self._store_outer("B", (parameter,), layout) for parameter in shape.parameters(prefix, "B")]
        else:
            alike = itertools.groupby(shape.parameters(prefix, "W"), lambda parameter: layout.placement(parameter.role))
            self._outer = [self._store_outer("W", tuple(parameters), layout) for _, parameters in alike]
        self._uses_all_rows = not any(self.own_heads)
        self._is_one_weight = len(self._outer) == 1 and self.is_one_tensor and self._uses_all_rows
        has_latent_gate = architecture.has_latent_gate(model, layer)
        self.latent_gate = LatentGate(model, shape, prefix, layout) if has_latent_gate else None
        self.recompute(NO_RECOMPUTE)

    @property
    def ranks_here(self) -> Sequence[int]:
        return [param_slice.rows for param_slice in self.slices["A"]]

    def weights(self) -> Sequence[Tensor]:
        if len(self._outer) == len(self.own_heads):
            stored = [getattr(self, name) for name in self._outer]
        else:
            stored = [part.view(getattr(self, name)) for name in self._outer for part in self.slices[name]]
        if self._uses_all_rows:
            return stored
        return [w if own is None else w.narrow(0, *own) for w, own in zip(stored, self.own_heads, strict=True)]

    def dense(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Same as in `LinearGroup`, but avoids a copy if the group is stored as one tensor."""
        if not self._is_one_weight:
            return super().dense(inputs)
        rows = [param_slice.rows for param_slice in self.slices[self._outer[0]]]
        y_TO = linear(inputs[0], getattr(self, self._outer[0]))
        # Splitting into a single part would copy the gradient.
        return [y_TO] if len(rows) == 1 else list(y_TO.split(rows, dim=-1))

    def _store_outer(self, factor: str, parameters: Sequence[Parameter], layout: Sharding) -> str:
        """Stores parameters as `{factor}_{slot names}` and returns that name."""
        name = "_".join((factor, *(parameter.name.split(".")[-2] for parameter in parameters)))
        self.add_fused_param(name, parameters, layout)
        return name
