"""Times whole optimizer steps of several configurations, interleaved in one run, with their communication, memory and size.

A group is one run, on processes of its own. A share is single-rank emulation: the work of one TP rank,
with communication modeled.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.commands import result_of
from benchmarks.experiments.contest import Call, Ratio, Spread, largest, launches, ratio, spread, take_turns
from benchmarks.experiments.results import Facts, MeasurementError
from benchmarks.experiments.shares import exposed_collectives, without_the_others
from boost.config import Config
from boost.config.architecture import groups as linears
from boost.config.architecture import parameter_count
from boost.config.schema import ParallelConfig
from boost.config.traffic import Collective
from boost.machine import available_cores
from boost.measure.steps import Stepper, look_at
from boost.parallel.mesh import Mesh
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware
from boost.plan.timing import Predictor
from boost.train.rendezvous import choose_device, close_mesh, open_mesh


@dataclass(frozen=True)
class TimingGroup:
    """Contenders that are timed together. All have the same device and the same mesh."""

    name: str
    """Unique among groups."""
    purpose: str
    """Purpose of the group, by which reports select groups."""
    contenders: dict[str, Config]
    """Configurations by name, in table order."""
    share: bool = False
    """Whether to emulate a single rank on one process."""
    peers: bool = False
    """Whether to time other libraries too, if installed."""

    @property
    def parallel(self) -> ParallelConfig:
        """The parallel configuration that all contenders share, except for the layout."""
        return next(iter(self.contenders.values())).parallel

    @property
    def processes(self) -> int:
        """Number of processes to start."""
        return 1 if self.share else self.parallel.world_size


def run_groups(groups: Sequence[TimingGroup], rounds: int, hardware: Hardware | None = None) -> list[Facts]:
    """The measurements of each group. `hardware` models the collectives of emulated ranks. Raises MeasurementError (see
    `contest.take_turns`)."""
    configured = os.environ.get("OMP_NUM_THREADS")  # the same number of threads in every group
    threads = int(configured) if configured else max(available_cores() // max(group.processes for group in groups), 1)
    return [result_of(measured, (group, rounds, threads, hardware), group.processes) for group in groups]


def measured(group: TimingGroup, rounds: int, threads: int, hardware: Hardware | None) -> Facts:
    """Measures a group on all processes of this launch."""
    torch.set_num_threads(threads)
    run = next(iter(group.contenders.values())).run
    if not group.share:
        facts = measure_group(group, open_mesh(group.parallel, run.device, run.timeout_s), rounds)
        close_mesh()
        return facts
    assert hardware is not None, "single-rank emulation needs a hardware profile"
    with without_the_others(group.parallel, choose_device(run.device)) as mesh:
        facts = measure_group(group, mesh, rounds)
    predictor = Predictor(hardware)
    waits = {name: exposed_collectives(predictor.predict(config)) for name, config in group.contenders.items()}
    return facts | {"priced_by": hardware.title, "waits_s": waits}


def measure_group(group: TimingGroup, mesh: Mesh, rounds: int) -> Facts:
    """Measures a group on this process; see `measure_steppers`."""
    steppers = {name: Stepper(each, mesh) for name, each in group.contenders.items()}
    for stepper in steppers.values():
        stepper.step()
    return measure_steppers(group, steppers, mesh, rounds)


def measure_steppers(group: TimingGroup, steppers: Mapping[str, Stepper], mesh: Mesh, rounds: int) -> Facts:
    """Measures a group, given its steppers. Each must have taken a step, because one-time buffers must exist before memory is
    measured. Sizes and bytes are maxima over processes; times end when all processes are done."""
    rows = {name: _row(name, stepper) for name, stepper in steppers.items()}
    calls: dict[str, Call] = {name: stepper.step for name, stepper in steppers.items()}
    others, skipped = _peers(group, mesh)
    turns = take_turns(calls | others, mesh, rounds, warm_up=1, words=group.name)
    rows |= {name: {"name": name, "peer": True} for name in others}
    config = next(iter(group.contenders.values()))
    return {
        "name": group.name,
        "purpose": group.purpose,
        "share": group.share,
        "tp": config.parallel.tp,
        "processes": group.processes,
        "threads": torch.get_num_threads(),
        "device": mesh.device.type,
        "dtype": config.train.compute_dtype,
        "tokens": config.train.global_batch * config.train.seq_len,
        "rows": [row | {"seconds": turns.seconds[name], "repeats": turns.repeats[name]} for name, row in rows.items()],
        "skipped": skipped,
        "probe_s": turns.probe_s,
    }


def _peers(group: TimingGroup, mesh: Mesh) -> tuple[dict[str, Call], dict[str, str]]:
    """({name: step} of other libraries, {name: reason} of those skipped)."""
    if not group.peers:
        return {}, {}
    from benchmarks.experiments.peers import peers

    return peers(next(config for config in group.contenders.values() if config.model.low_rank), mesh)


def _row(name: str, stepper: Stepper) -> Facts:
    config, seen = stepper.config, look_at(stepper)
    return {
        "name": name,
        "family": config.model.family,
        "layout": config.parallel.layout,
        "config": {part: getattr(config, part).model_dump() for part in ("model", "parallel", "train")},
        "parameters": parameter_count(config.model),
        "peak_bytes": int(largest(seen.peak_bytes, stepper.mesh)),
        "sent_bytes": int(largest(seen.sent_bytes, stepper.mesh)),
        "sent_in_blocks": sent_in_blocks(config, seen.collectives, stepper.mesh.pp.rank),
        "collectives": dict(Counter(each.kind for each in seen.collectives)),
    }


def sent_in_blocks(config: Config, counted: Sequence[Collective], pp_rank: int = 0) -> int:
    """Bytes sent by one process inside blocks, excluding embedding, head, gradients and step stats.

    Counted collectives have no names, so the bytes come from the configuration's collective table. Raises MeasurementError if
    table and counts differ.
    """
    table = list(step_collectives(config, pp_rank))
    if Counter(map(_seen_as, counted)) != Counter(map(_seen_as, table)):
        raise MeasurementError(
            f"{config.parallel.layout} issued collectives that differ from the collective table: a bug in BOOST"
        )
    places = {group.name for group in linears(config.model, 0)}
    return sum(each.sent_bytes for each in table if each.place in places and each.phase != "step")


def _seen_as(collective: Collective) -> tuple[str, int, str, int]:
    return collective.kind, collective.elements, collective.dtype, collective.processes


def seconds_of(group: Facts, name: str) -> np.ndarray:
    """Step seconds of a contender [launches, rounds], including modeled communication time for an emulated rank."""
    row = next(row for row in group["rows"] if row["name"] == name)
    waits: float = group.get("waits_s", {}).get(name, 0.0)
    return launches(row["seconds"]) + waits


def times(group: Facts, over: str, under: str) -> Ratio:
    """Ratio of two contenders' step times (over / under)."""
    return ratio(seconds_of(group, over), seconds_of(group, under))


def names(group: Facts) -> list[str]:
    """Names of the group's contenders."""
    return [row["name"] for row in group["rows"]]


def spread_of(group: Facts, name: str) -> Spread:
    """Median and quartiles of a contender's step time."""
    return spread(seconds_of(group, name))


def in_ms(found: Spread) -> str:
    """Formats a median with quartiles in ms."""
    digits = 1 if found.median < 0.1 else 0
    return f"{1e3 * found.median:.{digits}f} ({1e3 * found.low:.{digits}f} to {1e3 * found.high:.{digits}f})"


def shape_of(group: Facts) -> str:
    """Describes the group's exact dimensions."""
    rows = [row for row in group["rows"] if "config" in row]
    model, train = rows[0]["config"]["model"], rows[0]["config"]["train"]
    ranks = (row["config"]["model"].get("rank") for row in rows)  # a dense model has none
    rank = next((rank for rank in ranks if rank), None)
    count = train["global_batch"] // train["micro_batch"]
    micro = f"{count} micro-batch{'es' if count > 1 else ''} of {train['micro_batch']} x {train['seq_len']} tokens"
    return (
        f"d {model['dim']}, f {model['ffn_dim']}, r {rank}, {model['layers']} block{'s' if model['layers'] > 1 else ''}, "
        f"{model['heads']} heads, V {model['vocab_size']}; {micro}; compute in {train['compute_dtype']}, weights in "
        f"{train['param_dtype']}; TP {group['tp']}, {group['threads']} thread(s) per process"
    )
