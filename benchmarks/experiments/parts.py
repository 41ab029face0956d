"""Ablation from the dense model under megatron-sp to btp-sp, adding one optimization at a time, all in one run.

Also the time and memory of recomputation: conventional full-block, and low-rank, which needs no re-communication.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.experiments.contest import Ratio, in_words, ratio, rounds_words
from benchmarks.experiments.endtoend import Machine, cut_flags, size_flags
from benchmarks.experiments.side_by_side import TimingGroup, in_ms, run_groups, seconds_of, shape_of, spread_of
from boost.config import load
from boost.config.schema import DType
from boost.measure import drawing
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, facts_of, save_section

LADDER = "ladder"
"""Purpose of all groups of this experiment."""


@dataclass(frozen=True)
class AblationStep:
    """A configuration, and what it adds to the previous one."""

    name: str
    added: str
    """Description for the report."""
    parallel: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)
    family: str = "cola"


_BTP = {"layout": "btp", "norm": "online", "grouping": True}

LAYOUTS = (
    AblationStep("dense, megatron-sp", "the full-rank model, token-sharded", {"layout": "megatron-sp"}, family="dense"),
    AblationStep(
        "vanilla, published",
        "low-rank factors sharded along r; attention and gated product replicated, linears ungrouped",
        {"layout": "vanilla", "vanilla": "published", "grouping": False},
    ),
    AblationStep("vanilla, strong", "attention and gated product sharded, linears grouped", {"layout": "vanilla"}),
    AblationStep(
        "btp, sync, ungrouped",
        "sharded along d and f: collectives at the bottleneck",
        {**_BTP, "norm": "sync", "grouping": False},
    ),
    AblationStep(
        "btp, sync, grouped", "one GEMM and one collective each for q, k, v and for gate, up", {**_BTP, "norm": "sync"}
    ),
    AblationStep("btp, online", "RMSNorm's statistic all-reduced with the latents", _BTP),
    AblationStep(
        "btp-sp",
        "token-sharded residual stream: single-phase collectives, no norm across processes",
        {"layout": "btp-sp"},
    ),
)
"""Each step adds one optimization; 'vanilla, published' is the paper's form, so the next step fixes two things."""

COMPILED = AblationStep("btp-sp, compiled", "torch.compile of every block", {"layout": "btp-sp"}, {"compile": "blocks"})

RECOMPUTED = (
    AblationStep(
        "btp-sp, full-block",
        "full blocks recomputed, including collectives",
        {"layout": "btp-sp"},
        {"recompute": "full-block"},
    ),
    AblationStep(
        "btp-sp, low-rank",
        "only operations after the latents recomputed, without re-communication",
        {"layout": "btp-sp"},
        {"recompute": "low-rank"},
    ),
)


def ablation_steps(compiled: bool) -> tuple[AblationStep, ...]:
    """All steps of the ablation, in order."""
    return (*LAYOUTS, *((COMPILED,) if compiled else ()), *RECOMPUTED)


def ladder(
    machine: Machine, tp: int, dtype: DType, compiled: bool, overrides: Sequence[str], source: str, share: bool = False
) -> TimingGroup:
    """All ablation steps as one group. Raises ConfigError."""
    found = {}
    for ablation in ablation_steps(compiled):
        words = size_flags(machine.device, tp, dtype, ablation.family)
        words += cut_flags(ablation.parallel, tp)
        words += [f"--train.{key}={str(value).lower()}" for key, value in ablation.train.items()]
        found[ablation.name] = load(source, [*words, *overrides])
    return TimingGroup(f"{f'share of TP {tp}' if share else f'TP {tp}'}, {dtype}", LADDER, found, share)


def groups(
    machine: Machine,
    dtypes: Sequence[DType],
    shares: Sequence[int],
    compiled: bool,
    overrides: Sequence[str],
    source: str,
) -> list[TimingGroup]:
    """The ablation on all processes in each dtype, and single-rank emulation of other TP sizes in the first dtype.

    Raises ConfigError.
    """
    whole = [ladder(machine, machine.tp, dtype, compiled, overrides, source) for dtype in dtypes if machine.tp > 1]
    return whole + [ladder(machine, tp, dtypes[0], compiled, overrides, source, share=True) for tp in shares]


def parts(machine: Machine, found: Sequence[TimingGroup], rounds: int, out: Path) -> int:
    """Runs the experiment. Writes `out`.json, .md and the figures."""
    measured, left_out = run_groups(found, rounds, machine.hardware)
    if os.environ.get("RANK", "0") != "0":
        return 0
    config = next(iter(found[0].contenders.values()))
    added = {ablation.name: ablation.added for ablation in ablation_steps(compiled=True)}
    facts = facts_of("parts", config, rounds=rounds, groups=measured, left_out=left_out, added=added)
    save_section(out, facts, section(facts))
    print(out.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def section(facts: Facts) -> Section:
    """A table and a figure per group."""
    intro = (
        "Whole optimizer steps. Every row adds one optimization to the previous row; the rows of a table are interleaved: "
        f"{rounds_words(facts)}. Times are medians with quartiles. Ratios are medians of the ratio within a round, with "
        "95% bootstrap intervals; above 1, the row is faster. Recomputation trades time for memory. MB = 10^6 bytes."
    )
    left_out = [f"Not measured: {'; '.join(facts['left_out'])}."] if facts["left_out"] else []
    shown: list[Table | Figure] = []
    for number, group in enumerate(facts["groups"]):
        caption = f"{group['name']}: each bar runs from the previous step time to this one; whiskers are quartiles"
        shown += [
            Figure(f"parts{f'-{number}' if number else ''}", caption, _drawn(group)),
            _table(group, facts["added"]),
        ]
    return Section("Ablation: one optimization at a time", (intro, *shown, *left_out))


def goals(facts: Facts) -> list[Goal]:
    """None: the end-to-end experiment covers these goals."""
    return []


def before_each(group: Facts) -> list[tuple[str, Ratio, Ratio]]:
    """(name, speed-up over the previous step, speed-up over the first step) of every ablation step."""
    found = [(row["name"], seconds_of(group, row["name"])) for row in group["rows"]]
    before = [found[0], *found]
    return [
        (name, ratio(earlier, taken), ratio(found[0][1], taken))
        for (_, earlier), (name, taken) in zip(before, found, strict=False)
    ]


def _table(group: Facts, added: dict[str, str]) -> Table:
    share = group["share"]
    rows = []
    for row, (name, to_before, to_first) in zip(group["rows"], before_each(group), strict=True):
        modeled = [f"{1e3 * group['waits_s'][name]:.1f}"] if share else []
        cells = [name, added[name], in_ms(spread_of(group, name)), *modeled]
        cells += ["", ""] if row is group["rows"][0] else [in_words(to_before), in_words(to_first)]
        rows.append((*cells, f"{row['sent_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / 1e6:.1f}"))
    headings = ["configuration", "what it adds", f"step ms, {'computation measured' if share else 'measured'}:"]
    headings += ["collectives ms, modeled:"] if share else []
    headings += ["speed-up over previous:", "speed-up over first:", "sent MB, counted:", "peak MB, measured:"]
    priced = f" Collective times modeled with {group['priced_by']}." if share else ""
    return Table(f"{group['name']}: {shape_of(group)}, on {group['device']}.{priced}", tuple(headings), tuple(rows))


def _drawn(group: Facts) -> Callable[[Path], None]:
    """Returns a function that draws a waterfall chart of step time, with peak memory next to it."""

    def draw(path: Path) -> None:
        pyplot = drawing.pyplot()

        labels = [row["name"] for row in group["rows"]]
        spreads = [spread_of(group, name) for name in labels]
        middle = [1e3 * each.median for each in spreads]
        figure, (axis, memory) = pyplot.subplots(
            1, 2, figsize=(7.4, 1.0 + 0.32 * len(labels)), sharey=True, layout="constrained",
            gridspec_kw={"width_ratios": [2.4, 1]},
        )  # fmt: skip
        faster, slower, first = drawing.SERIES[0], drawing.SERIES[1], drawing.PEER
        axis.barh(0, middle[0], 0.7, color=first)
        for y in range(1, len(middle)):
            change = middle[y] - middle[y - 1]
            axis.barh(y, change, 0.7, left=middle[y - 1], color=faster if change < 0 else slower)
            axis.plot([middle[y - 1]] * 2, [y - 1, y + 0.35], color=drawing.MUTED, linewidth=0.7)
        error = [
            [1e3 * (s.median - s.low) for s in spreads],
            [1e3 * (s.high - s.median) for s in spreads],
        ]
        axis.errorbar(middle, range(len(middle)), xerr=error, fmt="none", ecolor=drawing.INK, elinewidth=1)
        ends = [max(1e3 * s.high, middle[max(y - 1, 0)]) for y, s in enumerate(spreads)]
        for y, value in enumerate(middle):
            axis.annotate(f"{middle[0] / value:.2f}x", (ends[y], y), (6, 0), textcoords="offset points", va="center")
        axis.set_yticks(range(len(labels)), labels)
        axis.set(title="ms per step, speed-up over the first", xlim=(0, 1.16 * max(ends)))
        axis.invert_yaxis()
        peaks = [row["peak_bytes"] / 1e6 for row in group["rows"]]
        memory.barh(range(len(labels)), peaks, 0.7, color=drawing.PEER)
        for y, peak in enumerate(peaks):
            memory.annotate(f"{peak:,.0f}", (peak, y), (4, 0), textcoords="offset points", va="center")
        memory.set(title="peak MB", xlim=(0, 1.3 * max(peaks)))
        for each in (axis, memory):
            drawing.tidy(each)
            each.grid(visible=False, axis="y")
        drawing.write(figure, path)

    return draw
