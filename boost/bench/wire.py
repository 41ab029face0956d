"""Whole steps over a wire with a rate: two network namespaces as two hosts, one process on each, every layout in one run.

On one machine, gloo's communication is a copy in memory by the same cores: cheap, and impossible to hide. Here it takes the time
of its bytes. Two rates are marked, found from a run without a limit: on the *share-matched* wire the bytes of a btp step take the
fraction of the step that the paper's 7B row has on A100s, on the *slow* wire half of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from boost.bench.contest import Ratio, in_words, ratio, spread
from boost.bench.endtoend import BTP, BTP_SP, MEGATRON, MEGATRON_SP, PARALLEL, PUBLISHED, VANILLA, cut_flags
from boost.bench.side_by_side import in_ms, shape_of
from boost.bench.traffic import ISSUE
from boost.config import Config, load
from boost.errors import ConfigError, MeasurementError
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.drawing import pyplot, tidy, write
from boost.measure.hosts import Host, two_hosts, why_no_hosts
from boost.measure.results import Facts, facts_of, save_section
from boost.measure.steps import flags, shape
from boost.parallel.mesh import Mesh

CONTENDERS = (MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP)
MARKED = {"share-matched": 0.17, "slow": 0.5}
"""Fraction of a btp step that its bytes take on the marked wires. The first is that of the paper's 7B row on A100s."""

SIZE = (1024, 4, 2736, 16)
"""d, blocks, f, heads."""

BATCH = flags(vocab_size=4096, seq_len=512, micro_batch=2, global_batch=2)
MIB = (1, 4, 16)
"""Payloads of bare collectives, MiB of the gathered or summed tensor."""

PORT = 29400
"""Free in a namespace that nobody else uses."""


def contenders(source: str, overrides: Sequence[str]) -> dict[str, Config]:
    """Every layout at TP 2, the dense model for megatron's. Raises ConfigError."""
    found = {}
    for name in CONTENDERS:
        family = "dense" if name in (MEGATRON, MEGATRON_SP) else "cola"
        words = [
            "--run.device=cpu",
            "--optim.lr=1e-6",
            *shape(*SIZE, family=family),
            *BATCH,
            *cut_flags(PARALLEL[name], 2),
        ]
        found[name] = load(source, [*words, *overrides])
    return found


def wire(source: str, overrides: Sequence[str], rates: Sequence[float], launches: int, rounds: int, out: Path) -> int:
    """The experiment. `rates`: Mbit/s, in addition to the marked ones. Raises ConfigError where there can be no wire."""
    if reason := why_no_hosts(limited=True):
        raise ConfigError(f"boost bench wire needs two network namespaces: {reason}")
    found, groups = contenders(source, overrides), []
    with two_hosts() as hosts:
        free = measure(hosts, None, found, rounds)
        groups.append(free)
        marked = {name: marked_rate(free, fraction) for name, fraction in MARKED.items()}
        for _ in range(launches):
            for rate in sorted({*rates, *marked.values()}, reverse=True):
                groups.append(measure(hosts, rate, found, rounds))
    facts = facts_of("wire", found[BTP], rounds=rounds, launches=launches, marked=marked, groups=groups)
    save_section(out, facts, section(facts))
    print(out.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def marked_rate(free: Facts, fraction: float) -> float:
    """Mbit/s at which the bytes of a btp step take `fraction` of it, if none is hidden. Without a limit they take next to none."""
    seconds = spread(_row(free, BTP)["seconds"]).median
    return max(1, round(_row(free, BTP)["sent_bytes"] * 8e-6 * (1 - fraction) / (fraction * seconds)))


def measure(hosts: tuple[Host, Host], mbit: float | None, found: Mapping[str, Config], rounds: int) -> Facts:
    """One launch: a process on each host, all contenders in turns, and bare collectives. Raises MeasurementError."""
    for host in hosts:
        host.limit(mbit)
    with tempfile.TemporaryDirectory(prefix="boost-wire-") as folder:
        group = {"rounds": rounds, "mbit": mbit, "contenders": {name: c.model_dump() for name, c in found.items()}}
        Path(folder, "group.json").write_text(json.dumps(group), encoding="utf-8")
        processes = [_start(host, hosts[0], rank, folder) for rank, host in enumerate(hosts)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise MeasurementError(f"a process over the wire ended with exit code {next(filter(None, codes))}")
        return {"mbit": mbit, **json.loads(Path(folder, "measured.json").read_text(encoding="utf-8"))}


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
    return subprocess.Popen(host.command(sys.executable, "-m", "boost.bench.wire_process", folder), env=environment)


def collective_calls(mesh: Mesh) -> dict[str, Any]:
    """Bare collectives by kind and MiB, and a copy of as many bytes in memory."""
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
    """None yet: the figures of the Performance table for wires come with overlap."""
    return []


def section(facts: Facts) -> Section:
    """Steps and bare collectives by rate."""
    rates = _rates(facts)
    lead = (
        f"{shape_of(facts['groups'][0])}. One process on each of two hosts, which are network namespaces; whole steps, medians and "
        f"quartiles over {facts['rounds']} interleaved rounds of each of {facts['launches']} launches. On the share-matched wire "
        f"({facts['marked']['share-matched']:g} Mbit/s) the bytes of a btp step take 17 % of it, on the slow one "
        f"({facts['marked']['slow']:g} Mbit/s) half."
    )
    steps = tuple(
        (_name(facts, rate), name, in_ms(spread(_seconds(facts, rate, name))), in_words(_against(facts, rate, name)))
        for rate in rates
        for name in CONTENDERS
    )
    return Section(
        "Whole steps over a wire",
        (
            lead,
            Table("Step time by rate (measured).", ("wire", "layout", "ms:", "time / btp:"), steps),
            _collective_table(facts, rates),
            Figure("wire", "Step time by the rate of the wire (measured; medians)", lambda path: _draw(facts, path)),
        ),
    )


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
        "Bare collectives of two processes, fp32 (measured). The limit is the time of the bytes that one process sends at the rate "
        "of the wire, or of a copy of the payload in memory if that is longer."
    )
    return Table(caption, ("wire", "collective", "MiB:", "ms:", "limit / time:"), tuple(rows))


def _draw(facts: Facts, path: Path) -> None:
    plot = pyplot()
    figure, axis = plot.subplots(figsize=(7, 4), layout="constrained")
    rates = [rate for rate in _rates(facts) if rate]
    for name in CONTENDERS:
        axis.plot(rates, [spread(_seconds(facts, rate, name)).median for rate in rates], "o-", label=name)
    for name, rate in facts["marked"].items():
        axis.axvline(rate, color="grey", linestyle=":")
        axis.annotate(f" {name}", (rate, axis.get_ylim()[1]), va="top")
    axis.set(xscale="log", xlabel="wire, Mbit/s", ylabel="seconds per step", ylim=(0, None))
    axis.legend()
    tidy(axis)
    write(figure, path)


def _rates(facts: Facts) -> list[float | None]:
    """Fastest first; None is no limit."""
    found = {group["mbit"] for group in facts["groups"]}
    return sorted(found, key=lambda rate: -(rate or float("inf")))


def _name(facts: Facts, rate: float | None) -> str:
    marked = next((f", {name}" for name, mbit in facts["marked"].items() if mbit == rate), "")
    return f"{rate:g} Mbit/s{marked}" if rate else "no limit"


def _row(group: Facts, name: str) -> Facts:
    found: Facts = next(row for row in group["rows"] if row["name"] == name)
    return found


def _seconds(facts: Facts, rate: float | None, name: str) -> list[float]:
    """Of all rounds of all launches."""
    return [s for group in facts["groups"] if group["mbit"] == rate for s in _row(group, name)["seconds"]]


def _collective(facts: Facts, rate: float | None, name: str) -> list[float]:
    return [s for group in facts["groups"] if group["mbit"] == rate for s in group["collectives"][name]]


def _against(facts: Facts, rate: float | None, name: str) -> Ratio:
    return ratio(_seconds(facts, rate, name), _seconds(facts, rate, BTP))
