"""Packed conversations: every counted token is a target once, and no document is cut unless it must be."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from boost.config.architecture import IGNORED
from boost.data.batches import Batches, EvaluationBatches
from boost.data.spans import Spans, boundaries_of
from boost.data.store import Split
from boost.data.windows import EqualWindows, PackedWindows, Segment


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
    windows, targets, first = PackedWindows(split, seq_len), list[int](), -1
    for segments in (windows[i] for i in range(len(windows))):
        assert sum(segment.n_inputs + 1 for segment in segments) <= seq_len + 1
        assert [*segments] == sorted(segments, key=lambda segment: segment.start) and segments[0].start > first
        first = segments[0].start
        for segment in segments:
            inside = np.arange(segment.start + 1, segment.start + 1 + segment.n_inputs)
            assert mask[inside].any(), "a segment without a target teaches nothing"
            targets += inside[mask[inside]].tolist()
            document = int(np.searchsorted(split.documents, segment.start, side="right")) - 1
            begin, end = (int(split.documents[document + i]) for i in (0, 1))
            is_whole = segment.start == begin and segment.start + segment.n_inputs + 1 == end
            assert is_whole or end - begin > seq_len + 1, "only a document that fits in no sequence is cut"
    assert sorted(targets) == np.flatnonzero(mask).tolist(), "every counted token is a target once"


def test_the_fullest_sequence_with_enough_room_takes_a_document() -> None:
    lengths = [4, 7, 3, 6, 2, 11]
    split = masked_split(lengths, np.ones(sum(lengths), dtype=bool))
    windows = PackedWindows(split, 10)
    starts = [[segment.start for segment in windows[i]] for i in range(len(windows))]
    # 11, then 7 + 4, then 6 + 3 + 2: eleven positions each.
    assert starts == [[0, 4], [11, 14, 20], [22]]


def test_almost_all_positions_are_filled() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.gamma(2.0, 100.0, 4000).astype(int) + 2, 1025)
    split = masked_split(lengths.tolist(), np.ones(int(lengths.sum()), dtype=bool))
    assert lengths.sum() / (len(PackedWindows(split, 1024)) * 1025) > 0.99


def test_short_documents_share_a_sequence_and_the_rest_is_padded() -> None:
    mask = np.zeros(22, dtype=bool)
    mask[[2, 3, 6, 8, 15, 21]] = True
    split = masked_split([5, 4, 7, 6], mask)  # documents start at 0, 5, 9, 16
    batches = Batches(split, 11, 1, 0)
    assert batches.n_samples == 2
    first, second = map(batches.sample, range(2))
    assert first.tokens.tolist() == [*range(5), *range(9, 15)] and first.document_ids.tolist() == [0] * 5 + [1] * 6
    assert [int(t) for t in first.targets if t != IGNORED] == [2, 3, 15]
    assert second.tokens.tolist() == [*range(5, 9), *range(16, 21), 22, 22]
    assert second.document_ids.tolist() == [0] * 4 + [1] * 5 + [2] * 2
    assert [int(t) for t in second.targets if t != IGNORED] == [6, 8, 21]
    evaluated = [int(t) for part in EvaluationBatches(split, 11, 2) for t in part.targets.ravel() if t != IGNORED]
    assert sorted(evaluated) == [2, 3, 6, 8, 15, 21]


def test_equal_windows_are_full_in_training_and_reach_the_end_in_evaluation() -> None:
    full, all_of_them = (EqualWindows(24, 10, partial) for partial in (False, True))
    assert [full[i] for i in range(len(full))] == [(Segment(0, 10),), (Segment(10, 10),)]
    assert [all_of_them[i] for i in range(len(all_of_them))] == [
        (Segment(0, 10),),
        (Segment(10, 10),),
        (Segment(20, 3),),
    ]
