"""Builds one page of all results: the goals, what was measured where, what is modeled, then every experiment.

The page is one self-contained file. It depends only on the results (it has no timestamp), so the same results give the same
bytes. Results of one experiment on several machines are listed one after another.
"""

import base64
import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from benchmarks.experiments import sections
from benchmarks.experiments.goals import TARGETS, Target, missing, status, target_of
from benchmarks.experiments.inline import inline_svg
from boost.config.schema import DType
from boost.errors import ConfigError
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, figures, machine, origin, read
from boost.train.rundir import storage_errors

DOTS_PER_INCH = 160
"""Resolution of PNG figures."""

KINDS = ("measured", "counted", "modeled")
"""Kinds of numbers. A table or figure gets a badge for each kind that its caption or headings mention."""

DASH, TIMES, MINUS = "\u2013", "\u00d7", "\u2212"
"""Typographic characters, escaped in source."""

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
    """The page, and the figures next to the results."""

    html: str
    pictures: dict[Path, bytes]


def read_results(folders: Sequence[Path]) -> list[Result]:
    """Reads results from `folders` and their immediate subfolders, in report order.

    Raises ConfigError for a folder without results and for a file that is not a result of a known experiment.
    """
    found: list[Result] = []
    for folder in folders:
        paths = [*sorted(folder.glob("*.json")), *sorted(folder.glob("*/*.json"))]
        if not paths:
            raise ConfigError(f"--results = '{folder}' contains no results; use a folder with results of experiments")
        for path in paths:
            facts = read(path)
            try:
                sections.place(facts["experiment"])
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            found.append(Result(path, facts, sections.section(facts), tuple(sections.goals(facts))))
    return sorted(found, key=lambda result: sections.place(result.experiment))  # stable: folders in their order


def make(results: Sequence[Result], out: Path, png: bool = True) -> BenchReport:
    """Builds the page for the path `out`. `png` also renders figures as PNG."""
    pictures: dict[Path, bytes] = {}
    blocks: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        drawn = _draw(result, pictures, png)
        blocks.setdefault(result.experiment, []).append(_block(result, drawn, out))
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
    sections = [_section(name, of_name) for name, of_name in blocks.items()]
    goals = _goals(results)
    html = environment.get_template("report.html.j2").render(
        style=Markup(_template("report.css").strip()),
        script=Markup(script),
        script_hash=digest,
        goals=goals,
        tally=[(words, sum(goal["status"] == words for goal in goals)) for words in ("met", "not met", "not measured")],
        sections=sections,
        modeled=[section for section in sections if "modeled" in section["kinds"]],
        origins=[block for of_name in blocks.values() for block in of_name if block["kinds"] != ["modeled"]],
    )
    return BenchReport(html, pictures)


def write(report: BenchReport, out: Path) -> None:
    """Writes the page and its figures. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.html, encoding="utf-8", newline="\n")
        for path, content in report.pictures.items():
            path.write_bytes(content)


def stale(report: BenchReport, out: Path) -> list[Path]:
    """Paths of the page and SVG figures that are missing or out of date."""
    wanted = {out: report.html.encode()} | {p: content for p, content in report.pictures.items() if p.suffix == ".svg"}
    return [path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content]


def prose(text: str) -> Markup:
    """Escapes prose, with `code` markup and with typographic characters outside of code."""
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
        return prose(DASH if plain == "-" else text)
    word, _, why = text.strip().partition(":") if kind == "skipped" else (text.strip(), "", "")
    return Markup('<span class="badge {}">{}</span>{}').format(kind, word, prose(why and f" {why.strip()}"))


def _signs(text: str) -> str:
    text = re.sub(r"(\d) ?x(?![\w-])", lambda m: m[0].replace("x", TIMES), text)
    text = re.sub(r"(?<![\w.])-(?=\d)", MINUS, text)
    return text.replace(">=", "≥").replace("<=", "≤").replace("+-", "±")


def _template(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _draw(result: Result, pictures: dict[Path, bytes], png: bool) -> dict[str, str]:
    """Draws a result's figures into `pictures`. Returns SVG documents by figure name."""
    drawn = {}
    for figure in figures(result.section):
        name = figure.name
        if result.path.with_name(f"{name}.svg") in pictures:  # taken by another result in the same folder
            name = f"{result.path.stem}-{name}"
        with tempfile.TemporaryDirectory() as folder:
            for suffix in (".svg", ".png")[: 1 + png]:
                path = Path(folder, name + suffix)
                _drawn_by(figure, path)
                pictures[result.path.with_name(path.name)] = path.read_bytes()
        drawn[figure.name] = pictures[result.path.with_name(f"{name}.svg")].decode()
    return drawn


def _drawn_by(figure: Figure, path: Path) -> None:
    import matplotlib

    # Settings must not change SVGs: they stay identical to those that the experiment wrote.
    with matplotlib.rc_context({"savefig.dpi": DOTS_PER_INCH} if path.suffix == ".png" else {}):
        figure.draw(path)


def _section(name: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = [kind for kind in KINDS if any(kind in block["kinds"] for block in blocks)]
    return {"id": name, "title": blocks[0]["title"], "kinds": kinds, "blocks": blocks}


def _block(result: Result, drawn: dict[str, str], out: Path) -> dict[str, Any]:
    """Template variables of one result."""
    environment = result.facts["environment"]
    parts = [_part(part, result, drawn) for part in result.section.parts]
    kinds = {kind for part in parts for kind in part.get("kinds", ())}
    versions = [f"torch {environment['torch']}", f"Python {environment['python']}"]
    if environment.get("cuda"):
        versions.append(f"CUDA {environment['cuda']}")
    return {
        "id": result.experiment,
        "title": result.section.title,
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
        "raw": _beside(result.path, out),
        "kinds": [kind for kind in KINDS if kind in kinds],
        "parts": parts,
    }


def _part(part: str | Table | Figure, result: Result, drawn: dict[str, str]) -> dict[str, Any]:
    match part:
        case Table():
            return _table(part)
        case Figure():
            # Unique per result and figure.
            prefix = re.sub(r"[^\w-]", "-", f"{result.path.parent.name}-{result.path.stem}-{part.name}-")
            svg = Markup(inline_svg(drawn[part.name], prefix, part.caption))
            return {"type": "figure", "caption": part.caption, "svg": svg, "kinds": _kinds([part.caption])}
    return {"type": "paragraph", "text": part}


def _table(table: Table) -> dict[str, Any]:
    columns = [
        {
            "heading": heading.rstrip(":"),
            "class": " ".join(
                word
                for word, holds in (("number", heading.endswith(":")), ("paper", "paper" in heading.lower()))
                if holds
            ),
        }
        for heading in table.headings
    ]
    return {
        "type": "table",
        "caption": table.caption,
        "columns": columns,
        "rows": [list(zip(row, columns, strict=True)) for row in table.rows],
        "kinds": _kinds([table.caption, *table.headings]),
        "paper": any("paper" in column["class"] for column in columns),
    }


def _kinds(texts: Iterable[str]) -> list[str]:
    words = set(re.findall(r"\w+", " ".join(texts).lower()))
    return [kind for kind in KINDS if kind in words]


def _goals(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per target, in order, with all of its results."""
    found: dict[Target, list[tuple[Goal, Result]]] = {target: [] for target in TARGETS}
    for result in results:
        for goal in result.goals:
            found[target_of(goal.what)].append((goal, result))
    return [
        {
            "target": target,
            "status": status(target, [goal for goal, _ in of_target]),
            "found": [
                {
                    "goal": goal,
                    "machine": _machine_of(goal, result),
                    "verdict": "met" if goal.met else "not measured" if goal.met is None else "not met",
                    "id": result.experiment,
                }
                for goal, result in of_target
            ],
            "missing": missing(target),
        }
        for target, of_target in found.items()
    ]


def _machine_of(goal: Goal, result: Result) -> str:
    """The machine of a goal's result; '' for predictions, or if the goal already names it."""
    name = machine(result.facts["environment"])
    return "" if goal.kind == "modeled" or name in goal.where else name


def dtypes(facts: Facts) -> list[str]:
    """Dtypes of a result: those that its rows name, else the compute dtype of its configuration."""
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


def _beside(path: Path, out: Path) -> str:
    """Relative link from the page to a result; '' if the result is not below the page's folder."""
    relative = Path(os.path.relpath(path, out.parent))
    return "" if ".." in relative.parts else relative.as_posix()
