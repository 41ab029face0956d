"""The layout interface that the decoder calls. `boost.parallel.layouts` implements it, one file per layout.

A block is two pairs of linear groups: qkv and gate_up project from the residual stream to heads or channels, o and down project
back. Each pair runs as

    layout.in_proj_comm(stream, gamma, group)                norm, local work, the collective: pending (saved, stream)
    outputs, latents = layout.in_proj_local(saved, group)    no collective
    partial = layout.out_proj_local(hidden, group)           no collective
    layout.out_proj_comm(stream, partial, group)             the collective, local work, the residual update: pending stream

The work between two collectives is a segment, which can be recomputed without communication. One call starts a collective and
another waits for it, so two halves of a micro-batch can be interleaved (`interleave`): start(a), start(b), wait(a), ... Work
after a collective is a continuation (`Pending.then`), because torch.compile does not trace generators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from boost.config.architecture import Parameter, Slot
from boost.config.layouts import LayoutSpec, Placement

if TYPE_CHECKING:
    from boost.models.attention import Context, SequenceShare
    from boost.models.group import LinearGroup

Latents = tuple[Tensor, ...]
"""Latents passed from one block to the next, one tensor per group or per slot; empty for families without latent gates."""

T = TypeVar("T")
U = TypeVar("U")


class Stream(NamedTuple):
    """State that flows through the blocks of a micro-batch. A tuple, so that torch finds the tensors in it."""

    x: Tensor
    """The residual stream, in the layout's shape."""
    prev_latents: Latents = ()
    """Queue over the four groups: each group takes the latents of the same group of the previous block from the front."""
    latents: Latents = ()
    """Latents of this block's groups so far, for the next block."""

    def take(self, count: int) -> "tuple[Latents, Stream]":
        """Takes the next `count` tensors off the queue. Returns (tensors, remaining stream)."""
        if not count:
            return (), self
        return self.prev_latents[:count], self._replace(prev_latents=self.prev_latents[count:])

    def put(self, latents: Latents) -> "Stream":
        """Appends a group's latents for the next block."""
        return self._replace(latents=(*self.latents, *latents)) if latents else self

    def add(self, update: Tensor) -> "Stream":
        """Adds an update to the residual stream."""
        return self._replace(x=self.x + update)

    def next_block(self) -> "Stream":
        """The stream as the next block receives it."""
        return Stream(self.x, self.latents)


class Saved(NamedTuple):
    """Inputs of the segment after an in-projection's collective. A block that recomputes saves only these."""

    tensors: Latents
    prev_latents: Latents = ()
    """Latents of the previous block, if they still have to be combined with `tensors`."""


class Pending(Generic[T]):
    """A collective in flight and the work after it. `wait` finishes both and returns the result or the next `Pending`."""

    __slots__ = ("wait",)

    def __init__(self, wait: "Callable[[], T | Pending[T]]") -> None:
        self.wait = wait

    def then(self, work: "Callable[[T], U | Pending[U]]") -> "Pending[U]":
        """Chains work on the result. The work may start a collective too."""

        def wait() -> "U | Pending[U]":
            result = self.wait()
            return result.then(work) if isinstance(result, Pending) else work(result)

        return Pending(wait)


class Done(Pending[T]):
    """A result that is already available, so chained work runs immediately."""

    __slots__ = ("result",)

    def __init__(self, result: T) -> None:
        super().__init__(lambda: result)
        self.result = result

    def then(self, work: "Callable[[T], U | Pending[U]]") -> "Pending[U]":
        after = work(self.result)
        return after if isinstance(after, Pending) else Done(after)


def interleave(runs: Sequence[Pending[T]], lag: int = 0) -> list[T]:
    """Runs chains interleaved and returns their results. In turn, each one waits once and runs until it has started its next
    collective. Each one trails the previous one by `lag` such steps.

    Autograd runs nodes in the reverse order of their creation, so the backward pass is interleaved too.
    """
    chains: list[Any] = list(runs)
    if len(chains) == 1:  # without the bookkeeping, which would take a tenth of the time of a token in a small model
        while isinstance(chains[0], Pending):
            chains[0] = chains[0].wait()
        return chains
    for number in range(len(chains)):
        for _ in range(lag * (len(chains) - 1 - number)):
            chains[number] = chains[number].wait() if isinstance(chains[number], Pending) else chains[number]
    while any(isinstance(chain, Pending) for chain in chains):
        chains = [chain.wait() if isinstance(chain, Pending) else chain for chain in chains]
    return chains


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
    """How one block runs."""

    block: SegmentRunner = call
    """Runs the whole block."""
    local: SegmentRunner = call
    """Runs each segment except attention's."""
    attention: SegmentRunner = call
    """Runs the segment from the latents of q, k, v to the output of attention."""
    sharded_latents: bool = False
    """Save latents before they are all-gathered: least memory, but the all-gather is repeated."""


NO_RECOMPUTE = RecomputePolicy()


class Layout(Protocol):
    """One way to shard the decoder over TP ranks: `spec` describes placements and communication, this implements them.

    T is the number of tokens of the micro-batch. `in_proj_local` returns all T tokens and 1/num_shards of the heads or channels
    (or, for an MLP that stays token-sharded, T/p tokens and all channels). `in_proj_comm` and `out_proj_comm` contain all
    collectives, except that latents saved sharded are gathered in `in_proj_local`. With a context axis, T is the number of
    local tokens, and attention has its own collectives.
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
    policy: RecomputePolicy
    """Recomputation policy of the segments."""
    halves: bool
    """Whether a micro-batch runs as two halves, so that one computes while the other's collectives are in flight."""
    lag: int
    """Steps (`interleave`) by which the second half trails the first."""

    def with_options(self, *, policy: RecomputePolicy = ..., inference: bool = ..., split: bool = ...) -> "Layout":
        """Returns the same function on the same weights with other options.

        `policy`: recomputation policy of the segments. `inference`: any number of tokens, without gradients. `split`: start and
        wait of a collective are separate autograd nodes. Options that are not given stay as they are.
        """
        ...

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

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Pending[Tensor]:
        """Embeds tokens (int64) into the residual stream, in `dtype`: the activations' dtype, so nothing wider is sent."""
        ...

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: "LinearGroup") -> Pending[tuple[Saved, Stream]]:
        """norm(x) and the first part of a group, up to its last collective."""
        ...

    def in_proj_local(self, saved: Saved, group: "LinearGroup") -> tuple[Sequence[Tensor], Latents]:
        """The rest of the group: one [T, d_out / num_shards] per slot, and its latents for the next block if they are computed
        here."""
        ...

    def sequence_share(self) -> "SequenceShare | None":
        """This process's share of each sequence; None: the whole sequence."""
        ...

    def enter_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: "Context"
    ) -> Pending[tuple[Tensor, Tensor, Tensor]]:
        """Redistributes q, k (both rotated) and v of the local tokens for attention: all tokens of some heads, or the same
        queries with all keys and values."""
        ...

    def leave_attention(self, attended: Tensor, context: "Context") -> Pending[Tensor]:
        """Redistributes attention's output to all heads of this TP rank for the local tokens."""
        ...

    def out_proj_local(self, hidden: Tensor, group: "LinearGroup") -> Tensor:
        """Heads or channels [T, d_in / num_shards] through the first part of a group, up to its first collective."""
        ...

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: "LinearGroup") -> Pending[Stream]:
        """The rest of the group, and its update of the residual stream."""
        ...

    def head_input(self, x: Tensor, gamma: Tensor) -> Pending[Tensor]:
        """The final norm of all T tokens, [T, d], replicated on every process. Each process then uses its own rows of the head,
        so gradients of the result are partial; the backward pass sums them."""
        ...

    def all_logits(self, x: Tensor, gamma: Tensor, head: Tensor) -> Pending[Tensor]:
        """Differentiable logits [T, V] of all tokens, replicated on every process (`loss` never materializes them)."""
        ...

    def loss(
        self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor, teaching: Teaching | None = None
    ) -> Pending[Tensor]:
        """Sum of the cross-entropy (nats, fp32 or wider scalar) over targets that are not -100. Equal on every process. With a
        teacher: of the distillation loss."""
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
