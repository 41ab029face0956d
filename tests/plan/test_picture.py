"""The picture of a block matches the placements and the collective table."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from boost.config import load
from boost.config.traffic import Collective
from boost.plan.inspection import Inspection, inspect
from boost.plan.picture import block_picture, block_rows
from boost.plan.svg import COLORS, WIDTH
from tests.plan.toys import LAYOUTS, inspected

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


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


def test_bars_of_btp() -> None:
    assert bars(inspected("btp")) == [
        ("all-reduce T x (3r + statistic)", "all-reduce T x 3r"),
        ("all-reduce T x r", "all-reduce T x r"),
        ("all-reduce T x (2r + statistic)", "all-reduce T x 2r"),
        ("all-reduce T x r", "all-reduce T x r"),
    ]
    ungrouped = bars(inspected("btp, ungrouped"))
    assert ungrouped[:3] == [("all-reduce T x (r + statistic)", "all-reduce T x r"), *[("all-reduce T x r",) * 2] * 2]
    assert bars(inspected("btp, sync"))[0] == ("all-reduce T x statistic", "all-reduce T x statistic")


def test_bars_of_other_layouts() -> None:
    assert bars(inspected("btp-sp"))[:2] == [
        ("all-gather T x 3r", "reduce-scatter T x 3r"),
        ("reduce-scatter T x r", "all-gather T x r"),
    ]
    assert bars(inspected("vanilla"))[-4:] == [
        ("", "all-reduce T x d"),
        ("reduce-scatter T x 2f", "all-gather T x 2f"),
        ("all-gather T x f", "reduce-scatter T x f"),
        ("all-reduce T x d", ""),
    ]
    assert bars(inspected("vanilla, published"))[:4] == [("", "all-reduce T x d"), *[("all-reduce T x d", "")] * 3]
    assert bars(inspected("megatron"))[:2] == [("", "all-reduce T x d"), ("all-reduce T x d", "")]


def test_collectives_stand_where_they_are_issued() -> None:
    down = ["A of down", "=", "silu", "B of down", "Residual + update"]
    assert titles(inspected("btp"))[-5:] == down
    assert titles(inspected("btp"))[2:6] == ["A of q, k, v", "=", "silu", "B of q, k, v"]
    assert titles(inspected("btp, sync"))[1:4] == ["RMSNorm", "=", "A of q, k, v"]
    assert titles(inspected("btp-sp"))[-5:] == down
    assert titles(inspected("btp-sp"))[2:6] == ["A of q, k, v", "silu", "=", "B of q, k, v"]
    vanilla = [
        "RMSNorm",
        "=",
        "A of q, k, v",
        "silu",
        "B of q, k, v",
        "=",
        "Attention",
        "=",
        "A of o",
        "silu",
        "B of o",
        "=",
    ]
    assert titles(inspected("vanilla"))[1:13] == vanilla
    assert titles(inspected("megatron"))[1:7] == ["RMSNorm", "=", "W of q, k, v", "Attention", "W of o", "="]


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
    block = [issued.collective for issued in inspection.issued if issued.collective.layer == inspection.layer]

    def kinds(collectives: list[Collective], phase: str) -> list[str]:
        return sorted(c.kind for c in collectives if c.phase == phase)

    drawn = bars(inspection)
    for side, phase in enumerate(("forward", "backward")):
        assert sorted(bar[side].split()[0] for bar in drawn if bar[side]) == kinds(block, phase)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_words_do_not_overlap_and_nothing_leaves_the_page(name: str, tp: int) -> None:
    inspection = inspected(name, f"--parallel.tp={tp}", "--model.kv_heads=4")
    text = block_picture(inspection, "boost-7b")
    assert text == block_picture(inspection, "boost-7b")
    root = ET.fromstring(text)
    assert root.findtext(f"{SVG}title", "").startswith(f"{inspection.layout} · boost-7b · TP {tp}")
    assert f"on {tp} processes" in root.findtext(f"{SVG}desc", "")
    boxes = []
    for element in root.iter(f"{SVG}text"):
        size, words = float(element.get("font-size", 0)), element.text or ""
        assert size >= 8
        width, x = 0.55 * size * len(words), float(element.get("x", 0))
        left = x - width / 2 if element.get("text-anchor") == "middle" else x
        assert left >= 0 and left + width <= WIDTH
        boxes.append(
            (left, left + width, float(element.get("y", 0)) - 0.75 * size, float(element.get("y", 0)) + 0.2 * size)
        )
    for a, b in itertools.combinations(boxes, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]
    height = float(root.get("height", 0))
    for element in root.iter(f"{SVG}rect"):
        if element.get("x"):
            assert float(element.get("x", 0)) + float(element.get("width", 0)) <= WIDTH
            assert float(element.get("y", 0)) + float(element.get("height", 0)) <= height


def held(inspection: Inspection, title: str) -> list[tuple[str, bool]]:
    (row,) = {row for row in block_rows(inspection) if row.title == title}
    return [(piece.axis, piece.partial) for piece in row.pieces]


def test_pieces_show_the_sharding() -> None:
    assert held(inspected("btp"), "A of q, k, v") == [("x", False)] * 3
    assert held(inspected("btp"), "B of gate, up") == [("y", False)] * 2
    assert held(inspected("btp", "--model.kv_heads=2"), "B of q, k, v") == [("y", False), ("", True), ("", True)]
    assert held(inspected("btp-sp"), "A of q, k, v") == [("", True)] * 3
    assert held(inspected("btp-sp"), "A of down") == [("x", False)]
    assert held(inspected("vanilla"), "A of down") == [("y", False)]
    assert held(inspected("vanilla"), "B of down") == [("x", False)]
    assert held(inspected("megatron"), "W of down") == [("x", False)]
    residuals = {"btp": "x", "btp-sp": "y", "vanilla": "", "megatron-sp": "y"}
    assert {name: held(inspected(name), "Residual stream")[0][0] for name in residuals} == residuals


def test_each_process_shows_its_own_shard() -> None:
    """A of o under btp: four outlines, each with the next quarter filled."""
    root = ET.fromstring(block_picture(inspected("btp"), "boost-7b"))
    filled: dict[str, list[tuple[float, float]]] = {color: [] for color in COLORS}
    outlines: dict[str, list[tuple[float, float]]] = {color: [] for color in COLORS}
    for element in root.iter(f"{SVG}rect"):
        span = float(element.get("x", 0)), float(element.get("width", 0))
        if element.get("fill") in filled and element.get("fill-opacity") == "1":
            filled[element.get("fill", "")].append(span)
        if element.get("fill") == "none" and element.get("stroke") in outlines:
            outlines[element.get("stroke", "")].append(span)
    for rank, color in enumerate(COLORS):
        x, width = min(span for span in outlines[color] if span[1] == 70)
        assert any(part == pytest.approx((x + rank * width / 4, width / 4), abs=0.02) for part in filled[color])


def test_file_names_are_escaped() -> None:
    root = ET.fromstring(block_picture(inspected(), "<b>&\x00\udcff" + "long" * 30))
    title = root.findtext(f"{SVG}title", "")
    assert "<b>&??long" in title
    assert "…" in title


@pytest.mark.parametrize("layout", ["btp", "btp-sp", "vanilla"])
def test_committed_pictures_are_up_to_date(layout: str) -> None:
    inspection = inspect(load("boost-7b", [f"--parallel.layout={layout}"]))
    committed = (PICTURES / f"{layout}.svg").read_text(encoding="utf-8")
    assert committed == block_picture(inspection, "boost-7b"), "regenerate them: see docs/layouts.md"
