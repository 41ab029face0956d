"""What one process of the context axis holds of each sequence, and the order of its rows (`boost.config.context`).

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
    """Two chunks of each sequence: one of its first half and one of its second half; or of one half only."""

    rank: int
    cp: int
    gathers_keys: bool
    """Whether keys and values are gathered and queries stay; else attention has all tokens of some heads."""
    documents: tuple[Documents | None, ...] = (None, None)
    """Of the queries of each chunk held here, where keys are gathered."""
    halves_held: tuple[int, ...] = (0, 1)
    """Of the sequence: 0 the first, 1 the second."""

    @property
    def chunks(self) -> list[int]:
        """Numbers of the chunks held here."""
        both = chunks_of(self.rank, self.cp)
        return [both[half] for half in self.halves_held]

    def halves(self) -> "tuple[SequenceShare, SequenceShare]":
        """Of the first half of the sequence, and of the second."""
        first, second = (
            replace(self, documents=(found,), halves_held=(half,)) for half, found in enumerate(self.documents)
        )
        return first, second

    def of_sequences(self, documents: Sequence[Documents | None]) -> "SequenceShare":
        """The same of some of the sequences."""
        return replace(self, documents=tuple(documents))

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Of the `tokens` tokens of a sequence held here, int64."""
        c = tokens // len(self.chunks)
        return torch.cat([torch.arange(number * c, (number + 1) * c, device=device) for number in self.chunks])

    def to_sequences(self, x: Tensor, batch: int) -> Tensor:
        """Rows of all processes, one process below the other -> in the order of sequences. A copy, unless they are in it."""
        return _reordered(x, self._order(batch))

    def to_processes(self, x: Tensor, batch: int) -> Tensor:
        """The other way round."""
        order = self._order(batch)
        return _reordered(x, sorted(range(len(order)), key=order.__getitem__))

    def _order(self, batch: int) -> list[int]:
        """For each chunk of each sequence, its number among those of all processes."""
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
