"""Times whole steps of every layout over a rate-limited wire. Network namespaces act as hosts with one process each.

On one machine, gloo communicates by copying memory on the compute cores, which is cheap and impossible to hide. Over a
rate-limited wire, communication takes time proportional to its bytes. Two rates per group are derived from its run without a
limit: on the *share-matched* wire, communication takes the same fraction of a btp step as in the paper's 7B row on A100s; on the
*slow* wire, it takes half of the step. Every finished launch is saved, so the same command at the same commit resumes. Needs root
and iproute2; the main set takes 65 minutes, all sets 103. Keep the machine idle.

  main      TP 2, d 1024, cola: every layout, with and without overlap; bare collectives; timelines
  meshes    TP 2 x PP 2, TP 2 x DP 2, DP 2
  sizes     d 512, 2048
  families  svd, lax
  many      as many tokens per step, relative to d, as 131k at d 4096
  halves    btp with and without overlapped halves, on five wires, next to predictions
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.commands import LEAST_ROUNDS, add_config, require_least
from benchmarks.experiments.contest import spread
from benchmarks.experiments.hosts import Host, hosts, why_no_hosts
from benchmarks.experiments.results import MACHINE, Facts, MeasurementError, facts_of, keep, read, resumed
from benchmarks.experiments.sections import save
from benchmarks.experiments.wire_plan import NO_LIMIT, SETS, WireGroup, WireSet, on_wire, row_of, wire_name
from benchmarks.experiments.wire_report import ISSUE, MIB
from boost.config import Config
from boost.errors import ConfigError
from boost.format import format_duration
from boost.parallel.mesh import Mesh
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware, Link
from boost.plan.timing import predict

ROOT = Path(__file__).parents[2]
"""Working directory of the processes, from which they import `benchmarks`."""

PARTIAL = ".partial"
"""Suffix of the file with a set's finished launches."""

PORT = 29400
"""Rendezvous port, always free in a new namespace."""


@dataclass(frozen=True)
class WireLaunch:
    """One launch of a group on one wire."""

    group: WireGroup
    wire: str
    number: int
    fraction: float | None = None
    """Fraction of a step that communication takes, if that determines the rate."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the launch within a result."""
        return self.group.name, self.wire, self.number


def wire(plan: WireSet, source: str, overrides: Sequence[str], rates: Sequence[float], out: Path) -> int:
    """Measures a set, or the launches missing from `out`.partial, which is written after every launch. Writes `out`.json, .md and
    the figures. Measures nothing if `out`.json already has this set with the same settings and commit.

    `rates`: Mbit/s, in addition to the marked rates. Raises ConfigError if this machine cannot create network namespaces or if
    `out`.partial has launches with other settings, and MeasurementError if a process fails.
    """
    if reason := why_no_hosts(limited=True):
        raise ConfigError(f"the wire experiment needs network namespaces: {reason}")
    configs = {group.name: group.configs(source, overrides) for group in plan.groups}
    facts = _begin(plan, configs, rates, out)
    every = list(schedule(plan, rates))
    for number, launch in enumerate(every, start=1):
        if launch.key in _done(facts):
            continue
        print(f"{plan.name} {number}/{len(every)}: {_words(launch)}; {_to_go(every, facts)} to go", flush=True)
        begun, mbit = time.monotonic(), rate_of(facts, launch)
        last = launch.number == plan.launches - 1
        with hosts(launch.group.processes) as found:
            measured = measure(found, mbit, launch, configs[launch.group.name], plan.rounds, draws=last)
        ran = {"group": launch.group.name, "wire": launch.wire, "launch": launch.number}
        facts["groups"].append({**ran, **measured, "wall_s": round(time.monotonic() - begun, 1)})
        first = plan.groups[0]
        free = on_wire(facts, first.name, NO_LIMIT)[0]
        facts["marked"] = {name: marked_rate(free, first.reference, share) for name, share in plan.marked.items()}
        keep(out, facts, PARTIAL)
    if plan.name == "halves":
        facts["predicted"] = predicted_gains(plan, configs[plan.groups[0].name], out.with_name("validation.json"))
    save(out, facts)
    out.with_suffix(PARTIAL).unlink(missing_ok=True)
    return 0


def schedule(plan: WireSet, rates: Sequence[float]) -> Iterator[WireLaunch]:
    """All launches in order. Each group starts without a limit, which determines its rates; wires are then interleaved launch by
    launch, so that a change in the machine's speed affects all of them equally. `rates` have one launch each."""
    for number in range(max(plan.launches, plan.free_launches)):
        for group in plan.groups:
            if number < plan.free_launches:
                yield WireLaunch(group, NO_LIMIT, number)
            if number == 0:
                for rate in sorted(rates, reverse=True):
                    yield WireLaunch(group, wire_name(rate), number)
            if number < plan.launches:
                for name, fraction in plan.marked.items():
                    yield WireLaunch(group, name, number, fraction)


def rate_of(facts: Facts, launch: WireLaunch) -> float | None:
    """Mbit/s of a launch's wire, or None for no limit. Marked rates come from the group's first launch without a limit."""
    if launch.wire == NO_LIMIT:
        return None
    if launch.fraction is None:
        return float(launch.wire.split()[0])
    return marked_rate(on_wire(facts, launch.group.name, NO_LIMIT)[0], launch.group.reference, launch.fraction)


def marked_rate(free: Facts, reference: str, fraction: float) -> float:
    """Mbit/s at which sending the bytes of a step of `reference` takes `fraction` of the step, if nothing overlaps. Assumes that
    communication costs almost nothing in `free`, the launch without a limit."""
    row = row_of(free, reference)
    seconds = spread(row["seconds"]).median
    return max(1, round(row["sent_bytes"] * 8e-6 * (1 - fraction) / (fraction * seconds)))


WIRE_OVERLAP = 0.5
"""Fraction of compute time in which a limited wire sends: the cores that compute also feed it (estimate)."""


def predicted_gains(plan: WireSet, configs: Mapping[str, Config], validation: Path) -> dict[str, float]:
    """Predicted speed-up of overlapped halves on every marked wire, with the calibrated profile in the result of 'validation'; {}
    without one."""
    if not validation.is_file() or not (machine := read(validation, "validation")["machine"]):
        return {}
    hardware = Hardware.model_validate(machine["hardware"]).model_copy(update={"overlap": WIRE_OVERLAP})
    plain, halved = (configs[each.name] for each in plan.groups[0].contenders)
    sent, gains = sum(each.sent_bytes for each in step_collectives(plain)), {}

    def seconds(config: Config, gb_s: float) -> float:
        link = Link(name="wire", latency_us=0.0, gb_s=gb_s)
        return predict(config, hardware.model_copy(update={"node": link, "network": link})).seconds

    for name, fraction in plan.marked.items():
        gb_s = sent * 1e-9 * (1 - fraction) / (fraction * seconds(plain, 1e6))
        gains[name] = seconds(plain, gb_s) / seconds(halved, gb_s)
    return gains


def _begin(plan: WireSet, configs: Mapping[str, Mapping[str, Config]], rates: Sequence[float], out: Path) -> Facts:
    """Empty results, or the finished or partial results of an earlier call with the same settings."""
    config = configs[plan.groups[0].name][plan.groups[0].reference]
    fresh = facts_of("wire", config, set=plan.name, rounds=plan.rounds, launches=plan.launches)
    environment = fresh["environment"]
    described = {
        group: {name: each.model_dump(exclude={"run", "data"}) for name, each in of_group.items()}
        for group, of_group in configs.items()
    }
    fresh["settings"] = {
        "set": plan.name,
        "rounds": plan.rounds,
        "launches": plan.launches,
        "free_launches": plan.free_launches,
        "rates": sorted(rates),
        "machine": {key: environment[key] for key in MACHINE},
        "torch": environment["torch"],
        "commit": (environment["git"] or {}).get("commit"),
        "configs": described,
        "recorded": {group.name: [asdict(each) for each in group.recorded] for group in plan.groups},
    }
    empty: Facts = {"marked": {}, "groups": []}
    if not out.with_suffix(PARTIAL).exists():
        # A finished result with other settings is replaced when this one finishes.
        with contextlib.suppress(ConfigError):
            return resumed(fresh, empty, out)
    return resumed(fresh, empty, out, PARTIAL)


def _done(facts: Facts) -> set[tuple[str, str, int]]:
    return {(launch["group"], launch["wire"], launch["launch"]) for launch in facts["groups"]}


def _words(launch: WireLaunch) -> str:
    wire = launch.wire if launch.fraction is None else f"{launch.wire} wire"
    return f"{launch.group.name}, {wire}, launch {launch.number + 1}"


def _to_go(every: Sequence[WireLaunch], facts: Facts) -> str:
    """Remaining time if launches take as long as earlier ones of the same group and wire, or else as the average of all so far."""
    taken = {(each["group"], each["wire"], each["launch"]): each["wall_s"] for each in facts["groups"]}
    remaining = 0.0
    for key in {each.key for each in every} - taken.keys() if taken else ():
        alike = [seconds for other, seconds in taken.items() if other[:2] == key[:2]]
        remaining += statistics.mean(alike or taken.values())
    return format_duration(remaining) if taken else "unknown time"


def measure(
    found: Sequence[Host],
    mbit: float | None,
    launch: WireLaunch,
    configs: Mapping[str, Config],
    rounds: int,
    draws: bool = False,
) -> Facts:
    """Runs one launch with one process per host: all contenders interleaved, and bare collectives if the group requests them.
    `draws`: also records timelines on the slow wire. Raises MeasurementError."""
    for host in found:
        host.limit(mbit)
    group = launch.group
    recorded = [each.name for each in group.recorded if draws and launch.wire == "slow"]
    with tempfile.TemporaryDirectory(prefix="boost-wire-") as folder:
        asked = {
            "rounds": rounds,
            "words": _words(launch),
            "contenders": {name: config.model_dump() for name, config in configs.items()},
            "collectives": group.collectives,
            "recorded": recorded,
        }
        Path(folder, "group.json").write_text(json.dumps(asked), encoding="utf-8")
        _run(found, folder)
        read = [Path(folder, f"measured{rank}.json").read_text(encoding="utf-8") for rank in range(len(found))]
    parts = [json.loads(text) for text in read]
    steps = parts[0].pop("steps")
    return {
        "mbit": mbit,
        **parts[0],
        "timelines": {name: [steps[name], *(part["steps"][name] for part in parts[1:])] for name in recorded},
    }


def _run(found: Sequence[Host], folder: str) -> None:
    """Runs a process on every host to completion. Raises MeasurementError if one fails."""
    processes = [_start(found, rank, folder) for rank in range(len(found))]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise MeasurementError(f"a process of the wire experiment failed with exit code {next(filter(None, codes))}")


def _start(found: Sequence[Host], rank: int, folder: str) -> "subprocess.Popen[bytes]":
    host = found[rank]
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(found)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": found[0].address,
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


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "wire", tp=False)
    parser.add_argument("--set", choices=(*SETS, "all"), default="main", help="what to measure (default main)")
    words = "additional rates of the main set, in Mbit/s (default 1000)"
    parser.add_argument("--rates", type=float, nargs="*", default=[1000.0], metavar="MBIT", help=words)
    words = "launches per marked rate (default 5 in the main set, 3 in many, 2 in the others)"
    parser.add_argument("--launches", type=int, metavar="N", help=words)
    words = "rounds per launch, at least 7 (default 15 in the main set, 9 in halves, 7 in the others)"
    parser.add_argument("--rounds", type=int, metavar="N", help=words)
    parser.add_argument("--restart", action="store_true", help="first discard the set's launches and results")


def run(args: argparse.Namespace) -> int:
    if args.rounds is not None:
        require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    if args.launches is not None:
        require_least("--launches", [args.launches])
    if any(not rate >= 1 for rate in args.rates):
        raise ConfigError(f"--rates = {min(args.rates):g} is too slow; smallest valid value: 1 (Mbit/s)")
    for name in SETS if args.set == "all" else (args.set,):
        plan, out = SETS[name], args.out if name == "main" else args.out.with_name(f"{args.out.name}-{name}")
        launches = args.launches or plan.launches
        plan = replace(
            plan, launches=launches, free_launches=min(launches, plan.free_launches), rounds=args.rounds or plan.rounds
        )
        if args.restart:
            for suffix in (".json", ".partial"):
                out.with_suffix(suffix).unlink(missing_ok=True)
        if code := wire(plan, args.config, args.overrides, args.rates if name == "main" else [], out):
            return code
    return 0
