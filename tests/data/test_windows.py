"""Packed conversations: every counted token is a target once, and no document is cut unless it must be."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from boost.config.architecture import IGNORED
from boost.data.batches import Batches, EvaluationBatches
from boost.data.spans import Spans, boundaries_of
from boost.data.store import Split
from boost.data.windows import EqualWindows, PackedWindows


def masked_split(lengths: list[int], mask: np.ndarray) -> Split:
    """Documents of these lengths; every token is its own position."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    for start in offsets[:-1]:
        mask[start] = False
    tokens, targets = np.arange(n, dtype=np.uint32), Spans(boundaries_of(mask))
    return Split("train", Path("STORE"), tokens, offsets, n, n + 1, n, None, targets, int(mask.sum()), int(mask.sum()))


@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_packed_windows(lengths: list[int], seq_len: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random(sum(lengths)) < 0.3
    mask[-1] = True  # one at least
    split = masked_split(lengths, mask)
    windows = PackedWindows(split, seq_len)
    targets, starts = [], set(split.documents.tolist())
    for start, n_inputs in (windows[i] for i in range(len(windows))):
        assert 1 <= n_inputs <= seq_len
        inside = np.arange(start + 1, start + 1 + n_inputs)
        assert mask[inside].any(), "a window without a target teaches nothing"
        targets += inside[mask[inside]].tolist()
        document = int(np.searchsorted(split.documents, start, side="right")) - 1
        longer = split.documents[document + 1] - split.documents[document] > seq_len + 1
        assert start in starts or longer, "only a document that fits in no window is cut"
    assert targets == np.flatnonzero(mask).tolist(), "every counted token is a target once"


def test_short_documents_share_a_window_and_the_rest_is_padded() -> None:
    mask = np.zeros(22, dtype=bool)
    mask[[2, 3, 6, 8, 15, 21]] = True
    split = masked_split([5, 4, 7, 6], mask)  # documents start at 0, 5, 9, 16
    batches = Batches(split, 10, 1, 0)
    assert batches.n_samples == 3
    first = batches.sample(0)
    assert first.tokens.tolist() == [*range(8), 22, 22]
    assert [int(t) for t in first.targets if t != IGNORED] == [2, 3, 6, 8]
    assert first.document_ids.tolist() == [0] * 5 + [1] * 3 + [2] * 2
    assert [int(t) for i in (1, 2) for t in batches.sample(i).targets if t != IGNORED] == [15, 21]
    evaluated = [int(t) for part in EvaluationBatches(split, 10, 2) for t in part.targets.ravel() if t != IGNORED]
    assert sorted(evaluated) == [2, 3, 6, 8, 15, 21]


def test_equal_windows_are_full_in_training_and_reach_the_end_in_evaluation() -> None:
    assert [EqualWindows(24, 10, False)[i] for i in range(len(EqualWindows(24, 10, False)))] == [(0, 10), (10, 10)]
    assert [EqualWindows(24, 10, True)[i] for i in range(len(EqualWindows(24, 10, True)))] == [
        (0, 10),
        (10, 10),
        (20, 3),
    ]
