"""The ladder: from the published low-rank baseline to the fastest layout, one change at a time, on share-matched and slow wires.

Measures nothing: it reads the main set of the wire experiment, in which all steps of the ladder are interleaved.
"""

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS, add_out
from benchmarks.experiments.colors import PEER
from benchmarks.experiments.contest import Ratio, in_words, ratio, spread, verdict_words
from benchmarks.experiments.results import Facts, Figure, Section, Table, read
from benchmarks.experiments.sections import save
from benchmarks.experiments.side_by_side import in_ms, shape_of
from benchmarks.experiments.steps import BTP, BTP_SP, BTP_SYNC, PUBLISHED, VANILLA
from benchmarks.experiments.wire_plan import (
    BTP_CP,
    BTP_UNGROUPED,
    COMPILED,
    MARKED,
    groups_of,
    launches_of,
    name_of,
    on_wire,
    seconds_of,
    wires,
)
from boost.drawing import INK, SERIES, pyplot, write
from boost.errors import ConfigError


@dataclass(frozen=True)
class LadderStep:
    """A contender and what it changes."""

    name: str
    before: str
    """The contender to compare it with, or '' for the first one."""
    change: str
    branch: bool = False
    """Whether the next step builds on an earlier one instead of this one."""


BTP_HALVES, BTP_SP_HALVES, BTP_CP_HALVES = (name_of(form, "halves") for form in (BTP, BTP_SP, BTP_CP))

LADDER = (
    LadderStep(PUBLISHED, "", "low-rank factors sharded along r; attention and gated product replicated"),
    LadderStep(VANILLA, PUBLISHED, "attention and gated product sharded"),
    LadderStep(
        BTP_UNGROUPED,
        VANILLA,
        "sharded along d and f: collectives at the bottleneck; RMSNorm's statistic alone; ungrouped",
    ),
    LadderStep(BTP_SYNC, BTP_UNGROUPED, "one GEMM and one collective each for q, k, v and for gate, up"),
    LadderStep(BTP, BTP_SYNC, "RMSNorm's statistic sent with the latents"),
    LadderStep(BTP_HALVES, BTP, "one half of a micro-batch computes while the other communicates", branch=True),
    LadderStep(BTP_CP, BTP, "tokens sharded, MLP local: collectives around attention only", branch=True),
    LadderStep(BTP_CP_HALVES, BTP_CP, "one half of a micro-batch computes while the other communicates", branch=True),
    LadderStep(BTP_SP, BTP, "residual stream sharded along tokens: collectives of one phase, no norm across processes"),
    LadderStep(BTP_SP_HALVES, BTP_SP, "one half of a micro-batch computes while the other communicates"),
    LadderStep(COMPILED.name, BTP_SP_HALVES, "element-wise work in one kernel per function (torch.compile)"),
)
"""Steps in table order. Each changes one thing, except the one from `vanilla` to `btp`, which also ungroups."""


def arguments(parser: argparse.ArgumentParser, name: str = "ladder") -> None:
    words = "result of 'wire --set main' (default benchmarks/results/wire.json)"
    parser.add_argument("--wire", type=Path, default=RESULTS / "wire.json", metavar="PATH", help=words)
    add_out(parser, name)


def run(args: argparse.Namespace) -> int:
    wire = read(args.wire, "wire")
    if wire["set"] != "main":
        raise ConfigError(f"--wire = '{args.wire}' is from the set '{wire['set']}'; use the result of --set main")
    save(args.out, facts_from(wire))
    return 0


def facts_from(wire: Facts) -> Facts:
    """The ladder's numbers and environment, taken from the main set."""
    (group,) = groups_of(wire)
    marked = [each for each in MARKED if on_wire(wire, group, each)]
    return {
        "experiment": "ladder",
        "environment": wire["environment"],
        "config": wire["config"],
        "rounds": wire["rounds"],
        "shape": shape_of(launches_of(wire, group)[0]),
        "wires": {each: wires(wire, group)[each] for each in marked},
        "steps": [
            {**asdict(step), "seconds": {each: seconds_of(wire, group, each, step.name) for each in marked}}
            for step in LADDER
        ],
    }


def ratios(facts: Facts, wire: str) -> list[tuple[Facts, Ratio | None, Ratio | None]]:
    """(step, speed-up over the previous step, speed-up over the first step) on one wire; None for the first step."""
    seconds = {step["name"]: step["seconds"][wire] for step in facts["steps"]}
    first = next(iter(seconds.values()))
    return [
        (step, ratio(seconds[step["before"]], own), ratio(first, own)) if step["before"] else (step, None, None)
        for step in facts["steps"]
        for own in [step["seconds"][wire]]
    ]


FASTER, SLOWER = SERIES[:2]


def section(facts: Facts) -> Section:
    """A figure, and a table for each wire."""
    lead = (
        f"Whole training steps from the main set of the wire experiment ({facts['shape']}). Each step of the ladder changes one "
        "thing, except the one from `vanilla` to `btp`, which also ungroups. All are interleaved in the same launches; ratios pair "
        "the same rounds, and 95% intervals resample launches, then rounds. Above 1, a step is faster than the one before."
    )
    caption = (
        "Step time, starting from the published baseline (measured). Every bar starts at the median of the step that it is "
        "compared with and ends at its own median; whiskers are quartiles. Hatched steps are alternatives on which the next step "
        "does not build."
    )
    return Section(
        "The ladder: one change at a time",
        (
            lead,
            Figure("ladder", caption, partial(_draw, facts)),
            *(_table(facts, wire) for wire in facts["wires"]),
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
        axis.grid(visible=True)
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
