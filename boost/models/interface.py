"""The layout interface that the decoder calls. `boost.parallel.layouts` implements it, one file per layout.

A block is two pairs of linears: qkv and gate_up project from the residual stream to heads or channels, o and down project back.
Each pair runs as

    layout.in_proj_comm(stream, gamma, group)                norm, local work, the collective: pending (saved, stream)
    outputs, latents = layout.in_proj_local(saved, group)    no collective
    partial = layout.out_proj_local(hidden, group)           no collective
    layout.out_proj_comm(stream, partial, group)             the collective, local work, the residual update: pending stream

What lies between two collectives is a segment: it can be recomputed without communication. Because a collective is started
by one call and waited for by another, two halves of a micro-batch can be interleaved (`interleave`): start(a), start(b),
wait(a), ... What follows a collective is a continuation (`Pending.then`), which torch.compile traces as it does not generators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from boost.config.architecture import Parameter, Slot
from boost.config.layouts import LayoutSpec, Placement

if TYPE_CHECKING:
    from boost.models.attention import Context
    from boost.models.group import LinearGroup
    from boost.models.sequence_share import SequenceShare

Latents = tuple[Tensor, ...]
"""Latents passed from one block to the next, one tensor per group or per slot; empty for families without latent gates."""

T = TypeVar("T")
U = TypeVar("U")


class Stream(NamedTuple):
    """What flows through the blocks of a micro-batch. A tuple, so that torch finds the tensors in it."""

    x: Tensor
    """The residual stream, in the shape that the layout gives it."""
    prev_latents: Latents = ()
    """A queue over the four groups: each takes those of the same group of the previous block from the front."""
    latents: Latents = ()
    """Of this block's groups so far, for the next block."""

    def take(self, count: int) -> "tuple[Latents, Stream]":
        """The next `count` tensors of the queue, and the stream without them."""
        if not count:
            return (), self
        return self.prev_latents[:count], self._replace(prev_latents=self.prev_latents[count:])

    def put(self, latents: Latents) -> "Stream":
        """The stream with latents of a group for the next block."""
        return self._replace(latents=(*self.latents, *latents)) if latents else self

    def add(self, update: Tensor) -> "Stream":
        """The stream with an update of the residual."""
        return self._replace(x=self.x + update)

    def next_block(self) -> "Stream":
        """The stream as the next block receives it."""
        return Stream(self.x, self.latents)


class Saved(NamedTuple):
    """What enters the segment after an in-projection's collective; a recomputing block saves only this."""

    tensors: Latents
    prev_latents: Latents = ()
    """Those still to be combined with the latents in `tensors`."""


class Pending(Generic[T]):
    """A started collective and the work after it: `wait` finishes both, and returns the result or what is pending next."""

    __slots__ = ("wait",)

    def __init__(self, wait: "Callable[[], T | Pending[T]]") -> None:
        self.wait = wait

    def then(self, work: "Callable[[T], U | Pending[U]]") -> "Pending[U]":
        """This and then work on its result, which may start a collective too."""

        def wait() -> "U | Pending[U]":
            found = self.wait()
            return found.then(work) if isinstance(found, Pending) else work(found)

        return Pending(wait)


class Done(Pending[T]):
    """A result that nothing has to be waited for: what follows runs at once."""

    __slots__ = ("result",)

    def __init__(self, result: T) -> None:
        super().__init__(lambda: result)
        self.result = result

    def then(self, work: "Callable[[T], U | Pending[U]]") -> "Pending[U]":
        found = work(self.result)
        return found if isinstance(found, Pending) else Done(found)


def interleave(runs: Sequence[Pending[T]], lag: int = 0) -> list[T]:
    """The results. Each in turn waits once and runs until it has started its next collective; each is `lag` such steps behind
    the one before it.

    Autograd runs nodes in the reverse order of their creation, so the backward pass is interleaved too.
    """
    found: list[Any] = list(runs)
    for number in range(len(found)):
        for _ in range(lag * (len(found) - 1 - number)):
            found[number] = found[number].wait() if isinstance(found[number], Pending) else found[number]
    while any(isinstance(each, Pending) for each in found):
        found = [each.wait() if isinstance(each, Pending) else each for each in found]
    return found


class SegmentRunner(Protocol):
    """Calls a function; decides what the backward pass finds of it.

    The function may be called again, much later, with the same arguments: what it reads beside them must not change.
    """

    def __call__(self, function: Callable[..., Any], /, *arguments: Any) -> Any: ...


def call(function: Callable[..., Any], /, *arguments: Any) -> Any:
    """Whatever autograd saves."""
    return function(*arguments)


@dataclass(frozen=True)
class RecomputePolicy:
    """How one block runs."""

    block: SegmentRunner = call
    """All of it."""
    local: SegmentRunner = call
    """Its segments except attention's."""
    attention: SegmentRunner = call
    """The segment from the latents of q, k, v to what leaves attention."""
    sharded_latents: bool = False
    """Latents are saved before they are gathered: least memory, but the all-gather is repeated."""


NO_RECOMPUTE = RecomputePolicy()


class Layout(Protocol):
    """One way to shard the decoder over TP ranks: `spec` describes placements and communication, this implements them.

    T is the number of tokens of the micro-batch; what `in_proj_local` returns has all T tokens, and 1/num_shards of the heads or
    channels (of an MLP that stays with its tokens, T/p tokens and all channels). Collectives stand in `in_proj_comm` and
    `out_proj_comm` (and, of latents that are saved sharded, in `in_proj_local`). On a context axis T is the number of tokens held
    here, and attention has collectives of its own.
    """

    spec: LayoutSpec
    rank: int
    """This process's TP rank."""
    size: int
    """p, the number of TP processes."""
    num_shards: int
    """The number of parts into which heads and channels are sharded: p, or 1 where every process computes all of them."""
    grouping: bool
    """Whether linears of one input share one GEMM and one collective, and so one tensor of latents."""
    policy: RecomputePolicy
    """How segments run."""
    halves: bool
    """Whether a micro-batch runs as two halves, one of which computes while the other's collectives are in flight."""
    lag: int
    """Steps (`interleave`) by which the second half follows the first through the blocks."""

    def with_options(self, *, policy: RecomputePolicy = ..., inference: bool = ..., split: bool = ...) -> "Layout":
        """The same function on the same weights: its segments run under a policy, for any number of tokens without
        gradients, or with collectives that are started and waited for by nodes of their own. What is not given stays."""
        ...

    def placement(self, role: str) -> Placement:
        """Where a parameter of this role lies."""
        ...

    def crosses_as_heads(self, slot: Slot) -> bool:
        """Whether this projection computes all heads of this process's tokens, which are then exchanged, and not this process's
        heads of all tokens."""
        ...

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        """Shape of the residual stream of `tokens` tokens on one process: what pipeline stages exchange."""
        ...

    def latent_shape(self, rank: int, tokens: int) -> tuple[int, int]:
        """Shape of latents of whole width `rank`, as they cross to the next block, on one process."""
        ...

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Pending[Tensor]:
        """The residual stream of tokens (int64), in `dtype`: that of activations, so nothing wider is sent."""
        ...

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: "LinearGroup") -> Pending[tuple[Saved, Stream]]:
        """norm(x) into a group, up to its last collective."""
        ...

    def in_proj_local(self, saved: Saved, group: "LinearGroup") -> tuple[Sequence[Tensor], Latents]:
        """The rest of the group: one [T, d_out / num_shards] a slot, and its latents for the next block if they arise here."""
        ...

    def sequence_share(self) -> "SequenceShare | None":
        """What this process holds of each sequence; None: all of it."""
        ...

    def enter_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: "Context"
    ) -> Pending[tuple[Tensor, Tensor, Tensor]]:
        """Rotated queries and keys, and values, of the tokens held here -> what attention takes: all tokens of some heads, or the
        same queries with all keys and values."""
        ...

    def leave_attention(self, attended: Tensor, context: "Context") -> Pending[Tensor]:
        """What attention returned -> all heads of this TP process, of the tokens held here."""
        ...

    def out_proj_local(self, hidden: Tensor, group: "LinearGroup") -> Tensor:
        """Heads or channels [T, d_in / num_shards] into a group, up to its first collective."""
        ...

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: "LinearGroup") -> Pending[Stream]:
        """The rest of the group, and its update of the residual stream."""
        ...

    def head_input(self, x: Tensor, gamma: Tensor) -> Pending[Tensor]:
        """The final norm of all T tokens, [T, d], whole on every process. Each then uses its own rows of the head, so gradients of
        the result are partial; they are summed in the backward pass."""
        ...

    def all_logits(self, x: Tensor, gamma: Tensor, head: Tensor) -> Pending[Tensor]:
        """Differentiable logits [T, V] of all tokens, whole and equal on every process (`loss` never forms them)."""
        ...

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Pending[Tensor]:
        """Sum of the cross-entropy (nats, fp32 or wider scalar) over targets that are not -100. Equal on every process."""
        ...

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        """Logits [N, V] of the tokens numbered `tokens_N` of the T, whole on every process (for generation)."""
        ...


def local_slice(parameter: Parameter, layout: Layout, whole: Tensor) -> Tensor:
    """This process's part of a whole tensor of the parameter's global shape, as a view."""
    dim = layout.placement(parameter.role).dim
    if dim is None:
        return whole
    length = parameter.shape[dim] // layout.size
    return whole.narrow(dim, layout.rank * length, length)


def local_kv_heads(kv_heads: int, layout: Layout) -> int:
    """Key/value heads that one process computes: at least one, shared with others where there are fewer than parts."""
    return max(kv_heads // layout.num_shards, 1)
