"""Compares the performance model with steps measured on this machine: time, memory and bytes sent.

`--measure` first times whole optimizer steps on random tokens, with a profile calibrated on other shapes:

    boost plan calibrate --device cpu --nproc 2 --out local.toml
    python -m benchmarks validation --measure --hardware local.toml

Measurements are stored with their profile, by device type. Predictions are recomputed every time to reflect changes to the model.
A share is single-rank emulation of TP (`benchmarks.experiments.shares`). Exits with code 1 if an error exceeds its limit.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.commands import add_out, result_of
from benchmarks.experiments.contest import largest
from benchmarks.experiments.results import Facts, read
from benchmarks.experiments.sections import save
from benchmarks.experiments.shares import share_prediction, without_the_others
from benchmarks.experiments.steps import SIZE_3B, SIZE_7B
from boost.config import Config, load
from boost.config.layouts import layout_spec
from boost.config.load import from_tree
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.format import format_bytes
from boost.machine import available_cores
from boost.measure.speed import Probe
from boost.measure.steps import SIZE_1B, SMALL, Prediction, Stepper, flags, look_at, prediction, shape
from boost.parallel.mesh import mesh_of
from boost.plan.categories import GRADIENTS, OPTIMIZER, WEIGHTS
from boost.plan.hardware import Hardware, load_hardware
from boost.plan.search import max_peak
from boost.train.progress import progress
from boost.train.rendezvous import choose_device, close_mesh, open_mesh
from boost.train.rundir import environment

TIME_LIMIT, PEAK_LIMIT, BYTES_LIMIT = 0.10, 0.05, 0.0
"""Maximum relative errors of measured steps: seconds, peak bytes, sent bytes."""

CONFIGURATIONS = 12
"""Minimum number of configurations to measure on CPUs."""

ROUNDS = 7
"""Interleaved rounds of all configurations. The median is used."""

MACHINE, GPU = "machine", "gpu"
"""Sections of the result, by the device type of the steps."""

MIDDLE, LARGE = (768, 3, 2048, 12), (1024, 2, 2736, 16)
"""(d, blocks, f, heads)."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", action="store_true", help="measure steps on this machine first (a few minutes)")
    words = "hardware profile of this machine, for --measure"
    parser.add_argument("--hardware", metavar="FILE", help=words)
    add_out(parser, "validation")


def run(args: argparse.Namespace) -> int:
    if args.measure != (args.hardware is not None):
        raise ConfigError(
            "--measure and --hardware FILE need each other; create a profile with boost plan calibrate --out FILE"
        )
    facts: Facts = read(args.out.with_suffix(".json"), "validation") if args.out.with_suffix(".json").is_file() else {}
    sections = {name: facts.get(name) for name in (MACHINE, GPU)}
    if args.measure:
        hardware = load_hardware(args.hardware)
        sections[GPU if hardware.device == "cuda" else MACHINE] = {
            "environment": environment(load(None)),
            "hardware": hardware.model_dump(),
            "rows": [asdict(step) for step in measure(hardware)],
        }
    facts = {"experiment": "validation", "environment": environment(load(None)), "config": load(None).model_dump()}
    for section in filter(None, sections.values()):
        hardware = Hardware.model_validate(section["hardware"])
        for row in section["rows"]:
            row |= asdict(_predict(from_tree(row["config"]), hardware, row["share"]))
    facts |= sections
    save(args.out, facts)
    return int(not all(verdict.holds for verdict in verdicts(facts)))


def _predict(config: Config, hardware: Hardware, share: bool) -> Prediction:
    return share_prediction(config, hardware) if share else prediction(config, hardware)


@dataclass(frozen=True)
class Verdict:
    """Verdict on the predictions of one quantity, based on the worst one."""

    section: str
    what: str
    count: int
    worst: float
    """Signed relative error of the worst prediction."""
    limit: float
    least: int
    """Minimum number of predictions."""

    @property
    def holds(self) -> bool:
        """Whether there are enough predictions and all are within the limit."""
        return abs(self.worst) <= self.limit and self.count >= self.least


def verdicts(facts: Facts) -> Iterator[Verdict]:
    """Yields verdicts: seconds within 10%, memory within 5%, bytes exact; on CPUs, for at least 12 configurations."""
    for name in (MACHINE, GPU):
        rows = facts[name]["rows"] if facts[name] else []
        least = CONFIGURATIONS if name == MACHINE else 1
        for what, limit in (("time", TIME_LIMIT), ("memory", PEAK_LIMIT), ("bytes sent", BYTES_LIMIT)):
            if rows:
                yield Verdict(name, what, len(rows), max((off(row)[what] for row in rows), key=abs), limit, least)


def off(row: dict[str, Any]) -> dict[str, float]:
    """Relative errors of one measured step."""
    predicted, counted = row["predicted_sent"], row["counted_sent"]
    return {
        "time": row["predicted_s"] / row["measured_s"] - 1,
        "memory": row["predicted_peak"] / row["measured_peak"] - 1,
        "bytes sent": predicted / counted - 1 if counted else float(predicted > 0),
    }


@dataclass(frozen=True)
class MeasuredStep:
    """Predicted and measured step of one configuration; maxima over processes."""

    name: str
    processes: int
    config: dict[str, Any]
    share: bool
    """Whether this is single-rank emulation without collectives."""
    predicted_s: float
    measured_s: float
    """Median seconds, normalized to the machine's speed during calibration: each time is divided by the slowdown of a small fixed
    workload right before and after, on the slowest process."""
    quartiles_s: tuple[float, float]
    raw_s: float
    """Median wall-clock seconds."""
    predicted_peak: int
    """Predicted peak memory in bytes."""
    measured_peak: int
    predicted_sent: int
    """Predicted bytes sent by one process per step."""
    counted_sent: int


def measure(hardware: Hardware) -> list[MeasuredStep]:
    """Measures the steps of `cases` on this machine. Configurations with the same number of processes run in interleaved rounds;
    those that do not fit in the profile's memory are skipped.

    Raises ConfigError if this machine's device type differs from the profile's.
    """
    found: list[MeasuredStep] = []
    for processes, share, names in _groups(hardware.device):
        work = list(fitting([(name, case(name, hardware.device)) for name in names], hardware))
        if not work:
            continue
        rows = result_of(measured, (work, hardware, share), processes)
        found += [MeasuredStep(**row | {"quartiles_s": tuple(row["quartiles_s"])}) for row in rows]
    return found


def fitting(work: Sequence[tuple[str, Config]], hardware: Hardware) -> Iterator[tuple[str, Config]]:
    """Yields configurations that fit in memory together: each runs while the training states of all others are in memory."""
    states, peaks = zip(*(_memory(config, hardware) for _, config in work), strict=True)
    usable = hardware.usable_bytes
    kept: list[int] = []
    for i in sorted(range(len(work)), key=lambda i: peaks[i]):
        held = sum(states[j] for j in kept)
        if held + peaks[i] <= usable and all(held + states[i] - states[j] + peaks[j] <= usable for j in kept):
            kept.append(i)
        else:
            needs = format_bytes(held + peaks[i])
            print(f"{work[i][0]}: skipped: {needs} does not fit in {format_bytes(usable)}", flush=True)
    yield from (work[i] for i in sorted(kept))


def _memory(config: Config, hardware: Hardware) -> tuple[int, int]:
    """Returns (bytes between steps, bytes at the peak of a step)."""
    held, _ = max_peak(config, hardware.is_gpu)
    states = sum(held.by_category.get(category, 0) for category in (WEIGHTS, OPTIMIZER, GRADIENTS))
    return states, held.total


def measured(work: Sequence[tuple[str, Config]], hardware: Hardware, share: bool) -> list[Facts]:
    """Measures configurations on all processes of this launch."""
    return [asdict(row) for row in (measure_shares if share else measure_process)(work, hardware)]


def measure_process(work: Sequence[tuple[str, Config]], hardware: Hardware, rounds: int = ROUNDS) -> list[MeasuredStep]:
    """Measures, in this process, configurations with the same number of processes. Returns rows on the main process, else []."""
    first = work[0][1]
    _set_threads(hardware)
    mesh = open_mesh(ParallelConfig(layout="single", dp=first.parallel.world_size), first.run.device)
    meshes = [mesh_of(config.parallel, mesh.device) if mesh.size > 1 else mesh for _, config in work]
    steppers = [Stepper(config, of_its_own) for (_, config), of_its_own in zip(work, meshes, strict=True)]
    rows = _rows([name for name, _ in work], steppers, hardware, rounds, share=False)
    mesh.barrier()
    close_mesh()
    return rows if mesh.is_main else []


def measure_shares(work: Sequence[tuple[str, Config]], hardware: Hardware, rounds: int = ROUNDS) -> list[MeasuredStep]:
    """Measures one TP process without the others (single-rank emulation). All configurations have the same TP size."""
    parallel, device = work[0][1].parallel, choose_device(work[0][1].run.device)
    _set_threads(hardware)
    with without_the_others(parallel, device) as mesh:
        steppers = [Stepper(config, mesh) for _, config in work]
        return _rows([name for name, _ in work], steppers, hardware, rounds, share=True)


def _set_threads(hardware: Hardware) -> None:
    """Uses as many threads as during calibration, even if fewer processes share the machine now."""
    torch.set_num_threads(max(available_cores() // hardware.per_node, 1))


def _rows(
    names: Sequence[str], steppers: Sequence[Stepper], hardware: Hardware, rounds: int, share: bool
) -> list[MeasuredStep]:
    for stepper in steppers:  # the first step of a pipeline allocates its buffers and sends their shapes
        stepper.step()
    seen = [_seen(stepper) for stepper in steppers]
    seconds: list[list[tuple[float, float]]] = [[] for _ in steppers]
    probe = Probe(steppers[0].mesh.device)
    usual = hardware.speeds_of(1 if share else steppers[0].mesh.size).probe_us * 1e-6
    for number in progress(range(rounds), f"steps of {len(steppers)} configurations", enabled=steppers[0].mesh.is_main):
        order = list(range(len(steppers)))
        for i in order[number % len(order) :] + order[: number % len(order)]:
            before, taken = probe.seconds(), steppers[i].seconds()
            slower = (before + probe.seconds()) / 2 / usual if usual else 1.0
            seconds[i].append((taken, largest(slower, steppers[i].mesh)))
    return [
        _row(name, stepper, hardware, share, times, *facts)
        for name, stepper, times, facts in zip(names, steppers, seconds, seen, strict=True)
    ]


def _seen(stepper: Stepper) -> tuple[int, int]:
    """(peak bytes, sent bytes) of one step, the maximum over processes."""
    seen = look_at(stepper)
    return int(largest(seen.peak_bytes, stepper.mesh)), int(largest(seen.sent_bytes, stepper.mesh))


def _row(
    name: str,
    stepper: Stepper,
    hardware: Hardware,
    share: bool,
    timed: Sequence[tuple[float, float]],
    measured_peak: int,
    counted: int,
) -> MeasuredStep:
    times = [seconds / slower for seconds, slower in timed]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return MeasuredStep(
        name=name,
        processes=stepper.config.parallel.world_size,
        config=stepper.config.model_dump(),
        share=share,
        measured_s=statistics.median(times),
        quartiles_s=(low, high),
        raw_s=statistics.median(seconds for seconds, _ in timed),
        measured_peak=measured_peak,
        counted_sent=counted,
        **asdict(_predict(stepper.config, hardware, share)),
    )


def cases(device: str) -> list[str]:
    """Names of the configurations measured on a device type."""
    return list(_CASES[device])


def case(name: str, device: str) -> Config:
    """Returns the configuration with this name."""
    return load("demo", [*_BASE[device], *_CASES[device][name]])


def _groups(device: str) -> list[tuple[int, bool, list[str]]]:
    """Groups configurations that are measured in the same run: (number of processes, whether they are shares, names)."""
    groups: dict[tuple[int, bool, int], list[str]] = {}
    for name in cases(device):
        parallel, share = case(name, device).parallel, name.startswith("share")
        key = (1 if share else parallel.world_size, share, parallel.tp)
        groups.setdefault(key if share else (key[0], False, 0), []).append(name)
    return [(processes, share, names) for (processes, share, _), names in groups.items()]


_BASE = {
    "cpu": [*flags(vocab_size=4096, seq_len=256, tp=1), "--run.device=cpu"],
    "cuda": [*flags(vocab_size=32000, seq_len=4096, tp=1), "--run.device=cuda", "--train.compute_dtype=bfloat16"],
}
_CASES: dict[str, dict[str, list[str]]] = {
    "cpu": {
        "cola 512": shape(*SMALL) + flags(micro_batch=4, global_batch=4),
        "dense 512": shape(*SMALL, family="dense") + flags(micro_batch=4, global_batch=4),
        "lax 768": shape(*MIDDLE, family="lax") + flags(micro_batch=4, global_batch=4),
        "cola 1024, 2 micro-batches": shape(*LARGE) + flags(micro_batch=2, global_batch=4),
        "cola 512, low-rank": shape(*SMALL) + flags(micro_batch=8, global_batch=8, recompute="low-rank"),
        "btp 512": shape(*SMALL) + flags(tp=2, layout="btp", micro_batch=4, global_batch=4),
        "btp-sp 512": shape(*SMALL) + flags(tp=2, layout="btp-sp", micro_batch=8, global_batch=8),
        "vanilla 512": shape(*SMALL) + flags(tp=2, layout="vanilla", micro_batch=4, global_batch=4),
        "megatron-sp 512": shape(*SMALL, family="dense")
        + flags(tp=2, layout="megatron-sp", micro_batch=4, global_batch=4),
        "btp 768, full-block": shape(*MIDDLE)
        + flags(tp=2, layout="btp", recompute="full-block", micro_batch=4, global_batch=4),
        "dp 768": shape(*MIDDLE) + flags(dp=2, micro_batch=4, global_batch=8),
        "pp 512, 8 micro-batches": shape(*SMALL) + flags(pp=2, micro_batch=4, global_batch=32),
        "btp 1024, 2 micro-batches": shape(*LARGE) + flags(tp=2, layout="btp", micro_batch=4, global_batch=8),
        "btp-sp 1024": shape(*LARGE) + flags(tp=2, layout="btp-sp", micro_batch=4, global_batch=4),
        "vanilla 1024": shape(*LARGE) + flags(tp=2, layout="vanilla", micro_batch=2, global_batch=2),
        "megatron 1024": shape(*LARGE, family="dense")
        + flags(tp=2, layout="megatron", micro_batch=4, global_batch=4),
        "share of TP 4, btp 1024": shape(*LARGE) + flags(tp=4, layout="btp", micro_batch=4, global_batch=4),
        "share of TP 4, btp-sp 1024": shape(*LARGE) + flags(tp=4, layout="btp-sp", micro_batch=4, global_batch=4),
        "share of TP 8, vanilla 1024": shape(*LARGE) + flags(tp=8, layout="vanilla", micro_batch=4, global_batch=4),
    },
    "cuda": {
        "cola 1B": shape(*SIZE_1B) + flags(micro_batch=2, global_batch=2),
        "dense 1B": shape(*SIZE_1B, family="dense") + flags(micro_batch=2, global_batch=2),
        "svd 1B, 4 sequences": shape(*SIZE_1B, family="svd") + flags(micro_batch=4, global_batch=4),
        "lax 1B": shape(*SIZE_1B, family="lax") + flags(micro_batch=2, global_batch=2),
        "cola 3B, low-rank": shape(*SIZE_3B) + flags(micro_batch=4, global_batch=8, recompute="low-rank"),
        "cola 7B": shape(*SIZE_7B) + flags(micro_batch=2, global_batch=4),
        "dense 7B": shape(*SIZE_7B, family="dense") + flags(micro_batch=2, global_batch=2),
        **{
            f"share of TP {tp}, {layout} 7B": shape(*SIZE_7B, family="cola" if layout_spec(layout).low_rank else "dense")
            + flags(tp=tp, layout=layout, micro_batch=4, global_batch=4)
            for tp in (2, 4, 8)
            for layout in ("btp", "btp-sp", "vanilla", "megatron-sp")
        },
    },
}  # fmt: skip
"""Configurations by device type: sizes, layouts, families and batches that calibration does not cover."""
