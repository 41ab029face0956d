"""What a trace of a pass says: its operations, its collectives and its memory."""

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
    """Where collectives are started and waited for."""

    @functools.cached_property
    def work(self) -> Counted:
        """How often each operation runs."""
        return work_of(self.log)


class Lives(NamedTuple):
    """Live bytes at the start of a pass and after each allocation, in addition to memory held at its start."""

    forward: tuple[int, ...]
    """Inputs are held at the start."""
    backward: tuple[int, ...]
    """Saved tensors and output gradients are held at the start."""
    first_backward: tuple[int, ...]
    """The same if weight gradients are new and stay allocated."""
    input_backward: tuple[int, ...] = (0,)
    """The same if weight gradients are deferred."""


@dataclass(frozen=True)
class TracedPass(PassOps):
    """Operations and memory of a pass; sizes in bytes."""

    saved: tuple[Held, ...]
    """Tensors saved for the backward pass, without latents of the previous block."""
    input_bytes: int
    """Inputs."""
    output_bytes: int
    """Outputs, and as much for their gradients."""
    lives: Lives
    """Live bytes."""
    new_gradients: int
    """Weight gradients."""
    deferred: int = 0
    """Gradients held for deferred weight gradients, in addition to `saved`."""
    prev_saved: tuple[int, ...] = ()
    """Bytes of each latent of the previous block that this block keeps alive; 0 if it does not."""
    latents_saved: tuple[bool, ...] = ()
    """Whether each latent for the next block is in `saved`."""

    @functools.cached_property
    def forward(self) -> int:
        """Peak of the forward pass, in addition to memory held at its start, inputs included."""
        return max(self.lives.forward)

    @functools.cached_property
    def backward(self) -> int:
        """Peak of the backward pass, in addition to saved tensors and output gradients."""
        return max(self.lives.backward)

    @functools.cached_property
    def first_backward(self) -> int:
        """The same if weight gradients are new and stay allocated."""
        return max(self.lives.first_backward)

    @functools.cached_property
    def input_backward(self) -> int:
        """The same if weight gradients are deferred."""
        return max(self.lives.input_backward)

    @functools.cached_property
    def by_category(self) -> Counter[str]:
        """Bytes of `saved`."""
        sums: Counter[str] = Counter()
        for held in self.saved:
            sums[held.category] += held.bytes
        return sums
