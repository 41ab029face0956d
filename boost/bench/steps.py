"""Optimizer steps as a run does them, on made-up tokens: how long they take, what they hold, what they send.

Beside each the performance model's prediction, from a hardware profile that was measured with other shapes.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from boost.bench.memory import MemoryTracker
from boost.config import Config
from boost.config.schema import ParallelConfig
from boost.data.batches import Batch
from boost.models.stored import storages
from boost.optim.build import build_optimizer
from boost.parallel.counting import CollectiveCounter
from boost.parallel.gradients import GradientReducer, agree, clip
from boost.parallel.mesh import Mesh, close_mesh, mesh_of, open_mesh
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware
from boost.plan.memory import GRADIENTS, OPTIMIZER, WEIGHTS
from boost.plan.peak import peak
from boost.plan.timing import predict
from boost.train.console import progress
from boost.train.model import backward, build_model, initialize_model


@dataclass(frozen=True)
class Step:
    """One configuration: what was predicted of its step and what was seen, on the busiest process."""

    name: str
    processes: int
    config: dict[str, Any]
    predicted_s: float
    measured_s: float
    """Median."""
    quartiles_s: tuple[float, float]
    predicted_peak: int
    """Bytes at the worst moment."""
    measured_peak: int
    predicted_sent: int
    """Bytes that one process sends in a step."""
    counted_sent: int


class Stepper:
    """A model with its optimizer on one process of a mesh. Steps on the same made-up tokens every time."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.model = build_model(config, mesh)
        initialize_model(self.model, config.train.seed)
        self.storages = list(storages(self.model))
        self.reducer = GradientReducer(self.storages, mesh)
        self.optimizer = build_optimizer(self.storages, config, mesh)
        self.batches = _batches(config)

    def step(self) -> None:
        """As `train.loop` does it."""
        train = self.config.train
        tokens = train.global_batch * train.seq_len
        self.reducer.begin(len(self.batches))
        loss = backward(self.model, self.batches, self.config, divisor=tokens)
        self.reducer.finish()
        targets = sum(batch.targets.size for batch in self.batches)
        agreement = agree(self.storages, loss, targets, tokens, False, self.mesh)
        clip((s.tensor for s in self.storages), agreement, self.config.optim.clip)
        self.optimizer.step(0, self.config.optim.lr)

    def seconds(self) -> float:
        """Of one step, from the moment when all processes begin to that when all are done."""
        self._all_here()
        begun = time.perf_counter()
        self.step()
        self._all_here()
        return time.perf_counter() - begun

    def _all_here(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self.mesh.barrier()


def time_passes(config: Config, device: torch.device, rounds: int) -> list[float]:
    """Seconds of a forward and backward pass of a micro-batch, in one process."""
    mesh = Mesh(device)
    model = build_model(config, mesh)
    initialize_model(model, config.train.seed)
    batches, result = _batches(config), []
    for _ in range(rounds + 2):
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        backward(model, batches[:1], config, divisor=1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        result.append(time.perf_counter() - begun)
    return result[2:]


def measure_process(work: Sequence[tuple[str, Config]], hardware: Hardware, rounds: int) -> list[Step]:
    """One process of the measurement of configurations with one number of processes, in interleaved rounds."""
    first = work[0][1]
    mesh = open_mesh(ParallelConfig(layout="single", dp=first.parallel.world_size), first.run.device)
    meshes = [mesh_of(config.parallel, mesh.device) if mesh.size > 1 else mesh for _, config in work]
    steppers = [Stepper(config, of_its_own) for (_, config), of_its_own in zip(work, meshes, strict=True)]
    for stepper in steppers:  # a pipeline's first step makes its buffers, and sends their shapes
        stepper.step()
    seen = [_seen(stepper) for stepper in steppers]
    seconds: list[list[float]] = [[] for _ in steppers]
    for number in progress(rounds, f"steps of {len(work)} configurations", enabled=mesh.is_main):
        order = list(range(len(steppers)))
        for i in order[number % len(order) :] + order[: number % len(order)]:
            seconds[i].append(steppers[i].seconds())
    result = [
        _row(name, stepper, hardware, times, *facts)
        for (name, _), stepper, times, facts in zip(work, steppers, seconds, seen, strict=True)
    ]
    mesh.barrier()
    close_mesh()
    return result


def _seen(stepper: Stepper) -> tuple[int, int]:
    """(bytes at the worst moment, bytes sent) of one step, the largest of all processes."""
    tracker, counter = MemoryTracker(), CollectiveCounter()
    for storage in stepper.storages:
        tracker.watch(storage.tensor, WEIGHTS)
    for value in stepper.optimizer.state_tensors():
        tracker.watch(value, OPTIMIZER)
    hooks = [
        s.parameter.register_post_accumulate_grad_hook(lambda p: tracker.watch(p.grad, GRADIENTS))
        for s in stepper.storages
        if s.shard is None
    ]
    with tracker, counter:
        stepper.step()
    for hook in hooks:
        hook.remove()
    facts = torch.tensor([sum(tracker.peak.values()), sum(c.sent_bytes for c in counter.collectives)])
    if stepper.mesh.size > 1:
        torch.distributed.all_reduce(facts, torch.distributed.ReduceOp.MAX)
    return int(facts[0]), int(facts[1])


def _row(
    name: str, stepper: Stepper, hardware: Hardware, times: Sequence[float], measured_peak: int, counted: int
) -> Step:
    config = stepper.config
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    ranks = range(config.parallel.pp)
    return Step(
        name=name,
        processes=config.parallel.world_size,
        config=config.model_dump(),
        predicted_s=predict(config, hardware).seconds,
        measured_s=statistics.median(times),
        quartiles_s=(low, high),
        predicted_peak=max(peak(config, rank).total for rank in ranks),
        measured_peak=measured_peak,
        predicted_sent=max(sum(c.sent_bytes for c in step_collectives(config, rank)) for rank in ranks),
        counted_sent=counted,
    )


def _batches(config: Config) -> list[Batch]:
    """One replica's micro-batches of a step."""
    train = config.train
    count = train.global_batch // (config.parallel.dp * train.micro_batch)
    shape = (train.micro_batch, train.seq_len + 1)
    rng = np.random.default_rng(train.seed)
    made: Iterable[np.ndarray] = (rng.integers(0, config.model.vocab_size, shape) for _ in range(count))
    return [Batch(x[:, :-1].copy(), x[:, 1:].copy(), np.zeros_like(x[:, 1:])) for x in made]
