"""One process's share of each sequence on the context axis, and the order of its rows (`boost.config.context`).

Legend: B sequences of a micro-batch, cp processes of the axis, c tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from boost.config.context import chunks_of
from boost.models.documents import Documents


@dataclass(frozen=True)
class SequenceShare:
    """Two chunks of each sequence, one from each half of the sequence; or the chunk of one half only."""

    rank: int
    cp: int
    gathers_keys: bool
    """Whether keys and values are gathered while queries stay local. Otherwise attention gets all tokens of some heads."""
    documents: tuple[Documents | None, ...] = (None, None)
    """Documents of the queries of each local chunk, if keys are gathered."""
    halves_held: tuple[int, ...] = (0, 1)
    """Halves of the sequence that this share covers: 0 the first, 1 the second."""

    @property
    def chunks(self) -> list[int]:
        """Indices of the local chunks."""
        both = chunks_of(self.rank, self.cp)
        return [both[half] for half in self.halves_held]

    def halves(self) -> "tuple[SequenceShare, SequenceShare]":
        """Shares of the first and of the second half of the sequence."""
        first, second = (
            replace(self, documents=(found,), halves_held=(half,)) for half, found in enumerate(self.documents)
        )
        return first, second

    def of_sequences(self, documents: Sequence[Documents | None]) -> "SequenceShare":
        """The same share, of some of the sequences."""
        return replace(self, documents=tuple(documents))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions of the `tokens` local tokens of a sequence, int64."""
        c = tokens // len(self.chunks)
        return torch.cat([torch.arange(number * c, (number + 1) * c, device=device) for number in self.chunks])

    def to_sequences(self, x: Tensor, batch: int) -> Tensor:
        """Reorders rows from process order (one process after another) to sequence order. Copies, unless the order is the same."""
        return _reordered(x, self._order(batch))

    def to_processes(self, x: Tensor, batch: int) -> Tensor:
        """Inverse of `to_sequences`."""
        order = self._order(batch)
        return _reordered(x, sorted(range(len(order)), key=order.__getitem__))

    def _order(self, batch: int) -> list[int]:
        """For each chunk of each sequence, its index in process order."""
        places = []
        for index, half in enumerate(self.halves_held):
            ranks = range(self.cp) if half == 0 else range(self.cp - 1, -1, -1)
            places += [(rank, index) for rank in ranks]
        held = len(self.halves_held)
        return [(rank * batch + b) * held + index for b in range(batch) for rank, index in places]


def _reordered(x: Tensor, order: Sequence[int]) -> Tensor:
    if list(order) == list(range(len(order))):
        return x
    blocks = x.split(x.shape[0] // len(order))
    return torch.cat([blocks[number] for number in order])
