"""Each cell of the by-GPUs grid matches a separate search."""

from pathlib import Path

import pytest

from boost.plan import by_gpus as module
from boost.plan.by_gpus import GpusCell, by_gpus, draw
from boost.plan.candidates import Request
from boost.plan.search import Search
from tests.plan.toys import base, hardware


@pytest.fixture(scope="module")
def rows() -> list[list[GpusCell]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_TOKENS", 8192)
        return by_gpus(Request(base(), 4, hardware()))


def test_each_cell_is_the_fastest_of_its_case(rows: list[list[GpusCell]]) -> None:
    config = base()
    assert [[cell.gpus for cell in row] for row in rows] == [[2, 4]] * 3
    assert [row[0].tokens for row in rows] == [512, 2048, 8192]
    for row in rows:
        for cell in row:
            train = config.train.model_copy(update={"global_batch": cell.tokens // config.train.seq_len})
            asked = config.model_copy(update={"train": train})
            plan = Search(Request(asked, cell.gpus, hardware(), frozenset({"parallel.pp"}))).fastest()
            assert plan is not None and cell.plan is not None and plan.config == cell.plan.config
            assert cell.plan.config.parallel.pp == 1


def test_ways_in_words(rows: list[list[GpusCell]]) -> None:
    """One sequence uses TP; many sequences use DP."""
    few, many = rows[0][-1], rows[-1][-1]
    assert few.label.endswith("TP 4") and few.kind == few.label.split()[0]
    assert (many.label, many.kind) == ("DP", "DP")
    assert GpusCell(1, 2, None).label == GpusCell(1, 2, None).kind == ""


def test_the_picture_has_every_cell(rows: list[list[GpusCell]], tmp_path: Path) -> None:
    draw("a <title>", "below", rows, tmp_path / "grid.svg")
    drawn = (tmp_path / "grid.svg").read_text()
    assert "a &lt;title&gt;" in drawn and "4 GPUs" in drawn
    assert all(f">{cell.label}<" in drawn for row in rows for cell in row)
