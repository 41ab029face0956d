"""Report of `python -m benchmarks ideal`: a table, a figure and a goal."""

from pathlib import Path

import numpy as np

from benchmarks.experiments.contest import Ratio, Seconds, in_words, launches, ratio, rounds_words, spread
from boost.measure import drawing
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts

LAYOUTS = ("btp-sp", "btp", "vanilla", "megatron-sp")
JUDGED = ("btp-sp", "btp")
ALONE, WIRE = "alone, ", "wire, "
"""Prefixes of contender names: a family's single-process step, and a layout's collectives."""
LEAST = 0.93
"""Goal: minimum fraction of the ideal."""


def section(facts: Facts) -> Section:
    """A table and a figure."""
    return Section(
        f"TP={facts['tp']} against the ideal",
        (
            f"The ideal is the single-process step time divided by {facts['tp']}, plus the step's collectives in isolation. "
            f"Whole training steps: {_where(facts)}. Medians of {rounds_words(facts)}, with quartiles in "
            "parentheses. The ratio to the ideal is the median of the ratio within a round, with its 95% bootstrap interval.",
            _table(facts),
            Figure("ideal-parts", f"Where the time of a TP={facts['tp']} step goes", lambda path: draw(facts, path)),
        ),
    )


def goals(facts: Facts) -> list[Goal]:
    """The goal that this experiment answers, decided by the better of our layouts."""
    found = {layout: efficiency(facts, layout) for layout in JUDGED}
    best = max(each.low for each in found.values())
    return [
        Goal(
            f"TP={facts['tp']} against the ideal (a {facts['tp']}th of the TP=1 compute + measured wire time of its bytes)"
            if facts["tp"] != 2
            else "TP=2 against the ideal (half of the TP=1 compute + measured wire time of its bytes)",
            f">= {LEAST:.2f} of ideal",
            _where(facts),
            ", ".join(f"{layout} {in_words(each)}" for layout, each in found.items()),
            best >= LEAST,
        )
    ]


def ideal(facts: Facts, layout: str) -> np.ndarray:
    """Seconds of the ideal step [launches, rounds]."""
    return _compute(facts, layout) + _wire(facts, layout)


def efficiency(facts: Facts, layout: str) -> Ratio:
    """Ideal time / step time."""
    return ratio(ideal(facts, layout), facts["turns"]["seconds"][layout])


def _compute(facts: Facts, layout: str) -> np.ndarray:
    """Single-process step time / TP, in each round."""
    found: np.ndarray = launches(facts["turns"]["seconds"][ALONE + facts["families"][layout]]) / facts["tp"]
    return found


def _wire(facts: Facts, layout: str) -> np.ndarray:
    return launches(facts["turns"]["seconds"][WIRE + layout])


def _rest(facts: Facts, layout: str) -> np.ndarray:
    return launches(facts["turns"]["seconds"][layout]) - ideal(facts, layout)


def _table(facts: Facts) -> Table:
    rows = [
        (
            layout,
            facts["families"][layout],
            _ms(facts["turns"]["seconds"][layout]),
            _ms(_compute(facts, layout)),
            _ms(_wire(facts, layout)),
            _ms(_rest(facts, layout)),
            str(len(facts["collectives"][layout])),
            f"{facts['sent_bytes'][layout] / 1e6:.1f}",
            in_words(efficiency(facts, layout)),
        )
        for layout in LAYOUTS
    ]
    headings = (
        "layout",
        "family",
        "step, ms:",
        f"1/{facts['tp']} of TP=1, ms:",
        "wire, ms:",
        "overhead, ms:",
        "collectives:",
    )
    return Table(
        "Breakdown of the step time. Times are measured; collectives and bytes (MB = 10^6 bytes sent by one process) are counted.",
        (*headings, "sent, MB:", "of ideal:"),
        tuple(rows),
    )


def _where(facts: Facts) -> str:
    model, train = facts["config"]["model"], facts["config"]["train"]
    return (
        f"{model['layers']} blocks, d {model['dim']}, f {model['ffn_dim']}, {model['heads']} heads, r {model['rank']}, V "
        f"{model['vocab_size']}, {train['global_batch']} x {train['seq_len']} tokens in micro-batches of {train['micro_batch']}, "
        f"{train['compute_dtype']}, {facts['tp']} processes, {facts['device']}"
    )


def _ms(seconds: Seconds) -> str:
    found = spread(seconds)
    return f"{1e3 * found.median:.0f} ({1e3 * found.low:.0f} to {1e3 * found.high:.0f})"


def draw(facts: Facts, path: Path) -> None:
    """Draws one bar per layout: compute and wire time stacked, with a mark at the measured step time."""
    pyplot = drawing.pyplot()

    figure, axis = pyplot.subplots(figsize=(7.4, 0.9 + 0.42 * len(LAYOUTS)), layout="constrained")
    places, left = range(len(LAYOUTS)), [0.0] * len(LAYOUTS)
    parts = ((f"1/{facts['tp']} of TP=1", _compute, drawing.SERIES[0]), ("wire", _wire, drawing.SERIES[1]))
    for label, part, color in parts:
        widths = [1e3 * spread(part(facts, layout)).median for layout in LAYOUTS]
        axis.barh(places, widths, 0.6, left=left, label=label, color=color)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    steps = [spread(facts["turns"]["seconds"][layout]) for layout in LAYOUTS]
    errors = [[1e3 * (s.median - s.low) for s in steps], [1e3 * (s.high - s.median) for s in steps]]
    axis.errorbar(
        [1e3 * s.median for s in steps], places, xerr=errors, fmt="D", markersize=4.5, color=drawing.INK, elinewidth=1,
        label="measured step",
    )  # fmt: skip
    for y, (layout, step) in enumerate(zip(LAYOUTS, steps, strict=True)):
        where = (max(1e3 * step.high, left[y]), y)
        words = f"{1e3 * step.median:.0f}, {efficiency(facts, layout).value:.2f} of ideal"
        axis.annotate(words, where, (7, 0), textcoords="offset points", va="center")
    axis.set_yticks(places, [f"{layout} ({facts['families'][layout]})" for layout in LAYOUTS])
    axis.set(xlabel="ms per step", xlim=(0, 1.3 * max(*left, *(1e3 * s.high for s in steps))))
    axis.invert_yaxis()
    drawing.tidy(axis)
    axis.grid(visible=False, axis="y")
    figure.legend(loc="outside upper right", ncols=3)
    drawing.write(figure, path)
