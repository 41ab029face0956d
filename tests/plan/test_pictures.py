"""The picture of a block matches the placements and the collective table, and committed pictures are up to date."""

from pathlib import Path

import pytest

from boost.config import load
from boost.config.traffic import Collective
from boost.plan.inspection import Inspection, inspect
from boost.plan.pictures import block_rows, draw_block
from tests.plan.toys import LAYOUTS, inspected

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


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
    cross = ["A of q, k, v", "=", "Mixed latents", "B of q, k, v"]
    assert titles(inspected("vanilla", *LAX))[3:7] == titles(inspected("btp", *LAX))[2:6] == cross
    assert titles(inspected("btp-sp", *LAX))[2:6] == ["A of q, k, v", "Mixed latents", "=", "B of q, k, v"]
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


@pytest.mark.parametrize("layout", ["btp", "btp-sp", "vanilla"])
def test_committed_pictures_are_up_to_date(layout: str, tmp_path: Path) -> None:
    inspection = inspect(load("boost-7b", [f"--parallel.layout={layout}"]))
    draw_block(inspection, "boost-7b", tmp_path / "block.svg")
    committed = (PICTURES / f"{layout}.svg").read_text(encoding="utf-8")
    assert committed == (tmp_path / "block.svg").read_text(encoding="utf-8"), "regenerate them: see docs/layouts.md"
