"""SVG documents become small without a visible change."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from boost.measure import drawing
from boost.measure.svg import LEAST_THINNED, path_data, slim, thinned

DRAWING = """<?xml version="1.0" encoding="utf-8" standalone="no"?>
<svg xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg" width="100pt" height="50pt"
     viewBox="0 0 100 50" version="1.1">
 <metadata><a href="http://matplotlib.org"/></metadata>
 <defs><style type="text/css">*{stroke-linejoin: round}</style></defs>
 <g id="figure_1">
  <g id="tick_1"><g><defs><path id="mark1" d="M 0 0 L 0 3.5" style="stroke: #ff0000"/></defs>
   <use xlink:href="#mark1" x="1.23456" y="2" style="stroke: #ff0000"/></g></g>
  <g id="tick_2"><g><defs><path id="mark2" d="M 0 0 L 0 3.5" style="stroke: #00ff00"/></defs>
   <use xlink:href="#mark2" x="4" y="2" style="stroke: #00ff00"/></g></g>
  <g id="text_1"><text style="font: bold 10px 'DejaVu Sans', sans-serif; text-anchor: middle" x="5.55555" y="-0.04"
     transform="rotate(-0 5 7)">a &lt; b</text></g>
  <g id="bar_1"><path d="M 0 0 L 1 0 L 1 1 z" clip-path="url(#clip1)" style="fill: #0000ff"/></g>
  <g id="bar_2"><path d="M 3 0 L 4 0 L 4 1 z" clip-path="url(#clip2)" style="fill: #0000ff"/></g>
 </g>
 <defs><clipPath id="clip1"><rect x="0" y="0" width="9" height="9"/></clipPath>
  <clipPath id="clip2"><rect x="0" y="0" width="9" height="9"/></clipPath>
  <clipPath id="unused"><rect x="0" y="0" width="8" height="9"/></clipPath></defs>
</svg>"""


def test_what_occurs_twice_is_written_once_and_what_nobody_sees_is_left_out() -> None:
    made = slim(DRAWING)
    root = ET.fromstring(made)
    tags = [each.tag.rpartition("}")[2] for each in root.iter()]
    assert tags.count("clipPath") == 1 and tags.count("defs") == 1 and tags.count("use") == 2 and "style" not in tags
    assert [each.get("d") for each in root.iter() if each.tag.endswith("path")] == ["M0 0v3.5", "M0 0h1v1zM3 0h1v1z"]
    ids = [each.get("id") for each in root.iter() if each.get("id")]
    assert len(ids) == len(set(ids)) == 2
    uses = [each for each in root.iter() if each.tag.endswith("use")]
    assert [each.get("stroke") for each in uses] == ["#ff0000", "#00ff00"]
    assert {each.get("href") for each in uses} <= {f"#{name}" for name in ids} and uses[0].get("x") == "1.2"
    (text,) = (each for each in root.iter() if each.tag.endswith("text"))
    assert text.text == "a < b" and (text.get("x"), text.get("y")) == ("5.6", "0") and text.get("transform") is None
    assert root.get("font-size") == "10" and text.get("font-weight") == "bold" and "DejaVu" not in made
    assert slim(DRAWING) == made and len(made) < 0.6 * len(DRAWING)


def test_coordinates_are_relative_to_rounded_ones() -> None:
    assert path_data("M 0.04 0.06 L 10.04 0.06 L 10.04 -5.5 Q 1 1 2 2 C 1 1 2 2 3 3.25 z M 1 1 L 2 3") == (
        "M0 .1h10v-5.6q-9 6.5-8 7.5c-1-1 0 0 1 1.2zM1 1l1 2"
    )
    # A hundred steps of a third do not add up to an error.
    end = path_data("M 0 0 " + " ".join(f"L {n / 3} 0" for n in range(1, 31)))
    assert sum(float(each or 0) for each in end.removeprefix("M0 0h").split("h")) == pytest.approx(10)


def test_a_line_keeps_the_points_that_matter() -> None:
    line = [(10 * x, 0) for x in range(200)]
    assert thinned(line) == [line[0], line[-1]]
    spike = [(x, 500 if x == 1000 else y) for x, y in line]
    assert thinned(spike) == [spike[0], spike[99], spike[100], spike[101], spike[-1]]
    assert thinned(line[: LEAST_THINNED - 1]) == line[: LEAST_THINNED - 1]


def test_curves_that_coincide_are_written_once(tmp_path: Path) -> None:
    figure, axis = drawing.pyplot().subplots()
    for name in ("btp", "vanilla"):
        axis.plot([(7 * n * n) % 50 for n in range(60)], color=drawing.color_of(name))
    drawing.write(figure, tmp_path / "curves.svg")
    root = ET.fromstring((tmp_path / "curves.svg").read_text(encoding="utf-8"))
    uses = [each for each in root.iter() if each.tag.endswith("use")]
    assert {each.get("href") for each in uses} == {uses[0].get("href")} and len(uses) == 2
    assert [each.get("stroke") for each in uses] == [drawing.color_of("btp"), drawing.color_of("vanilla")]


def test_what_is_no_drawing_is_refused() -> None:
    with pytest.raises(ValueError, match="not an SVG"):
        slim("<html/>")
