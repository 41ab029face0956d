"""Makes the SVG documents that matplotlib writes small, without a visible change.

matplotlib repeats every style, wraps every tick in nested groups and writes coordinates with six decimals. Here, coordinates are
rounded to a tenth of a point, long lines keep only the points that matter at that precision, shapes and styles that occur several
times are written once, and groups and IDs that nothing needs are removed. Text stays text, in the reader's sans-serif font.
"""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'Liberation Sans', Arial, sans-serif"
)
"""Fonts of text. matplotlib lays text out in DejaVu Sans, which is wider than all of these, so nothing collides."""

TOLERANCE = 3.0
"""Maximum deviation of a thinned line from the original, in tenths of a point."""

LEAST_THINNED = 40
"""Lines with fewer points keep all of them."""

LEAST_SHARED = 120
"""Path data of this length that occurs several times is written once."""

DROPPED = {"metadata", "style", "title", "desc", "script"}
INHERITED = {"fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "fill-opacity", "clip-path"}
"""Attributes that a group can hold for all of its children. (A clip path is not inherited, but clips the whole group.)"""

DEFAULTS = {
    "stroke-linejoin": None,
    "stroke-linecap": None,
    "stroke-dashoffset": "0",
    "font-weight": "400",
    "font-style": "normal",
    "font-family": None,
}
"""Properties to leave out, if they have this value; None: any value."""

_NUMERIC = {"x", "y", "width", "height", "r", "cx", "cy", "transform", "viewBox", "points"}
_NUMBER = re.compile(r"-?\d*\.?\d+(?:e[-+]?\d+)?")
_FONT = re.compile(r"(?P<rest>.*?)(?P<size>[\d.]+)px (?P<family>.*)")
_ID = re.compile(r"url\(#([^)]*)\)")


def slim(text: str) -> str:
    """Returns a smaller SVG document that looks the same. Raises ValueError if `text` is not an SVG document."""
    root = ET.fromstring(text)
    if root.tag != f"{{{SVG}}}svg":
        raise ValueError(f"'{root.tag}' is not an SVG document")
    _clean(root)
    _share_definitions(root)
    _flatten(root)
    _merge_paths(root)
    _share_paths(root)
    _hoist(root)
    _name(root)
    for key in ("font-size", "fill"):
        _set_common(root, key)
    root.set("font-family", FONTS)
    root.set("stroke-linejoin", "round")
    root.set("xmlns", SVG)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _set_common(root: ET.Element, key: str) -> None:
    """Moves the most frequent value of a property of text to the root."""
    found = Counter(each.get(key, "") for each in root.iter("text"))
    common = max(found, key=lambda value: (found[value], value)) if found else ""
    for each in root.iter("text"):
        if common and each.get(key) == common:
            del each.attrib[key]
    if common:
        root.set(key, common)


def _clean(root: ET.Element) -> None:
    """Drops namespaces, metadata and white space, turns styles into attributes, and rounds coordinates."""
    for parent in list(root.iter()):
        parent.tag = parent.tag.rpartition("}")[2]
        for child in [child for child in parent if child.tag.rpartition("}")[2] in DROPPED]:
            parent.remove(child)
    for element in root.iter():
        found = {key.replace(f"{{{XLINK}}}", ""): value for key, value in element.attrib.items()}
        found |= _properties(found.pop("style", ""))
        found.pop("version", None)
        if element.tag == "text" and found.get("transform", "").startswith(("rotate(-0 ", "rotate(0 ")):
            del found["transform"]
        element.attrib.clear()
        for key, value in found.items():
            if key == "d":
                value = path_data(value)
            elif key in _NUMERIC and "matrix" not in value:
                value = _NUMBER.sub(lambda number: _short(float(number[0])), value)
            if DEFAULTS.get(key, "") not in (value, None):
                element.set(key, value)
        if element.tag not in ("text", "tspan"):
            element.text = None
        element.tail = None


def _properties(style: str) -> dict[str, str]:
    """The properties of a `style` attribute; `font` as its parts, without the family."""
    found = {}
    for declaration in filter(None, map(str.strip, style.split(";"))):
        key, _, value = declaration.partition(":")
        found[key.strip()] = value.strip()
    font = _FONT.fullmatch(found.pop("font", ""))
    if font:
        found["font-size"] = _short(float(font["size"]))
        if "italic" in font["rest"]:
            found["font-style"] = "italic"
        if weight := re.search(r"\b(bold|[5-9]00)\b", font["rest"]):
            found["font-weight"] = "600" if weight[0] == "600" else "bold"
    if "font-size" in found:
        found["font-size"] = found["font-size"].removesuffix("px")
    return found


def _short(value: float, digits: int = 1) -> str:
    """A number with at most so many decimals, without zeros that it does not need."""
    words = f"{round(value, digits) + 0.0:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if words in ("0", "-0") else words.replace("-0.", "-.").removeprefix("0")


def path_data(data: str) -> str:
    """Rounds path data (absolute M, L, Q, C and Z) to tenths and makes it relative."""
    words = re.findall(r"[A-Za-z]|-?\d*\.?\d+(?:e[-+]?\d+)?", data)
    here, begin, made, place = (0, 0), (0, 0), list[str](), 0
    command, run = "", list[tuple[int, int]]()

    def lines() -> None:
        nonlocal here
        for point in thinned([here, *run])[1:]:
            made.append(_line(point[0] - here[0], point[1] - here[1]))
            here = point
        run.clear()

    while place < len(words):
        if words[place].isalpha():
            command, place = words[place], place + 1
        if command.upper() == "Z":
            lines()
            made.append("z")
            here, command = begin, ""
            continue
        count = {"M": 1, "L": 1, "Q": 2, "C": 3}[command]
        numbers = [round(10 * float(word)) for word in words[place : place + 2 * count]]
        points, place = list(zip(numbers[::2], numbers[1::2], strict=True)), place + 2 * count
        if command == "L":
            run.append(points[0])
            continue
        lines()
        if command == "M":
            made.append("M" + _numbers(points[0]))
            begin, command = points[0], "L"
        else:
            made.append(command.lower() + _numbers([n - here[i % 2] for point in points for i, n in enumerate(point)]))
        here = points[-1]
    lines()
    return "".join(made)


def _line(x: int, y: int) -> str:
    if not x:
        return f"v{_numbers([y])}"
    return f"l{_numbers([x, y])}" if y else f"h{_numbers([x])}"


def _numbers(tenths: Sequence[int]) -> str:
    """Coordinates, with a space only where it is needed."""
    words = [_short(number / 10) for number in tenths]
    made = words[0]
    for last, word in pairwise(words):
        made += word if word[0] == "-" or (word[0] == "." and "." in last) else f" {word}"
    return made


def thinned(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leaves out points that are less than TOLERANCE from the line through the others (Douglas and Peucker, 1973)."""
    if len(points) < LEAST_THINNED:
        return list(points)
    kept, parts = {0, len(points) - 1}, [(0, len(points) - 1)]
    while parts:
        first, last = parts.pop()
        away = [_distance(points[i], points[first], points[last]) for i in range(first + 1, last)]
        if away and (worst := max(away)) > TOLERANCE:
            middle = first + 1 + away.index(worst)
            kept.add(middle)
            parts += [(first, middle), (middle, last)]
    return [points[i] for i in sorted(kept)]


def _distance(point: tuple[int, int], begin: tuple[int, int], end: tuple[int, int]) -> float:
    """Distance from a point to a segment."""
    x, y = end[0] - begin[0], end[1] - begin[1]
    px, py = point[0] - begin[0], point[1] - begin[1]
    length = x * x + y * y
    along = min(max((px * x + py * y) / length, 0.0), 1.0) if length else 0.0
    return float(((px - along * x) ** 2 + (py - along * y) ** 2) ** 0.5)


def _references(element: ET.Element) -> Iterator[str]:
    for key, value in element.attrib.items():
        if key == "href" and value.startswith("#"):
            yield value[1:]
        yield from _ID.findall(value)


def _rename(root: ET.Element, names: dict[str, str]) -> None:
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "href" and value.startswith("#"):
                element.set(key, f"#{names.get(value[1:], value[1:])}")
            elif "url(" in value:
                element.set(key, _ID.sub(lambda found: f"url(#{names.get(found[1], found[1])})", value))


def _share_definitions(root: ET.Element) -> None:
    """Moves definitions that are used to one place, each of them once."""
    used = {name for element in root.iter() for name in _references(element)}
    first, names, kept = dict[str, str](), dict[str, str](), list[ET.Element]()
    for parent in list(root.iter()):
        for definitions in [child for child in parent if child.tag == "defs"]:
            parent.remove(definitions)
            for each in definitions:
                name = each.attrib.pop("id", "")
                if name in used:
                    if each.tag == "path":  # a marker: what uses it says its colors
                        each.attrib.pop("stroke", None)
                        each.attrib.pop("fill", None)
                    written = ET.tostring(each, encoding="unicode")
                    if written not in first:
                        kept.append(each)
                        first[written] = name
                    names[name] = first[written]
    for each, name in zip(kept, first.values(), strict=True):
        each.set("id", name)
    _rename(root, names)
    if kept:
        definitions = ET.Element("defs")
        definitions.extend(kept)
        root.insert(0, definitions)


def _flatten(root: ET.Element) -> None:
    """Removes IDs that nothing refers to, then groups without attributes and shapes without size."""
    used = {name for element in root.iter() for name in _references(element)}
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)

    def children(parent: ET.Element) -> Iterator[ET.Element]:
        for child in parent:
            if child.tag == "g":
                child[:] = list(children(child))
                if not child.attrib or not len(child):
                    yield from child
                    continue
            yield child

    root[:] = list(children(root))


def _merge_paths(root: ET.Element) -> None:
    """Joins neighboring paths of one opaque style. Text between them does not matter: it is above both."""
    for parent in root.iter():
        last: ET.Element | None = None
        for child in list(parent):
            if child.tag == "text":
                continue
            opaque = not any("opacity" in key for key in child.attrib)
            mergeable = child.tag == "path" and opaque and not {"id", "transform"} & child.attrib.keys()
            one_kind = child.get("fill") == "none" or child.get("stroke", "none") == "none"
            if mergeable and one_kind and last is not None and _style(child) == _style(last):
                last.set("d", last.get("d", "") + child.get("d", ""))
                parent.remove(child)
            else:
                last = child if mergeable and one_kind else None


def _style(path: ET.Element) -> dict[str, str]:
    return {key: value for key, value in path.attrib.items() if key != "d"}


def _share_paths(root: ET.Element) -> None:
    """Writes long path data that occurs several times (curves that coincide) once."""
    drawn = [each for each in root.iter("path") if "id" not in each.attrib and len(each.get("d", "")) >= LEAST_SHARED]
    several = [data for data, count in Counter(each.get("d", "") for each in drawn).items() if count > 1]
    definitions = root.find("defs")
    if several and definitions is None:
        definitions = ET.Element("defs")
        root.insert(0, definitions)
    for number, data in enumerate(several):
        assert definitions is not None
        ET.SubElement(definitions, "path", {"id": f"shared{number}", "d": data})
        for each in drawn:
            if each.get("d") == data:
                each.tag = "use"
                del each.attrib["d"]
                each.set("href", f"#shared{number}")


def _hoist(root: ET.Element) -> None:
    """Collects neighbors of one style in a group that has it, where that is shorter."""
    for parent in list(root.iter()):
        if parent.tag not in ("svg", "g"):
            continue
        made, run = list[ET.Element](), list[ET.Element]()
        for child in [*parent, ET.Element("end")]:
            if run and _inherited(child) != _inherited(run[0]):
                made += _grouped(run)
                run = []
            run.append(child)
        parent[:] = made


def _inherited(element: ET.Element) -> dict[str, str]:
    if element.tag not in ("path", "use"):
        return {"": str(id(element))}
    return {key: value for key, value in element.attrib.items() if key in INHERITED}


def _grouped(run: list[ET.Element]) -> list[ET.Element]:
    style = _inherited(run[0])
    if len(run) < 2 or not style or "" in style:
        return run
    group = ET.Element("g", style)
    for each in run:
        for key in style:
            del each.attrib[key]
        group.append(each)
    return [group]


def _name(root: ET.Element) -> None:
    """Gives what is left short names."""
    ids = [each.get("id", "") for each in root.iter() if "id" in each.attrib]
    names = {name: f"{chr(97 + i % 26)}{i // 26 or ''}" for i, name in enumerate(ids)}
    for element in root.iter():
        if "id" in element.attrib:
            element.set("id", names[element.get("id", "")])
    _rename(root, names)
