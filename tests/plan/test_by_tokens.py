"""Each cell of the by-tokens grid matches a separate search."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from boost.plan import by_tokens as module
from boost.plan.by_tokens import Cell, by_tokens, changes, draw, fastest, slower
from boost.plan.candidates import Request
from boost.plan.search import Search
from tests.plan.toys import base, hardware


@pytest.fixture(scope="module")
def rows() -> list[list[Cell]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_TOKENS", 4096)
        return by_tokens(Request(base(), 4, hardware()))


def test_each_cell_is_the_fastest_of_its_case(rows: list[list[Cell]]) -> None:
    config = base()
    assert [row[0].tokens for row in rows] == [config.train.seq_len << n for n in range(len(rows))]
    assert all([cell.tp for cell in row] == [1, 2, 4] for row in rows) and rows[-1][0].tokens == 4096
    for row in rows[::2]:
        for cell in row:
            train = config.train.model_copy(update={"global_batch": cell.tokens // config.train.seq_len})
            asked = config.model_copy(
                update={"train": train, "parallel": config.parallel.model_copy(update={"tp": cell.tp})}
            )
            every = Search(Request(asked, 4, hardware(), frozenset({"parallel.tp", "parallel.pp"})))
            plan = every.fastest()
            assert (plan is None) == (cell.plan is None)
            if plan is not None and cell.plan is not None:
                assert plan.config == cell.plan.config and cell.plan.config.parallel.pp == 1
    assert rows[0][0].plan is None, "one sequence is too few for four replicas"


def test_fastest_slower_and_changes(rows: list[list[Cell]]) -> None:
    for row in rows:
        best = fastest(row)
        assert best is not None
        assert all(slower(cell, row) >= slower(best, row) == 1 for cell in row if cell.plan is not None)
    found = changes(rows)
    assert found[0] == fastest(rows[0])
    kinds = [(cell.layout, cell.tp) for cell in found]
    assert all(a != b for a, b in itertools.pairwise(kinds))
    nothing = [replace(cell, plan=None) for cell in rows[0]]
    assert fastest(nothing) is None and changes([nothing, rows[0]]) == [fastest(rows[0])]


def test_the_picture_has_every_cell(rows: list[list[Cell]], tmp_path: Path) -> None:
    draw("a <title>", "below", rows, tmp_path / "grid.svg")
    drawn = (tmp_path / "grid.svg").read_text()
    assert "a &lt;title&gt;" in drawn and "too few sequences" in drawn
    assert drawn.count(", 1.00 x<") >= len(rows)
