"""Builds one page with all results: the goals, every experiment, and the machines and commits.

The page is one self-contained file. It depends only on the results and has no timestamp, so the same results give the same bytes.
Results of one experiment on several machines are listed one after another.
"""

import argparse
import base64
import hashlib
import os
import re
import shlex
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from benchmarks.commands import PAGE, RESULTS
from benchmarks.experiments import colors, headline, origins, sections
from benchmarks.experiments.colors import TONES
from benchmarks.experiments.goals import VERDICTS, goal_rows
from benchmarks.experiments.results import (
    Facts,
    Figure,
    Goal,
    Section,
    Table,
    as_markdown,
    figures,
    machine,
    origin,
    read,
)
from benchmarks.experiments.wire_plan import SETS
from boost.config.schema import DType
from boost.errors import ConfigError
from boost.files import storage_errors

KINDS = ("measured", "counted", "modeled")
"""Kinds of numbers. A table or figure gets a badge for each kind that its caption or headings mention."""

DASH, TIMES, MINUS = "\u2013", "\u00d7", "\u2212"
"""Typographic characters, escaped in source."""

LONG_TEXT = 30
"""Text columns with cells longer than this wrap."""

FEW_COLUMNS = 6
"""Tables with at most this many columns show intervals next to their numbers, not below them."""

MOST_ROWS = 100
"""Tables with more rows are left out of the page, which links to their Markdown file."""

FIRST_FIGURE = (
    "Seconds per training step by wire speed (measured; medians and quartiles). Each layout is shown in its faster form, with or "
    "without overlap; published vanilla has no overlap. On the share-matched wire, communication takes the same fraction of a btp "
    "step as on A100s."
)
"""Caption of the figure on the first screen."""

FIRST_SENTENCE = re.compile(r".{20,}?[.] ")
"""What a folded table shows of its caption; a mere "Measured." says too little."""

INTERVAL_CELL = re.compile(
    r"(?P<value>[^()]*\d[^()]*) \((?P<interval>[^()]*\d to [^()]*)\)(?P<unit>[ %x]*)(, (?P<remark>[a-z ]+))?"
)
"""A table cell that is a number with an interval and an optional remark."""

_RAISED = str.maketrans("0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")

_VERDICTS = {"met": "met", "holds": "met", "not met": "unmet", "does not hold": "unmet"}


@dataclass(frozen=True)
class Result:
    """A result file with the section and goals of its experiment."""

    path: Path
    facts: Facts
    section: Section
    goals: tuple[Goal, ...]

    @property
    def experiment(self) -> str:
        """Its name."""
        return str(self.facts["experiment"])


@dataclass(frozen=True)
class BenchReport:
    """The page, and the files that are committed: figures and tables next to the results, and the goals."""

    html: str
    files: dict[Path, bytes]


def read_results(folders: Sequence[Path]) -> list[Result]:
    """Reads results from `folders` and their immediate subfolders, in report order.

    Raises ConfigError for a folder without results and for a file that is not a result of a known experiment.
    """
    found: list[Result] = []
    for folder in folders:
        paths = sorted([*folder.glob("*.json"), *folder.glob("*/*.json")], key=lambda path: (path.parent, path.stem))
        if not paths:
            raise ConfigError(f"--results = '{folder}' contains no results; use a folder with results of experiments")
        for path in paths:
            facts = read(path)
            if facts["experiment"] in sections.SETTLED:
                continue
            try:
                sections.place(facts["experiment"])
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            found.append(Result(path, facts, sections.section(facts), tuple(sections.goals(facts))))
    return sorted(found, key=_place)  # stable: keeps the order of folders


def _place(result: Result) -> tuple[int, int]:
    """Position in the report: by experiment, with the wire's sets in measurement order."""
    of_wire = result.facts["set"] if result.experiment == "wire" else ""
    return sections.place(result.experiment), list(SETS).index(of_wire) if of_wire in SETS else 0


def make(results: Sequence[Result], out: Path) -> BenchReport:
    """Builds the page for the path `out`."""
    pictures: dict[Path, bytes] = {}
    first = _first_screen(results, pictures)
    blocks: dict[str, list[dict[str, Any]]] = {}
    for number, result in enumerate(results):
        drawn = _draw(result, pictures)
        blocks.setdefault(result.experiment, []).append(_block(result, drawn, out, f"f{number}"))
    script = _template("report.js").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"prose": prose, "cell": cell}
    found = []
    for name, of_name in blocks.items():
        kinds = [kind for kind in KINDS if any(kind in block["kinds"] for block in of_name)]
        found.append({"id": name, "title": of_name[0]["title"], "kinds": kinds, "blocks": of_name})
    goals = goal_rows([(result.facts, result.goals) for result in results])
    chapters = [
        {"title": title, "id": title.lower().replace(" ", "-"), "sections": held}
        for title, names in sections.CHAPTERS.items()
        if (held := [section for section in found if section["id"] in names])
    ]
    html = environment.get_template("report.html.j2").render(
        style=Markup(f"{_colors()}\n{_template('report.css').strip()}"),
        script=Markup(script),
        script_hash=digest,
        first=first,
        goals=goals,
        tally=[(words, sum(goal["status"] == words for goal in goals)) for words in VERDICTS],
        settled=sections.SETTLED,
        chapters=chapters,
        modeled=[section for section in found if "modeled" in section["kinds"]],
        origins=[block for of_name in blocks.values() for block in of_name if block["kinds"] != ["modeled"]],
    )
    tables = {result.path.with_suffix(".md"): as_markdown(result.facts, result.section).encode() for result in results}
    return BenchReport(html, {**pictures, **tables, out.with_name("goals.md"): _goals_table(goals).encode()})


def _goals_table(goals: Sequence[dict[str, Any]]) -> str:
    """The goals as a page with a Markdown table."""
    lines = ["# Goals", "", "| metric | goal | result | |", "|---|---|---|---|"]
    for row in goals:
        decided = [each["goal"] for each in row["found"] if each["goal"].met is not None]
        found = "<br>".join(f"{goal.kind} {prose(goal.found).striptags()}" for goal in decided)
        what, figure = (prose(text).striptags() for text in (row["target"].what, row["target"].figure))
        lines.append(f"| {what} | {figure} | {found} | {row['status']} |")
    return "\n".join(lines) + "\n"


def write(report: BenchReport, out: Path) -> None:
    """Writes the page, figures and tables. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.html, encoding="utf-8", newline="\n")
        for path, content in report.files.items():
            path.write_bytes(content)


def stale(report: BenchReport) -> list[Path]:
    """Paths of the committed files that are missing or out of date."""
    return [path for path, content in report.files.items() if not path.is_file() or path.read_bytes() != content]


def _by_name(results: Sequence[Result]) -> dict[str, Facts]:
    return {str(result.path): result.facts for result in results}


def prose(text: str) -> Markup:
    """Escapes prose; renders `code` markup and, outside code, typographic characters."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # unbalanced backtick
        parts = [text]
    made = [Markup("<code>{}</code>").format(p) if i % 2 else escape(_signs(p)) for i, p in enumerate(parts)]
    return Markup("").join(made)


def cell(text: str) -> Markup:
    """Formats a table cell; verdicts and skipped entries get a badge."""
    plain = text.strip().lower()
    kind = "skipped" if plain.startswith("skipped") else _VERDICTS.get(plain) or (plain if plain in KINDS else None)
    if kind is None:
        found = INTERVAL_CELL.fullmatch(text.strip())
        return _spread(found) if found else prose(DASH if plain == "-" else text)
    word, _, why = text.strip().partition(":") if kind == "skipped" else (text.strip(), "", "")
    return Markup('<span class="badge {}">{}</span>{}').format(kind, word, prose(why and f" {why.strip()}"))


def _spread(found: re.Match[str]) -> Markup:
    """Formats a number with its interval next to it or below, and a remark below."""
    remark = Markup("<small>{}</small>").format(found["remark"]) if found["remark"] else ""
    return Markup("{}<i>{}</i>{}").format(prose(found["value"] + found["unit"]), prose(found["interval"]), remark)


def _signs(text: str) -> str:
    text = re.sub(r"([\d)]) ?x(?![\w-])", lambda m: m[0].replace("x", TIMES), text)
    text = re.sub(r"(?<=\d) %", "%", text)
    text = re.sub(r"\b10\^(\d+)", lambda m: f"10{m[1].translate(_RAISED)}", text)
    text = text.replace(">=", "≥").replace("<=", "≤").replace("+-", "±")
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, text)


def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _colors() -> str:
    """CSS variables for all figure colors, on a white and on a dark page."""
    light, dark = (
        "".join(f"--{name}:{getattr(tone, side)};" for name, tone in colors.TONES.items()) for side in ("light", "dark")
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _first_screen(results: Sequence[Result], pictures: dict[Path, bytes]) -> dict[str, Any]:
    """Template variables of the first screen. Its figure is written next to the result that it shows."""
    every = [result.facts for result in results]
    svgs, wire = list[Markup](), headline.wire_of(every)
    for result in results if wire else ():
        if result.facts is wire:
            for name, narrow in (("headline", False), ("headline-narrow", True)):
                figure = Figure(name, FIRST_FIGURE, partial(headline.draw, wire, narrow=narrow))
                _pictured(figure, name, result.path, pictures)
                svg = pictures[result.path.with_name(f"{name}.svg")].decode()
                svgs.append(Markup(inline_svg(svg, f"h{len(svgs)}", FIRST_FIGURE)))
    days = sorted({facts["environment"]["started"][:10] for facts in every})
    return {
        "numbers": headline.numbers([(result.facts, result.goals) for result in results]),
        "svgs": svgs,
        "caption": FIRST_FIGURE,
        "measured": headline.measured_words(every),
        "modeled": headline.modeled_words(every),
        "commits": origins.in_words(_by_name(results)),
        "days": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    }


def _draw(result: Result, pictures: dict[Path, bytes]) -> dict[str, str]:
    """Draws a result's figures into `pictures`. Returns SVG documents by figure name."""
    drawn = {}
    for figure in figures(result.section):
        name = figure.name
        if result.path.with_name(f"{name}.svg") in pictures:  # taken by another result in the same folder
            name = f"{result.path.stem}-{name}"
        _pictured(figure, name, result.path, pictures)
        drawn[figure.name] = pictures[result.path.with_name(f"{name}.svg")].decode()
    return drawn


def _pictured(figure: Figure, name: str, beside: Path, pictures: dict[Path, bytes]) -> None:
    """Draws a figure into `pictures`, under its path next to a result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.svg")
        figure.draw(path)
        pictures[beside.with_name(path.name)] = path.read_bytes()


def _block(result: Result, drawn: dict[str, str], out: Path, prefix: str) -> dict[str, Any]:
    """Template variables of one result."""
    environment = result.facts["environment"]
    parts = [_part(part, drawn, f"{prefix}-{number}") for number, part in enumerate(result.section.parts)]
    kinds = {kind for part in parts for kind in part.get("kinds", ())}
    versions = [f"torch {environment['torch']}", f"Python {environment['python']}"]
    raw = Path(os.path.relpath(result.path, out.parent))
    if environment.get("cuda"):
        versions.append(f"CUDA {environment['cuda']}")
    return {
        "id": result.experiment,
        "title": result.section.title,
        "stem": result.path.stem,
        "command": [shlex.quote(word) for word in environment["command"]],
        "origin": origin(environment),
        "machine": machine(environment),
        "dtypes": ", ".join(dtypes(result.facts)) or DASH,
        "processes": max(
            [environment["world_size"], *(group.get("processes", 1) for group in result.facts.get("groups", ()))]
        ),
        "threads": environment.get("threads") or DASH,
        "versions": ", ".join(versions),
        "commit": _commit(environment),
        "day": environment["started"][:10],
        # The page links to the result only if it is below the page's folder.
        "raw": raw.as_posix() if ".." not in raw.parts else "",
        "kinds": [kind for kind in KINDS if kind in kinds],
        "parts": parts,
    }


def _part(part: str | Table | Figure, drawn: dict[str, str], prefix: str) -> dict[str, Any]:
    """Template variables of one part. `prefix`: prefix of the IDs in a figure, unique on the page."""
    match part:
        case Table():
            return _table(part)
        case Figure():
            svg = Markup(inline_svg(drawn[part.name], prefix, part.caption))
            return {"type": "figure", "caption": part.caption, "svg": svg, "kinds": _kinds([part.caption])}
    return {"type": "paragraph", "text": part}


def _table(table: Table) -> dict[str, Any]:
    """Template variables of a table. `class` of a column: t for text, p for the paper's numbers, l for long text."""
    columns = []
    for number, heading in enumerate(table.headings):
        longest = max((len(row[number]) for row in table.rows), default=0)
        classes = ["t"] if not heading.endswith(":") else []
        classes += ["l"] if classes and longest > LONG_TEXT else []
        classes += ["p"] if "paper" in heading.lower() else []
        columns.append({"heading": heading.rstrip(": "), "class": " ".join(classes)})
    caption = FIRST_SENTENCE.match(table.caption)
    return {
        "type": "table",
        "caption": caption[0] if caption else table.caption,
        "remarks": table.caption[caption.end() :] if caption else "",
        "columns": columns,
        "rows": [list(zip(row, columns, strict=True)) for row in table.rows],
        "kinds": _kinds([table.caption, *table.headings]),
        "is_long": len(table.rows) > MOST_ROWS,
        "roomy": len(columns) <= FEW_COLUMNS,
    }


def _kinds(texts: Iterable[str]) -> list[str]:
    words = set(re.findall(r"\w+", " ".join(texts).lower()))
    return [kind for kind in KINDS if kind in words]


def dtypes(facts: Facts) -> list[str]:
    """Dtypes of a result: those named in its rows, otherwise its configuration's compute dtype."""
    known = get_args(DType)
    shown = {key: value for key, value in facts.items() if key not in ("config", "environment", "published")}
    named = {text for key, text in _leaves(shown) if key == "dtype"} & set(known)
    named |= {key for key, _ in _leaves(shown)} & set(known)
    if not named:
        named = {text for key, text in _leaves(facts) if key == "compute_dtype"} & set(known)
    return [dtype for dtype in known if dtype in named]


def _leaves(tree: Any, key: str = "") -> Iterable[tuple[str, str]]:
    """Yields (key, text) of all keys and strings, except in hardware profiles, which list many dtypes."""
    if isinstance(tree, dict):
        for name, below in tree.items():
            if name != "hardware":
                yield name, ""
                yield from _leaves(below, name)
    elif isinstance(tree, list):
        for below in tree:
            yield from _leaves(below, key)
    elif isinstance(tree, str):
        yield key, tree


def _commit(environment: Facts) -> str:
    git = environment["git"] or {}
    return (git.get("commit") or "unknown")[:10] + (" and uncommitted changes" if git.get("dirty") else "")


def arguments(parser: argparse.ArgumentParser) -> None:
    words = "read results from DIR and its immediate subfolders; may be repeated (default benchmarks/results)"
    parser.add_argument("--results", type=Path, action="append", metavar="DIR", help=words)
    parser.add_argument(
        "--out", type=Path, default=PAGE, metavar="FILE", help="output page (default benchmarks/report.html)"
    )
    words = "write nothing; exit with code 1 if a figure or a table is out of date"
    parser.add_argument("--check", action="store_true", help=words)
    words = "with --check: also exit with code 1 if results come from several commits or have uncommitted changes"
    parser.add_argument("--one-commit", action="store_true", help=words)


def run(args: argparse.Namespace) -> int:
    if args.one_commit and not args.check:
        raise ConfigError("--one-commit needs --check; add it")
    results = read_results(args.results or [RESULTS])
    page = make(results, args.out)
    if not args.check:
        write(page, args.out)
        print(f"{args.out}: {len(results)} results; wrote {len(page.files)} figures and tables")
        return 0
    wrong = [f"{path} is out of date; run 'python -m benchmarks report'" for path in stale(page)]
    if args.one_commit:
        wrong += origins.strays(_by_name(results))
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

_GRAYS = ((0x20, "ink"), (0x90, "muted"), (0xFA, "line"), (0xFF, "paper"))
"""(maximum brightness, theme color): text, secondary text, grids and bands, background."""

_NAMES = {tone.light: name for name, tone in TONES.items()}
"""Names of the page's colors by their value on a white page."""

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
        # Drop references to anything outside this document: the page must not fetch anything.
        return f"#{prefix}{value[1:]}" if value.startswith("#") else "#"
    value = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}\1)", value)
    if key in ("style", "fill", "stroke"):
        return re.sub(r"#[0-9a-f]{6}\b", _color, value)
    return value


def _color(found: re.Match[str]) -> str:
    """The CSS variable of a color that the page defines; other colors are unchanged."""
    if name := _NAMES.get(found[0]):
        return f"var(--{name})"
    red, green, blue = (int(found[0][at : at + 2], 16) for at in (1, 3, 5))
    if red != green or green != blue:
        return found[0]
    return f"var(--{next(name for limit, name in _GRAYS if red <= limit)})"


def _bare(text: str | None) -> str | None:
    return text.strip() or None if text is not None else None
