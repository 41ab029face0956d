"""Report of the wire experiment: step times by wire, hidden communication, bare collectives, timelines, and the goals.

Sets with several groups show only step times, and how ratios depend on mesh, size and family. Bare collectives and timelines are in
the main set.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.experiments.colors import color_of
from benchmarks.experiments.contest import Ratio, at_least, bootstrap, in_words, spread, verdict_words
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table
from benchmarks.experiments.side_by_side import in_ms, shape_of
from benchmarks.experiments.steps import BTP, BTP_SP, MEGATRON, MEGATRON_SP, PUBLISHED, VANILLA
from benchmarks.experiments.timeline import ProcessStep, draw_on, from_numbers, rows
from benchmarks.experiments.wire_plan import (
    BTP_CP,
    DENSE,
    FORMS,
    LOW_RANK,
    MARKED,
    NO_LIMIT,
    ULYSSES,
    collective_seconds,
    faster,
    fastest,
    groups_of,
    launches_of,
    name_of,
    names_of,
    on_wire,
    plain_and_halved,
    row_of,
    seconds_of,
    wires,
)
from boost.drawing import MUTED, SERIES, pyplot, write
from boost.parallel import collectives

ISSUE = {
    "all-reduce": collectives.all_reduce,
    "all-gather": collectives.all_gather,
    "reduce-scatter": collectives.reduce_scatter,
    "all-to-all": collectives.all_to_all,
}
"""The runtime function that issues each kind of collective."""

MIB = (1, 4, 16)
"""Payloads of bare collectives: MiB of the gathered or reduced tensor."""

HIDDEN = 0.65
"""Goal: minimum fraction of TP communication hidden by overlap, if communication takes a fraction COMMUNICATION of the step."""

COMMUNICATION = (0.4, 0.6)

LEAST_ADDED = 0.05
"""Minimum fraction of a step that the wire must add for the hidden fraction to be shown; below it, the ratio is noise."""

BEST = tuple(each.name for each in plain_and_halved(BTP, BTP_SP))
"""Candidates for the best low-rank layout; the fastest is compared with the baselines."""

DRAWN = (MEGATRON, MEGATRON_SP, ULYSSES, PUBLISHED, VANILLA, BTP, BTP_SP, BTP_CP)
"""Layouts in the figure; the others are ablations."""

TITLES = {
    "main": "Whole steps over a rate-limited wire",
    "meshes": "The same with pipeline and data parallelism",
    "sizes": "The same at other sizes",
    "families": "The same for other families",
    "many": "The same with many tokens per step",
    "halves": "When overlapped halves pay",
}


def goals(facts: Facts) -> list[Goal]:
    """Main set: ratios on the marked wires. Set of many tokens: btp-cp against btp-sp. Both: the fraction of communication hidden.
    Halves: that none is slower where it is predicted to be faster. The others have none."""
    group = groups_of(facts)[0]
    if facts["set"] == "halves":
        return _halves_goals(facts, group)
    if facts["set"] == "many":
        crossings = [_crossing_goal(facts, group, *each) for each in (("share-matched", 1.0), ("slow", 1.25))]
        return [*crossings, _hidden_goal(facts, group)]
    if facts["set"] != "main":
        return []
    found = [
        _ratio_goal(facts, "share-matched", "published vanilla", PUBLISHED, 2.3),
        _ratio_goal(facts, "share-matched", "strong vanilla", VANILLA, 1.8),
        _ratio_goal(facts, "share-matched", "megatron-sp", MEGATRON_SP, 1.95),
        _ratio_goal(facts, "slow", "strong vanilla", name_of(VANILLA, "halves"), 3.0),
        _ratio_goal(facts, "slow", "megatron-sp", name_of(MEGATRON_SP, "halves"), 2.0),
    ]
    against = faster(facts, group, "slow", name_of(BTP_SP, "halves"), name_of(BTP, "halves"))
    found.append(at_least("slow wire: btp-sp against btp", 1.5, _where(facts, group, "slow"), against))
    return [*found, _hidden_goal(facts, group)]


def _ratio_goal(facts: Facts, wire: str, words: str, baseline: str, least: float) -> Goal:
    group = groups_of(facts)[0]
    best = fastest(facts, group, wire, BEST)
    what, found = f"{wire} wire: best low-rank layout against {words}", faster(facts, group, wire, best, baseline)
    return at_least(what, least, _where(facts, group, wire), found, f" ({best})")


def _halves_goals(facts: Facts, group: str) -> list[Goal]:
    """Halves against whole micro-batches on the wires on which halves are predicted to be faster, if there are any."""
    plain, halved = names_of(facts, group)
    chosen = [wire for wire, predicted in facts["predicted"].items() if predicted > 1]
    if not chosen:
        return []
    found = {wire: faster(facts, group, wire, halved, plain) for wire in chosen}
    worst = min(found, key=lambda wire: found[wire].low)
    what, where = "overlapped halves where the planner chooses them", shape_of(launches_of(facts, group)[0])
    return [at_least(what, 1, where, found[worst], f" ({worst}, the worst of {len(found)} wires)")]


def _crossing_goal(facts: Facts, group: str, wire: str, least: float) -> Goal:
    """btp-cp against btp-sp, each with or without overlap, whichever is faster."""
    forms = ([each.name for each in plain_and_halved(form)] for form in (BTP_CP, BTP_SP))
    ours, theirs = (fastest(facts, group, wire, names) for names in forms)
    found = faster(facts, group, wire, ours, theirs)
    what = f"many tokens, {wire} wire: btp-cp against btp-sp"
    return at_least(what, least, _where(facts, group, wire), found, f" ({ours} against {theirs})")


def _hidden_goal(facts: Facts, group: str) -> Goal:
    """The fraction of communication that overlap hides in layouts measured with and without it, on wires that the goal covers."""
    found, elsewhere, (low, high) = list[tuple[str, Ratio]](), list[str](), COMMUNICATION
    for form in _with_both(facts, group):
        on = [(f"{form} at {mbit:g} Mbit/s", wire) for wire, mbit in wires(facts, group).items() if mbit]
        on = [(words, wire) for words, wire in on if low <= communication(facts, group, wire, form) <= high]
        found += [(words, hidden(facts, group, wire, form)) for words, wire in on]
        elsewhere += [] if on else [form]
    words = "; ".join(f"{form}: {in_words(share)}" for form, share in found)
    if elsewhere:
        words += f"{'; ' if words else ''}on no wire {low:.0%} to {high:.0%} of a step: {', '.join(elsewhere)}"
    met = all(share.low >= HIDDEN for _, share in found) if found else None
    where = shape_of(launches_of(facts, group)[0])
    return Goal("communication of TP hidden", f">= {HIDDEN:.2f}", where, words, met)


def communication(facts: Facts, group: str, wire: str, form: str) -> float:
    """Fraction of a step without overlap that the wire adds."""
    floor = _without_wire(facts, group, form)
    return float(np.median([1 - floor / t for launch in seconds_of(facts, group, wire, form) for t in launch]))


def hidden(facts: Facts, group: str, wire: str, form: str) -> Ratio:
    """Fraction of the time added by the wire that overlap hides: (t - t_halves) / (t - t_0), where t_0 is the faster step
    (with or without overlap) without a limit."""
    floor = _without_wire(facts, group, form)
    plain, halved = (seconds_of(facts, group, wire, name) for name in (form, name_of(form, "halves")))
    return bootstrap(lambda t, t_halves: np.median((t - t_halves) / (t - floor), axis=-1), plain, halved)


def _without_wire(facts: Facts, group: str, form: str) -> float:
    """Seconds of a step without a limit, in the faster form (with or without overlap)."""
    both = (form, name_of(form, "halves"))
    return min(spread(seconds_of(facts, group, NO_LIMIT, name)).median for name in both)


def _with_both(facts: Facts, group: str) -> list[str]:
    """Layouts measured with and without overlap."""
    names = names_of(facts, group)
    return [form for form in FORMS if form in names and name_of(form, "halves") in names]


def _where(facts: Facts, group: str, wire: str) -> str:
    return f"{shape_of(on_wire(facts, group, wire)[0])}; {wires(facts, group)[wire]:g} Mbit/s"


def section(facts: Facts) -> Section:
    """Step times; for sets of one group, also hidden communication, bare collectives and timelines."""
    groups, name = groups_of(facts), facts["set"]
    lead = (
        "Each emulated host (a network namespace) runs one process, on the cores of one machine. Times of whole steps are medians "
        f"and quartiles over {facts['rounds']} interleaved rounds of each launch. Ratios pair steps of the same round; 95% "
        "intervals resample launches, then rounds. On the share-matched wire, communication takes 17% of a btp step without "
        "overlap, as in the paper's 7B row; on the slow wire, it takes half."
    )
    parts: list[str | Table | Figure] = [lead]
    parts += [_step_table(facts, group) for group in groups]
    if len(groups) > 1:
        figure = Figure(f"wire-{name}", _GAINS_CAPTION, partial(_draw_gains, facts))
        return Section(TITLES[name], (parts[0], figure, _gains_table(facts), *parts[1:]))
    suffix = "" if name == "main" else f"-{name}"
    (group,) = groups
    if name == "halves":
        return Section(TITLES[name], (lead, _halves_table(facts, group), _hidden_table(facts, group)))
    parts.append(_hidden_table(facts, group))
    if launches_of(facts, group)[0].get("collectives"):
        parts.append(_collective_table(facts, group))
    parts.append(Figure(f"wire{suffix}", "Step time by wire rate (measured; medians)", partial(_draw, facts, group)))
    return Section(TITLES[name], (*parts, *_timelines(facts, f"wire{suffix}-timeline")))


def _step_table(facts: Facts, group: str) -> Table:
    """One row per layout: its step time on every wire, and relative to the reference on marked wires."""
    reference, found = BTP if BTP in names_of(facts, group) else LOW_RANK, wires(facts, group)
    headings, launched = ["layout"], []
    for wire, mbit in found.items():
        headings += [f"{_title(wire, mbit)}, ms:", *([f"{wire}, time / {reference}:"] if wire in MARKED else [])]
        launched.append(f"{wire} {len(on_wire(facts, group, wire))}")
    cells = []
    for name in names_of(facts, group):
        row = [name]
        for wire in found:
            row.append(in_ms(spread(seconds_of(facts, group, wire, name))))
            if wire in MARKED:
                against = faster(facts, group, wire, reference, name)
                row.append("1" if name == reference else verdict_words(against))
        cells.append(tuple(row))
    what = f"{group}: " if group else ""
    shape = shape_of(launches_of(facts, group)[0])
    caption = f"{what}step time by wire (measured). {shape}. Launches: {', '.join(launched)}."
    return Table(caption, tuple(headings), tuple(cells))


def _halves_table(facts: Facts, group: str) -> Table:
    """Speed-up of overlapped halves by wire, measured and predicted."""
    plain, halved = names_of(facts, group)
    cells = []
    for wire, mbit in wires(facts, group).items():
        times = [in_ms(spread(seconds_of(facts, group, wire, name))) for name in (plain, halved)]
        gain, predicted = faster(facts, group, wire, halved, plain), facts["predicted"].get(wire)
        cells.append(
            (wire, f"{mbit:g}" if mbit else "-", *times, verdict_words(gain), f"{predicted:.2f}" if predicted else "-")
        )
    caption = f"Speed of overlapped halves relative to whole micro-batches. {shape_of(launches_of(facts, group)[0])}."
    headings = ("communication", "Mbit/s:", "whole, ms:", "halves, ms:", "measured:", "predicted:")
    return Table(caption, headings, tuple(cells))


def _title(wire: str, mbit: float | None) -> str:
    return f"{mbit:g} Mbit/s, {wire}" if wire in MARKED else wire


def _hidden_table(facts: Facts, group: str) -> Table:
    cells = []
    for wire, mbit in wires(facts, group).items():
        for form in _with_both(facts, group) if mbit else ():
            added = communication(facts, group, wire, form)
            found = in_words(hidden(facts, group, wire, form)) if added >= LEAST_ADDED else "-"
            cells.append((_title(wire, mbit), form, f"{max(added, 0):.0%}", found))
    caption = (
        "Added: the fraction of a step without overlap that the wire adds (without a limit, communication takes time too). Hidden: "
        f"the fraction of the added time that overlap hides (measured). Less than {LEAST_ADDED:.0%} of a step is within noise."
    )
    return Table(caption, ("wire", "layout", "added:", "hidden:"), tuple(cells))


def _collective_table(facts: Facts, group: str) -> Table:
    cells = []
    for wire, mbit in wires(facts, group).items():
        for mib in MIB:
            copy = spread(collective_seconds(facts, group, wire, f"copy, {mib} MiB")).median
            for kind in ISSUE:
                taken = spread(collective_seconds(facts, group, wire, f"{kind}, {mib} MiB")).median
                sent = (mib << 20) * (1.0 if kind == "all-reduce" else 0.5)
                floor = max(copy, sent * 8e-6 / mbit if mbit else 0.0)
                cells.append((_title(wire, mbit), kind, str(mib), f"{1e3 * taken:.1f}", f"{floor / taken:.2f}"))
    caption = (
        "Bare collectives of two processes, fp32 (measured). The limit is the time to send one process's bytes at the wire rate, "
        "or to copy the payload in memory if that takes longer."
    )
    return Table(caption, ("wire", "collective", "MiB:", "ms:", "limit / time:"), tuple(cells))


def _draw(facts: Facts, group: str, path: Path) -> None:
    figure, axis = pyplot().subplots(figsize=(8.5, 4.4), layout="constrained")
    limited = {wire: mbit for wire, mbit in wires(facts, group).items() if mbit}
    for name in names_of(facts, group):
        form = name.removesuffix(", halves")
        if form not in DRAWN:
            continue
        medians = [spread(seconds_of(facts, group, wire, name)).median for wire in limited]
        axis.plot([*limited.values()], medians, "o-" if name == form else "o--", color=color_of(form), label=name)
    for wire in (each for each in MARKED if each in limited):
        axis.axvline(limited[wire], color=MUTED, linestyle=":")
        side = "left" if limited[wire] == min(limited.values()) else "right"  # away from the axis
        axis.annotate(f" {wire} ", (limited[wire], 0), (0, 4), textcoords="offset points", ha=side)
    axis.set(xscale="log", xlabel="wire, Mbit/s", ylabel="seconds per step", ylim=(0, None))
    axis.set_xticks([*limited.values()], [f"{rate:,g}" for rate in limited.values()])
    axis.minorticks_off()
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), handlelength=3.2)
    axis.grid(visible=True)
    write(figure, path)


def _timelines(facts: Facts, name: str) -> Iterator[Table | Figure]:
    """Recorded steps, if any."""
    found = {
        contender: [from_numbers(each) for each in steps]
        for launch in facts["groups"]
        for contender, steps in launch.get("timelines", {}).items()
    }
    if not found:
        return
    yield Table(
        "One recorded step per process on the slow wire (measured; recording adds overhead).",
        ("layout", "rank:", "step ms:", "compute ms:", "in flight ms:", "waiting ms:", "overlapped:"),
        tuple((contender, *row) for contender, steps in found.items() for row in rows(steps)),
    )
    yield Figure(
        name,
        "The same steps: when each process computes, has collectives in flight, or only waits (measured)",
        partial(_draw_timelines, found),
    )


def _draw_timelines(found: Mapping[str, Sequence[ProcessStep]], path: Path) -> None:
    figure, axes = pyplot().subplots(
        len(found), 1, figsize=(12, 1.45 * len(found) + 0.6), layout="constrained", sharex=True, squeeze=False
    )
    for axis, (name, steps) in zip(axes[:, 0], found.items(), strict=True):
        draw_on(axis, steps)
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("milliseconds")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="outside upper right", frameon=False)
    write(figure, path)


BASELINES = (PUBLISHED, name_of(VANILLA, "halves"), name_of(MEGATRON_SP, "halves"), DENSE)
"""Baselines of the small sets, each in its faster form on marked wires."""

_GAINS_CAPTION = "Speed-up of the best low-rank layout over the baselines (measured); whiskers are 95% intervals."


def gains(facts: Facts) -> Iterator[tuple[str, str, str, str, Ratio]]:
    """Yields (group, marked wire, best low-rank layout, baseline, speed-up of the layout over the baseline) of a result."""
    for group in groups_of(facts):
        names = names_of(facts, group)
        for wire in (each for each in MARKED if on_wire(facts, group, each)):
            best = fastest(facts, group, wire, (*BEST, LOW_RANK))
            for baseline in (each for each in BASELINES if each in names):
                yield group, wire, best, baseline, faster(facts, group, wire, best, baseline)


def _gains_table(facts: Facts) -> Table:
    cells = []
    for group, wire, best, baseline, found in gains(facts):
        ours, theirs = (row_of(on_wire(facts, group, wire)[0], name)["sent_bytes"] for name in (best, baseline))
        row = (group, _title(wire, wires(facts, group)[wire]), best, baseline, verdict_words(found))
        cells.append((*row, f"{theirs / ours:.2f}"))
    headings = ("group", "wire", "best low-rank layout", "baseline", "speed-up:", "bytes, baseline / best:")
    return Table("Speed-up of the best low-rank layout over each baseline (measured).", headings, tuple(cells))


def _draw_gains(facts: Facts, path: Path) -> None:
    found = list(gains(facts))
    labels = list(dict.fromkeys((group, baseline) for group, _, _, baseline, _ in found))
    figure, axis = pyplot().subplots(figsize=(8, 0.8 + 0.42 * len(labels)), layout="constrained")
    for number, wire in enumerate(MARKED):
        of_wire = [(labels.index((group, baseline)), ratio) for group, on, _, baseline, ratio in found if on == wire]
        places = [place + 0.18 * (2 * number - 1) for place, _ in of_wire]
        values = [ratio.value for _, ratio in of_wire]
        ends = [[r.value - r.low for _, r in of_wire], [r.high - r.value for _, r in of_wire]]
        axis.errorbar(values, places, xerr=ends, fmt="o", color=SERIES[number], capsize=2, label=f"{wire} wire")
    axis.axvline(1, color=MUTED, linewidth=0.8)
    axis.set_yticks(range(len(labels)), [f"{group}: {baseline}" for group, baseline in labels])
    axis.invert_yaxis()
    axis.set(xlabel="speed-up", xlim=(0, None))
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    axis.grid(visible=True)
    write(figure, path)
