"""Runtimes of `megatron` and, with a token-sharded residual stream, of `megatron-sp`. Shapes: `boost.config.layouts.megatron`.

Legend: T tokens, d hidden width, O outputs on this process.
"""

from collections.abc import Iterator

from torch import Tensor

from boost.layouts.runtime import Replicated, TokenSharded
from boost.models.group import LinearGroup
from boost.models.interface import Flow


class Megatron(Replicated):
    """Column-parallel W, then row-parallel W. The kind of residual stream determines the collectives before and after them.

    In at least one of the two passes, two consecutive collectives have only a norm between them. To hide both, the row-parallel
    W is a separate step, and the second half trails by one step, so it can compute during either collective.
    """

    lag = 1

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """norm(x) for all tokens."""
        normed = self.start(self.to_shards, group.down(self.norm(flow.x, gamma)))
        yield
        flow.arrived = (normed.wait(),)

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """Rows of W: a partial sum. With overlapped halves, deferred to `leave`."""
        return hidden if self.splits else group.down(hidden)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """The sum over processes."""
        if self.splits:
            yield
            partial = group.down(partial)
        update = self.start(self.from_shards, partial)
        yield
        flow.add(update.wait(), group)


class MegatronSP(TokenSharded, Megatron):
    """All-gathers before column-parallel linears and reduce-scatters after row-parallel ones."""
