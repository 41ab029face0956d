"""The trace of a pass: its operations, collectives and memory."""

import functools
from collections import Counter
from dataclasses import dataclass
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
