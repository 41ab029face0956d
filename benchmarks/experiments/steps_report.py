"""Report of the end-to-end experiment: step times, speed-ups next to the paper's, and the goals."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.experiments import colors, published
from benchmarks.experiments.contest import Ratio, in_words, rounds_words, spread
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table
from benchmarks.experiments.side_by_side import in_ms, names, shape_of, spread_of, times
from benchmarks.experiments.steps import (
    BOUND,
    BTP,
    BTP_SP,
    FAMILIES,
    MEGATRON,
    MEGATRON_SP,
    PUBLISHED,
    SHARES,
    VANILLA,
    WEAK_SCALING,
)
from boost import drawing

BYTES = 0.50
"""Goal: maximum ratio of btp-sp bytes to btp bytes."""

LEAST_WIDTH = 1024
"""Minimum d for the bytes goal."""


def section(facts: Facts) -> Section:
    """All tables and figures."""
    intro = (
        "Whole optimizer steps (forward, backward, gradient reduction, clipping, AdamW) on random tokens. Contenders are "
        f"timed in {rounds_words(facts)}. Times are medians with quartiles. Ratios are medians of per-round ratios, with 95% "
        "bootstrap intervals; above 1, the row's contender is faster. Bytes sent by one process are counted at the dispatcher. "
        "Peak memory counts tensors, without allocator rounding. 1 MB is 10^6 bytes. Models have fewer blocks and proportionally "
        "smaller vocabularies than the paper's. The paper's steps have 16,384 tokens; with fewer, communication that happens once "
        "per step weighs more. Under btp-sp, this is the gradient all-reduce of the outer factors, the difference between the two "
        "byte columns."
    )
    left_out = [f"Not measured: {'; '.join(facts['left_out'])}."] if facts["left_out"] else []
    figures = (
        Figure("steps", "Step time by contender; whiskers are quartiles, hatched parts modeled", partial(_bars, facts)),
        Figure(
            "steps-speedups", "Speed-ups next to the paper's; whiskers are 95% intervals", partial(_speedups, facts)
        ),
    )
    return Section(
        "End-to-end step time",
        (
            intro,
            figures[0],
            *map(_group_table, facts["groups"]),
            figures[1],
            _speedup_table(facts),
            *map(_family_table, _of(facts, FAMILIES)),
            *left_out,
        ),
    )


def goals(facts: Facts) -> list[Goal]:
    """The performance goals that this experiment decides."""
    cut = [group for group in _of(facts, WEAK_SCALING) if group["tp"] > 1]
    wide = [group for group in cut if _row(group, BTP)["config"]["model"]["dim"] >= LEAST_WIDTH and group["tp"] == 2]
    found = [_bytes_goal(group) for group in wide if group["dtype"] == "bfloat16"]
    both = [*cut, *_of(facts, BOUND)]
    if both:
        found.append(_never_slower(both))
    return found


def _bytes_goal(group: Facts) -> Goal:
    ours, theirs = _row(group, BTP_SP), _row(group, BTP)
    inside, whole = (ours[key] / theirs[key] for key in ("sent_in_blocks", "sent_bytes"))
    remark = f"blocks only; {whole:.2f} x for a whole step, including embedding, head and gradient all-reduces"
    found = f"{inside:.3f} x"
    return Goal(
        "btp-sp against btp, bytes", f"{BYTES:.2f}x", shape_of(group), found, inside <= BYTES, "counted", remark
    )


def _never_slower(groups: Sequence[Facts]) -> Goal:
    found = [(times(group, BTP, BTP_SP), group) for group in groups]
    value, worst = min(found, key=lambda each: each[0].value)
    met = all(each.low >= 1 for each, _ in found)
    where = f"worst of {len(groups)} groups: {worst['name']}; {shape_of(worst)}"
    shown = f"{in_words(value)} x"
    return Goal("btp-sp against btp, time", "never slower", where, shown, met, ratio=value, least=1.0)


def best(group: Facts) -> str:
    """btp or btp-sp, whichever has the shorter median step."""
    return min((BTP, BTP_SP), key=lambda name: spread_of(group, name).median)


def _of(facts: Facts, *purposes: str) -> list[Facts]:
    return [group for group in facts["groups"] if group["purpose"] in purposes]


def _row(group: Facts, name: str) -> Facts:
    row: Facts = next(row for row in group["rows"] if row["name"] == name)
    return row


def _group_table(group: Facts) -> Table:
    has = names(group)
    bases = [
        name
        for name in (
            VANILLA,
            MEGATRON_SP,
            "dense",
            f"cola: {PUBLISHED}",
            MEGATRON if group["purpose"] == FAMILIES else "",
        )
        if name in has
    ]
    shared = ["computed ms, measured:", "collectives ms, modeled:"] if group["share"] else []
    headings = ["contender", "parameters, M:", *shared, f"step ms{', total' if shared else ', measured'}:", "tokens/s:"]
    headings += [f"against {base}:" for base in bases]
    headings += ["sent MB, counted:", "sent in blocks:", "peak MB, measured:"]
    priced = f" Collective times are modeled with {group['priced_by']}." if group["share"] else ""
    skipped = "".join(f" {name} was skipped: {why}." for name, why in group["skipped"].items())
    caption = f"{group['name']}: {shape_of(group)}, on {group['device']}.{priced}{skipped}"
    return Table(caption, tuple(headings), tuple(_cells(group, row, bases) for row in group["rows"]))


def _cells(group: Facts, row: Facts, bases: Sequence[str]) -> tuple[str, ...]:
    name, taken = row["name"], spread_of(group, row["name"])
    cells = [name, f"{row['parameters'] / 1e6:.1f}" if "parameters" in row else ""]
    if group["share"]:
        cells += [f"{1e3 * spread(row['seconds']).median:.0f}", f"{1e3 * group['waits_s'][name]:.1f}"]
    cells += [in_ms(taken), f"{group['tokens'] / taken.median:,.0f}"]
    cells += ["1" if base == name else in_words(times(group, base, name)) for base in bases]
    keys = ("sent_bytes", "sent_in_blocks", "peak_bytes")
    return *cells, *(f"{row[key] / 1e6:.1f}" if key in row else "" for key in keys)


def _paper(tp: int) -> published.PublishedRow | None:
    return next((row for row in published.STEPS if (row.tp, row.pp) == (tp, 1)), None)


def _pairs(group: Facts) -> Iterator[tuple[str, Ratio, float | None]]:
    """Yields (comparison, our ratio, the paper's ratio) for one group."""
    paper, has = _paper(group["tp"]), names(group)
    theirs = {way: paper.seconds[way] / paper.seconds["BOOST"] for way in published.WAYS} if paper else {}
    if group["tp"] == 1:
        yield "cola against dense", times(group, "dense", "cola"), theirs.get("full-rank")
        return
    first = best(group)
    for words, over, under, paper_ratio in (
        (f"{BTP} against {PUBLISHED}", PUBLISHED, BTP, theirs.get("vanilla")),
        (f"{BTP} against {MEGATRON}", MEGATRON, BTP, theirs.get("full-rank")),
        (f"{first} (best) against {VANILLA} (strong)", VANILLA, first, None),
        (f"{first} (best) against {MEGATRON_SP}", MEGATRON_SP, first, None),
        (f"{BTP_SP} against {BTP}", BTP, BTP_SP, None),
        *((f"{first} (best) against {peer}", peer, first, None) for peer in _peers(group)),
    ):
        if over in has and under in has:
            yield words, times(group, over, under), paper_ratio


def _peers(group: Facts) -> list[str]:
    return [row["name"] for row in group["rows"] if row.get("peer")]


def _compared(facts: Facts) -> list[tuple[Facts, str, Ratio, float | None]]:
    groups = _of(facts, WEAK_SCALING, BOUND, SHARES)
    return [(group, *pair) for group in groups for pair in _pairs(group)]


def _speedup_table(facts: Facts) -> Table:
    rows = []
    for group, words, found, paper_ratio in _compared(facts):
        paper = _paper(group["tp"])
        size = f" ({paper.size}, TP {paper.tp})" if paper and paper_ratio else ""
        kind = "computation measured, collectives modeled" if group["share"] else "measured"
        rows.append((group["name"], words, in_words(found), kind, f"{paper_ratio:.2f}{size}" if paper_ratio else ""))
    caption = (
        "Speed-ups next to the paper's. The paper's are on A100 GPUs (batch 4, 4096 tokens, bf16) over its own full-rank and "
        "vanilla baselines. Ours are over the same baselines and over the strongest form of each."
    )
    return Table(caption, ("group", "what", "ours, times:", "kind", "paper, times:"), tuple(rows))


def _family_table(group: Facts) -> Table:
    full = next(row for row in published.STEPS if row.size == "7B").seconds["full-rank"]
    rows = []
    for family, (boost, vanilla) in published.FAMILIES.items():
        ours = f"{family}: {BTP}"
        pairs = ((f"{family}: {PUBLISHED}", vanilla / boost), (MEGATRON, full / boost))
        rows.append(
            (
                family,
                *(x for over, paper_ratio in pairs for x in (in_words(times(group, over, ours)), f"{paper_ratio:.2f}")),
            )
        )
    headings = ("family", "btp against vanilla, published:", "paper:", "against megatron:", "paper :")
    caption = f"By architecture, measured: {shape_of(group)}. The paper's numbers are for its 7B at TP 4 on A100s."
    return Table(caption, headings, tuple(rows))


def _bars(facts: Facts, path: Path) -> None:
    """Draws one panel per group with one bar per contender."""
    groups = facts["groups"]
    heights = [0.75 + 0.23 * len(group["rows"]) for group in groups]
    figure, axes = drawing.pyplot().subplots(
        len(groups), 1, figsize=(7.4, sum(heights)), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, group in zip(axes[:, 0], groups, strict=True):
        found, peers = names(group), _peers(group)
        spreads = [spread_of(group, name) for name in found]
        waits = [1e3 * group.get("waits_s", {}).get(name, 0.0) for name in found]
        middle = [1e3 * each.median for each in spreads]
        high = [1e3 * each.high for each in spreads]
        error = [[1e3 * (s.median - s.low) for s in spreads], [1e3 * (s.high - s.median) for s in spreads]]
        hues = [colors.PEER if name in peers else colors.color_of(name, number) for number, name in enumerate(found)]
        measured = [whole - wait for whole, wait in zip(middle, waits, strict=True)]
        axis.barh(found, measured, 0.7, color=hues)
        if any(waits):
            axis.barh(found, waits, 0.7, left=measured, color="white", edgecolor=hues, hatch="////", linewidth=0.8)
        axis.errorbar(middle, found, xerr=error, fmt="none", ecolor=drawing.INK, elinewidth=1)
        for place, value in enumerate(middle):
            axis.annotate(f"{value:,.0f}", (high[place], place), (5, 0), textcoords="offset points", va="center")
        axis.invert_yaxis()
        axis.set(title=f"{group['name']}, ms per step", xlim=(0, 1.08 * max(high)))
        axis.grid(visible=True, axis="x")
    drawing.write(figure, path)


def _speedups(facts: Facts, path: Path) -> None:
    """Draws one row per ratio below the name of its group, with the paper's ratio if available."""
    labels, shown, last = list[str](), list[tuple[int, Ratio, float | None]](), None
    for group, words, found, paper_ratio in _compared(facts):
        if group["name"] != last:
            labels += [""] * bool(labels) + [group["name"]]
            last = group["name"]
        shown.append((len(labels), found, paper_ratio))
        labels.append(words)
    titles = [n for n, label in enumerate(labels) if label and n not in {y for y, _, _ in shown}]
    figure, axis = drawing.pyplot().subplots(figsize=(7.4, 0.7 + 0.2 * len(labels)), layout="constrained")
    for number, (y, found, _) in enumerate(shown):
        axis.errorbar(
            found.value, y, xerr=[[max(found.value - found.low, 0)], [max(found.high - found.value, 0)]], fmt="o",
            color=drawing.SERIES[0], markersize=4.5, elinewidth=1.4, label=None if number else "ours, 95% interval",
        )  # fmt: skip
    papers = [(paper_ratio, y) for y, _, paper_ratio in shown if paper_ratio]
    if papers:
        axis.plot(*zip(*papers, strict=True), "D", markerfacecolor="none", color=drawing.SERIES[1], label="paper")
    axis.axvline(1, color=drawing.MUTED, linewidth=1)
    axis.set_yticks(range(len(labels)), labels)
    for n in titles:
        axis.get_yticklabels()[n].set_fontweight("bold")
    axis.set(xlabel="speed-up; right of 1, ours is faster", xlim=(0, None), ylim=(len(labels) - 0.4, -0.6))
    axis.grid(visible=True, axis="x")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    drawing.write(figure, path)
