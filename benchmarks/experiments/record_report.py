"""Report of the public record: errors by source, GPU, stack and size, the intervals, and every row."""

import operator
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.experiments.record import HELD, errors, held_by_interval, mesh_kind, spreads
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table
from boost import drawing
from boost.plan.step_time import SHARE

LIMIT, BIAS_LIMIT, LEAST_GROUP = 0.10, 0.08, 10
"""Limits for the held-out half: mean absolute error, bias of a group, and minimum size of a group in rows."""


def _tokens(row: Facts) -> str:
    return next((f"up to {most:,}" for most in (2048, 4096, 8192) if row["seq"] <= most), "longer")


def _gpus(row: Facts) -> str:
    return next((f"up to {most}" for most in (8, 64, 512) if row["gpus"] <= most), "more")


SIZES = {"tokens per sequence": "seq", "GPUs": "gpus"}
"""Groups that are ranges of a number, and its field."""

GROUPS: dict[str, Callable[[Facts], str]] = {
    "source": lambda row: str(row["source"]),
    "GPU": lambda row: str(row["gpu"]),
    "stack": lambda row: str(row["stack"]),
    "tokens per sequence": _tokens,
    "GPUs": _gpus,
}


def goals(facts: Facts) -> list[Goal]:
    """The goals for the held-out half."""
    held = [row for row in facts["rows"] if row["half"] == HELD]
    found, inside = errors(held), held_by_interval(facts)
    where = f"{len(held)} rows of {len(facts['rows'])}, held out (seed {facts['seed']})"
    biased = [
        f"{by} {name} {of_group.bias:+.0%}"
        for by, key in GROUPS.items()
        for name in dict.fromkeys(map(key, held))
        if abs((of_group := errors(row for row in held if key(row) == name)).bias) > BIAS_LIMIT
        and of_group.count >= LEAST_GROUP
    ]
    return [
        Goal(
            "performance model: the public record",
            f"MAPE <= {LIMIT:.0%}, no group of {LEAST_GROUP} with a bias over {BIAS_LIMIT:.0%}",
            where,
            f"MAPE {found.mape:.1%}, bias {found.bias:+.1%}",
            found.mape <= LIMIT and not biased,
            "modeled",
            f"beyond their limit: {', '.join(biased)}" if biased else "",
        ),
        Goal(
            "performance model: its interval",
            f"covers {SHARE:.0%}",
            where,
            f"{sum(inside)} of {len(inside)} ({sum(inside) / len(inside):.0%})",
            sum(inside) >= SHARE * len(inside),
            "modeled",
        ),
    ]


def section(facts: Facts) -> Section:
    """Builds the report: the table of errors by group, the figure, and every row."""
    lead = (
        f"{len(facts['rows'])} training speeds published by others, predicted by the performance model of `boost plan` with the "
        f"speeds of the software that they ran on. Those are fitted to half of the rows (seed {facts['seed']}); the other half "
        "is the result. Nothing was run for this report."
    )
    sources = tuple((name, each["title"], each["url"], each["note"]) for name, each in facts["sources"].items())
    run = ("source", "model", "GPU", "GPUs:", "TP x PP", "tokens:", "stack", "recomputed", "half")
    headings = (*run, "measured s:", "predicted s:", "ratio:")
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
    ratio = row["predicted_s"] / row["measured_s"]
    run = (row["source"], row["model"], row["gpu"], str(row["gpus"]), f"{row['tp']} x {row['pp']}", f"{row['seq']:,}")
    times = (f"{row['measured_s']:.2f}", f"{row['predicted_s']:.2f}", f"{ratio:.2f}")
    return (*run, row["stack"], row["recompute"], row["half"], *times)


def error_table(facts: Facts) -> Table:
    """Errors of the held-out half and of all rows, by group."""
    rows = []
    for by, key in {"all": lambda row: "", **GROUPS}.items():
        every = sorted(facts["rows"], key=operator.itemgetter(SIZES[by])) if by in SIZES else facts["rows"]
        for name in dict.fromkeys(map(key, every)):
            members = [row for row in every if key(row) == name]
            held = [row for row in members if row["half"] == HELD]
            rows.append((by, name, *_cells(held), *_cells(members)))
    headings = ("by", "", *(f"{half} {what}:" for half in (HELD, "all") for what in ("rows", "median", "MAPE", "bias")))
    return Table("Predicted over measured seconds (modeled).", headings, tuple(rows))


def interval_table(facts: Facts) -> Table:
    """The intervals, and how many held-out rows lie inside each."""
    rows = []
    kinds = [mesh_kind(row) for row in facts["rows"] if row["half"] == HELD]
    inside = held_by_interval(facts)
    for name, spread in spreads(facts).items():
        of_kind = [each for each, kind in zip(inside, kinds, strict=True) if kind == name]
        held = f"{sum(of_kind)} of {len(of_kind)}"
        rows.append((MESHES[name], f"{spread.rows}", f"{spread.low:.3f}", f"{spread.high:.3f}", held))
    headings = ("mesh", "fitted rows:", "low:", "high:", "held-out rows inside:")
    return Table(
        f"Measured over predicted seconds: {SHARE:.0%} of the fitted rows are between low and high (modeled).",
        headings,
        tuple(rows),
    )


MESHES = {
    "replicas": "data parallelism",
    "sharded": "with TP or a pipeline",
    "blocking": "with blocking pipeline sends",
}


def _cells(rows: Sequence[Facts]) -> tuple[str, ...]:
    if not rows:
        return ("0", "-", "-", "-")
    found = errors(rows)
    return str(found.count), f"{found.median:.2f}", f"{found.mape:.1%}", f"{found.bias:+.1%}"


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
