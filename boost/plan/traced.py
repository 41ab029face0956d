"""The trace of a pass: its operations, collectives and memory; and that of any micro-batch, derived from two others."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from boost.config.traffic import Collective
from boost.plan.tape import Flight, Held, Operation, work_of
from boost.plan.work import Counted


@dataclass(frozen=True)
class PassOps:
    """Operations of one micro-batch in one block, the loss or the embedding, on one process."""

    log: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    flights: tuple[Flight, ...]
    """Starts of and waits for collectives."""

    @functools.cached_property
    def work(self) -> Counted:
        """Counts how often each operation runs."""
        return work_of(self.log)


class Lives(NamedTuple):
    """Live bytes at the start of a pass and after each allocation, in addition to memory held at its start."""

    forward: tuple[int, ...]
    """Live bytes of the forward pass; inputs are held at its start."""
    backward: tuple[int, ...]
    """Live bytes of the backward pass; saved tensors and output gradients are held at its start."""
    first_backward: tuple[int, ...]
    """The same for a first micro-batch, whose weight gradients stay allocated."""
    input_backward: tuple[int, ...] = (0,)
    """The same if weight gradients are deferred (zero bubble)."""


@dataclass(frozen=True)
class TracedPass(PassOps):
    """Operations and memory of a pass; sizes in bytes."""

    saved: tuple[Held, ...]
    """Tensors saved for the backward pass, except latents of the previous block."""
    input_bytes: int
    """Bytes of the inputs."""
    output_bytes: int
    """Bytes of the outputs; their gradients take as many."""
    lives: Lives
    """Live bytes over time."""
    new_gradients: int
    """Bytes of weight gradients."""
    deferred: int = 0
    """Bytes of output gradients held for deferred weight gradients, in addition to `saved`."""
    prev_saved: tuple[int, ...] = ()
    """Bytes of each latent of the previous block that this block keeps alive; 0 if it does not."""
    latents_saved: tuple[bool, ...] = ()
    """Whether each latent for the next block is in `saved`."""

    @functools.cached_property
    def forward(self) -> int:
        """Peak of the forward pass, in addition to memory held at its start (including inputs)."""
        return max(self.lives.forward)

    @functools.cached_property
    def backward(self) -> int:
        """Peak of the backward pass, in addition to saved tensors and output gradients."""
        return max(self.lives.backward)

    @functools.cached_property
    def first_backward(self) -> int:
        """The same for a first micro-batch, whose weight gradients stay allocated."""
        return max(self.lives.first_backward)

    @functools.cached_property
    def input_backward(self) -> int:
        """The same if weight gradients are deferred (zero bubble)."""
        return max(self.lives.input_backward)

    @functools.cached_property
    def by_category(self) -> Counter[str]:
        """Bytes of `saved` by category."""
        sums: Counter[str] = Counter()
        for held in self.saved:
            sums[held.category] += held.bytes
        return sums


# Other micro-batches. Every size in a block is either constant or proportional to the micro-batch, and two traces show which. Live
# bytes are sums of both kinds, so they are linear in the micro-batch. A peak is the maximum of these lines.


class _DiffersError(Exception):
    """The two traces differ in more than sizes, or a size is neither constant nor proportional."""


@dataclass(frozen=True)
class _Scale:
    """Extrapolates sizes from two micro-batches to a third one."""

    low: int
    high: int
    wanted: int

    def shape(self, small: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
        """Scales a shape; each dimension must be constant or proportional."""
        if small == large:
            return small
        low, high = self.low, self.high
        if len(small) != len(large) or any(y != x and y * low != x * high for x, y in zip(small, large, strict=True)):
            raise _DiffersError
        return tuple(x if x == y else x * self.wanted // low for x, y in zip(small, large, strict=True))

    def bytes(self, small: int, large: int) -> int:
        """Evaluates the line through both sizes."""
        more, rest = divmod((large - small) * (self.wanted - self.low), self.high - self.low)
        if rest:
            raise _DiffersError
        return small + more

    def all_bytes(self, small: Sequence[int], large: Sequence[int]) -> tuple[int, ...]:
        """The same for two sequences of sizes, element by element."""
        if len(small) != len(large):
            raise _DiffersError
        return tuple(map(self.bytes, small, large))


def scaled_pass(small: TracedPass, large: TracedPass, micro_batches: tuple[int, int], wanted: int) -> TracedPass | None:
    """Returns the trace of micro-batch `wanted`; None if it cannot be derived from those of `micro_batches`."""
    scale = _Scale(*micro_batches, wanted)
    try:
        return _scaled(small, large, scale)
    except _DiffersError:
        return None


def _scaled(small: TracedPass, large: TracedPass, scale: _Scale) -> TracedPass:
    same_kind = small.flights == large.flights and small.latents_saved == large.latents_saved
    if not same_kind or len(small.log) != len(large.log) or len(small.saved) != len(large.saved):
        raise _DiffersError
    lives = Lives(*(scale.all_bytes(a, b) for a, b in zip(small.lives, large.lives, strict=True)))
    return TracedPass(
        tuple(_operation(a, b, scale) for a, b in zip(small.log, large.log, strict=True)),
        tuple(_collective(a, b, scale) for a, b in zip(small.collectives, large.collectives, strict=True)),
        small.flights,
        saved=tuple(_held(a, b, scale) for a, b in zip(small.saved, large.saved, strict=True)),
        input_bytes=scale.bytes(small.input_bytes, large.input_bytes),
        output_bytes=scale.bytes(small.output_bytes, large.output_bytes),
        lives=lives,
        new_gradients=scale.bytes(small.new_gradients, large.new_gradients),
        deferred=scale.bytes(small.deferred, large.deferred),
        prev_saved=scale.all_bytes(small.prev_saved, large.prev_saved),
        latents_saved=small.latents_saved,
    )


def _operation(small: Operation, large: Operation, scale: _Scale) -> Operation:
    if small[1:] != large[1:]:
        raise _DiffersError
    return Operation(scale.shape(small.shape, large.shape), *small[1:])


def _collective(small: Collective, large: Collective, scale: _Scale) -> Collective:
    if replace(small, shape=large.shape) != large:
        raise _DiffersError
    return replace(small, shape=scale.shape(small.shape, large.shape))


def _held(small: Held, large: Held, scale: _Scale) -> Held:
    same = small.category, small.made_by, small.dtype, small.place
    if same != (large.category, large.made_by, large.dtype, large.place):
        raise _DiffersError
    size, shape = scale.bytes(small.bytes, large.bytes), scale.shape(small.shape, large.shape)
    return Held(size, small.category, small.made_by, shape, small.dtype, small.place)
