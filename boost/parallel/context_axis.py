"""Attention over the context-parallel (CP) axis: either exchanges heads or gathers keys and values (`boost.config.attention`).

Legend: n local tokens of a micro-batch, N = cp n tokens on all CP ranks; H query and K key/value heads of one TP rank, E width
of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from boost.config.attention import crosses_as_heads, local_heads
from boost.config.layouts.spec import EXCHANGE, GATHER, Comm
from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.attention import SequenceShare
from boost.models.interface import Done, Pending
from boost.parallel.collectives import InFlight, features_to_rows, heads_for_each, rows_to_features
from boost.parallel.mesh import Axis

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""

Start = Callable[[Comm, Tensor], InFlight]
"""Starts a differentiable collective over the context axis."""


class ContextAxis:
    """Communicates attention's inputs and outputs over the axis: one collective in and, if heads are exchanged, one out."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, axis: Axis) -> None:
        self.axis, self.head_dim = axis, model.head_dim
        self.as_heads = crosses_as_heads(model, parallel)
        self.heads, self.kv_heads = local_heads(model, parallel)

    def share(self) -> SequenceShare:
        """This process's share of each sequence."""
        return SequenceShare(self.axis.rank, self.axis.size, gathers_keys=not self.as_heads)

    def enter(self, start: Start, qkv: QKV, share: SequenceShare, batch: int) -> Pending[QKV]:
        """Redistributes q, k, v before attention: [n, H E], [n, K E], [n, K E] -> (q, k, v).

        Heads exchanged: [N, H E / cp] and twice [N, K E / cp], of whole sequences. Keys and values gathered: q as it is, and
        all keys and values, [N, K E] each.
        """
        q, k, v = qkv
        if not self.as_heads:
            gathering = start(GATHER, torch.cat((k, v), dim=-1))

            def gathered() -> QKV:
                keys, values = share.to_sequences(gathering.wait(), batch).chunk(2, dim=-1)
                return q, keys, values

            return Pending(gathered)
        keys_values = [heads_for_each(x, self.kv_heads, self.axis.size) for x in (k, v)]
        exchange = start(EXCHANGE, features_to_rows([q, *keys_values], self.axis))
        kv = max(self.kv_heads // self.axis.size, 1) * self.head_dim
        widths = [self.heads // self.axis.size * self.head_dim, kv, kv]

        def exchanged() -> QKV:
            own_q, own_k, own_v = share.to_sequences(exchange.wait(), batch).split(widths, dim=-1)
            return own_q, own_k, own_v

        return Pending(exchanged)

    def leave(self, start: Start, attended: Tensor, share: SequenceShare, batch: int) -> Pending[Tensor]:
        """Redistributes attention's output: heads [N, H E / cp] of whole sequences -> [n, H E]. A no-op if keys and values were
        gathered."""
        if not self.as_heads:
            return Done(attended)
        exchange = start(EXCHANGE, share.to_processes(attended, batch))
        return Pending(lambda: rows_to_features(exchange.wait(), self.axis))
