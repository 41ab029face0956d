"""Report of the public record: errors by source, GPU, stack and size, the intervals, and every row."""

import operator
from collections.abc import Callable
from pathlib import Path

from benchmarks.experiments.record import TAIL, errors, gpu_kind, independent, inside, limits, unseen
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table
from boost import drawing

LIMIT, BIAS_LIMIT, LEAST_GROUP, COVERED = 0.12, 0.08, 10, 0.75
"""Limits for software to which nothing was fitted: mean absolute error, bias of a kind of GPU with at least LEAST_GROUP rows, and
fraction of rows inside the interval from the other sources."""


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


MESHES = {"replicas": "data parallelism", "sharded": "with TP or a pipeline"}


def goals(facts: Facts) -> list[Goal]:
    """The goals, for software to which nothing was fitted."""
    rows, found = independent(facts), unseen(facts)
    where = "sources to which nothing was fitted, each left out in turn, with equal weights"
    biased = [
        f"{name} {of_group.bias:+.0%}"
        for name in dict.fromkeys(map(gpu_kind, rows))
        if abs((of_group := errors(row for row in rows if gpu_kind(row) == name)).bias) > BIAS_LIMIT
        and of_group.count >= LEAST_GROUP
    ]
    return [
        Goal(
            "performance model: software never seen",
            f"MAPE <= {LIMIT:.0%}, no kind of GPU with a bias over {BIAS_LIMIT:.0%}",
            where,
            "; ".join(f"{MESHES[kind]} {of.mape:.1%}, bias {of.bias:+.1%}" for kind, of in found.items()),
            all(of.mape <= LIMIT for of in found.values()) and not biased,
            "modeled",
            f"beyond their limit: {', '.join(biased)}" if biased else "",
        ),
        Goal(
            "performance model: its interval",
            f"covers {COVERED:.0%}",
            where,
            "; ".join(f"{MESHES[kind]} {of.inside:.0%}" for kind, of in found.items()),
            all(of.inside >= COVERED for of in found.values()),
            "modeled",
        ),
    ]


def section(facts: Facts) -> Section:
    """Builds the report: the table of errors by group, the figure, and every row."""
    lead = (
        f"Predictions by the performance model of `boost plan` are compared with {len(facts['rows'])} published training speeds. "
        "A prediction uses no number of a software stack that is fitted to the row's own source. Profiles took numbers from some "
        "sources; the errors for software never seen, and all intervals, come from the other sources. Nothing was run for this "
        "report."
    )
    sources = tuple(
        (name, each["title"], each["url"], each["fitted"], each["note"]) for name, each in facts["sources"].items()
    )
    run = ("source", "model", "GPU", "GPUs:", "TP x PP", "tokens:", "stack", "recomputed")
    headings = (*run, "measured s:", "left out, predicted s:", "ratio:")
    return Section(
        "The performance model against the public record",
        (
            lead,
            unseen_table(facts),
            error_table(facts),
            interval_table(facts),
            Figure(
                "record", "Predicted over measured seconds (modeled over published)", lambda path: draw(facts, path)
            ),
            Table("Sources.", ("source", "title", "URL", "fitted to it", "interpretation"), sources),
            Table("Every row (modeled and published).", headings, tuple(map(_row, facts["rows"]))),
        ),
    )


def _row(row: Facts) -> tuple[str, ...]:
    run = (row["source"], row["model"], row["gpu"], str(row["gpus"]), f"{row['tp']} x {row['pp']}", f"{row['seq']:,}")
    measured, predicted = row["measured_s"], row["predicted_s"]
    return (*run, row["stack"], row["recompute"], f"{measured:.2f}", f"{predicted:.2f}", f"{predicted / measured:.2f}")


def unseen_table(facts: Facts) -> Table:
    """Errors for software to which nothing was fitted."""
    rows = [
        (MESHES[kind], f"{of.sources}", f"{of.rows}", f"{of.mape:.1%}", f"{of.bias:+.1%}", f"{of.inside:.0%}")
        for kind, of in unseen(facts).items()
    ]
    title = "Software never seen: sources from which no number was taken, each left out in turn, with equal weights (modeled)."
    return Table(title, ("mesh", "sources:", "rows:", "MAPE:", "bias:", "inside:"), tuple(rows))


def error_table(facts: Facts) -> Table:
    """Errors and rows inside the interval with sources left out, by group."""
    rows, within = [], dict(zip(map(id, facts["rows"]), inside(facts), strict=True))
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
    """The intervals that `boost plan` prints."""
    found = limits(independent(facts))
    rows = [(MESHES[kind], f"{found[kind][0]:.3f}", f"{found[kind][1]:.3f}") for kind in MESHES]
    title = f"Measured over predicted seconds: {1 - 2 * TAIL:.0%} are between low and high; sources weigh the same (modeled)."
    return Table(title, ("mesh", "low:", "high:"), tuple(rows))


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
