"""Report helpers for single-block experiments: rows, table cells, bar charts, and the paper's numbers next to ours."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.contest import Ratio, Seconds, launches, pooled, ratio, rounds_words, spread
from boost.measure import drawing
from boost.measure.document import Table
from boost.measure.results import Facts
from boost.plan.hardware import load_hardware
from boost.plan.published import Compared, Comparison

PROFILE = "a100-80g"
"""Hardware profile of the paper."""

MODELED = f"modeled, {PROFILE}:"
"""Heading for predictions on the paper's model size and hardware."""


@dataclass(frozen=True)
class RangeBar:
    """A bar with an error interval."""

    value: float
    low: float
    high: float


def find_row(facts: Facts, **wanted: Any) -> Facts | None:
    """The first row of a result with these values; None if there is none."""
    return next((row for row in facts["rows"] if wanted.items() <= row.items()), None)


def row_of(facts: Facts, **wanted: Any) -> Facts:
    """Same as `find_row`, for a row that exists."""
    row = find_row(facts, **wanted)
    assert row is not None, f"no row with {wanted}"
    return row


def batches_of(facts: Facts) -> list[int]:
    """The batch sizes of a result, ascending."""
    return sorted({row["batch"] for row in facts["rows"]})


def comparison() -> Comparison:
    """The paper's numbers and our predictions, on the paper's hardware."""
    return Comparison(load_hardware(PROFILE))


def as_facts(compared: Iterable[Compared]) -> list[Facts]:
    """Published and predicted numbers as result rows."""
    keys = ("table", "what", "published", "predicted", "unit")
    return [{key: getattr(each, key) for key in keys} for each in compared]


def compared_table(caption: str, rows: Iterable[Facts]) -> Table:
    """Table of the paper's numbers next to our predictions for the same runs."""
    cells = [(f"{row['what']}", row["unit"], f"{row['published']:g}", f"{row['predicted']:.4g}") for row in rows]
    return Table(caption, ("what", "unit", "paper:", MODELED), tuple(cells))


def shape_words(facts: Facts) -> str:
    """A description of the block and its configuration."""
    model, train = facts["config"]["model"], facts["config"]["train"]
    return (
        f"A block of {model['family']}, d {model['dim']}, f {model['ffn_dim']}, r {model['rank']}, {model['heads']} heads; "
        f"sequences of {train['seq_len']} tokens, {train['compute_dtype']}"
    )


def turns_words(facts: Facts) -> str:
    """A description of the number of rounds."""
    return (
        f"measured: medians of {rounds_words(facts)}, with quartiles of times and 95% bootstrap intervals of "
        "ratios in parentheses"
    )


def milliseconds(seconds: Seconds) -> str:
    """Median and quartiles in ms, formatted."""
    found = spread(seconds)
    return _with_spread(1e3 * found.median, 1e3 * found.low, 1e3 * found.high)


def times(over: Seconds, under: Seconds) -> str:
    """Ratio of two times with its interval, formatted."""
    found = ratio(over, under)
    return f"{found.value:.2f}x ({found.low:.2f} to {found.high:.2f})"


def percent(found: Ratio) -> str:
    """A fraction in percent with its interval, formatted."""
    return f"{100 * found.value:.0f} ({100 * found.low:.0f} to {100 * found.high:.0f})"


def differences(more: Seconds, less: Seconds) -> Seconds:
    """Differences within each round."""
    return launches(more) - launches(less)


def ms_bar(seconds: Seconds) -> RangeBar:
    """A bar of the median and quartiles, in ms."""
    found = spread(seconds)
    return RangeBar(1e3 * found.median, 1e3 * found.low, 1e3 * found.high)


def middle(seconds: Seconds) -> float:
    """The median."""
    return statistics.median(pooled(seconds))


def _with_spread(value: float, low: float, high: float) -> str:
    digits = 1 if max(abs(value), abs(high)) >= 10 else 2 if max(abs(value), abs(high)) >= 1 else 3
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def draw_bars(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, RangeBar]]], unit: str) -> None:
    """Draws one panel per entry of `panels` ({title: {series: {group: bar}}}), one below the other, with intervals as whiskers."""
    pyplot = drawing.pyplot()

    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(7.4, 2.5 * len(panels) + 0.3), squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    colors = {name: drawing.color_of(name, number) for number, name in enumerate(names)}
    for axis, (title, series) in zip(axes[:, 0], panels.items(), strict=True):
        groups = list(dict.fromkeys(group for bars in series.values() for group in bars))
        held = {group: [name for name, bars in series.items() if group in bars] for group in groups}
        width = 0.8 / max(len(names_here) for names_here in held.values())
        for name, bars in series.items():
            places = [groups.index(g) + (held[g].index(name) - (len(held[g]) - 1) / 2) * width for g in bars]
            values = [bar.value for bar in bars.values()]
            # The interval of a skewed sample may exclude its median; whiskers cannot have negative length.
            below = [max(bar.value - bar.low, 0.0) for bar in bars.values()]
            above = [max(bar.high - bar.value, 0.0) for bar in bars.values()]
            axis.bar(places, values, 0.92 * width, color=colors[name])
            axis.errorbar(places, values, yerr=[below, above], fmt="none", ecolor=drawing.INK, elinewidth=1)
        axis.set_xticks(range(len(groups)), groups)
        axis.set(title=f"{title}, {unit}", ylim=(0, None), xlim=(-0.6, len(groups) - 0.4))
        drawing.tidy(axis)
        axis.grid(visible=False, axis="x")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(names), 6))
    drawing.write(figure, path)
