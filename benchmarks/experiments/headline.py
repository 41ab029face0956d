"""The report's first screen: a figure, four numbers, and what is measured and modeled. All of it comes from result files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments import colors, record
from benchmarks.experiments.contest import Spread, pooled, spread
from benchmarks.experiments.results import Facts, Goal, machine
from benchmarks.experiments.steps import BTP, BTP_SP, MEGATRON_SP, PUBLISHED, VANILLA
from benchmarks.experiments.wire_plan import faster, groups_of
from boost import drawing

NOT_MEASURED = "not measured"

SPEEDS = (
    (PUBLISHED, "the speed of vanilla, as published", "2.27x"),
    (MEGATRON_SP, "the speed of full rank (megatron-sp)", "1.91x"),
)
"""(baseline, meaning of its number, the paper's best). README.md and docs/results.md have the same pair."""

SLOW = (
    "slow wire: best low-rank layout against strong vanilla",
    "the speed of strong vanilla",
    "slow wire, the baseline overlapped too",
)
"""(goal, meaning of its number, its conditions)."""

LINES = (
    (VANILLA + ", published", "vanilla, published", (PUBLISHED,)),
    (VANILLA, "vanilla, strong", (VANILLA,)),
    (MEGATRON_SP, "full rank", (MEGATRON_SP,)),
    (BTP, "btp", (BTP,)),
    (BTP_SP, "btp-sp", (BTP_SP,)),
)
"""(name that sets the color, label, contenders) of every line. Only the fastest overlap variant is drawn."""

FREE = 3.0
"""The unlimited wire is drawn at this multiple of the fastest rate."""


@dataclass(frozen=True)
class Headline:
    """A number on the first screen."""

    value: str
    interval: str
    what: str
    where: str
    kind: str
    """measured, counted or modeled, or '' if there is no result."""
    id: str
    """The experiment that produced it."""


def numbers(results: Sequence[tuple[Facts, Sequence[Goal]]]) -> list[Headline]:
    """The four numbers, from (facts, goals) of every result."""
    wire = wire_of([facts for facts, _ in results])
    return [*(_speed(wire, *each) for each in SPEEDS), _ratio(results, *SLOW), _bytes(results)]


def _speed(wire: Facts | None, baseline: str, words: str, paper: str) -> Headline:
    """The speed of btp relative to a baseline, neither overlapped, as in the paper."""
    if wire is None:
        return Headline(NOT_MEASURED, "", words, "", "", "wire")
    found = faster(wire, groups_of(wire)[0], "share-matched", BTP, baseline)
    where = f"{BTP}; share-matched wire, neither side overlapped; the paper's best: {paper}"
    return Headline(f"{found.value:.2f}x", f"{found.low:.2f} to {found.high:.2f}", words, where, "measured", "wire")


def _goal(results: Sequence[tuple[Facts, Sequence[Goal]]], what: str) -> tuple[Facts, Goal] | None:
    """The first result that decides a goal."""
    decided = (
        (facts, goal) for facts, goals in results for goal in goals if goal.what == what and goal.met is not None
    )
    return next(decided, None)


def _ratio(results: Sequence[tuple[Facts, Sequence[Goal]]], name: str, words: str, conditions: str) -> Headline:
    found = _goal(results, name)
    if found is None or (ratio := found[1].ratio) is None:
        return Headline(NOT_MEASURED, "", words, "", "", "wire")
    shown = f"{ratio.low:.2f} to {ratio.high:.2f}"
    form = re.search(r"\(([^()]*[a-z][^()]*)\)$", found[1].found)
    where = f"{form[1].replace(', halves', ', overlapped')}; {conditions}" if form else conditions
    return Headline(f"{ratio.value:.2f}x", shown, words, where, found[1].kind, found[0]["experiment"])


def _bytes(results: Sequence[tuple[Facts, Sequence[Goal]]]) -> Headline:
    words, found = "bytes sent by btp-sp, relative to btp", _goal(results, "btp-sp against btp, bytes")
    parts = re.match(r"[\d.]+", found[1].found) if found else None
    if found is None or parts is None:
        return Headline(NOT_MEASURED, "", words, "", "", "steps")
    where = f"inside blocks, {found[1].where.partition(',')[0]}"
    return Headline(f"{float(parts[0]):.2f}x", "exact", words, where, found[1].kind, "steps")


def wire_of(results: Sequence[Facts]) -> Facts | None:
    """The result that the figure shows: the first from the wire's main set that includes the published baseline."""
    for facts in results:
        whole = facts["experiment"] == "wire" and facts["set"] == "main"
        if whole and any(row["name"] == PUBLISHED for row in facts["groups"][0]["rows"]):
            return facts
    return None


def measured_words(results: Sequence[Facts]) -> str:
    """Where the numbers of the first screen were measured."""
    facts = wire_of(results) or (results[0] if results else None)
    if facts is None:
        return NOT_MEASURED
    where = machine(facts["environment"])
    gloo = ", gloo over a rate-limited wire" if facts["experiment"] == "wire" else ""
    return f"whole training steps on {where}{gloo}: two processes, TP 2, fp32; ratios have 95% intervals"


def modeled_words(results: Sequence[Facts]) -> str:
    """What the performance model supplies, and its error."""
    words = "step times on GPUs and at the paper's sizes, predicted by the performance model"
    for facts in results:
        if facts["experiment"] == "record":
            off = record.errors(facts["rows"]).mape
            words += (
                f"; its mean absolute error on {len(facts['rows'])} published runs, leaving out each source in turn, "
                f"is {off:.1%}"
            )
    return words


def draw(facts: Facts, path: Path, narrow: bool = False) -> None:
    """Draws step time over wire speed: one line per layout, labeled at its end. `narrow`: for a phone."""
    figure, axis = drawing.pyplot().subplots(figsize=(3.9, 3.5) if narrow else (7.6, 4.5), layout="constrained")
    rates = sorted({launch["mbit"] for launch in _launches(facts) if launch["mbit"]}, reverse=True)
    free = any(launch["mbit"] is None for launch in _launches(facts))
    places = ([FREE * rates[0]] if free else []) + rates
    labels, top = [], 0.0
    for name, words, contenders in LINES:
        found = [_fastest(facts, rate, contenders) for rate in ([None] if free else []) + rates]
        if not all(found):
            continue
        color, middle = colors.color_of(name), [each.median for each in found if each]
        error = [
            [each.median - each.low for each in found if each],
            [each.high - each.median for each in found if each],
        ]
        axis.errorbar(places, middle, yerr=error, color=color, elinewidth=1.2, linewidth=0, capsize=2)
        marked = {"marker": "o", "markersize": 4.5, "color": color}
        axis.plot(places[free:], middle[free:], linewidth=2.2, **marked)
        if free:
            axis.plot(places[:2], middle[:2], linewidth=1.2, linestyle=":", **marked)
        labels.append((f"{words}  {middle[-1]:.2f} s", middle[-1], color))
        top = max(top, *middle)
    axis.set(xscale="log", xlabel="wire speed in Mbit/s, slower to the right", ylabel="seconds per training step")
    axis.set(ylim=(0, 1.12 * top), xlim=(places[0] * 1.25, places[-1] / 1.12))
    shown = [] if free is False else ["no limit"]
    axis.set_xticks(places, [*shown, *(f"{rate:,.0f}" for rate in rates)])
    axis.minorticks_off()
    named = {launch["wire"]: launch["mbit"] for launch in _launches(facts)}
    for wire, name in (("share-matched", "share-matched"), ("slow", "slow wire")):
        if not isinstance(rate := named.get(wire), int | float):
            continue
        axis.axvline(rate, color=drawing.MUTED, linestyle=(0, (2, 2)), linewidth=0.9, zorder=0)
        axis.annotate(
            f"{name} ",
            (rate, 1.12 * top),
            (-2, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            color=drawing.MUTED,
        )
    axis.grid(visible=True, axis="y")
    if narrow:
        axis.set_xlabel("wire speed, Mbit/s")
    _labels(axis, labels, places[-1], narrow)
    drawing.write(figure, path)


def _labels(axis: Any, labels: Sequence[tuple[str, float, str]], x: float, narrow: bool) -> None:
    if narrow:  # short names only
        labels = [
            (text.partition("  ")[0].replace("vanilla, published", "vanilla, pub."), y, color)
            for text, y, color in labels
        ]
    colors.label_ends(axis, labels, x)


def _launches(facts: Facts) -> list[Facts]:
    """Launches of the first group."""
    first = facts["groups"][0]["group"]
    return [launch for launch in facts["groups"] if launch["group"] == first]


def _fastest(facts: Facts, rate: float | None, contenders: Sequence[str]) -> Spread | None:
    """The spread of these contenders' fastest form at a rate, or None if there is none."""
    seconds: dict[str, list[float]] = {}
    for launch in _launches(facts):
        for row in launch["rows"] if launch["mbit"] == rate else ():
            plain = row["name"].removesuffix(", halves")
            if plain in contenders:
                seconds.setdefault(row["name"], []).extend(pooled(row["seconds"]))
    return min(map(spread, seconds.values()), key=lambda each: each.median, default=None)
