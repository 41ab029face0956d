"""The picture of a block matches the placements and the collective table, and committed pictures are up to date."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boost import drawing
from boost.config import load
from boost.config.traffic import Collective
from boost.plan.inspection import Inspection, inspect
from boost.plan.pictures import block_rows, draw_block, draw_grid
from tests.plan.toys import LAYOUTS, inspected

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a drawing function, and returns its figure instead of writing it."""
    figures: list[Any] = []
    monkeypatch.setattr(drawing, "write", lambda figure, path: figures.append(figure))

    def draw(function: Callable[..., None], *arguments: Any) -> Any:
        function(*arguments, Path("none.svg"))
        figure = figures.pop()
        figure.canvas.draw()
        drawing.pyplot().close(figure)
        return figure

    return draw


def bars(inspection: Inspection) -> list[tuple[str, str]]:
    """(forward, backward) of every bar, without their bytes."""
    return [
        (forward.partition(" · ")[0], backward.partition(" · ")[0])
        for row in block_rows(inspection)
        for forward, backward in row.bars
    ]


def titles(inspection: Inspection) -> list[str]:
    """Row titles from top to bottom; '=' stands for a bar."""
    return ["=" if row.bars else row.title.partition(" on the")[0] for row in block_rows(inspection)]


LAX = ("--model.family", "lax", "--model.gate", "tensor")


def test_gated_latents() -> None:
    """vanilla shards latents, so gate and LayerNorm have collectives; the other layouts have none."""
    cross = ["A of q, k, v", "=", "Gated latents", "B of q, k, v"]
    assert titles(inspected("vanilla", *LAX))[3:7] == titles(inspected("btp", *LAX))[2:6] == cross
    assert titles(inspected("btp-sp", *LAX))[2:6] == ["A of q, k, v", "Gated latents", "=", "B of q, k, v"]
    between = [bar for bar in bars(inspected("vanilla", *LAX)) if "sums" in bar[0] or "r " in bar[0]]
    assert [bar[0].partition(" ·")[0] for bar in between[:2]] == ["all-gather T x 3r", "all-reduce T x sums"]
    assert [bar[0] for bar in bars(inspected("btp", *LAX))] == [bar[0] for bar in bars(inspected("btp"))]


@pytest.mark.parametrize("name", [*LAYOUTS, "vanilla, lax"])
def test_every_collective_of_a_block_is_drawn_once(name: str) -> None:
    inspection = inspected("vanilla", *LAX) if name == "vanilla, lax" else inspected(name)
    block = [c for c in inspection.of_micro_batch if c.layer == inspection.layer]

    def kinds(collectives: list[Collective], phase: str) -> list[str]:
        return sorted(c.kind for c in collectives if c.phase == phase)

    drawn = bars(inspection)
    for side, phase in enumerate(("forward", "backward")):
        assert sorted(bar[side].split()[0] for bar in drawn if bar[side]) == kinds(block, phase)


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def require_words_apart(figure: Any) -> None:
    """No words overlap, none leave the page, none are too small to read."""
    page = figure.bbox
    boxes = []
    for text in figure.axes[0].texts:
        if text.get_text():
            assert text.get_fontsize() >= 5.7, text.get_text()
            boxes.append((text.get_window_extent(), text.get_text()))
    for box, words in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, words
    for (a, words), (b, others) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 or b.x1 <= a.x0 or a.y1 <= b.y0 + 3 or b.y1 <= a.y0 + 3  # descenders may touch
        assert apart, (words, others)


def test_grids(drawn: Callable[..., Any]) -> None:
    """Each cell has its words, and equal kinds have equal colors."""
    cells = [("DP", "DP"), ("btp TP 8 CP 4", "btp"), ("too few tokens", "")]
    figure = drawn(draw_grid, "title", "below", "tokens", ["1", "2", "3"], [("4", cells), ("5", cells)])
    assert texts(figure).count("btp TP 8 CP 4") == 2 and {"4", "5", "tokens"} <= set(texts(figure))
    faces = [patch.get_facecolor() for patch in figure.axes[0].patches]
    assert faces[:3] == faces[3:] and len(set(faces)) == 3
    require_words_apart(figure)


@pytest.mark.parametrize("layout", ["btp", "btp-sp", "vanilla"])
def test_committed_pictures_are_up_to_date(layout: str, tmp_path: Path) -> None:
    inspection = inspect(load("boost-7b", [f"--parallel.layout={layout}"]))
    draw_block(inspection, "boost-7b", tmp_path / "block.svg")
    committed = (PICTURES / f"{layout}.svg").read_text(encoding="utf-8")
    assert committed == (tmp_path / "block.svg").read_text(encoding="utf-8"), "regenerate them: see docs/layouts.md"
