"""One style and one color per layout, which differ for everybody and are readable on white and on dark pages."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experiments import colors
from benchmarks.experiments.colors import TONES, color_of
from boost import drawing
from boost.config.layouts import layout_names
from boost.drawing import SERIES

LAYOUTS = ("megatron", "megatron-sp", "ulysses", "vanilla-published", "vanilla", "btp", "btp-sp", "btp-cp")
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}
"""What linear RGB looks like (Machado, Oliveira and Fernandes, 2009)."""


def linear(color: str) -> np.ndarray:
    values = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    dim, bright = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (bright + 0.05) / (dim + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(np.maximum(xyz, 0)), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("side", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_colors_of_layouts_differ_for_everybody(side: str, sight: str) -> None:
    seen = {name: lab(np.clip(np.asarray(SIGHT[sight]) @ linear(getattr(TONES[name], side)), 0, 1)) for name in LAYOUTS}
    apart = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in itertools.combinations(LAYOUTS, 2)}
    assert min(apart.values()) > 18, min(apart, key=lambda pair: apart[pair])


@pytest.mark.parametrize("side", ["light", "dark"])
def test_colors_are_visible(side: str) -> None:
    paper = getattr(TONES["paper"], side)
    for name in ("ink", "muted", *LAYOUTS):
        assert contrast(getattr(TONES[name], side), paper) >= 4.5, name
    assert all(contrast(color, paper) >= 3 for color in (*SERIES, colors.PEER))


def test_every_layout_has_one_color_whatever_is_said_about_it() -> None:
    for name in set(layout_names()) - {"single"}:
        assert color_of(name) == TONES[name].light
    for said, name in (
        ("btp, online, halves", "btp"), ("cola: btp-sp", "btp-sp"), ("vanilla, published", "vanilla-published"),
        ("vanilla, strong", "vanilla"), ("dense, megatron-sp", "megatron-sp"), ("full-rank", "megatron"), ("BOOST", "btp"),
    ):  # fmt: skip
        assert color_of(said) == TONES[name].light
    assert color_of("cola", 1) == SERIES[1] and color_of("svd", len(SERIES)) == SERIES[0]


def test_labels_at_line_ends_do_not_collide(tmp_path: Path) -> None:
    figure, axis = drawing.pyplot().subplots(figsize=(5, 3))
    axis.plot([0, 1], [0, 1])
    colors.label_ends(axis, [("low", 0.5, "#143ab6"), ("high", 0.51, "#006490"), ("far", 0.9, "#c00434")], 1)
    figure.canvas.draw()
    low, high, far = (each.get_window_extent() for each in axis.texts)
    assert low.y1 <= high.y0 + 1 and high.y1 < far.y0 and all(each.x0 > axis.bbox.x1 - 30 for each in (low, high, far))
    drawing.write(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
