"""Which tokens of a split count in the loss (a loss mask), as spans: on disk 16 bytes per answer, however long it is."""

import bisect
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from boost.data.blocks import FileArray


class Spans:
    """Spans of tokens that count in the loss. `boundaries` int64 [2 n], increasing: span i has tokens boundaries[2 i] to
    boundaries[2 i + 1] - 1."""

    def __init__(self, boundaries: "FileArray | npt.NDArray[np.int64]") -> None:
        self.boundaries = boundaries

    def counted(self, start: int, length: int) -> npt.NDArray[np.bool_]:
        """Whether each of `length` tokens from `start` counts; [length]."""
        first = bisect.bisect_right(self.boundaries, start)
        last = bisect.bisect_right(self.boundaries, start + length - 1)
        local = np.asarray(self.boundaries[first:last]) - start
        passed = first + np.searchsorted(local, np.arange(length), side="right")
        return passed % 2 == 1

    def before(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many tokens count before each position. Reads all boundaries."""
        spans = np.asarray(self.boundaries[:], dtype=np.int64).reshape(-1, 2)
        starts, ends = spans[:, 0], spans[:, 1]
        totals = np.concatenate([[0], np.cumsum(ends - starts)])
        begun = np.searchsorted(starts, positions, side="right")
        unfinished = np.where(begun > 0, ends[np.maximum(begun - 1, 0)] - positions, 0)
        return np.asarray(totals[begun] - np.maximum(unfinished, 0))


def boundaries_of(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Boundaries [2 n] of the runs of True in a mask [length]."""
    padded = np.concatenate([[False], mask, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).astype(np.int64)
