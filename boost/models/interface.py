"""What the decoder asks of a layout. `boost.parallel.layouts` implements it, one file a layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from boost.config.architecture import Parameter
from boost.config.cuts import Cut

if TYPE_CHECKING:
    from boost.models.group import Group

Latents = tuple[Tensor, ...]
"""Latents that cross from one block to the next, one a group; empty for families without a crossing."""


class Runner(Protocol):
    """Calls a function; decides what the backward pass finds of it.

    The function may be called again, much later, with the same arguments: what it reads beside them must not change. So
    carried latents, whose name is bound anew along a block, are arguments.
    """

    def __call__(self, function: Callable[..., Any], /, *arguments: Any) -> Any: ...


def keep(function: Callable[..., Any], /, *arguments: Any) -> Any:
    """Whatever autograd keeps."""
    return function(*arguments)


@dataclass(frozen=True)
class Policy:
    """How one block runs."""

    block: Runner = keep
    """All of it."""
    local: Runner = keep
    """Its segments but for that of attention."""
    attention: Runner = keep
    """The segment from the latents of q, k, v to what leaves attention."""
    sharded: bool = False
    """Latents are kept before they are gathered: least memory, and the all-gather is issued again. btp-sp only."""


KEEP = Policy()


class Layout(Protocol):
    """One way to spread the decoder over TP processes.

    The residual stream is opaque to the decoder: it only adds to it what `leave` returns. T is the number of tokens of the
    micro-batch; what `open` returns always has all T tokens, and 1/w of the heads or channels.

    Collectives stand in `enter` and `leave` (and, of latents that are kept sharded, in `open`). `open` and `close` are local,
    so the decoder recomputes what lies between them without communication; `local` runs the local parts of the other two.
    """

    name: str
    rank: int
    """This process's TP rank."""
    size: int
    """p, the number of TP processes."""
    wide: int
    """w, the number of parts into which heads and channels are cut: p, or 1 where every process computes all of them."""
    grouping: bool
    """Whether linears of one input share one GEMM and one collective, and so one tensor of latents."""

    @property
    def for_inference(self) -> "Layout":
        """The same function on the same weights for any number of tokens, without gradients."""
        ...

    @property
    def with_sharded_latents(self) -> "Layout":
        """The same function, whose `enter` returns this process's part of the latents, and whose `open` gathers them."""
        ...

    def cut(self, role: str) -> Cut:
        """Where a parameter of this role is cut."""
        ...

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        """Shape of the residual stream of `tokens` tokens on one process: what pipeline stages exchange."""
        ...

    def latent_shape(self, group: "Group", tokens: int) -> tuple[int, int]:
        """Shape of the latents of a group, as `bend` meets and carries them, on one process."""
        ...

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual stream of tokens (int64), in `dtype`: that of activations, so nothing wider is sent."""
        ...

    def enter(
        self, x: Tensor, gamma: Tensor, group: "Group", carried: Latents, local: Runner
    ) -> tuple[Sequence[Tensor], Latents]:
        """norm(x) into an entering group, up to its last collective: what a block keeps, and the latents to carry on."""
        ...

    def open(self, kept: Sequence[Tensor], group: "Group", carried: Latents) -> tuple[Sequence[Tensor], Latents]:
        """The rest of the group: one [T, d_out / w] a slot, and the latents to carry on."""
        ...

    def close(self, a: Tensor, group: "Group") -> Tensor:
        """Heads or channels [T, d_in / w] into a leaving group, up to its first collective."""
        ...

    def leave(self, closed: Tensor, group: "Group", carried: Latents, local: Runner) -> tuple[Tensor, Latents]:
        """The rest of the group, as an update of the residual stream, and the latents to carry on."""
        ...

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """Sum of the cross-entropy (nats, fp32 or wider scalar) over targets that are not -100. Equal on every process."""
        ...

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        """Logits [N, V] of the tokens numbered `tokens_N` of the T, whole on every process (for generation)."""
        ...


def local_slice(parameter: Parameter, layout: Layout, whole: Tensor) -> Tensor:
    """This process's part of a whole tensor of the parameter's global shape, as a view."""
    dim = layout.cut(parameter.role).dim
    if dim is None:
        return whole
    length = parameter.shape[dim] // layout.size
    return whole.narrow(dim, layout.rank * length, length)


def kv_heads_here(kv_heads: int, layout: Layout) -> int:
    """Key/value heads that one process computes: at least one, shared with others where there are fewer than parts."""
    return max(kv_heads // layout.wide, 1)
