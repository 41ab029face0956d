"""Runs optimizer steps as in training, on random tokens, and measures their time, memory and collectives against predictions."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boost.config import Config
from boost.config.schema import ModelConfig
from boost.config.traffic import Collective
from boost.data.batches import Batch
from boost.measure.counting import CollectiveCounter
from boost.measure.exactness import MadeBatches
from boost.measure.memory import MemoryTracker
from boost.measure.speed import synchronize
from boost.parallel.gradients import StepFlags, StepStats
from boost.parallel.mesh import Mesh
from boost.plan.categories import GRADIENTS, OPTIMIZER, WEIGHTS
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware
from boost.plan.memory import peak
from boost.plan.timing import predict
from boost.train.checkpoint import Position
from boost.train.graphs import WARM_UP, CapturedPasses
from boost.train.hardware import memory_bytes
from boost.train.model import build_model, choose_kernels, initialize_model
from boost.train.prefetch import host_batch, to_device
from boost.train.step import Passes, Update, run_passes
from boost.train.step import Stepper as TrainingStepper

SMALL, SIZE_1B = (512, 4, 1376, 8), (2048, 6, 5472, 32)
"""(d, blocks, f, heads) for models whose steps take about a second: SMALL on a CPU core, SIZE_1B on a GPU."""


class Stepper:
    """A model, its optimizer and the steps of `boost train` on one process in a mesh. Every step uses the same random tokens."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        model = build_model(config, mesh)
        initialize_model(model, config.train.seed)
        made = made_up_batches(config)  # the same in every step and for every replica
        batches = MadeBatches(lambda step: made)
        self._training = TrainingStepper(config, mesh, model, batches)
        self.fused_params, self.optimizer = self._training.fused_params, self._training.optimizer
        self.stats: StepStats | None = None
        """Statistics from the last step."""

    def step(self) -> list[Tensor]:
        """Runs one step. Returns the loss, on a process that holds the head, and the local gradients."""
        passes, update = self._launch()
        self.stats = self._training.read(update)
        has_head = self.mesh.pp.rank == self.mesh.pp.size - 1
        return [passes.loss] * has_head + [s.tensor.grad for s in self.fused_params if s.tensor.grad is not None]

    def _launch(self) -> tuple[Passes, Update]:
        # Another model in this process may have chosen other kernels.
        choose_kernels(self.config, self.mesh.device)
        training, position = self._training, Position(0, 0)
        passes = training.passes(position, self.config.optim.lr, training.batch(position))
        return passes, training.update(passes, StepFlags.NONE)

    def seconds(self, steps: int = 1) -> float:
        """Seconds for one step, from a common start until all processes are done. Several steps are averaged: as in
        training, the host launches each step before it reads the previous step's statistics."""
        self._all_here()
        begun, previous = time.perf_counter(), None
        for _ in range(steps):
            _, update = self._launch()
            if previous is not None:
                self._training.read(previous)
            previous = update
        assert previous is not None
        self.stats = self._training.read(previous)
        self._all_here()
        return (time.perf_counter() - begun) / steps

    def _all_here(self) -> None:
        synchronize(self.mesh.device)
        self.mesh.barrier()


def time_passes(config: Config, device: torch.device, rounds: int) -> list[float]:
    """Seconds for the forward and the backward pass of a micro-batch in one process, one value per round."""
    mesh = Mesh(device)
    model = build_model(config, mesh)
    initialize_model(model, config.train.seed)
    batches, result = [host_batch(made_up_batches(config)[0])], []
    for _ in range(rounds + 2):
        model.zero_grad(set_to_none=True)
        synchronize(device)
        begun = time.perf_counter()
        run_passes(model, batches, config, divisor=1)
        synchronize(device)
        result.append(time.perf_counter() - begun)
    return result[2:]


@dataclass(frozen=True)
class ObservedStep:
    """Memory and collectives observed in one step on one process."""

    peak_bytes: int
    """Peak memory in bytes: weights, gradients, optimizer state, activations."""
    collectives: list[Collective]
    """All collectives issued, in order."""

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.collectives)


def look_at(stepper: Stepper) -> ObservedStep:
    """Runs one step, more slowly than usual, and records all tensors and collectives. A replay would hide them, so a step whose
    passes are a CUDA graph runs twice: as usual for its memory, and without the graph."""
    training, held = stepper._training, 0
    usual = training.run_passes
    if isinstance(usual, CapturedPasses):
        held = _bytes_with_graph(stepper)
        training.run_passes = usual.passes
    tracker, counter = MemoryTracker(), CollectiveCounter()
    for fused in stepper.fused_params:
        tracker.watch(fused.tensor, WEIGHTS)
    for value in stepper.optimizer.state_tensors():
        tracker.watch(value, OPTIMIZER)
    hooks = [
        s.parameter.register_post_accumulate_grad_hook(lambda p: tracker.watch(p.grad, GRADIENTS))
        for s in stepper.fused_params
        if s.shard is None and s.parameter.requires_grad
    ]
    # torch >= 2.13 refuses to compile whole blocks under such modes, which would see nothing inside them.
    with torch.compiler.set_stance("force_eager"), tracker, counter:
        stepper.step()
    for hook in hooks:
        hook.remove()
    training.run_passes = usual
    return ObservedStep(held or sum(tracker.peak.values()), counter.collectives)


def _bytes_with_graph(stepper: Stepper) -> int:
    """Peak memory of captured steps and of an evaluation, which cannot use the graph's memory; 0 on CPUs, which have no graphs."""
    if stepper.mesh.device.type != "cuda":
        return 0
    for _ in range(WARM_UP + 1):
        stepper.step()
    tokens, targets, _ = to_device(made_up_batches(stepper.config)[0], False, stepper.mesh.device)
    with torch.no_grad():
        stepper._training.model(tokens, targets)
    return memory_bytes(stepper.mesh.device)


@dataclass(frozen=True)
class Prediction:
    """Predicted maxima over pipeline ranks."""

    predicted_s: float
    predicted_peak: int
    predicted_sent: int


def prediction(config: Config, hardware: Hardware) -> Prediction:
    """Predicts what `look_at` and `Stepper.seconds` measure. Raises ConfigError if the profile has no speed for a dtype."""
    ranks = range(config.parallel.pp)
    return Prediction(
        predicted_s=predict(config, hardware).seconds,
        predicted_peak=max(peak(config, rank, hardware.is_gpu).total for rank in ranks),
        predicted_sent=max(sum(c.sent_bytes for c in step_collectives(config, rank)) for rank in ranks),
    )


def made_up_batches(config: Config) -> list[Batch]:
    """Random micro-batches for one replica in a step."""
    train = config.train
    count = train.global_batch // (config.parallel.dp * train.micro_batch)
    shape = (train.micro_batch, train.seq_len + 1)
    rng = np.random.default_rng(train.seed)
    made = (rng.integers(0, config.model.vocab_size, shape) for _ in range(count))
    return [Batch(x[:, :-1].copy(), x[:, 1:].copy(), np.zeros_like(x[:, 1:])) for x in made]


def flags(**fields: object) -> list[str]:
    """Builds command-line overrides for a configuration. Fields without a known section belong to [model]."""
    places = {"micro_batch": "train", "global_batch": "train", "seq_len": "train", "recompute": "train"}
    places |= dict.fromkeys(("tp", "pp", "dp", "layout", "shard", "norm"), "parallel")
    return [f"--{places.get(name, 'model')}.{name}={value}" for name, value in fields.items()]


def shape(dim: int, layers: int, ffn: int, heads: int, **others: object) -> list[str]:
    """Overrides for a model of this size, with r = d/4."""
    own = ModelConfig.choice(others).smallest(dim)
    return flags(dim=dim, ffn_dim=ffn, heads=heads, layers=layers, **own, **others)
