"""What the decoder asks of a layout. `boost.parallel.layouts` implements it, one file a layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from boost.config.architecture import Parameter

if TYPE_CHECKING:
    from boost.models.group import Group

Latents = tuple[Tensor, ...]
"""Latents that cross from one block to the next, one a group; empty for families without a crossing."""


@dataclass(frozen=True)
class Cut:
    """Where a parameter is cut over the TP processes, and what its local gradient is."""

    dim: int | None = None
    """Tensor dim along which each process holds an equal, contiguous shard; None: every process holds all of it."""

    partial: bool = False
    """True for a parameter held whole whose local gradient is one term of a sum over TP processes: it is reduced
    once per optimizer step. False: the local gradient is complete."""


class Layout(Protocol):
    """One way to spread the decoder over TP processes: two tables and a handful of functions.

    The residual stream is opaque to the decoder: it only adds to it what `leave` returns. T is the number of tokens of the
    micro-batch, p the TP size; what `enter` returns always has all T tokens and 1/p of the heads or channels.
    """

    name: str
    rank: int
    """This process's TP rank."""
    size: int
    """p, the number of TP processes."""

    def cut(self, role: str) -> Cut:
        """Where a parameter of this role is cut."""
        ...

    def embed(self, tokens_T: Tensor, table: Tensor) -> Tensor:
        """The residual stream of tokens (int64)."""
        ...

    def enter(self, x: Tensor, gamma: Tensor, group: "Group", carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """norm(x) through every linear of an entering group: one [T, d_out / p] a slot, and the latents to carry on."""
        ...

    def leave(self, a: Tensor, group: "Group", carried: Latents) -> tuple[Tensor, Latents]:
        """Heads or channels [T, d_in / p] through a leaving group, as an update of the residual stream."""
        ...

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """Sum of the cross-entropy (nats, fp32 or wider scalar) over targets that are not -100. Equal on every process."""
        ...

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        """Logits [N, V] of the tokens numbered `tokens_N` of the T, whole on every process (for generation)."""
        ...


def local_shape(parameter: Parameter, layout: Layout) -> tuple[int, ...]:
    """Shape of this process's part of a parameter."""
    dim = layout.cut(parameter.role).dim
    return tuple(n // layout.size if i == dim else n for i, n in enumerate(parameter.shape))


def local_slice(parameter: Parameter, layout: Layout, whole: Tensor) -> Tensor:
    """This process's part of a whole tensor of the parameter's global shape, as a view."""
    dim = layout.cut(parameter.role).dim
    if dim is None or layout.size == 1:
        return whole
    length = parameter.shape[dim] // layout.size
    return whole.narrow(dim, layout.rank * length, length)
