"""Which tokens the samples of a split have: windows of S tokens, or conversations packed into sequences of up to S tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from boost.data.store import Split


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a split: n inputs from a start, and the targets that follow each of them."""

    start: int
    n_inputs: int


class Windows(Protocol):
    """Samples of a split. A segment of n inputs takes n + 1 positions of a sequence: its last target is an input too, without a
    target. The last segment takes n."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Segment, ...]:
        """The segments of a sample, in order."""
        ...


class EqualWindows:
    """Consecutive windows of S inputs. With `partial`, the last one has what is left; else only full windows count."""

    def __init__(self, n_tokens: int, seq_len: int, partial: bool) -> None:
        self._targets, self._seq_len = max(n_tokens - 1, 0), seq_len
        self._length = -(-self._targets // seq_len) if partial else self._targets // seq_len

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Segment, ...]:
        start = index * self._seq_len
        return (Segment(start, min(self._seq_len, self._targets - start)),)


class PackedWindows:
    """Whole documents, each in the fullest sequence that has room for it, longest first (best-fit decreasing).

    Only documents of more than S + 1 tokens are split, into segments of S inputs and a rest; the last target of one is the first
    input of the next. Segments without a target are left out. Samples, and the segments of a sample, are in the order of the split.

    Takes 12 bytes per document and 8 per sample. Building takes about 1 s per million documents.
    """

    def __init__(self, split: Split, seq_len: int) -> None:
        starts, n_inputs = _segments(split, seq_len)
        sample_of = _in_order_of_first(_best_fit(n_inputs + 1, seq_len + 1))
        order = np.argsort(sample_of, kind="stable")
        self._starts, self._n_inputs = starts[order], n_inputs[order].astype(np.int32)
        self._first = np.concatenate([[0], np.cumsum(np.bincount(sample_of))]).astype(np.int64)
        """Index of the first segment of each sample, and the number of segments."""

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> tuple[Segment, ...]:
        segments = range(self._first[index], self._first[index + 1])
        return tuple(Segment(int(self._starts[i]), int(self._n_inputs[i])) for i in segments)


def windows_of(split: Split, seq_len: int, partial: bool) -> Windows:
    """The samples of a split: packed if it has a loss mask. `partial`: see `EqualWindows`."""
    if split.targets is not None:
        return PackedWindows(split, seq_len)
    return EqualWindows(split.n_tokens, seq_len, partial)


def _segments(split: Split, seq_len: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and numbers of inputs of all segments with a target, in order; both [n]."""
    assert split.targets is not None, "only splits with a loss mask are packed"
    bounds = np.asarray(split.documents[:], dtype=np.int64)
    inputs = np.maximum(np.diff(bounds) - 1, 0)
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(inputs)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = bounds[document] + number * seq_len
    n_inputs = np.minimum(inputs[document] - number * seq_len, seq_len)
    useful = split.targets.before(starts + 1 + n_inputs) > split.targets.before(starts + 1)
    return starts[useful], n_inputs[useful]


def _best_fit(sizes: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """The sample of each segment, [n]: largest segments first, each into the fullest sample that has room for it."""
    sample_of = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, n_samples = 0, 0  # bit r of `rooms`: whether some sample has room r
    for segment in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[segment])
        if enough := rooms >> size:
            room = size + (enough & -enough).bit_length() - 1
            sample = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, sample, n_samples = capacity, n_samples, n_samples + 1
        sample_of[segment] = sample
        if left := room - size:
            with_room[left].append(sample)
            rooms |= 1 << left
    return sample_of


def _in_order_of_first(sample_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same grouping of segments, with samples numbered in the order of their first segments."""
    _, first, numbers = np.unique(sample_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[numbers]
