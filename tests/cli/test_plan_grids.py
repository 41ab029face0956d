"""Each cell of a grid matches a separate search."""

import itertools
from dataclasses import replace

import pytest

from boost.cli import plan_grids as grids
from boost.cli.plan_grids import Grid, GridPlan, slower_than
from boost.plan.candidates import Request
from boost.plan.search import Search
from tests.plan.toys import base, hardware


@pytest.fixture(scope="module")
def by_gpus() -> Grid:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "MOST_TOKENS", 8192)
        return grids.by_gpus(Request(base(), 4, hardware()))


def test_by_gpus(by_gpus: Grid) -> None:
    config = base()
    assert [[cell.gpus for cell in row] for row in by_gpus] == [[2, 4]] * 3
    assert [row[0].tokens for row in by_gpus] == [512, 2048, 8192]
    for cell in itertools.chain.from_iterable(by_gpus):
        train = config.train.model_copy(update={"global_batch": cell.tokens // config.train.seq_len})
        request = Request(config.model_copy(update={"train": train}), cell.gpus, hardware(), frozenset({"parallel.pp"}))
        plan = Search(request).fastest()
        assert plan is not None and cell.plan is not None and plan.config == cell.plan.config
        assert cell.plan.config.parallel.pp == 1


def test_ways_in_words(by_gpus: Grid) -> None:
    """One sequence uses TP; many sequences use DP."""
    few, many = by_gpus[0][-1], by_gpus[-1][-1]
    assert few.label.endswith("TP 4") and few.kind == few.label.split()[0]
    assert (many.label, many.kind) == ("DP", "DP")
    assert GridPlan(1, 2, None).label == GridPlan(1, 2, None).kind == ""


def test_more_gpus_that_are_slower_are_marked(by_gpus: Grid) -> None:
    two, four = by_gpus[0][0], by_gpus[0][-1]
    assert two.plan is not None and four.plan is not None
    for factor, fewer in ((0.5, None), (2.0, 2)):
        time = replace(four.plan.time, seconds=factor * two.plan.time.seconds)
        cell = replace(four, plan=replace(four.plan, time=time))
        assert slower_than([two, cell], cell) == fewer
    assert slower_than([two, four], two) is None
