"""Batches with one document per row, as the published evaluations of low-rank pretraining have them.

GaLore, LORO and CoLA evaluate on the first S tokens of each document of C4's validation split, padded to S, and ignore the padding.
"""

from collections.abc import Iterator

import numpy as np

from boost.config.architecture import IGNORED
from boost.data.batches import Batch
from boost.data.store import Split


class DocumentBatches:
    """Rows [S] of one document each, in order, `batch` rows at a time: its first S tokens, of which the last is eos.

    Targets beyond a document or outside the loss mask are `IGNORED`; a document's first token is no target. All DP ranks yield the
    same number of batches. `max_tokens` limits evaluation to as many documents as have that many tokens, at least one. `len` is the
    number of batches.
    """

    def __init__(
        self, split: Split, seq_len: int, batch: int, dp_rank: int = 0, dp: int = 1, max_tokens: int | None = None
    ) -> None:
        self._split, self._seq_len, self._batch, self._dp_rank, self._dp = split, seq_len, batch, dp_rank, dp
        self._ends = np.asarray(split.documents[:])
        self._documents = split.n_documents
        if max_tokens is not None:
            used = np.minimum(np.diff(self._ends), seq_len).cumsum()
            self._documents = min(int(np.searchsorted(used, max_tokens)) + 1, self._documents)

    def __len__(self) -> int:
        return -(-self._documents // (self._batch * self._dp))

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            first = (step * self._dp + self._dp_rank) * self._batch
            tokens = np.full((self._batch, self._seq_len), self._split.eos, dtype=np.int64)
            targets = np.full((self._batch, self._seq_len), IGNORED, dtype=np.int64)
            for row, number in enumerate(range(first, min(first + self._batch, self._documents))):
                start, end = int(self._ends[number]), int(self._ends[number + 1])
                length = min(end - start, self._seq_len)
                document = self._split.window(start, length)
                document[-1] = self._split.eos
                tokens[row, : length - 1], targets[row, : length - 1] = document[:-1], document[1:]
                if self._split.targets is not None:
                    targets[row, : length - 1][~self._split.targets.counted(start + 1, length - 1)] = IGNORED
            yield Batch(tokens, targets, np.zeros((self._batch, self._seq_len), dtype=np.int32))
