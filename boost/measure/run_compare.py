"""Several runs next to each other: what differs in their configurations, and their curves, as text and as pictures."""

import html
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from boost.drawing import pyplot, tidy, write
from boost.format import format_count
from boost.measure.run_record import RunRecord

LETTERS = "ABCDEFGHIJ"
"""Short names of runs, in the order of the command line."""
BINS = 200
"""Points of a curve in a picture: each is a mean over equal parts of the x axis."""
IGNORED_KEYS = ("run.dir",)
"""Keys that differ between any two runs."""

Axis = Literal["step", "tokens"]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A metric of one run."""

    letter: str
    name: str
    points: Points
    """(x, y), finite, in the order of x."""


def config_difference(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Values by key, one per run, of keys that are not equal in all; None where a run does not have the key."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key) for run in runs] for key in keys if key not in IGNORED_KEYS}
    return {key: per_run for key, per_run in values.items() if any(value != per_run[0] for value in per_run)}


def curves(runs: Sequence[RunRecord], metric: str, axis: Axis) -> list[Curve]:
    """The metric of each run that has it."""
    result = []
    for letter, run in zip(LETTERS, runs, strict=False):
        series = run.series(metric)
        points = [(float(step if axis == "step" else run.tokens_at(step)), value) for step, value in series]
        if points:
            result.append(Curve(letter, str(run.path), points))
    return result


def averaged(points: Points, bins: int, end: float) -> Points:
    """Mean (x, y) of the points in each of `bins` equal parts of [0, end] that has any."""
    parts: dict[int, Points] = {}
    for x, y in points:
        parts.setdefault(min(int(x / end * bins), bins - 1) if end else 0, []).append((x, y))
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for _, part in sorted(parts.items())
    ]


def text_plot(drawn: Sequence[Curve], width: int, height: int = 12) -> list[str]:
    """Lines of at most `width` columns: curves as their letters, `*` where several meet, on a plain grid."""
    margin = 10
    columns = max(width - margin - 2, 10)
    end = max(x for curve in drawn for x, _ in curve.points)
    shown = [(curve.letter, averaged(curve.points, columns, end)) for curve in drawn]
    values = [y for _, points in shown for _, y in points]
    low, high = min(values), max(values)
    cells = [[" "] * columns for _ in range(height)]
    for letter, points in shown:
        for x, y in points:
            column = min(int(x / end * columns), columns - 1) if end else 0
            row = round((high - y) / (high - low) * (height - 1)) if high > low else height // 2
            cells[row][column] = letter if cells[row][column] in (" ", letter) else "*"
    labels = {0: high, height - 1: low, height // 2: high - (high - low) * (height // 2) / (height - 1)}
    lines = [
        f"{f'{labels[row]:.4g}' if row in labels else '':>{margin}} |{''.join(cells[row]).rstrip()}"
        for row in range(height)
    ]
    right = format_count(end)
    return [*lines, f"{'':{margin}} +{'-' * columns}", f"{'':{margin}}  0{right:>{columns - 1}}"]


def facts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """State and numbers of each run, for JSON."""
    return [
        {
            "run": str(run.path),
            "state": run.state,
            "reason": run.reason,
            "updated": run.updated.isoformat(timespec="seconds") if run.updated else None,
            **asdict(run.summary()),
            "damaged_lines": run.damaged,
        }
        for run in runs
    ]


def draw(panels: dict[str, list[Curve]], axis: Axis, path: Path) -> None:
    """A picture with a panel per metric, in the format of the suffix of `path` (matplotlib's)."""
    write(_figure(panels, axis), path)


def page(panels: dict[str, list[Curve]], axis: Axis, tables: dict[str, list[list[str]]]) -> str:
    """One HTML file with the curves, then tables by title, whose first row is the head."""
    picture = io.StringIO()
    if panels:
        figure = _figure(panels, axis)
        figure.savefig(picture, format="svg", metadata={"Date": None})
        pyplot().close(figure)
    drawn = picture.getvalue()
    parts = [drawn[drawn.index("<svg") :] if drawn else ""]
    for title, rows in tables.items():
        parts.append(f"<h2>{html.escape(title)}</h2>\n<table>")
        for number, row in enumerate(rows):
            tag = "td" if number else "th"
            parts.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
        parts.append("</table>")
    return _PAGE.replace("BODY", "\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>boost runs compare</title>
<style>
body { font: 14px system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: 0.2em 1em 0.2em 0; text-align: left; border-bottom: 1px solid #ddd; }
</style></head><body>
<h1>Runs</h1>
BODY
</body></html>
"""


def _figure(panels: dict[str, list[Curve]], axis: Axis) -> Any:
    figure, axes = pyplot().subplots(
        1, max(len(panels), 1), figsize=(5.5 * max(len(panels), 1), 4.5), layout="constrained", squeeze=False
    )
    for panel, (metric, drawn) in zip(axes[0], panels.items(), strict=False):
        tidy(panel)
        end = max(x for curve in drawn for x, _ in curve.points)
        for curve in drawn:
            points = averaged(curve.points, BINS, end)
            marker = "o" if len(points) < 20 else None
            panel.plot(
                *zip(*points, strict=True),
                label=f"{curve.letter}  {curve.name}",
                linewidth=1.3,
                marker=marker,
                markersize=3,
            )
        panel.set(xlabel="tokens" if axis == "tokens" else "step", ylabel=metric.replace("_", " "))
    if panels:
        axes[0][0].legend(frameon=False, fontsize="small")
    return figure


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table; '-' for none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
