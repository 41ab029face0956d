"""The report page in a real browser: a page of two small results, and the committed page on a desktop and on a phone."""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from tests.benchmarks.experiments.pages import page_of, results

__all__ = ["results"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
COMMITTED = Path(__file__).parents[3] / "benchmarks" / "report.html"
MOST_BYTES = 600_000
"""Largest committed page."""

SMALLEST = 9.0
"""Smallest text of a figure, in pixels."""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

LOOK = """
document.body.dataset.seen = JSON.stringify({
  page: document.documentElement.scrollWidth, window: innerWidth, title: document.title,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  aligned: getComputedStyle(document.querySelector(".chapter .data td:not(.t)")).textAlign,
  apart: getComputedStyle(document.querySelector(".chapter td.p")).backgroundColor
    !== getComputedStyle(document.querySelector(".chapter .data td:not(.p):not(.t)")).backgroundColor,
  copy: !document.querySelector("button.copy").hidden,
  of: document.querySelector(".chapter table.data tbody tr").cells[1].dataset.of,
  drawn: Math.min(...[...document.querySelectorAll("svg")].map(each => each.getBoundingClientRect().height)),
});
"""

SURVEY = """
for (const each of document.querySelectorAll("details")) each.open = true;
const box = each => each.getBoundingClientRect();
const shown = selector => [...document.querySelectorAll(selector)].filter(each => box(each).width > 0);
const rgb = words => words.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = color => {
  const [r, g, b] = rgb(color).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (one, other) => {
  const [dim, bright] = [light(one), light(other)].sort((a, b) => a - b);
  return (bright + 0.05) / (dim + 0.05);
};
const paper = getComputedStyle(document.querySelector(".numbers")).backgroundColor;
const faint = [], collisions = [], outside = [];
let smallest = 99;
for (const svg of shown("svg")) {
  const name = svg.getAttribute("aria-label").slice(0, 40), edge = box(svg);
  const texts = [...svg.querySelectorAll("text")].filter(each => each.textContent.trim());
  for (const text of texts) {
    const found = contrast(getComputedStyle(text).fill, paper), at = box(text);
    smallest = Math.min(smallest, parseFloat(getComputedStyle(text).fontSize) * edge.width / svg.viewBox.baseVal.width);
    if (found < 4.5) // WCAG 2.2, level AA
      faint.push([name, text.textContent, found]);
    if (at.left < edge.left - 2 || at.right > edge.right + 2 || at.top < edge.top - 2 || at.bottom > edge.bottom + 2)
      outside.push([name, text.textContent]);
  }
  // The box of slanted text is larger than the text.
  const level = texts.filter(each => !/rotate\\((?!-90|90)/.test(each.getAttribute("transform")));
  level.forEach((one, i) => level.slice(i + 1).forEach(other => {
    const a = box(one), b = box(other);
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 0.35 * Math.min(a.height, b.height)) collisions.push([name, one.textContent, other.textContent]);
  }));
}
const edges = each => [each.tagName + "." + each.className, Math.round(box(each).right), each.textContent.slice(0, 40)];
scrollTo(0, 0);
parent.postMessage(JSON.stringify({
  page: document.documentElement.scrollWidth, width: innerWidth, height: innerHeight,
  dark: matchMedia("(prefers-color-scheme: dark)").matches, faint, collisions, outside, smallest,
  cut: shown(".data td, .data th, .goals td").filter(each => box(each).right > box(each.closest("section")).right).map(edges),
  scrolled: shown(".scroll").filter(each => each.querySelector("table") && each.scrollWidth > each.clientWidth + 1)
    .map(each => each.textContent.trim().slice(0, 60)),
  figure: shown(".headline svg").map(each => [box(each).top, box(each).bottom]),
  numbers: shown(".numbers li").map(each => [box(each).top, box(each).bottom]),
  scope: box(document.querySelector(".scope")).bottom,
  values: shown(".numbers b").map(each => [each.textContent, parseFloat(getComputedStyle(each).fontSize)]),
  stuck: getComputedStyle(document.querySelector("nav")).position,
}), "*");
"""

FRAME = """<!doctype html><body style="margin:0"><script>
addEventListener("message", event => {{ document.body.dataset.seen = event.data; }});
</script><iframe src="copy.html" style="border:0;width:{width}px;height:{height}px"></iframe>"""
"""Shows a page at exactly this size: Chromium's windows are at least 500 pixels wide. A frame of a file can only send messages."""


def test_the_page_of_two_results(results: Path, tmp_path: Path) -> None:
    page, copy = tmp_path / "report.html", tmp_path / "copy.html"
    page.write_text(page_of(results), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        outside = f'<img src="http://127.0.0.1:{server.getsockname()[1]}/x.png" alt="">'
        copy.write_text(with_script(page.read_text(encoding="utf-8"), LOOK, outside), encoding="utf-8")
        dom = browse(tmp_path, copy, 390, 900, "--dump-dom", "--blink-settings=preferredColorScheme=0")
        with pytest.raises(BlockingIOError):  # nobody came
            server.accept()
    seen = said(dom)
    assert seen["page"] <= seen["window"] < 600, "wider than a phone"
    assert seen["title"].startswith("BOOST") and seen["copy"] and seen["dark"] and seen["apart"]
    assert seen["of"] == "step s" and seen["drawn"] > 100
    assert "Steps &lt;script&gt;" in dom and dom.count("<h2>") == 5 and "2.06" in dom and "not measured" in dom

    for name, width, flag, darkness in (("wide", 1280, 1, (200, 256)), ("phone", 412, 0, (0, 60))):
        shot = tmp_path / f"{name}.png"
        scheme = f"--blink-settings=preferredColorScheme={flag}"
        browse(tmp_path, page, width, 1400, f"--screenshot={shot}", "--hide-scrollbars", scheme)
        pixels = (255 * matplotlib.image.imread(shot)[..., :3]).astype(int)
        assert pixels.shape[:2] == (1400, width)
        corner = pixels[-1, 0]
        ink = (np.abs(pixels - corner).sum(-1) > 150).mean()
        assert darkness[0] <= corner.mean() < darkness[1] and 0.01 < ink < 0.5


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_the_committed_page(width: int, height: int, dark: bool, tmp_path: Path) -> None:
    """Nothing overflows, no column is cut, no label of a figure collides or is too faint, and the first screen is complete."""
    html = COMMITTED.read_text(encoding="utf-8")
    assert len(html.encode()) < MOST_BYTES
    copy = tmp_path / "copy.html"
    copy.write_text(with_script(html, SURVEY), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, height=height), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
    seen = said(browse(tmp_path, frame, 1500, 1000, "--dump-dom", "--hide-scrollbars", scheme))
    assert seen["dark"] == dark and seen["page"] <= seen["width"] and seen["width"] == width
    assert seen["cut"] == [] and seen["scrolled"] == []
    assert seen["faint"] == [] and seen["collisions"] == [] and seen["outside"] == []
    assert seen["smallest"] >= SMALLEST and seen["stuck"] == "sticky"
    ((top, bottom),) = seen["figure"]
    assert 0 < top < bottom < seen["height"] and bottom - top > 200
    assert len(seen["numbers"]) == 5 and all(size >= 24 or value == "not measured" for value, size in seen["values"])
    if width > 1000:
        assert all(0 < top < bottom <= height for top, bottom in seen["numbers"]) and seen["scope"] <= height
    else:
        assert seen["numbers"][0][0] < height


def said(dom: str) -> dict[str, Any]:
    """What a script left in the page."""
    found = re.search(r'data-seen="([^"]*)"', dom)
    assert found is not None
    seen: dict[str, Any] = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    return seen


def with_script(html: str, script: str, more: str = "") -> str:
    """The page with an added script that its policy allows, and with `more` that it may not."""
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = html.replace("script-src ", f"script-src 'sha256-{allowed}' ")
    return html.replace("</body>", f"{more}<script>{script}</script></body>")


def browse(tmp_path: Path, page: Path, width: int, height: int, *flags: str) -> str:
    """Chromium's output for a page. Its processes have exited afterwards."""
    assert BROWSER is not None
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},{height}"]
    browser = subprocess.Popen(
        [BROWSER, *usual, *place, *flags, page.as_uri()],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = browser.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
    assert browser.returncode == 0
    return printed
