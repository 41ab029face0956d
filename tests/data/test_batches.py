"""Order as a function of (seed, step); the same samples for every number of processes; every token evaluated once."""

import dataclasses
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.config.architecture import IGNORED
from boost.data.batches import Batches, DocumentBatches, EvaluationBatches, ShuffledOrder
from boost.data.mixture import MixedSplit
from boost.data.store import Split
from boost.errors import ConfigError, DataError
from boost.parallel.mesh import share


def make_split(n_tokens, document=5):
    offsets = np.unique(np.append(np.arange(0, n_tokens, document), n_tokens)).astype(np.int64)
    # Every token is its own position, so that a target tells which one it is.
    tokens = np.arange(n_tokens, dtype=np.uint32)
    return Split("train", "STORE", tokens, offsets, n_tokens, n_tokens + 1, eos=n_tokens, largest_token=n_tokens)


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_every_epoch_holds_every_sample_once(n, seed):
    order = ShuffledOrder(n, seed)
    for epoch in range(3):
        assert sorted(order[epoch * n + i] for i in range(n)) == list(range(n))


def test_epochs_and_seeds_differ():
    n = 500
    a, b = ShuffledOrder(n, 1), ShuffledOrder(n, 2)
    first, second, other = [a[i] for i in range(n)], [a[n + i] for i in range(n)], [b[i] for i in range(n)]
    for one, two in ((first, second), (first, other), (first, list(range(n)))):
        # Two independent permutations agree in about one place.
        assert sum(x == y for x, y in zip(one, two, strict=True)) < 15


def test_order_holds_no_index_array():
    # Two billion samples: an array of them would take 16 GB, and a list of their shuffles minutes.
    order = ShuffledOrder(2**31, 0)
    assert all(0 <= order[i] < 2**31 for i in (0, 10**9, 2**31, 5 * 2**31 + 3))


def test_order_does_not_change_between_releases():
    # A change here would make every run resume onto other data.
    order = ShuffledOrder(10, 7)
    assert [order[i] for i in range(20)] == [7, 9, 0, 8, 4, 2, 5, 6, 3, 1, 6, 0, 4, 2, 7, 9, 1, 5, 8, 3]


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 12), (1, 1), (2, 3), (3, 4), (4, 3), (12, 1)])
def test_ranks_and_micro_batches_only_cut_the_global_batch(dp, micro_batch):
    batches = Batches(make_split(500), seq_len=8, global_batch=12, seed=1)
    (whole,) = batches.numbered(2, [0], 12)
    shares = [share(12 // micro_batch, rank, dp) for rank in range(dp)]
    parts = [part for own in shares for part in batches.numbered(2, own, micro_batch)]
    assert all(part.tokens.shape == (micro_batch, 8) for part in parts)
    for name in ("tokens", "targets", "document_ids"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def mixed(*sizes):
    """A mixture of splits of so many tokens; the first has most weight. Tokens of source i start at 10,000 i."""
    parts = []
    for i, n in enumerate(sizes):
        part = make_split(n)
        tokens = part.tokens + np.uint32(10_000 * i)
        parts.append(Split("train", f"STORE{i}", tokens, part.documents, n, 100_000, 99_999, 99_999))
    weights = [Fraction(k + 1, sum(range(len(sizes) + 1))) for k in reversed(range(len(sizes)))]
    return MixedSplit(tuple(parts), tuple(weights), tuple(f"s{i}" for i in range(len(sizes))))


def test_a_mixture_repeats_and_skips_no_sample_of_a_source_over_resumes_with_other_replicas():
    split, taken = mixed(301, 121, 81), []
    assert [float(weight) for weight in split.weights] == [3 / 6, 2 / 6, 1 / 6]
    step = 0
    for dp, steps in ((1, 3), (2, 4), (4, 2), (3, 5)):  # three resumes, each in a process of its own
        batches = Batches(split, seq_len=10, global_batch=12, seed=4)
        for _ in range(steps):
            parts = [part for rank in range(dp) for part in batches.numbered(step, share(12, rank, dp), 1)]
            taken += [int(part.tokens[0, 0]) for part in parts]
            step += 1
    by_source = [[t % 10_000 // 10 for t in taken if t // 10_000 == i] for i in range(3)]
    assert [len(found) for found in by_source] == [84, 56, 28], "12 x 14 samples in shares of 3, 2 and 1 sixths"
    for found, n in zip(by_source, (30, 12, 8), strict=True):
        epochs = [found[start : start + n] for start in range(0, len(found), n)]
        assert len(epochs) > 2
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])


def test_a_mixture_of_one_store_is_that_store():
    part = make_split(301)
    alone, mixture = Batches(part, 10, 8, 5), Batches(MixedSplit((part,), (Fraction(1),), ("s",)), 10, 8, 5)
    for step in range(9):
        np.testing.assert_array_equal(alone.sample_indices(step), mixture.sample_indices(step))


def test_stores_of_equal_size_are_not_read_in_step():
    batches = Batches(mixed(501, 501), seq_len=10, global_batch=60, seed=4)
    found = batches.sample_indices(0)
    first, second = found[found < 50][:20], found[found >= 50][:20] - 50
    assert len(second) == 20 and sum(first == second) < 5


def test_a_store_of_a_mixture_that_is_too_small_is_named():
    with pytest.raises(DataError, match="STORE1: split 'train' has 9 tokens, but"):
        Batches(mixed(301, 9), 10, 1, 0)


def test_a_sample_is_a_window_with_its_documents():
    batches = Batches(make_split(41, document=7), seq_len=10, global_batch=1, seed=0)
    batch = batches.samples([2, 3])
    np.testing.assert_array_equal(batch.tokens[0], np.arange(20, 30))
    np.testing.assert_array_equal(batch.targets[0], np.arange(21, 31))
    np.testing.assert_array_equal(batch.document_ids[0], np.arange(20, 30) // 7 - 2)
    assert (batch.tokens.dtype, batch.targets.dtype, batch.document_ids.dtype) == (np.int64, np.int64, np.int32)
    np.testing.assert_array_equal(batch.targets[1], np.arange(31, 41))
    without = Batches(make_split(41, document=7), 10, 1, 0, documents=False).samples([2, 3])
    np.testing.assert_array_equal(without.tokens, batch.tokens)
    assert not without.document_ids.any()


@pytest.mark.parametrize("shortest", [0, 1, 5])
def test_documents_are_found_among_thousands(shortest: int) -> None:
    """Their ids, with one read each, in stores with more documents than a landmark covers, some of them empty."""
    rng = np.random.default_rng(shortest)
    ends = np.cumsum(rng.integers(shortest, 9, 5000))
    split = dataclasses.replace(make_split(int(ends[-1])), documents=np.concatenate([[0], ends]))
    for start in rng.integers(0, ends[-1] - 64, 200):
        inside = np.searchsorted(split.documents, np.arange(start, start + 64), side="right")
        np.testing.assert_array_equal(split.document_ids(int(start), 64), inside - inside[0])


def test_corpus_shorter_than_a_sequence():
    with pytest.raises(DataError, match=r"10 tokens, but .* 10 \+ 1; set train.seq_len to 9"):
        Batches(make_split(10), 10, 1, 0)
    assert Batches(make_split(10), 9, 1, 0).n_samples == 1


def test_a_seed_that_is_none():
    with pytest.raises(ConfigError, match="seed = -1"):
        Batches(make_split(100), 4, 10, -1)


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 80), st.integers(1, 12), st.integers(1, 3), st.integers(1, 4))
def test_evaluation_predicts_every_token_but_the_first_once(n_tokens, seq_len, batch, dp):
    split = make_split(n_tokens)
    per_rank = [list(EvaluationBatches(split, seq_len, batch, rank, dp)) for rank in range(dp)]
    assert len({len(batches) for batches in per_rank}) == 1
    targets = []
    for part in (part for batches in per_rank for part in batches):
        assert part.tokens.shape == part.targets.shape == part.document_ids.shape == (batch, seq_len)
        real = part.targets != IGNORED
        np.testing.assert_array_equal(part.tokens[real] + 1, part.targets[real])
        assert (part.tokens[~real] == split.eos).all()
        targets += part.targets[real].tolist()
    assert sorted(targets) == list(range(1, n_tokens))


def test_padding_belongs_to_no_document_of_the_text():
    (batch,) = EvaluationBatches(make_split(8, document=5), 10, 1)
    assert batch.document_ids[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_evaluation_that_isolates_no_documents_does_not_read_them():
    split = make_split(41)
    unread = dataclasses.replace(split, documents=None)
    batches = EvaluationBatches(unread, 10, 2, documents=False)
    for batch, whole in zip(batches, EvaluationBatches(split, 10, 2), strict=True):
        np.testing.assert_array_equal(batch.tokens, whole.tokens)
        np.testing.assert_array_equal(batch.targets, whole.targets)
        assert not batch.document_ids.any()


def test_a_batch_names_a_token_beyond_the_vocabulary_of_its_store():
    batches = Batches(mixed(41, 41), 10, 1, 0, documents=False)
    object.__setattr__(batches.splits[0], "largest_token", 20)  # below the tokens of the other store, too
    batches.samples([0, 1, *range(4, 8)])
    for sample, row in ((2, 20), (3, 30)):
        with pytest.raises(DataError, match=rf"STORE0: .* token id .. near position {row}, above .* 20"):
            batches.samples([0, sample, 4])


def test_evaluation_of_windows_spread_over_the_split():
    split = make_split(101)
    parts = list(EvaluationBatches(split, 10, 2, max_tokens=35))
    targets = np.concatenate([part.targets[part.targets != IGNORED] for part in parts])
    assert targets.tolist() == [*range(1, 11), *range(31, 41), *range(61, 71)]
    assert sum((part.targets != IGNORED).sum() for part in EvaluationBatches(split, 10, 2, max_tokens=1)) == 10


def test_evaluation_of_a_single_token_is_refused_at_the_call():
    with pytest.raises(DataError, match=r"has too few tokens \(1\): evaluation needs at least 2"):
        EvaluationBatches(make_split(1), 4, 1)


@pytest.mark.slow
def test_importing_grain_says_nothing_and_hides_nothing():
    code = (
        "from boost.data.batches import ShuffledOrder; ShuffledOrder(3, 0)\n"
        "from absl import logging; logging.warning('kept')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "jax" not in done.stderr and "kept" in done.stderr


def split_of(lengths: list[int]) -> Split:
    """Documents of these lengths, every token its own position."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    return Split("heldout", Path("STORE"), np.arange(n, dtype=np.uint32), offsets, n, n + 1, n, n)


X = IGNORED


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


def test_a_part_of_the_documents() -> None:
    assert len(DocumentBatches(split_of([3, 6, 2]), 4, 1, max_tokens=4)) == 2
