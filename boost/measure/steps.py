"""Measures optimizer steps as in training, on random tokens: time, memory and communication.

Each step is compared with a prediction from a hardware profile that was calibrated with other shapes. A share is single-rank
emulation of TP (`boost.measure.shares`).
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from boost.config import Config, load
from boost.config.layouts import layout_spec
from boost.config.schema import ParallelConfig
from boost.config.traffic import Collective
from boost.data.batches import Batch
from boost.format import format_bytes
from boost.measure.memory import MemoryTracker
from boost.measure.shares import without_the_others
from boost.measure.speed import Probe, synchronize
from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.parallel.counting import CollectiveCounter
from boost.parallel.gradients import GradientReducer, clip_gradients, reduce_step_stats
from boost.parallel.mesh import Mesh, choose_device, close_mesh, mesh_of, open_mesh
from boost.parallel.working import WorkingCopies
from boost.plan.categories import GRADIENTS, OPTIMIZER, WEIGHTS
from boost.plan.hardware import Hardware
from boost.plan.prediction import prediction
from boost.plan.search import max_peak
from boost.train.console import progress
from boost.train.launch import launch
from boost.train.model import backward, build_model, choose_kernels, initialize_model
from boost.train.rundir import available_cores

ROUNDS = 7
"""Interleaved rounds of all configurations. The median is used."""


@dataclass(frozen=True)
class MeasuredStep:
    """Predicted and measured step of one configuration; maxima over processes."""

    name: str
    processes: int
    config: dict[str, Any]
    share: bool
    """Whether it is single-rank emulation, without collectives."""
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


class Stepper:
    """A model and its optimizer on one process of a mesh. Every step uses the same random tokens."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.model = build_model(config, mesh)
        initialize_model(self.model, config.train.seed)
        self.fused_params = list(fused_params(self.model))
        self.reducer = GradientReducer(self.fused_params, mesh, getattr(torch, config.train.sum_dtype))
        self.copies = WorkingCopies(self.model, config, self.reducer.accumulated)
        self.optimizer = build_optimizer(self.fused_params, config, mesh)
        self.batches = [batch.share(mesh.cp.rank, mesh.cp.size) for batch in made_up_batches(config)]

    def step(self) -> list[Tensor]:
        """Runs one step, as in `train.loop`. Returns the loss, on a process that holds the head, and the local gradients."""
        train = self.config.train
        choose_kernels(train.compile, self.mesh.device)  # of this process: another model in it may have chosen others
        tokens = train.global_batch * train.seq_len
        self.reducer.begin(len(self.batches))
        with self.copies.in_use():
            loss = backward(self.model, self.batches, self.config, divisor=tokens)
        self.reducer.finish()
        targets = sum(batch.targets.size for batch in self.batches)
        stats = reduce_step_stats(self.fused_params, loss, targets, tokens, self.mesh)
        clip_gradients((s.tensor for s in self.fused_params), stats, self.config.optim.clip)
        self.optimizer.step(0, self.config.optim.lr)
        has_head = self.mesh.pp.rank == self.mesh.pp.size - 1
        return [loss] * has_head + [s.tensor.grad for s in self.fused_params if s.tensor.grad is not None]

    def seconds(self) -> float:
        """Seconds of one step, from a common start until all processes are done."""
        self._all_here()
        begun = time.perf_counter()
        self.step()
        self._all_here()
        return time.perf_counter() - begun

    def _all_here(self) -> None:
        synchronize(self.mesh.device)
        self.mesh.barrier()


def time_passes(config: Config, device: torch.device, rounds: int) -> list[float]:
    """Seconds of the forward and backward pass of a micro-batch in one process, one value per round."""
    mesh = Mesh(device)
    model = build_model(config, mesh)
    initialize_model(model, config.train.seed)
    batches, result = made_up_batches(config), []
    for _ in range(rounds + 2):
        model.zero_grad(set_to_none=True)
        synchronize(device)
        begun = time.perf_counter()
        backward(model, batches[:1], config, divisor=1)
        synchronize(device)
        result.append(time.perf_counter() - begun)
    return result[2:]


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
        with tempfile.TemporaryDirectory(prefix="boost-steps-") as folder:
            out = Path(folder) / "steps.json"
            code = launch(_measure_into, (work, hardware, share, out), processes, log_dir=None)
            if code:
                raise SystemExit(code)
            found += [
                MeasuredStep(**row | {"quartiles_s": tuple(row["quartiles_s"])}) for row in json.loads(out.read_text())
            ]
    return found


def fitting(work: Sequence[tuple[str, Config]], hardware: Hardware) -> Iterator[tuple[str, Config]]:
    """Yields the configurations that fit together: each one runs while the training states of all others are in memory."""
    states, peaks = zip(*(_memory(config, hardware) for _, config in work), strict=True)
    usable = hardware.usable_bytes
    kept: list[int] = []
    for i in sorted(range(len(work)), key=lambda i: peaks[i]):
        held = sum(states[j] for j in kept)
        if held + peaks[i] <= usable and all(held + states[i] - states[j] + peaks[j] <= usable for j in kept):
            kept.append(i)
        else:
            needs = format_bytes(held + peaks[i])
            print(f"{work[i][0]}: skipped, {needs} do not fit in {format_bytes(usable)}", flush=True)
    yield from (work[i] for i in sorted(kept))


def _memory(config: Config, hardware: Hardware) -> tuple[int, int]:
    """Returns (bytes between steps, bytes at the peak of a step)."""
    held, _ = max_peak(config, hardware.is_gpu)
    states = sum(held.by_category.get(category, 0) for category in (WEIGHTS, OPTIMIZER, GRADIENTS))
    return states, held.total


def _measure_into(work: Sequence[tuple[str, Config]], hardware: Hardware, share: bool, out: Path) -> int:
    rows = measure_shares(work, hardware) if share else measure_process(work, hardware)
    if rows:
        out.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    return 0


def measure_process(work: Sequence[tuple[str, Config]], hardware: Hardware, rounds: int = ROUNDS) -> list[MeasuredStep]:
    """Measures configurations with the same number of processes, in one of them. Returns rows on the main process, else []."""
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
    """Sets the number of threads to that during calibration, even if fewer processes share the machine now."""
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
    for number in progress(rounds, f"steps of {len(steppers)} configurations", enabled=steppers[0].mesh.is_main):
        order = list(range(len(steppers)))
        for i in order[number % len(order) :] + order[: number % len(order)]:
            before, taken = probe.seconds(), steppers[i].seconds()
            slower = (before + probe.seconds()) / 2 / usual if usual else 1.0
            seconds[i].append((taken, largest(slower, steppers[i].mesh)))
    return [
        _row(name, stepper, hardware, share, times, *facts)
        for name, stepper, times, facts in zip(names, steppers, seconds, seen, strict=True)
    ]


@dataclass(frozen=True)
class ObservedStep:
    """Memory and collectives observed in one step of one process."""

    peak_bytes: int
    """Peak memory in bytes: weights, gradients, optimizer state, activations."""
    collectives: list[Collective]
    """All collectives issued, in order."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by this process."""
        return sum(each.sent_bytes for each in self.collectives)


def look_at(stepper: Stepper) -> ObservedStep:
    """Runs one step, more slowly than usual, and records every tensor and collective."""
    tracker, counter = MemoryTracker(), CollectiveCounter()
    for fused in stepper.fused_params:
        tracker.watch(fused.tensor, WEIGHTS)
    for value in stepper.optimizer.state_tensors():
        tracker.watch(value, OPTIMIZER)
    hooks = [
        s.parameter.register_post_accumulate_grad_hook(lambda p: tracker.watch(p.grad, GRADIENTS))
        for s in stepper.fused_params
        if s.shard is None
    ]
    with tracker, counter:
        stepper.step()
    for hook in hooks:
        hook.remove()
    return ObservedStep(sum(tracker.peak.values()), counter.collectives)


def _seen(stepper: Stepper) -> tuple[int, int]:
    """(peak bytes, sent bytes) of one step, the maximum over processes."""
    seen = look_at(stepper)
    return int(largest(seen.peak_bytes, stepper.mesh)), int(largest(seen.sent_bytes, stepper.mesh))


def largest(number: float, mesh: Mesh) -> float:
    """Maximum of a number over all processes."""
    found = torch.tensor(number, dtype=torch.double, device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


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
        **asdict(prediction(stepper.config, hardware, share)),
    )


def made_up_batches(config: Config) -> list[Batch]:
    """Random micro-batches of one replica for a step."""
    train = config.train
    count = train.global_batch // (config.parallel.dp * train.micro_batch)
    shape = (train.micro_batch, train.seq_len + 1)
    rng = np.random.default_rng(train.seed)
    made: Iterable[np.ndarray] = (rng.integers(0, config.model.vocab_size, shape) for _ in range(count))
    return [Batch(x[:, :-1].copy(), x[:, 1:].copy(), np.zeros_like(x[:, 1:])) for x in made]


def cases(device: str) -> list[str]:
    """Names of the configurations that are measured on a device type."""
    return list(_CASES[device])


def case(name: str, device: str) -> Config:
    """Returns the configuration with this name."""
    return load("demo", [*_BASE[device], *_CASES[device][name]])


def _groups(device: str) -> list[tuple[int, bool, list[str]]]:
    """Groups the configurations that are measured in one run: (number of processes, whether they are shares, names)."""
    groups: dict[tuple[int, bool, int], list[str]] = {}
    for name in cases(device):
        parallel, share = case(name, device).parallel, name.startswith("share")
        key = (1 if share else parallel.world_size, share, parallel.tp)
        groups.setdefault(key if share else (key[0], False, 0), []).append(name)
    return [(processes, share, names) for (processes, share, _), names in groups.items()]


def flags(**fields: Any) -> list[str]:
    """Builds command-line overrides of a configuration. Fields without a known section belong to [model]."""
    places = {"micro_batch": "train", "global_batch": "train", "seq_len": "train", "recompute": "train"}
    places |= dict.fromkeys(("tp", "pp", "dp", "layout", "shard", "norm"), "parallel")
    return [f"--{places.get(name, 'model')}.{name}={value}" for name, value in fields.items()]


def shape(dim: int, layers: int, ffn: int, heads: int, **others: Any) -> list[str]:
    """Overrides for a model of this size, with r = d/4."""
    rank = {} if others.get("family") == "dense" else {"rank": dim // 4}
    return flags(dim=dim, ffn_dim=ffn, heads=heads, layers=layers, **rank, **others)


SMALL, MIDDLE, LARGE = (512, 4, 1376, 8), (768, 3, 2048, 12), (1024, 2, 2736, 16)
SIZE_1B, SIZE_3B, SIZE_7B = (2048, 6, 5472, 32), (3072, 4, 8192, 24), (4096, 4, 11008, 32)

_BASE = {
    "cpu": [*flags(vocab_size=4096, seq_len=256, tp=1), "--run.device=cpu"],
    "cuda": [
        *flags(vocab_size=32000, seq_len=4096, tp=1),
        "--run.device=cuda",
        "--train.compute_dtype=bfloat16",
    ],
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
"""Configurations by device type: sizes, layouts, families and batches that calibration does not measure."""
