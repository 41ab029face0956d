"""One document per row: the first tokens of each, with the last one replaced by eos, and only tokens of the loss mask."""

from pathlib import Path

import numpy as np

from boost.config.architecture import IGNORED
from boost.data.document_batches import DocumentBatches
from boost.data.spans import Spans, boundaries_of
from boost.data.store import Split

X = IGNORED


def split_of(lengths: list[int], mask: list[int] | None = None) -> Split:
    """Documents of these lengths, every token its own position; `mask`: positions of the tokens that count."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    counted = np.isin(np.arange(n), [] if mask is None else mask)
    targets = None if mask is None else Spans(boundaries_of(counted))
    return Split("heldout", Path("STORE"), np.arange(n, dtype=np.uint32), offsets, n, n + 1, n, None, targets)


def test_the_first_tokens_of_each_document() -> None:
    batches = DocumentBatches(split_of([3, 6, 2]), 4, 2)  # documents start at 0, 3, 9; eos is 11
    first, second = batches
    assert first.tokens.tolist() == [[0, 1, 11, 11], [3, 4, 5, 11]]
    assert first.targets.tolist() == [[1, 11, X, X], [4, 5, 11, X]]
    assert second.targets.tolist() == [[11, X, X, X], [X, X, X, X]], "the last row is padding"


def test_two_ranks_share_the_documents() -> None:
    split = split_of([3, 6, 2])
    ranks = [[batch.targets.tolist() for batch in DocumentBatches(split, 4, 1, rank, 2)] for rank in (0, 1)]
    assert ranks == [[[[1, 11, X, X]], [[11, X, X, X]]], [[[4, 5, 11, X]], [[X, X, X, X]]]]


def test_only_tokens_of_the_loss_mask_are_targets() -> None:
    (batch,) = DocumentBatches(split_of([3, 6, 2], [2, 5, 8, 9]), 4, 3)
    assert batch.targets.tolist() == [[X, 11, X, X], [X, 5, X, X], [X, X, X, X]], "9 is a first token"


def test_a_part_of_the_documents() -> None:
    assert len(DocumentBatches(split_of([3, 6, 2]), 4, 1, max_tokens=4)) == 2
