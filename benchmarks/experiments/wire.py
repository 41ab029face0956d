"""Whole steps over a rate-limited wire: two network namespaces act as two hosts with one process each, every layout in one run.

On one machine, gloo communicates by copying memory with the same cores: cheap, and impossible to hide. Over a rate-limited wire,
communication takes time in proportion to its bytes. Two rates are derived from a run without a limit: on the *share-matched* wire,
communication takes the same fraction of a btp step as in the paper's 7B row on A100s; on the *slow* wire, half of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.experiments.contest import Ratio, bootstrap, in_words, ratio, spread
from benchmarks.experiments.endtoend import BTP, BTP_SP, MEGATRON, MEGATRON_SP, PARALLEL, PUBLISHED, VANILLA, cut_flags
from benchmarks.experiments.hosts import Host, two_hosts, why_no_hosts
from benchmarks.experiments.side_by_side import in_ms, shape_of
from benchmarks.experiments.traffic import ISSUE
from boost.config import Config, load
from boost.errors import ConfigError, MeasurementError
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.drawing import pyplot, tidy, write
from boost.measure.results import Facts, facts_of, save_section
from boost.measure.steps import flags, shape
from boost.measure.timeline import ProcessStep, draw_on, rows
from boost.parallel.mesh import Mesh

ROOT = Path(__file__).parents[2]
"""Working directory of the processes, which import `benchmarks`."""

BTP_CP = "btp-cp"
FORMS = {**PARALLEL, BTP_CP: {"layout": "btp-cp"}}
"""[parallel] of every contender that --layouts accepts."""

LAYOUTS = (MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP)
CONTENDERS = tuple(
    (layout, overlap)
    for layout in LAYOUTS
    for overlap in ("none", "halves")
    if (layout, overlap) != (PUBLISHED, "halves")
)
"""(layout, parallel.overlap). The published baseline has no overlap, as in the paper."""

BEST = ((BTP, "none"), (BTP, "halves"), (BTP_SP, "none"), (BTP_SP, "halves"))
"""Candidates for the best low-rank layout; the fastest is compared with the baselines."""

RECORDED = (
    (BTP, "none"),
    (BTP, "halves"),
    (BTP_SP, "halves"),
    (BTP_CP, "halves"),
    (VANILLA, "halves"),
    (MEGATRON_SP, "halves"),
)
"""Contenders with a timeline of one step on the slow wire, in this order."""

MARKED = {"share-matched": 0.17, "slow": 0.5}
"""Fraction of a btp step that communication takes on each marked wire. The first matches the paper's 7B row on A100s."""

SIZE = (1024, 4, 2736, 16)
"""d, blocks, f, heads."""

BATCH = flags(vocab_size=4096, seq_len=512, micro_batch=2, global_batch=2)
MIB = (1, 4, 16)
"""Payloads of bare collectives: MiB of the gathered or reduced tensor."""

HIDDEN = 0.65
"""Goal: minimum fraction of TP communication that overlap hides on the slow wire."""

PORT = 29400
"""Always free in a new namespace."""


def name_of(layout: str, overlap: str) -> str:
    """Name of a contender."""
    return layout if overlap == "none" else f"{layout}, {overlap}"


def contenders(source: str, overrides: Sequence[str], layouts: Sequence[str] = ()) -> dict[str, Config]:
    """Configurations at TP 2 by name, with and without overlap; megatron layouts run the dense model.

    `layouts`: only these and btp; by default, all that the goals name. Raises ConfigError.
    """
    found = {}
    chosen = [(each, overlap) for each in dict.fromkeys((BTP, *layouts)) for overlap in ("none", "halves")]
    for layout, overlap in chosen if layouts else CONTENDERS:
        family = "dense" if layout in (MEGATRON, MEGATRON_SP) else "cola"
        words = [
            "--run.device=cpu",
            "--optim.lr=1e-6",
            *shape(*SIZE, family=family),
            *BATCH,
            *cut_flags({**FORMS[layout], "overlap": overlap}, 2),
        ]
        found[name_of(layout, overlap)] = load(source, [*words, *overrides])
    return found


def wire(
    source: str,
    overrides: Sequence[str],
    rates: Sequence[float],
    launches: int,
    rounds: int,
    out: Path,
    layouts: Sequence[str] = (),
) -> int:
    """Runs the experiment. `rates`: Mbit/s, in addition to the marked ones; `layouts`: see `contenders`.

    Raises ConfigError if this machine cannot create network namespaces.
    """
    if reason := why_no_hosts(limited=True):
        raise ConfigError(f"the wire experiment needs two network namespaces: {reason}")
    found, groups = contenders(source, overrides, layouts), []
    with two_hosts() as hosts:
        free = measure(hosts, None, found, rounds)
        groups.append(free)
        marked = {name: marked_rate(free, fraction) for name, fraction in MARKED.items()}
        for launch in range(launches):
            for rate in sorted({*rates, *marked.values()}, reverse=True):
                draws = launch == launches - 1 and rate == marked["slow"]
                recorded = [name for each in RECORDED if (name := name_of(*each)) in found] if draws else []
                groups.append(measure(hosts, rate, found, rounds, recorded))
    facts = facts_of("wire", found[BTP], rounds=rounds, launches=launches, marked=marked, groups=groups)
    save_section(out, facts, section(facts))
    print(out.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def marked_rate(free: Facts, fraction: float) -> float:
    """Mbit/s at which communication takes `fraction` of a btp step without overlap, given that it costs almost nothing in the
    unlimited run `free`."""
    seconds = spread(_row(free, BTP)["seconds"]).median
    return max(1, round(_row(free, BTP)["sent_bytes"] * 8e-6 * (1 - fraction) / (fraction * seconds)))


def measure(
    hosts: tuple[Host, Host],
    mbit: float | None,
    found: Mapping[str, Config],
    rounds: int,
    recorded: Sequence[str] = (),
) -> Facts:
    """Runs one launch with one process per host: all contenders interleaved, bare collectives, and then a timeline of one step for
    every contender in `recorded`. Raises MeasurementError."""
    for host in hosts:
        host.limit(mbit)
    with tempfile.TemporaryDirectory(prefix="boost-wire-") as folder:
        group = {
            "rounds": rounds,
            "mbit": mbit,
            "contenders": {name: c.model_dump() for name, c in found.items()},
            "recorded": list(recorded),
        }
        Path(folder, "group.json").write_text(json.dumps(group), encoding="utf-8")
        processes = [_start(host, hosts[0], rank, folder) for rank, host in enumerate(hosts)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise MeasurementError(
                f"a process of the wire experiment failed with exit code {next(filter(None, codes))}"
            )
        parts = [
            json.loads(Path(folder, f"measured{rank}.json").read_text(encoding="utf-8")) for rank in range(len(hosts))
        ]
        timelines = {name: [part["timelines"][name] for part in parts] for name in recorded}
        return {"mbit": mbit, **parts[0], "timelines": timelines}


def _start(host: Host, first: Host, rank: int, folder: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": host.wire,
        "OMP_NUM_THREADS": "1",
    }
    command = host.command(sys.executable, "-m", "benchmarks.experiments.wire_process", folder)
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def collective_calls(mesh: Mesh) -> dict[str, Any]:
    """Bare collectives by kind and MiB, and memory copies of the same sizes."""
    calls: dict[str, Any] = {}
    for mib in MIB:
        whole = torch.randn(mib << 18, device=mesh.device)
        own = whole[: whole.numel() // mesh.size]
        calls[f"copy, {mib} MiB"] = lambda whole=whole: [whole.clone()]
        for kind, issue in ISSUE.items():
            sent = own if kind == "all-gather" else whole
            calls[f"{kind}, {mib} MiB"] = lambda issue=issue, sent=sent: [issue(sent, mesh.tp)]
    return calls


def goals(facts: Facts) -> list[Goal]:
    """Goals: ratios on the marked wires, and the fraction of communication hidden on the slow one; for a run with btp-cp, the goals
    for many-token steps instead."""
    if _has(facts, BTP_CP):
        return [_crossing_goal(facts, wire, least) for wire, least in (("share-matched", 1.0), ("slow", 1.25))]
    matched, slow = (float(facts["marked"][name]) for name in MARKED)
    found = [
        _ratio_goal(facts, matched, "share-matched wire", "published vanilla", (PUBLISHED, "none"), 2.3),
        _ratio_goal(facts, matched, "share-matched wire", "strong vanilla", (VANILLA, "none"), 1.8),
        _ratio_goal(facts, matched, "share-matched wire", "megatron-sp", (MEGATRON_SP, "none"), 1.95),
        _ratio_goal(facts, slow, "slow wire", "strong vanilla", (VANILLA, "halves"), 3.0),
        _ratio_goal(facts, slow, "slow wire", "megatron-sp", (MEGATRON_SP, "halves"), 2.0),
    ]
    halved = [
        layout for layout in LAYOUTS if (layout, "halves") in CONTENDERS and _has(facts, name_of(layout, "halves"))
    ]
    shares = {layout: hidden(facts, slow, layout) for layout in halved}
    words = ", ".join(f"{layout} {in_words(share)}" for layout, share in shares.items())
    met = all(share.low >= HIDDEN for share in shares.values())
    found.append(Goal("communication of TP hidden", f">= {HIDDEN:.2f}", _where(facts, slow), words, met))
    against = _faster(facts, slow, (BTP_SP, "halves"), (BTP, "halves"))
    found.append(
        Goal(
            "slow wire: btp-sp against btp",
            ">= 1.5x",
            _where(facts, slow),
            f"{in_words(against)} x",
            against.low >= 1.5,
        )
    )
    return found


def _ratio_goal(facts: Facts, rate: float, wire: str, words: str, baseline: tuple[str, str], least: float) -> Goal:
    best = min(BEST, key=lambda each: spread(_seconds(facts, rate, name_of(*each))).median)
    found, what = _faster(facts, rate, best, baseline), f"{wire}: best low-rank layout against {words}"
    shown = f"{in_words(found)} x ({name_of(*best)})"
    return Goal(what, f">= {least:g}x", _where(facts, rate), shown, found.low >= least)


def _crossing_goal(facts: Facts, wire: str, least: float) -> Goal:
    """btp-cp against btp-sp, each with or without overlap, whichever is faster."""
    rate = float(facts["marked"][wire])
    forms = [
        [(layout, overlap) for overlap in ("none", "halves") if _has(facts, name_of(layout, overlap))]
        for layout in (BTP_CP, BTP_SP)
    ]
    ours, theirs = (min(each, key=lambda form: spread(_seconds(facts, rate, name_of(*form))).median) for each in forms)
    found = _faster(facts, rate, ours, theirs)
    shown = f"{in_words(found)} x ({name_of(*ours)} against {name_of(*theirs)})"
    what = f"many tokens, {wire} wire: btp-cp against btp-sp"
    return Goal(what, f">= {least:g}x", _where(facts, rate), shown, found.low >= least)


def _faster(facts: Facts, rate: float, ours: tuple[str, str], theirs: tuple[str, str]) -> Ratio:
    return ratio(_seconds(facts, rate, name_of(*theirs)), _seconds(facts, rate, name_of(*ours)))


def hidden(facts: Facts, rate: float, layout: str) -> Ratio:
    """Fraction of the time added by the wire that overlap hides: (t - t_halves) / (t - t_0), where t_0 is the faster step
    (with or without overlap) on an unlimited wire."""
    free = [_seconds(facts, None, name_of(layout, overlap)) for overlap in ("none", "halves")]
    floor = min(spread(seconds).median for seconds in free)
    plain, halved = (_seconds(facts, rate, name_of(layout, overlap)) for overlap in ("none", "halves"))
    return bootstrap(lambda t, t_halves: np.median((t - t_halves) / (t - floor), axis=-1), plain, halved)


def _has(facts: Facts, name: str) -> bool:
    return any(row["name"] == name for row in facts["groups"][0]["rows"])


def _where(facts: Facts, rate: float) -> str:
    return f"{shape_of(facts['groups'][0])}; {rate:g} Mbit/s"


def section(facts: Facts) -> Section:
    """Step times, hidden communication and bare collectives, by rate."""
    rates = _rates(facts)
    lead = (
        f"{shape_of(facts['groups'][0])}. Two hosts (network namespaces) with one process each. Whole steps: medians and quartiles "
        f"over {facts['rounds']} interleaved rounds of each of {facts['launches']} launches. On the share-matched wire "
        f"({facts['marked']['share-matched']:g} Mbit/s), communication takes 17 % of a btp step without overlap; on the slow wire "
        f"({facts['marked']['slow']:g} Mbit/s), half."
    )
    steps = tuple(
        (_name(facts, rate), name, in_ms(spread(_seconds(facts, rate, name))), in_words(_against(facts, rate, name)))
        for rate in rates
        for name in _names(facts)
    )
    shares = [
        (_name(facts, rate), layout, in_words(hidden(facts, rate, layout)))
        for rate in rates
        for layout in FORMS
        if rate and _has(facts, layout) and _has(facts, name_of(layout, "halves"))
    ]
    return Section(
        "Whole steps over a rate-limited wire",
        (
            lead,
            Table("Step time by rate (measured).", ("wire", "layout", "ms:", "time / btp:"), steps),
            Table(
                "Fraction of the time added by the wire that overlap hides (measured).",
                ("wire", "layout", "hidden:"),
                tuple(shares),
            ),
            _collective_table(facts, rates),
            Figure(
                "wire-many" if _has(facts, BTP_CP) else "wire",
                "Step time by wire rate (measured; medians)",
                lambda path: _draw(facts, path),
            ),
            *_timelines(facts),
        ),
    )


def _timelines(facts: Facts) -> Iterator[Table | Figure]:
    """Recorded steps, if any."""
    found = {
        name: [ProcessStep.from_numbers(each) for each in steps]
        for group in facts["groups"]
        for name, steps in group.get("timelines", {}).items()
    }
    if not found:
        return
    yield Table(
        "One recorded step per process on the slow wire (measured; recording adds overhead).",
        ("layout", "rank:", "step ms:", "compute ms:", "in flight ms:", "waiting ms:", "overlapped:"),
        tuple((name, *row) for name, steps in found.items() for row in rows(steps)),
    )
    yield Figure(
        "wire-many-timeline" if _has(facts, BTP_CP) else "wire-timeline",
        "The same steps: when each process computes, has collectives in flight, or only waits (measured)",
        lambda path: _draw_timelines(found, path),
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


def _collective_table(facts: Facts, rates: Sequence[float | None]) -> Table:
    rows = []
    for rate in rates:
        for mib in MIB:
            copy = spread(_collective(facts, rate, f"copy, {mib} MiB")).median
            for kind in ISSUE:
                taken = spread(_collective(facts, rate, f"{kind}, {mib} MiB")).median
                sent = (mib << 20) * (1.0 if kind == "all-reduce" else 0.5)
                floor = max(copy, sent * 8e-6 / rate if rate else 0.0)
                rows.append((_name(facts, rate), kind, str(mib), f"{1e3 * taken:.1f}", f"{floor / taken:.2f}"))
    caption = (
        "Bare collectives of two processes, fp32 (measured). The limit is the time to send one process's bytes at the wire rate, "
        "or to copy the payload in memory if that takes longer."
    )
    return Table(caption, ("wire", "collective", "MiB:", "ms:", "limit / time:"), tuple(rows))


def _draw(facts: Facts, path: Path) -> None:
    plot = pyplot()
    figure, axis = plot.subplots(figsize=(8, 4), layout="constrained")
    rates = [rate for rate in _rates(facts) if rate]
    colors: dict[str, str] = {}
    for name in _names(facts):
        layout = name.removesuffix(", halves")
        medians = [spread(_seconds(facts, rate, name)).median for rate in rates]
        color = colors.setdefault(layout, f"C{len(colors)}")
        axis.plot(rates, medians, "o-" if name == layout else "o--", color=color, label=name)
    for name, rate in facts["marked"].items():
        axis.axvline(rate, color="grey", linestyle=":")
        axis.annotate(f"{name} ", (rate, 0), (0, 4), textcoords="offset points", ha="right")
    axis.set(xscale="log", xlabel="wire, Mbit/s", ylabel="seconds per step", ylim=(0, None))
    axis.set_xticks(rates, [f"{rate:,g}" for rate in rates])
    axis.minorticks_off()
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    tidy(axis)
    write(figure, path)


def _rates(facts: Facts) -> list[float | None]:
    """Rates in Mbit/s, fastest first; None is unlimited."""
    found = {group["mbit"] for group in facts["groups"]}
    return sorted(found, key=lambda rate: -(rate or float("inf")))


def _name(facts: Facts, rate: float | None) -> str:
    marked = next((f", {name}" for name, mbit in facts["marked"].items() if mbit == rate), "")
    return f"{rate:g} Mbit/s{marked}" if rate else "no limit"


def _names(facts: Facts) -> list[str]:
    """Names of the contenders, in order."""
    return [row["name"] for row in facts["groups"][0]["rows"]]


def _row(group: Facts, name: str) -> Facts:
    found: Facts = next(row for row in group["rows"] if row["name"] == name)
    return found


def _seconds(facts: Facts, rate: float | None, name: str) -> list[float]:
    """Step seconds of all rounds of all launches."""
    return [s for group in facts["groups"] if group["mbit"] == rate for s in _row(group, name)["seconds"]]


def _collective(facts: Facts, rate: float | None, name: str) -> list[float]:
    return [s for group in facts["groups"] if group["mbit"] == rate for s in group["collectives"][name]]


def _against(facts: Facts, rate: float | None, name: str) -> Ratio:
    return ratio(_seconds(facts, rate, name), _seconds(facts, rate, BTP))
