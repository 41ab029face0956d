"""Compares training on any mesh with one process: losses, gradients, weights and collectives.

Used by `boost verify` and by tests. Data is synthetic: rows have different numbers of targets, and documents have a few tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.config.traffic import Collective
from boost.data.batches import Batch, join
from boost.measure.counting import CollectiveCounter
from boost.models.fused import fused_params, local_slice
from boost.optim.adamw import build_optimizer
from boost.parallel.gradients import GradientReducer, StepStats, clip_gradients, launch_step_stats
from boost.parallel.mesh import Mesh
from boost.parallel.pipeline import Pipeline
from boost.parallel.working import WorkingCopies
from boost.plan.collectives import step_collectives
from boost.train.model import Model, build_model, host_batch, initialize_model, run_passes

DOCUMENT = 7
"""Length of a synthetic document in tokens."""

ALONE = {"tp": 1, "dp": 1, "cp": 1, "pp": 1, "virtual": 1, "split": (), "shard": "none", "shard_outer": False}
"""Fields of [parallel] for one process."""

ByName = dict[str, Tensor]
"""Tensors by logical parameter name."""


def alone(config: Config) -> Config:
    """Returns the configuration for one process."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=ALONE)})


@dataclass(frozen=True)
class Observed:
    """Record of a training run. Tensors are the local shards of one process."""

    initial: ByName
    gradients: list[ByName]
    """Gradients of each step, after clipping."""
    numbers: list[tuple[float, float]]
    """(loss, gradient norm) of each step."""
    weights: ByName
    """Weights after the last step."""


class TrainedModel:
    """Trains a model for a few optimizer steps, and records losses, clipped gradients and weights. Tensors are local shards."""

    build_optimizer = staticmethod(build_optimizer)

    def __init__(self, config: Config, mesh: Mesh, steps: int = 2, seed: int = 0) -> None:
        self.config, self.mesh = config, mesh
        self.model = build_model(config, mesh)
        initialize_model(self.model, seed)
        self.initial = {name: value.clone() for name, value in weights(self.model).items()}
        self.fused_params = list(fused_params(self.model))
        self.reducer = GradientReducer(self.fused_params, mesh, getattr(torch, config.train.sum_dtype))
        self.copies = WorkingCopies(self.model, config, self.reducer.accumulated)
        self.optimizer = self.build_optimizer(self.fused_params, config, mesh)
        self.gradients: list[ByName] = []
        """Gradients of each step, after clipping."""
        self.numbers = [self.step(step) for step in range(steps)]
        """(loss, gradient norm) of each step."""

    def seen(self) -> Observed:
        """Returns the record of the steps so far."""
        final = {name: value.clone() for name, value in weights(self.model).items()}
        return Observed(self.initial, list(self.gradients), list(self.numbers), final)

    def step(self, step: int) -> tuple[float, float]:
        """Runs one optimizer step. Returns (loss, gradient norm)."""
        stats = self.passes(step)
        clip_gradients((s.tensor for s in self.fused_params), stats, self.config.optim.clip)
        self.gradients.append({name: value.clone() for name, value in gradients(self.model).items()})
        self.optimizer.step(step, self.config.optim.lr)
        return stats.loss, stats.gradient_norm

    def passes(self, step: int, before_sums: Callable[[], None] = lambda: None) -> StepStats:
        """Runs a step without the update. `before_sums` is called after the passes, before the remaining gradient reductions."""
        cp = self.mesh.cp
        batches = [batch.share(cp.rank, cp.size) for batch in made_up_batches(self.config, step, self.mesh.dp.rank)]
        whole = [join(batches)] if isinstance(self.model, Pipeline) else batches
        positions = self.config.train.global_batch * self.config.train.seq_len
        self.reducer.begin(len(batches))
        with self.copies.in_use():
            loss = run_passes(self.model, [host_batch(batch) for batch in whole], self.config, positions)
        before_sums()
        self.reducer.finish()
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        return launch_step_stats(self.fused_params, loss, targets, positions, self.mesh).read()

    def collectives(self) -> list[Collective]:
        """Returns the collectives of a step without its update. Without PP, each one has its phase set."""
        groups = [axis.name for axis in (self.mesh.replicas, self.mesh.dp_cp) if axis.size > 1]
        counter = CollectiveCounter(step_groups=groups)

        def enter(phase: str) -> Callable[..., None]:
            return lambda *_: setattr(counter, "phase", phase)

        hooks = [
            self.model.register_forward_pre_hook(enter("forward")),
            self.model.register_forward_hook(enter("backward")),
        ]
        # Compiled blocks cannot run while a dispatch mode counts (an error in torch 2.13), and they issue the same collectives.
        with torch.compiler.set_stance("force_eager"), counter:
            self.passes(0, enter("step"))
        for hook in hooks:
            hook.remove()
        return counter.collectives


def made_up_batches(config: Config, step: int, dp_rank: int) -> Iterator[Batch]:
    """Yields the synthetic micro-batches of one replica in a step."""
    train = config.train
    tokens, targets = made_up_tokens(config, step)
    for row in range(train.global_batch):
        targets[row, : (3 * row) % train.seq_len] = IGNORED
    share = train.global_batch // config.parallel.dp
    for start in range(dp_rank * share, (dp_rank + 1) * share, train.micro_batch):
        rows = slice(start, start + train.micro_batch)
        documents = np.broadcast_to(np.arange(train.seq_len, dtype=np.int32) // DOCUMENT, tokens[rows].shape).copy()
        yield Batch(tokens[rows], targets[rows], documents)


def made_up_tokens(config: Config, seed: int, batch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns synthetic (tokens, targets), [B, S] each; `batch` defaults to the global batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch or config.train.global_batch, config.train.seq_len + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator).numpy()
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def relative_errors(actual: TrainedModel, expected: Observed) -> dict[str, float]:
    """Relative errors of this process's results against those of the whole model in one process, after the same number of steps."""
    model = actual.model
    numbers = zip(actual.numbers, expected.numbers, strict=True)
    per_step = [
        worst_error(ours, local_parts(model, theirs))
        for ours, theirs in zip(actual.gradients, expected.gradients, strict=True)
    ]
    local = local_parts(model, expected.initial)
    return {
        "initial": 0.0 if all(torch.equal(v, actual.initial[k]) for k, v in local.items()) else 1.0,
        "loss and norm": max(abs(a - e) / abs(e) for pair in numbers for a, e in zip(*pair, strict=True)),
        "first gradients": per_step[0],
        "gradients": max(per_step),
        "weights": worst_error(weights(model), local_parts(model, expected.weights)),
    }


def matches_table(config: Config, counted: list[Collective], pp_rank: int = 0) -> bool:
    """Whether a step issued the collectives of the table.

    Those of micro-batches must be in order, except under overlapped halves. Gradient reductions may be in any order. With PP or
    sharded weights, all may be in any order, since the schedule or torch determines it.
    """
    table = step_collectives(config, pp_rank)
    if config.parallel.pp > 1 or config.shards_weights:
        seen, expected = (Counter(c.on_the_wire[1:] for c in side) for side in (counted, table))
        return seen == expected
    seen_of_passes, expected_of_passes = (
        [c.on_the_wire for c in side if c.phase != "step"] for side in (counted, table)
    )
    sums = [Counter(c.on_the_wire for c in side if c.phase == "step") for side in (counted, table)]
    if config.parallel.overlap != "none":
        seen_of_passes, expected_of_passes = sorted(seen_of_passes), sorted(expected_of_passes)
    return seen_of_passes == expected_of_passes and sums[0] == sums[1]


def gradients(model: Model) -> ByName:
    """Local shard of every gradient."""
    return {
        param_slice.parameter.name: param_slice.view(s.tensor.grad)
        for s in fused_params(model)
        for param_slice in s.local_slices()
        if s.tensor.grad is not None
    }


def weights(model: Model) -> ByName:
    """Local shard of every weight."""
    return {
        param_slice.parameter.name: param_slice.view(s.tensor.detach())
        for s in fused_params(model)
        for param_slice in s.local_slices()
    }


def local_parts(model: Model, whole: ByName) -> ByName:
    """Expected local shards of unsharded tensors."""
    return {
        param_slice.parameter.name: local_slice(
            param_slice.parameter, model.layout, whole[param_slice.parameter.name]
        ).narrow(0, param_slice.offset, param_slice.rows)
        for s in fused_params(model)
        for param_slice in s.local_slices()
    }


def worst_error(actual: ByName, expected: ByName) -> float:
    """Largest relative error over all tensors; relative error is the maximum difference over the maximum expected magnitude."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[k] - expected[k]).abs().max() / expected[k].abs().max().clamp_min(1e-300)).item()
        for k in expected
        if expected[k].numel()
    )


def mean_error(actual: ByName, expected: ByName) -> float:
    """Norm of all differences relative to the norm of the expected values. For low precision, where single elements mean little."""
    squares = [
        ((actual[k].double() - expected[k].double()).square().sum(), expected[k].double().square().sum())
        for k in expected
    ]
    difference, total = (math.fsum(float(pair[i]) for pair in squares) for i in (0, 1))
    return math.sqrt(difference / total) if total else 0.0
