"""Turns a token store into batches. The order of samples depends only on (seed, step), not on the number of processes.

Sample i in a split is the window tokens[i * S : i * S + S + 1]: its first S tokens are inputs, its last S tokens are
targets. A mixture's samples are those from its first store, then those from its second store, and so on.
Shapes: G samples in a global batch, B in a micro-batch, S tokens in a sequence.
"""

import bisect
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from boost.config.architecture import IGNORED
from boost.config.attention import chunks_of
from boost.data.mixture import AnySplit, Proportions
from boost.data.store import Split
from boost.errors import ConfigError, DataError

# The index permutation of grain works on 32-bit integers.
MAX_SAMPLES = 1 << 31


@dataclass(frozen=True)
class Batch:
    """`tokens` and `targets` [B, S] int64; `document_ids` [B, S] int32, the document of each token within its row."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32]

    def share(self, rank: int, cp: int) -> "Batch":
        """The part for one CP rank (of `cp`): tokens and targets [B, S / cp] from its two chunks of each row
        (`boost.config.attention`), with the document ids for whole rows, which attention needs."""
        if cp == 1:
            return self
        chunks = [np.split(x, 2 * cp, axis=1) for x in (self.tokens, self.targets)]
        tokens, targets = (np.concatenate([parts[i] for i in chunks_of(rank, cp)], axis=1) for parts in chunks)
        return Batch(tokens, targets, self.document_ids)


def join(batches: Iterable[Batch]) -> Batch:
    """Concatenates micro-batches along the batch dimension."""
    rows = [(batch.tokens, batch.targets, batch.document_ids) for batch in batches]
    tokens, targets, document_ids = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Batch(tokens, targets, document_ids)


def _is_relevant(record: logging.LogRecord) -> bool:
    return "jax profiler" not in record.getMessage()


class ShuffledOrder:
    """An endless indexable sequence: each run of `n_samples` items is a new permutation of range(n_samples), grain's.

    Random access takes constant time, and no permutation is held in memory.
    """

    def __init__(self, n_samples: int, seed: int) -> None:
        # On import, grain warns through absl that jax is missing, which is irrelevant here.
        from absl import logging as absl_logging

        absl_logging.get_absl_logger().addFilter(_is_relevant)
        from grain.experimental import index_shuffle

        self._permute, self._n_samples = index_shuffle, n_samples
        # The same as grain.MapDataset.range(n_samples).seed(seed).shuffle().repeat(), which takes ten times as long per item.
        self._seed = int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._n_samples)
        seed = (self._seed + epoch) % (1 << 32)
        return int(self._permute(index, max_index=self._n_samples - 1, seed=seed, rounds=4))


class Batches:
    """Training batches from a split: every sample once per epoch, in a new order each epoch; batches may span two epochs.

    In a mixture, this holds for the samples from each store, and `Proportions` chooses the store for each sample.
    Trailing tokens that do not fill a window are dropped. Raises `DataError` if a store has no full window.
    """

    def __init__(self, split: AnySplit, seq_len: int, global_batch: int, seed: int, documents: bool = True) -> None:
        """`documents`: False leaves the document ids 0, for runs that do not isolate documents."""
        if seq_len < 1 or global_batch < 1:
            raise ConfigError(f"train.seq_len = {seq_len}, global batch = {global_batch}: both must be at least 1")
        if not 0 <= seed < 1 << 32:
            raise ConfigError(f"seed = {seed} must be between 0 and {(1 << 32) - 1}")
        self.split, self.seq_len, self.global_batch, self.seed = split, seq_len, global_batch, seed
        self._documents = documents
        self.splits = [split] if isinstance(split, Split) else list(split.parts)
        self.samples_of = [_n_samples(part, seq_len) for part in self.splits]
        """Number of samples in each store."""
        self._first = list(itertools.accumulate(self.samples_of, initial=0))
        self.n_samples = self._first[-1]
        self._proportions = Proportions([Fraction(1)] if isinstance(split, Split) else split.weights)
        # Seeds differ, so that stores of equal size, such as translations, are not read in lockstep.
        sequences = [np.random.SeedSequence((seed, source)) for source in range(len(self.splits))]
        seeds = [seed, *(int(sequence.generate_state(1)[0]) for sequence in sequences[1:])]
        self._orders = list(map(ShuffledOrder, self.samples_of, seeds))

    def sample_indices(self, step: int) -> npt.NDArray[np.int64]:
        """Sample indices for one optimizer step, int64 [G]; `step` counts from 0."""
        first = step * self.global_batch
        drawn = [self._proportions[first + i] for i in range(self.global_batch)]
        return np.array([self._first[source] + self._orders[source][count] for source, count in drawn], dtype=np.int64)

    def numbered(self, step: int, numbers: Iterable[int], micro_batch: int) -> Iterator[Batch]:
        """Yields the micro-batches of a step with these `numbers` (0 to G / B - 1). DP ranks take contiguous shares of the numbers,
        so the samples in a step depend neither on the number of ranks nor on the micro-batch size."""
        indices = self.sample_indices(step)
        for number in numbers:
            yield self.samples(indices[number * micro_batch : (number + 1) * micro_batch].tolist())

    def samples(self, indices: Sequence[int]) -> Batch:
        """The samples with these indices, one per row."""
        sources = [bisect.bisect_right(self._first, index) - 1 for index in indices]
        rows = [(self.splits[i], n - self._first[i]) for i, n in zip(sources, indices, strict=True)]
        return _rows(rows, self.seq_len, self._documents)


def _n_samples(split: Split, seq_len: int) -> int:
    """Number of whole windows in a training split. Raises `DataError` if it has none or too many."""
    number = (split.n_tokens - 1) // seq_len
    if number < 1:
        raise DataError(
            f"{split.path}: split {split.name!r} has {split.n_tokens} tokens, but one sequence needs at least "
            f"{seq_len} + 1; set train.seq_len to {max(split.n_tokens - 1, 1)} or less, or prepare more text"
        )
    if number > MAX_SAMPLES:
        smallest = -(-split.n_tokens // MAX_SAMPLES)
        raise DataError(
            f"{split.path}: {number} sequences of {seq_len} tokens exceed the limit of {MAX_SAMPLES}; "
            f"set train.seq_len to {smallest} or more"
        )
    return number


class EvaluationBatches:
    """Windows from the split in order, `batch` rows at a time. Every token except the first is a target exactly once.

    Targets beyond the end are `IGNORED`. All DP ranks yield the same number of batches, padded with rows without targets,
    because every rank must participate in the collectives. `max_tokens` limits evaluation to as many windows as fit, at least
    one, spread evenly over the split. Raises `DataError` if the split has no target. `len` is the number of batches.
    """

    def __init__(
        self,
        split: Split,
        seq_len: int,
        batch: int,
        dp_rank: int = 0,
        dp: int = 1,
        max_tokens: int | None = None,
        documents: bool = True,
    ) -> None:
        """`documents`: as in `Batches`."""
        if split.n_tokens < 2:
            raise DataError(
                f"{split.path}: split {split.name!r} has too few tokens ({split.n_tokens}): evaluation needs at least 2; add text"
            )
        self._split, self._seq_len, self._batch, self._dp_rank, self._dp = split, seq_len, batch, dp_rank, dp
        self._documents = documents
        self._windows = self._selected = -(-(split.n_tokens - 1) // seq_len)
        if max_tokens is not None:
            self._selected = min(self._selected, max(max_tokens // seq_len, 1))

    def __len__(self) -> int:
        return -(-self._selected // (self._batch * self._dp))

    def __iter__(self) -> Iterator[Batch]:
        for step in range(len(self)):
            first = (step * self._dp + self._dp_rank) * self._batch
            numbers = [
                min(i, self._selected) * self._windows // self._selected for i in range(first, first + self._batch)
            ]
            yield _rows([(self._split, number) for number in numbers], self._seq_len, self._documents)


class DocumentBatches:
    """Batches with one document per row, as in the published evaluations of low-rank pretraining: GaLore, LORO and CoLA take
    the first S tokens of each document in C4's validation split, padded to S, and ignore the padding.

    Each row [S] holds the first S tokens of a document, the last replaced by eos. Documents are in order, `batch` rows at a time.

    Targets beyond a document are `IGNORED`; a document's first token is not a target. All DP ranks yield
    the same number of batches. `max_tokens` limits evaluation to the first documents that together reach this many
    tokens, and at least one document. `len` is the number of batches.
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
            yield Batch(tokens, targets, np.zeros((self._batch, self._seq_len), dtype=np.int32))


def _rows(samples: Sequence[tuple[Split, int]], seq_len: int, documents: bool) -> Batch:
    """A row [S] for each (split, index of a window), padded with a separate document; an index beyond the last window gives only
    padding. `documents`: see `Batches`."""
    batch = Batch(
        np.empty((len(samples), seq_len), dtype=np.int64),
        np.empty((len(samples), seq_len), dtype=np.int64),
        np.zeros((len(samples), seq_len), dtype=np.int32),
    )
    rows = zip(samples, batch.tokens, batch.targets, batch.document_ids, strict=True)
    for (split, index), tokens, targets, ids in rows:
        start = index * seq_len
        end = min(max(split.n_tokens - 1 - start, 0), seq_len)
        document = 0
        if end:
            window = split.read(start, end + 1)
            tokens[:end], targets[:end] = window[:-1], window[1:]
            if documents:
                ids[:end] = split.document_ids(start, end)
                document = ids[end - 1] + 1
        tokens[end:], targets[end:], ids[end:] = split.eos, IGNORED, document
    if max(batch.tokens.max(), batch.targets.max()) > min(split.largest_token for split, _ in samples):
        for split, index in samples:  # raises an error, unless the store of another row has the lower limit
            start = min(index * seq_len, split.n_tokens)
            split.window(start, min(seq_len + 1, split.n_tokens - start))
    return batch
