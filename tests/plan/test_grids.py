"""Each cell of a grid matches a separate search."""

import itertools
from dataclasses import replace

import pytest

from boost.plan import grids
from boost.plan.candidates import Request
from boost.plan.grids import Grid, GridPlan, changes, fastest, slower
from boost.plan.search import Search
from tests.plan.toys import base, hardware


@pytest.fixture(scope="module")
def by_tokens() -> Grid:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "MOST_TOKENS", 4096)
        return grids.by_tokens(Request(base(), 4, hardware()))


@pytest.fixture(scope="module")
def by_gpus() -> Grid:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "MOST_TOKENS", 8192)
        return grids.by_gpus(Request(base(), 4, hardware()))


def test_by_tokens(by_tokens: Grid) -> None:
    config = base()
    assert [row[0].tokens for row in by_tokens] == [config.train.seq_len << n for n in range(len(by_tokens))]
    assert all([cell.column for cell in row] == [1, 2, 4] for row in by_tokens) and by_tokens[-1][0].tokens == 4096
    for row in by_tokens[::2]:
        for cell in row:
            train = config.train.model_copy(update={"global_batch": cell.tokens // config.train.seq_len})
            parallel = config.parallel.model_copy(update={"tp": cell.column})
            asked = config.model_copy(update={"train": train, "parallel": parallel})
            plan = Search(Request(asked, 4, hardware(), frozenset({"parallel.tp", "parallel.pp"}))).fastest()
            assert (plan is None) == (cell.plan is None)
            if plan is not None and cell.plan is not None:
                assert plan.config == cell.plan.config and cell.plan.config.parallel.pp == 1
    assert by_tokens[0][0].plan is None, "one sequence is too few for four replicas"


def test_fastest_slower_and_changes(by_tokens: Grid) -> None:
    for row in by_tokens:
        best = fastest(row)
        assert best is not None
        assert all(slower(cell, row) >= slower(best, row) == 1 for cell in row if cell.plan is not None)
    changed = changes(by_tokens)
    assert changed[0] == fastest(by_tokens[0])
    assert all((a.kind, a.column) != (b.kind, b.column) for a, b in itertools.pairwise(changed))
    nothing = [replace(cell, plan=None) for cell in by_tokens[0]]
    assert fastest(nothing) is None and changes([nothing, by_tokens[0]]) == [fastest(by_tokens[0])]


def test_by_gpus(by_gpus: Grid) -> None:
    config = base()
    assert [[cell.column for cell in row] for row in by_gpus] == [[2, 4]] * 3
    assert [row[0].tokens for row in by_gpus] == [512, 2048, 8192]
    for cell in itertools.chain.from_iterable(by_gpus):
        train = config.train.model_copy(update={"global_batch": cell.tokens // config.train.seq_len})
        request = Request(
            config.model_copy(update={"train": train}), cell.column, hardware(), frozenset({"parallel.pp"})
        )
        plan = Search(request).fastest()
        assert plan is not None and cell.plan is not None and plan.config == cell.plan.config
        assert cell.plan.config.parallel.pp == 1


def test_ways_in_words(by_gpus: Grid) -> None:
    """One sequence uses TP; many sequences use DP."""
    few, many = by_gpus[0][-1], by_gpus[-1][-1]
    assert few.label.endswith("TP 4") and few.kind == few.label.split()[0]
    assert (many.label, many.kind) == ("DP", "DP")
    assert GridPlan(1, 2, None).label == GridPlan(1, 2, None).kind == ""
