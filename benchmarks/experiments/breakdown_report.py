"""Report of the breakdown: stacked bars and tables, measured over the wire and modeled on the paper's GPUs."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experiments.breakdown import PARTS, PUBLISHED_NAMES, slower, total
from benchmarks.experiments.contest import ratio, spread, verdict_words
from benchmarks.experiments.endtoend import MEGATRON, PUBLISHED, VANILLA
from benchmarks.experiments.side_by_side import in_ms
from boost.format import format_percent
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.drawing import PEER, SERIES, pyplot, tidy, write
from boost.measure.results import Facts

TALK = 0.40
"""How much slower than the dense model vanilla is in the talk on the paper ("TP = 4 runtime breakdown")."""

COLORS = {"gemms": SERIES[0], "other": SERIES[2], "waiting": SERIES[1], "rest": PEER}


def goals(facts: Facts) -> list[Goal]:
    """None."""
    return []


def section(facts: Facts) -> Section:
    """Measured and modeled breakdowns."""
    lead = (
        "Exposed communication is the time in which a collective is in flight and nothing is computed. Other computation: "
        "element-wise work, norms, attention, loss, optimizer. Rest: no operation runs (Python, kernel launches)."
    )
    return Section("Where a step's time goes", (lead, *_measured(facts), *_modeled(facts)))


def _measured(facts: Facts) -> list[str | Table | Figure]:
    rows = facts["measured"]
    if not rows:
        return ["Not measured: the result of the wire experiment has no steps recorded by part."]
    cells = []
    for row in rows:
        parts = [_cell(row, part) for part in PARTS]
        cells.append((row["wire"], row["name"], f"{1e3 * total(row):.0f}", *parts, in_ms(spread(row["seconds"]))))
    counts = sorted({row["recorded"] for row in rows})
    table = Table(
        f"Recorded steps over the wire (measured): ms, and the fraction of the step; means of {' or '.join(map(str, counts))} "
        f"steps, one per launch and process. {facts['shape']}. Recording adds overhead: the last column has the median and "
        "quartiles without.",
        ("wire", "layout", "step ms:", *(f"{name} ms:" for name in PARTS.values()), "not recorded ms:"),
        tuple(cells),
    )
    said = [
        f"{wire} wire, time of {name} / {MEGATRON}: {verdict_words(ratio(seconds[name], seconds[MEGATRON]))}"
        for wire in facts["wires"]
        for seconds in [{row["name"]: row["seconds"] for row in rows if row["wire"] == wire}]
        for name in (PUBLISHED, VANILLA)
        if {name, MEGATRON} <= seconds.keys()
    ]
    caption = "A step by part over the wire (measured)."
    groups = {
        f"{wire} wire, {mbit:,g} Mbit/s": [r for r in rows if r["wire"] == wire]
        for wire, mbit in facts["wires"].items()
    }
    figure = Figure("breakdown", caption, partial(_draw, groups))
    return [figure, table, *([f"{'; '.join(said)}."] if said else [])]


def _modeled(facts: Facts) -> list[str | Table | Figure]:
    rows = facts["modeled"]
    cells = tuple(
        (
            row["name"],
            f"{1e3 * total(row):.0f}",
            *(_cell(row, part) for part in PARTS),
            f"{1e3 * row['published_s']:.0f}" if row["published_s"] else "-",
        )
        for row in rows
    )
    table = Table(
        f"A step of the 7B by part, TP 4, 4 sequences of 4,096 tokens in micro-batches of one (modeled: {facts['modeled_on']}): "
        "ms, and the fraction of the step.",
        ("layout", "step ms:", *(f"{name} ms:" for name in PARTS.values()), "paper ms:"),
        cells,
    )
    vanilla, dense = PUBLISHED_NAMES["vanilla"], PUBLISHED_NAMES["full-rank"]
    seconds = {row["way"]: row["published_s"] for row in rows if row["way"]}
    paper = seconds["vanilla"] / seconds["full-rank"] - 1
    said = (
        f"In the talk, a step of vanilla takes {format_percent(TALK, 0)} more time than one of the dense model at TP 4; by the "
        f"paper's step times, {_more(paper)}; by the model, {_more(slower(rows, vanilla, dense))}. Our strong `vanilla` takes "
        f"{_more(slower(rows, 'vanilla', 'megatron-sp'))} than `megatron-sp`, by the model."
    )
    groups = {facts["modeled_on"]: rows}
    figure = Figure("breakdown-modeled", "A step of the 7B by part, TP 4 (modeled).", partial(_draw, groups))
    return [figure, table, said]


def _more(fraction: float) -> str:
    return f"{format_percent(abs(fraction), 0)} {'more' if fraction >= 0 else 'less'} time"


def _cell(row: Facts, part: str) -> str:
    seconds = row["parts_s"][part]
    return f"{1e3 * seconds:.0f} ({format_percent(seconds / total(row), 0)})"


def _draw(groups: Mapping[str, Sequence[Facts]], path: Path) -> None:
    groups = {title: rows for title, rows in groups.items() if rows}
    heights = [len(rows) for rows in groups.values()]
    parts = [part for part in PARTS if any(row["parts_s"][part] for rows in groups.values() for row in rows)]
    figure, axes = pyplot().subplots(
        len(groups), 1, figsize=(9, 0.9 * len(groups) + 0.42 * sum(heights)), layout="constrained", squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, (title, rows) in zip(axes[:, 0], groups.items(), strict=True):
        _stack(axis, rows, parts)
        axis.set_title(title, loc="left", fontsize=10)
        tidy(axis)
    axes[-1, 0].set_xlabel("ms per step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(parts), loc="outside upper right", frameon=False)
    write(figure, path)


def _stack(axis: Any, rows: Sequence[Facts], parts: Sequence[str]) -> None:
    longest = max(map(total, rows))
    lefts = [0.0] * len(rows)
    for part in parts:
        widths = [1e3 * row["parts_s"][part] for row in rows]
        axis.barh(range(len(rows)), widths, 0.62, left=lefts, color=COLORS[part], label=PARTS[part])
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, left in enumerate(lefts):
        axis.annotate(f"{left:.0f}", (left, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_xlim(0, 1.1e3 * longest)
    axis.invert_yaxis()
