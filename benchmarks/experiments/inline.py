"""Prepares SVG figures for embedding in a page: unique IDs, theme colors, no metadata, no background.

A page is one document, so an ID used by two figures would resolve to the first. And black on white is unreadable on a dark
page, so the colors of `colors`, black, white and grays become variables of the page, which has two values of each.
"""

import re
import xml.etree.ElementTree as ET

from benchmarks.experiments.colors import TONES

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

_GRAYS = ((0x20, "ink"), (0x90, "muted"), (0xFA, "line"), (0xFF, "paper"))
"""(maximum brightness, theme color): text, secondary text, grids and bands, background."""

_NAMES = {tone.light: name for name, tone in TONES.items()}
"""Names of the page's colors by their values on a white page."""

_LEFT_OUT = {f"{{{SVG}}}{tag}" for tag in ("metadata", "style", "title", "desc", "script")}


def inline_svg(text: str, prefix: str, label: str) -> str:
    """Converts an SVG document to an inline element. `prefix` is prepended to all IDs; `label` is for screen readers.

    The root keeps its viewBox, and its width in points as the custom property --width. Raises ValueError if `text` is not SVG.
    """
    root = ET.fromstring(text)
    if root.tag != f"{{{SVG}}}svg":
        raise ValueError(f"'{root.tag}' is not an SVG document")
    width = re.match(r"[\d.]+", root.get("width", "100"))
    assert width is not None
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in _LEFT_OUT]:
            parent.remove(child)
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            element.set(key.replace(f"{{{XLINK}}}", ""), _attribute(key, value, prefix))
        element.tag = element.tag.replace(f"{{{SVG}}}", "")
        element.text, element.tail = _bare(element.text), _bare(element.tail)
    for key in ("width", "height", "version", "font-family", "xmlns"):
        root.attrib.pop(key, None)
    background = next((child for child in root if child.tag == "path"), None)
    if background is not None and background.get("fill") == "var(--paper)":
        root.remove(background)
    root.attrib |= {"role": "img", "aria-label": label, "style": f"--width:{float(width[0]):g}pt"}
    return ET.tostring(root, encoding="unicode").replace(" />", "/>")


def _attribute(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return prefix + value
    if key.endswith("href") and not value.startswith("data:image/png;base64,"):
        # Drop references outside this document: the page must not fetch anything.
        return f"#{prefix}{value[1:]}" if value.startswith("#") else "#"
    value = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}\1)", value)
    if key in ("style", "fill", "stroke"):
        return re.sub(r"#[0-9a-f]{6}\b", _color, value)
    return value


def _color(found: re.Match[str]) -> str:
    """The variable of a color that the page defines; other colors stay."""
    if name := _NAMES.get(found[0]):
        return f"var(--{name})"
    red, green, blue = (int(found[0][at : at + 2], 16) for at in (1, 3, 5))
    if red != green or green != blue:
        return found[0]
    return f"var(--{next(name for limit, name in _GRAYS if red <= limit)})"


def _bare(text: str | None) -> str | None:
    return text.strip() or None if text is not None else None
