"""Report of the ladder: a table for each wire, and a waterfall of both."""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experiments.colors import PEER
from benchmarks.experiments.contest import in_words, spread, verdict_words
from benchmarks.experiments.document import Figure, Section, Table
from benchmarks.experiments.ladder import LADDER, ratios
from benchmarks.experiments.results import Facts
from benchmarks.experiments.side_by_side import in_ms
from boost.drawing import INK, SERIES, pyplot, tidy, write

FASTER, SLOWER = SERIES[:2]


def section(facts: Facts) -> Section:
    """A figure, and a table for each wire."""
    lead = (
        f"Whole steps of the main set of the wire experiment ({facts['shape']}). Every step changes one thing, except that "
        "`vanilla` to `btp` also ungroups. Steps are interleaved in the same launches; ratios pair the same rounds, and 95% "
        "intervals resample launches, then rounds. Above 1, the step is faster than the one before."
    )
    measured = {step["name"] for step in facts["steps"]}
    missing = [step.name for step in LADDER if step.name not in measured]
    caption = (
        "Step time from the published baseline on (measured): every bar starts at the step that it is compared with and ends at "
        "its own median; whiskers are quartiles. Hatched steps are alternatives that the next step does not build on."
    )
    return Section(
        "The ladder: one change at a time",
        (
            lead,
            Figure("ladder", caption, partial(_draw, facts)),
            *(_table(facts, wire) for wire in facts["wires"]),
            *([f"Not measured: {', '.join(missing)}."] if missing else []),
        ),
    )


def _table(facts: Facts, wire: str) -> Table:
    cells = []
    for step, to_before, to_first in ratios(facts, wire):
        shown = [verdict_words(to_before), in_words(to_first)] if to_before and to_first else ["", ""]
        cells.append((step["name"], step["change"], step["before"], in_ms(spread(step["seconds"][wire])), *shown))
    headings = ("layout", "what it changes", "compared with", "ms:", "speed-up over that:", "over the first step:")
    return Table(f"{wire} wire, {facts['wires'][wire]:g} Mbit/s (measured).", headings, tuple(cells))


def _draw(facts: Facts, path: Path) -> None:
    steps, wires = facts["steps"], facts["wires"]
    figure, axes = pyplot().subplots(
        1, len(wires), figsize=(9.5, 0.9 + 0.36 * len(steps)), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (wire, mbit) in zip(axes[0], wires.items(), strict=True):
        _waterfall(axis, facts, wire)
        axis.set(xlabel="ms per step", title=f"{wire} wire, {mbit:,g} Mbit/s")
        tidy(axis)
    axes[0][0].set_yticks(range(len(steps)), [step["name"] for step in steps])
    axes[0][0].invert_yaxis()
    write(figure, path)


def _waterfall(axis: Any, facts: Facts, wire: str) -> None:
    spreads = {step["name"]: spread(step["seconds"][wire]) for step in facts["steps"]}
    right = max(1e3 * each.high for each in spreads.values())
    for place, (step, _, to_first) in enumerate(ratios(facts, wire)):
        own = spreads[step["name"]]
        start = 1e3 * spreads[step["before"]].median if step["before"] else 0.0
        end = 1e3 * own.median
        color = PEER if not step["before"] else FASTER if end < start else SLOWER
        axis.barh(
            place,
            end - start,
            left=start,
            height=0.62,
            color=color,
            hatch="///" if step["branch"] else None,
            edgecolor="white",
        )
        ends = [[1e3 * (own.median - own.low)], [1e3 * (own.high - own.median)]]
        axis.errorbar(end, place, xerr=ends, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        label = f"{to_first.value:.2f}x" if to_first else ""
        axis.annotate(
            label, (max(start, 1e3 * own.high), place), (6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_xlim(0, 1.12 * right)
