"""Prepares SVG figures for embedding in a page: unique IDs, theme colors, no metadata.

A page is one document, so an ID used by two figures would resolve to the first. And black on white is unreadable on a dark
page, so black, white and the grays of grids and frames become theme colors of the page.
"""

import re
import xml.etree.ElementTree as ET

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

_GRAYS = ((0x20, "ink"), (0x90, "muted"), (0xFA, "line"), (0xFF, "paper"))
"""(maximum brightness, theme color): text, secondary text, grids and bands, background."""

_LEFT_OUT = {f"{{{SVG}}}metadata", f"{{{SVG}}}style", f"{{{SVG}}}title", f"{{{SVG}}}desc", f"{{{SVG}}}script"}
_LONG = re.compile(r"-?\d+\.\d{3,}")


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
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": label, "style": f"--width: {float(width[0]):g}pt"}
    return ET.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return prefix + value
    if key.endswith("href"):
        # Drop references outside this document: the page must not fetch anything.
        return f"#{prefix}{value[1:]}" if value.startswith("#") else "#"
    value = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}\1)", value)
    if key in ("style", "fill", "stroke"):
        return re.sub(r"#([0-9a-f]{2})\1\1\b", _gray, value)
    if key in ("d", "points"):
        # Hundredths of a point are precise enough, and keep the page small.
        return _LONG.sub(lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
    return value


def _gray(found: re.Match[str]) -> str:
    brightness = int(found[1], 16)
    return f"var(--{next(name for limit, name in _GRAYS if brightness <= limit)})"


def _bare(text: str | None) -> str | None:
    return text.strip() or None if text is not None else None
