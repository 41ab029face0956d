"""`boost plan validate --record`: predictions beside the training speeds that others published.

Half of the rows, drawn by `SEED` for each source and GPU, serve to fit what a software stack reaches (`boost/plan/stacks.toml`);
the other half is the result. To score another planner: predict the seconds of a step of each held-out row of
`boost/plan/record.json` and take the mean of |predicted / measured - 1|.
"""

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from boost.config import load
from boost.measure import drawing
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, facts_of
from boost.plan.interval import SHARE, Spread, kind_of
from boost.plan.interval import spreads as shipped
from boost.plan.record import Row, record, score
from boost.plan.stack import stacks
from boost.train.console import progress

SEED = 20261123
LIMIT, BIAS_LIMIT, LEAST_GROUP = 0.10, 0.08, 10
"""Most mean absolute error of the held-out half; most bias of a group of at least so many rows."""

FITTED, HELD = "fitted", "held out"

RESULTS = Path("benchmarks/results/record")


def halves(rows: Sequence[Row]) -> list[str]:
    """FITTED or HELD of each row: half of each source and GPU."""
    found = [""] * len(rows)
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(f"{row.source} {row.gpu}", []).append(place)
    for name, members in groups.items():
        # A seed for each group: rows of new sources leave the halves of others as they are.
        random.Random(f"{SEED} {name}").shuffle(members)
        for number, place in enumerate(members):
            found[place] = HELD if number % 2 else FITTED
    return found


def compare(show: bool = False) -> Facts:
    """Every row with its prediction, as a result. `show`: a progress bar."""
    rows = record().rows
    each = []
    for scored, half in zip(progress(score(rows), "rows", enabled=show), halves(rows), strict=True):
        each.append(
            scored.row.model_dump()
            | {"stack": scored.stack, "half": half, "measured_s": scored.row.seconds, "predicted_s": scored.predicted_s}
            | ({"predicted_gib": scored.predicted_gib} if scored.predicted_gib is not None else {})
        )
    sources = {name: source.model_dump() for name, source in record().sources.items()}
    return facts_of("record", load(None), seed=SEED, sources=sources, rows=each)


@dataclass(frozen=True)
class Errors:
    """Of some rows."""

    count: int
    median: float
    """Of predicted over measured."""
    mape: float
    """Mean of |predicted / measured - 1|."""
    bias: float
    """Mean of predicted / measured - 1."""


def errors(rows: Iterable[Facts]) -> Errors:
    """Of at least one row."""
    ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
    off = [ratio - 1 for ratio in ratios]
    return Errors(len(ratios), statistics.median(ratios), statistics.fmean(map(abs, off)), statistics.fmean(off))


def holds(facts: Facts) -> bool:
    """Whether the held-out half is within its limits: error, bias of groups, interval."""
    return all(goal.met for goal in goals(facts))


def spreads(facts: Facts, half: str = FITTED) -> dict[str, Spread]:
    """Of the rows of a half: what `boost.plan.interval` ships."""
    found: dict[str, list[float]] = {}
    for row in facts["rows"]:
        if row["half"] == half:
            found.setdefault(_kind(row), []).append(row["measured_s"] / row["predicted_s"])
    return {kind: spread_of(ratios) for kind, ratios in found.items()}


def spread_of(ratios: Sequence[float]) -> Spread:
    """The deciles at both ends; of few ratios, the least and the most."""
    deciles = statistics.quantiles(ratios, n=10, method="exclusive")
    low, high = max(deciles[0], min(ratios)), min(deciles[-1], max(ratios))
    return Spread(low=round(low, 3), high=round(high, 3), rows=len(ratios))


def _kind(row: Facts) -> str:
    blocking = stacks()[row["stack"]].pipeline.blocking > 0
    return kind_of(row["tp"], row["pp"], blocking=blocking)


def held_by_interval(facts: Facts) -> list[bool]:
    """Whether the interval that is shipped holds each held-out row."""
    found = []
    for row in facts["rows"]:
        if row["half"] == HELD:
            spread = shipped()[_kind(row)]
            found.append(spread.low <= row["measured_s"] / row["predicted_s"] <= spread.high)
    return found


def _tokens(row: Facts) -> str:
    return next((f"up to {most:,}" for most in (2048, 4096, 8192) if row["seq"] <= most), "longer")


def _gpus(row: Facts) -> str:
    return next((f"up to {most}" for most in (8, 64, 512) if row["gpus"] <= most), "more")


GROUPS: dict[str, Callable[[Facts], str]] = {
    "source": lambda row: str(row["source"]),
    "GPU": lambda row: str(row["gpu"]),
    "stack": lambda row: str(row["stack"]),
    "tokens a sequence": _tokens,
    "GPUs": _gpus,
}


def goals(facts: Facts) -> list[Goal]:
    """Those of the held-out half."""
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
            f"holds {SHARE:.0%}",
            where,
            f"{sum(inside)} of {len(inside)} ({sum(inside) / len(inside):.0%})",
            sum(inside) >= SHARE * len(inside),
            "modeled",
        ),
    ]


def section(facts: Facts) -> Section:
    """The table of errors by group, the figure, and every row."""
    lead = (
        f"{len(facts['rows'])} training speeds that others published, predicted as `boost plan` would. What each software stack "
        f"reaches of the hardware is fitted to half of the rows (seed {facts['seed']}), the other half is the result. Nothing ran "
        "here."
    )
    sources = tuple((name, each["title"], each["url"], each["note"]) for name, each in facts["sources"].items())
    run = ("source", "model", "GPU", "GPUs:", "TP x PP", "tokens:", "stack", "recomputed", "half")
    headings = (*run, "measured s:", "predicted s:", "ratio:")
    return Section(
        "The performance model beside the public record",
        (
            lead,
            error_table(facts),
            interval_table(facts),
            Figure(
                "record", "Predicted over measured seconds (modeled over published)", lambda path: draw(facts, path)
            ),
            Table("Where it was published.", ("source", "what", "where", "how it is read"), sources),
            Table("Every row (modeled beside published).", headings, tuple(map(_row, facts["rows"]))),
        ),
    )


def _row(row: Facts) -> tuple[str, ...]:
    ratio = row["predicted_s"] / row["measured_s"]
    run = (row["source"], row["model"], row["gpu"], str(row["gpus"]), f"{row['tp']} x {row['pp']}", f"{row['seq']:,}")
    times = (f"{row['measured_s']:.2f}", f"{row['predicted_s']:.2f}", f"{ratio:.2f}")
    return (*run, row["stack"], row["recompute"], row["half"], *times)


def error_table(facts: Facts) -> Table:
    """Errors of the held-out half, and of all rows, by group."""
    rows = []
    for by, key in {"all": lambda row: "", **GROUPS}.items():
        for name in dict.fromkeys(map(key, facts["rows"])):
            members = [row for row in facts["rows"] if key(row) == name]
            held = [row for row in members if row["half"] == HELD]
            rows.append((by, name, *_cells(held), *_cells(members)))
    headings = ("by", "", *(f"{half} {what}:" for half in (HELD, "all") for what in ("rows", "median", "MAPE", "bias")))
    return Table("Predicted over measured seconds (modeled).", headings, tuple(rows))


def interval_table(facts: Facts) -> Table:
    """The intervals, and how many held-out rows each holds."""
    rows = []
    kinds = [_kind(row) for row in facts["rows"] if row["half"] == HELD]
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
    "blocking": "with a pipeline whose sends block",
}


def _cells(rows: Sequence[Facts]) -> tuple[str, ...]:
    if not rows:
        return ("0", "-", "-", "-")
    found = errors(rows)
    return str(found.count), f"{found.median:.2f}", f"{found.mape:.1%}", f"{found.bias:+.1%}"


def draw(facts: Facts, path: Path) -> None:
    """Ratios by length of a sequence and by number of GPUs, a marker for each source and GPU."""
    figure, axes = drawing.pyplot().subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    kinds = list(dict.fromkeys((row["source"], row["gpu"]) for row in facts["rows"]))
    for axis, field, words in zip(axes, ("seq", "gpus"), ("tokens a sequence", "GPUs"), strict=True):
        axis.axhspan(1 - LIMIT, 1 + LIMIT, color="0.9", linewidth=0)
        for number, kind in enumerate(kinds):
            rows = [row for row in facts["rows"] if (row["source"], row["gpu"]) == kind]
            ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
            places = [row[field] * (1 + 0.03 * number) for row in rows]
            axis.plot(places, ratios, "osD^vPX"[number % 7], color=f"C{number}", alpha=0.7, label=", ".join(kind))
        ticks = sorted({row[field] for row in facts["rows"]})
        axis.set(xscale="log", xlabel=words)
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
        axis.minorticks_off()
        drawing.tidy(axis)
    axes[0].set_ylabel("predicted / measured")
    axes[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.write(figure, path)
