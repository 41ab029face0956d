"""Report of the public record: errors by source, GPU, stack and size, the intervals, and every row."""

import operator
from collections.abc import Callable
from pathlib import Path

from benchmarks.experiments.record import errors, gpu_kind, inside, spreads
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table
from boost import drawing
from boost.plan.step_time import SHARE, kind_of

LIMIT, BIAS_LIMIT, LEAST_GROUP, COVERED = 0.12, 0.08, 10, 0.75
"""Limits, with whole sources left out: mean absolute error, bias of a kind of GPU with at least LEAST_GROUP rows, and fraction of
rows inside the interval from all other sources."""


SIZES = {"tokens per sequence": "seq", "GPUs": "gpus"}
"""Groupings by ranges of a numeric field, and that field."""

GROUPS: dict[str, Callable[[Facts], str]] = {
    "source": lambda row: str(row["source"]),
    "GPU": gpu_kind,
    "profile": lambda row: str(row["gpu"]),
    "stack": lambda row: str(row["stack"]),
    "tokens per sequence": lambda row: next((f"up to {n:,}" for n in (2048, 4096, 8192) if row["seq"] <= n), "longer"),
    "GPUs": lambda row: next((f"up to {n}" for n in (8, 64, 512) if row["gpus"] <= n), "more"),
}


def goals(facts: Facts) -> list[Goal]:
    """The goals, with whole sources left out in turn."""
    rows = facts["rows"]
    found, within = errors(rows), inside(rows)
    where = f"{len(rows)} rows of {len({row['source'] for row in rows})} sources, each left out in turn"
    biased = [
        f"{name} {of_group.bias:+.0%}"
        for name in dict.fromkeys(map(gpu_kind, rows))
        if abs((of_group := errors(row for row in rows if gpu_kind(row) == name)).bias) > BIAS_LIMIT
        and of_group.count >= LEAST_GROUP
    ]
    return [
        Goal(
            "performance model: the public record",
            f"MAPE <= {LIMIT:.0%}, no kind of GPU with a bias over {BIAS_LIMIT:.0%}",
            where,
            f"MAPE {found.mape:.1%}, bias {found.bias:+.1%}",
            found.mape <= LIMIT and not biased,
            "modeled",
            f"beyond their limit: {', '.join(biased)}" if biased else "",
        ),
        Goal(
            "performance model: its interval",
            f"covers {COVERED:.0%}",
            where,
            f"{sum(within)} of {len(within)} ({sum(within) / len(within):.0%})",
            sum(within) >= COVERED * len(within),
            "modeled",
        ),
    ]


def section(facts: Facts) -> Section:
    """Builds the report: the table of errors by group, the figure, and every row."""
    lead = (
        f"Predictions by the performance model of `boost plan` are compared with {len(facts['rows'])} published training speeds. "
        "Whole sources are left out in turn: a prediction uses nothing that is fitted to the row's own source, and its interval "
        "comes from all other sources. Nothing was run for this report."
    )
    sources = tuple((name, each["title"], each["url"], each["note"]) for name, each in facts["sources"].items())
    run = ("source", "model", "GPU", "GPUs:", "TP x PP", "tokens:", "stack", "recomputed")
    headings = (*run, "measured s:", "left out, predicted s:", "ratio:")
    return Section(
        "The performance model against the public record",
        (
            lead,
            error_table(facts),
            interval_table(facts),
            Figure(
                "record", "Predicted over measured seconds (modeled over published)", lambda path: draw(facts, path)
            ),
            Table("Sources.", ("source", "title", "URL", "interpretation"), sources),
            Table("Every row (modeled and published).", headings, tuple(map(_row, facts["rows"]))),
        ),
    )


def _row(row: Facts) -> tuple[str, ...]:
    run = (row["source"], row["model"], row["gpu"], str(row["gpus"]), f"{row['tp']} x {row['pp']}", f"{row['seq']:,}")
    measured, predicted = row["measured_s"], row["predicted_s"]
    return (*run, row["stack"], row["recompute"], f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured:.2f}")


def error_table(facts: Facts) -> Table:
    """Errors and rows inside the interval with sources left out, by group."""
    rows, within = [], dict(zip(map(id, facts["rows"]), inside(facts["rows"]), strict=True))
    for by, key in {"all": lambda row: "", **GROUPS}.items():
        every = sorted(facts["rows"], key=operator.itemgetter(SIZES[by])) if by in SIZES else facts["rows"]
        for name in dict.fromkeys(map(key, every)):
            members = [row for row in every if key(row) == name]
            found, share = errors(members), f"{sum(within[id(row)] for row in members)}"
            cells = f"{found.count}", f"{found.median:.2f}", f"{found.mape:.1%}", f"{found.bias:+.1%}", share
            rows.append((by, name, *cells))
    headings = ("by", "", *(f"left out {each}:" for each in ("rows", "median", "MAPE", "bias", "inside")))
    return Table("Predicted over measured seconds, sources left out in turn (modeled).", headings, tuple(rows))


def interval_table(facts: Facts) -> Table:
    """The intervals that `boost plan` prints, and how many rows lie inside the intervals from all other sources."""
    rows, within = facts["rows"], inside(facts["rows"])
    shown = []
    for name, spread in spreads(rows).items():
        of_kind = [each for each, row in zip(within, rows, strict=True) if kind_of(row["tp"], row["pp"]) == name]
        held = f"{sum(of_kind)} of {len(of_kind)}"
        shown.append((MESHES[name], f"{spread.rows}", f"{spread.low:.3f}", f"{spread.high:.3f}", held))
    headings = ("mesh", "rows:", "low:", "high:", "inside the interval from other sources:")
    return Table(
        f"Measured over predicted seconds: {SHARE:.0%} are between low and high, if every source counts equally (modeled).",
        headings,
        tuple(shown),
    )


MESHES = {"replicas": "data parallelism", "sharded": "with TP or a pipeline"}


def draw(facts: Facts, path: Path) -> None:
    """Plots ratios over sequence length and number of GPUs, with one marker per source and GPU."""
    figure, axes = drawing.pyplot().subplots(2, 1, figsize=(7.4, 6.2), layout="constrained")
    kinds = list(dict.fromkeys((row["source"], row["gpu"]) for row in facts["rows"]))
    for axis, field, words in zip(axes, ("seq", "gpus"), ("tokens per sequence", "GPUs"), strict=True):
        axis.axhspan(1 - LIMIT, 1 + LIMIT, color=drawing.LINE, linewidth=0)
        for number, kind in enumerate(kinds):
            rows = [row for row in facts["rows"] if (row["source"], row["gpu"]) == kind]
            ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
            places = [row[field] * (1 + 0.03 * number) for row in rows]
            axis.plot(
                places,
                ratios,
                "osD^vPX"[number % 7],
                color=drawing.SERIES[number % len(drawing.SERIES)],
                markersize=4.5,
                label=", ".join(kind),
            )
        ticks = list[int]()
        for place in sorted({row[field] for row in facts["rows"]}):
            if not ticks or place > 1.9 * ticks[-1]:  # closer labels would collide
                ticks.append(place)
        axis.set(xscale="log", xlabel=words)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(visible=True)
        axis.set_title("predicted / measured seconds")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    drawing.write(figure, path)
