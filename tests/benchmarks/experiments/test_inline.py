"""Inline SVG: IDs do not clash, black and white become theme colors, and nothing is fetched."""

from benchmarks.experiments import colors
from benchmarks.experiments.inline import inline_svg

DRAWING = """<?xml version="1.0" encoding="utf-8" standalone="no"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="460.8pt" height="345.6pt" viewBox="0 0 460.8 345.6"
     xmlns="http://www.w3.org/2000/svg" version="1.1">
 <metadata><a href="http://matplotlib.org">made by</a></metadata>
 <defs><style type="text/css">*{stroke-linejoin: round}</style><clipPath id="p1"><rect id="r"/></clipPath></defs>
 <g id="a" style="fill: #ffffff; stroke: #000000"><path d="M 1.23456 -7.0 L 0.0049 2" clip-path="url(#p1)"/></g>
 <use xlink:href="#a" style="fill: #1f77b4; stroke: #e6e6e6"/><path stroke="#143ab6" d="M0 0"/><use xlink:href="http://elsewhere/b.svg#c"/>
 <script>alert(1)</script>
</svg>"""


def test_names_colors_and_what_is_left_out() -> None:
    made = inline_svg(DRAWING, "mine-", 'A "picture" <of> it')
    assert 'id="mine-a"' in made and 'href="#mine-a"' in made and "url(#mine-p1)" in made and 'id="mine-p1"' in made
    assert "var(--paper)" in made and "var(--ink)" in made and "#1f77b4; stroke: var(--line)" in made
    assert "var(--btp)" in made and colors.TONES["btp"].light not in made
    assert "--width:460.8pt" in made and 'viewBox="0 0 460.8 345.6"' in made
    assert "&lt;of&gt;" in made and "&quot;picture&quot;" in made
    for absent in ("http:", "<style", "<script", "metadata", "xlink", "DOCTYPE", "height="):
        assert absent not in made
