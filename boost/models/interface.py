"""What the decoder and the layouts share: the state that flows through the blocks, recomputation policies, and the operations
of a layout. `boost.parallel.layouts` implements the layouts, one file each; `boost.models.block` calls them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from boost.config.architecture import Parameter, Slot
from boost.config.layouts import LayoutSpec, Placement

if TYPE_CHECKING:
    from boost.models.attention import Context, SequenceShare
    from boost.models.block import LinearGroup

Latents = tuple[Tensor, ...]
"""Latents, one tensor per group of linears or one per slot of it; empty for families that pass none from block to block."""


class Stream(NamedTuple):
    """What one block passes to the next. A tuple, so that torch finds the tensors in it."""

    x: Tensor
    """The residual stream, in the layout's shape."""
    latents: Latents = ()
    """Latents of the block's groups, in forward order."""


class Flow:
    """One part of a micro-batch on its way through the blocks: the residual stream, and what a collective has brought."""

    def __init__(self, x: Tensor, prev_latents: Latents = (), first_half: "Flow | None" = None) -> None:
        """`first_half`: of the sequence, if this is its second half, which attends to the keys of the first."""
        self.x = x
        """The residual stream; before the blocks, the tokens."""
        self.prev_latents = prev_latents
        """Queue over the groups: each takes the latents of the same group of the previous block from the front."""
        self.latents: Latents = ()
        """Latents of this block's groups so far, for the next block."""
        self.arrived: Latents = ()
        """What the last collective brought: the inputs of `Layout.project_in`, or of attention."""
        self.to_combine: Latents = ()
        """Latents of the previous block that `Layout.project_in` still has to combine with those that arrived."""
        self.first_half = first_half
        self.keys_values: list[tuple[Tensor, Tensor]] = []
        """Rotated keys and values [B, K, S, E] of a first half, one entry per block, which the second half takes."""

    def take(self, count: int) -> Latents:
        """Takes the next `count` tensors off the queue of the previous block's latents."""
        taken, self.prev_latents = self.prev_latents[:count], self.prev_latents[count:]
        return taken

    def add(self, update: Tensor) -> None:
        """Adds an update to the residual stream."""
        self.x = self.x + update

    def next_block(self) -> None:
        """This block's latents become those of the previous one."""
        self.prev_latents, self.latents = self.latents, ()


class Teaching(NamedTuple):
    """What a model learns from a teacher on the same tokens (`boost.parallel.distill`)."""

    hidden_TE: Tensor
    """The teacher's input of its head, [T, E], replicated; no gradient."""
    head_VE: Tensor
    """This process's rows of the teacher's head, the same vocabulary rows as of the model's own head."""
    weight: float
    """w in (1 - w) cross-entropy + w K^2 KL(teacher || model)."""
    temperature: float
    """K."""
    hidden_weight: float = 0.0
    """Weight of the mean squared difference between both models' inputs of the head."""
    cross_entropy: Tensor | None = None
    """Accumulates the cross-entropy alone, summed over targets (nats, fp64 scalar): the loss may mostly consist of other terms."""

    def split(self, sizes: Sequence[int]) -> "list[Teaching]":
        """The parts for consecutive tokens."""
        return [self._replace(hidden_TE=part) for part in self.hidden_TE.split(list(sizes))]


class SegmentRunner(Protocol):
    """Calls a function and decides what is saved for the backward pass.

    The function may be called again later with the same arguments, so anything else that it reads must not change.
    """

    def __call__(self, function: Callable[..., Any], /, *arguments: Any) -> Any: ...


def call(function: Callable[..., Any], /, *arguments: Any) -> Any:
    """Calls the function directly: autograd decides what is saved."""
    return function(*arguments)


@dataclass(frozen=True)
class RecomputePolicy:
    """What the blocks save in the forward pass, and what they recompute in the backward pass."""

    block: SegmentRunner = call
    """Runs the whole block."""
    local: SegmentRunner = call
    """Runs each segment except attention's."""
    attention: SegmentRunner = call
    """Runs the segment from the latents of q, k, v to the output of attention."""
    sharded_latents: bool = False
    """Save latents before they are all-gathered: least memory, but the all-gather is repeated."""


NO_RECOMPUTE = RecomputePolicy()


NOTHING_IN_FLIGHT: tuple[None, ...] = ()
"""Returned by operations of a layout that communicate nothing: there is nothing to wait for."""


class Layout(Protocol):
    """One way to shard the decoder over TP ranks: `spec` describes placements and communication, this implements them.

    Operations that communicate return an iterable (most are generators), which pauses while a collective is in flight. They
    leave their results in the flow. `project_in` and `project_out` do not communicate, except that latents saved sharded are
    gathered in `project_in`.

    T is the number of tokens of the micro-batch. `project_in` returns all T tokens and 1/num_shards of the heads or channels (or,
    for an MLP that stays token-sharded, T/p tokens and all channels). With a context axis, T is the number of local tokens, and
    attention has its own collectives.
    """

    spec: LayoutSpec
    rank: int
    """This process's TP rank."""
    size: int
    """p, the number of TP processes."""
    num_shards: int
    """Number of shards of heads and channels: p, or 1 if every process computes all of them."""
    grouping: bool
    """Whether linears that share an input share one GEMM, one collective, and one tensor of latents."""
    halves: bool
    """Whether a micro-batch runs as two halves, so that one computes while the other's collectives are in flight."""
    lag: int
    """Steps (`block.interleave`) by which the second half trails the first."""
    inference: "Layout"
    """The same function on the same weights for any number of tokens, without gradients."""

    def placement(self, role: str) -> Placement:
        """Placement of parameters with this role."""
        ...

    def crosses_as_heads(self, slot: Slot) -> bool:
        """Whether this projection computes all heads of this process's tokens, which are then exchanged, instead of this
        process's heads of all tokens."""
        ...

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        """Local shape of the residual stream of `tokens` tokens, which pipeline stages exchange."""
        ...

    def latent_shape(self, rank: int, tokens: int) -> tuple[int, int]:
        """Local shape of the latents passed to the next block, given their full width `rank`."""
        ...

    def sequence_share(self) -> "SequenceShare | None":
        """This process's share of each sequence; None: the whole sequence."""
        ...

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> Iterable[None]:
        """x: from tokens (int64, [T]) to their embedding in `dtype`: the activations' dtype, so nothing wider is sent."""
        ...

    def enter(self, flow: Flow, gamma: Tensor, group: "LinearGroup") -> Iterable[None]:
        """norm(x) and the first part of a group, up to its last collective. Leaves `arrived` and `to_combine`."""
        ...

    def project_in(self, arrived: Latents, prev: Latents, group: "LinearGroup") -> tuple[Sequence[Tensor], Latents]:
        """The rest of the group: one [T, d_out / num_shards] per slot, and its latents for the next block if they are computed
        here."""
        ...

    def enter_attention(self, flow: Flow, qkv: Sequence[Tensor], context: "Context") -> Iterable[None]:
        """Redistributes q, k (both rotated) and v of the local tokens for attention: all tokens of some heads, or the same
        queries with all keys and values. They arrive in this order."""
        ...

    def leave_attention(self, flow: Flow, attended: Tensor, context: "Context") -> Iterable[None]:
        """Redistributes attention's output: all heads of this TP rank arrive for the local tokens."""
        ...

    def project_out(self, hidden: Tensor, group: "LinearGroup") -> Tensor:
        """Heads or channels [T, d_in / num_shards] through the first part of a group, up to its first collective."""
        ...

    def leave(self, flow: Flow, partial: Tensor, group: "LinearGroup") -> Iterable[None]:
        """The rest of the group, and its update of x."""
        ...

    def head_input(self, flow: Flow, gamma: Tensor) -> Iterable[None]:
        """x: the final norm of all T tokens, [T, d], replicated on every process. Each process then uses its own rows of the
        head, so gradients of the result are partial; the backward pass sums them."""
        ...

    def loss(self, normed_TD: Tensor, head: Tensor, targets_T: Tensor, teaching: Teaching | None = None) -> Tensor:
        """Sum of the cross-entropy (nats, fp32 or wider scalar) over targets that are not -100, given the head's input. Equal on
        every process. With a teacher: of the distillation loss."""
        ...

    def all_logits(self, normed_TD: Tensor, head: Tensor) -> Tensor:
        """Differentiable logits [T, V] of all tokens, given the head's input, replicated on every process (`loss` never
        materializes them)."""
        ...

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        """Logits [N, V] of the tokens at indices `tokens_N`, replicated on every process (for generation)."""
        ...


def local_slice(parameter: Parameter, layout: Layout, whole: Tensor) -> Tensor:
    """This process's shard of a whole tensor of the parameter's global shape, as a view."""
    dim = layout.placement(parameter.role).dim
    if dim is None:
        return whole
    length = parameter.shape[dim] // layout.size
    return whole.narrow(dim, layout.rank * length, length)


def local_kv_heads(kv_heads: int, layout: Layout) -> int:
    """Number of key/value heads per process: at least one, which several processes share if there are fewer heads than shards."""
    return max(kv_heads // layout.num_shards, 1)
