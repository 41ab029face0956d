"""Compares training on any mesh with training on one process: losses, gradients, weights and collectives.

`boost verify` and tests use this module. Data is synthetic: rows differ in their numbers of targets, and documents are short.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.config.traffic import Collective
from boost.data.batches import Batch, Batches
from boost.measure.counting import CollectiveCounter
from boost.models.fused import FusedParam, ParamSlice, fused_params, local_slice
from boost.optim.adamw import build_optimizer
from boost.parallel.mesh import Mesh
from boost.plan.collectives import step_collectives
from boost.train.checkpoint import Position
from boost.train.model import Model, build_model, initialize_model
from boost.train.step import Stepper

DOCUMENT = 7
"""Length of a synthetic document in tokens."""

ALONE = {"tp": 1, "dp": 1, "cp": 1, "pp": 1, "virtual": 1, "split": (), "shard": "none", "shard_outer": False}
"""Fields in [parallel] for one process."""

ByName = dict[str, Tensor]
"""Tensors by logical parameter name."""


def alone(config: Config) -> Config:
    """Returns the configuration for one process."""
    return config.changed(parallel=ALONE)


@dataclass(frozen=True)
class Observed:
    """Record of a training run. Tensors are the local shards on one process."""

    initial: ByName
    gradients: list[ByName]
    """Gradients from each step, after clipping."""
    numbers: list[tuple[float, float]]
    """(loss, gradient norm) for each step."""
    weights: ByName
    """Weights after the last step."""


class MadeBatches(Batches):
    """Micro-batches for a step and all replicas, from `make` instead of a store; they repeat if there are too few."""

    def __init__(self, make: Callable[[int], Sequence[Batch]]) -> None:
        self.make = make

    def numbered(self, step: int, numbers: Iterable[int], micro_batch: int) -> Iterator[Batch]:
        """The micro-batches with these numbers in a step."""
        made = self.make(step)
        return (made[number % len(made)] for number in numbers)


class TrainedModel:
    """Runs a few steps of `boost train` on a model; records losses, clipped gradients and weights. Tensors are local shards."""

    build_optimizer = staticmethod(build_optimizer)

    def __init__(self, config: Config, mesh: Mesh, steps: int = 2, seed: int = 0) -> None:
        self.config, self.mesh = config, mesh
        self.model = build_model(config, mesh)
        initialize_model(self.model, seed)
        self.initial = {name: value.clone() for name, value in weights(self.model).items()}
        batches, build = MadeBatches(functools.partial(made_up_batches, config)), self.build_optimizer
        # Without tensors, it clips the gradients in place, because they are compared.
        self.stepper = Stepper(config, mesh, self.model, batches, ahead=False, from_tensors=False, build=build)
        self.fused_params, self.reducer = self.stepper.fused_params, self.stepper.reducer
        self.optimizer = self.stepper.optimizer
        self.gradients: list[ByName] = []  # as in Observed
        self.numbers = [self.step(step) for step in range(steps)]

    def seen(self) -> Observed:
        """Returns the record of the steps so far."""
        final = {name: value.clone() for name, value in weights(self.model).items()}
        return Observed(self.initial, list(self.gradients), list(self.numbers), final)

    def step(self, step: int) -> tuple[float, float]:
        """Runs one optimizer step. Returns (loss, gradient norm)."""
        stats = self.stepper.step(Position(step, 0), self.config.optim.lr)
        self.stepper.prefetcher.close()
        self.gradients.append({name: value.clone() for name, value in gradients(self.model).items()})
        return stats.loss, stats.gradient_norm

    def collectives(self) -> list[Collective]:
        """Runs one more step and returns the collectives issued before the update. Their phases are set only without PP."""
        groups = [axis.name for axis in (self.mesh.replicas, self.mesh.dp_cp) if axis.size > 1]
        counter = CollectiveCounter(step_groups=groups)

        def enter(phase: str) -> Callable[..., None]:
            return lambda *_: setattr(counter, "phase", phase)

        hooks = [
            self.model.register_forward_pre_hook(enter("forward")),
            self.model.register_forward_hook(enter("backward")),
        ]
        # Compiled blocks cannot run under a counting dispatch mode (an error in torch 2.13), but they issue the same collectives.
        with before(self.reducer, "finish", enter("step")), contextlib.ExitStack() as counting:
            counting.enter_context(torch.compiler.set_stance("force_eager"))
            counting.enter_context(counter)
            with before(self.optimizer, "step", counting.close):
                self.numbers.append(self.step(len(self.numbers)))
        for hook in hooks:
            hook.remove()
        return counter.collectives


@contextlib.contextmanager
def before(owner: object, method: str, call: Callable[[], object]) -> Iterator[None]:
    """Context manager: calls `call` before each call to a method of `owner`."""
    usual = getattr(owner, method)
    setattr(owner, method, lambda *arguments: (call(), usual(*arguments))[1])
    try:
        yield
    finally:
        setattr(owner, method, usual)


def made_up_batches(config: Config, step: int) -> list[Batch]:
    """The synthetic micro-batches for a step, for all replicas."""
    train = config.train
    tokens, targets = made_up_tokens(config, step)
    for row in range(train.global_batch):
        targets[row, : (3 * row) % train.seq_len] = IGNORED
    documents = np.broadcast_to(np.arange(train.seq_len, dtype=np.int32) // DOCUMENT, tokens.shape).copy()
    columns = (np.split(x, train.global_batch // train.micro_batch) for x in (tokens, targets, documents))
    return [Batch(*rows) for rows in zip(*columns, strict=True)]


def made_up_tokens(config: Config, seed: int, batch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns synthetic (tokens, targets), [B, S] each; `batch` defaults to the global batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch or config.train.global_batch, config.train.seq_len + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator).numpy()
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def relative_errors(actual: TrainedModel, expected: Observed) -> dict[str, float]:
    """Relative errors of this process's results against the whole model in one process, after the same number of steps."""
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
    """Whether a step issued the collectives in the table.

    Collectives for micro-batches must be in order, except with overlapped halves. Gradient reductions may be in any order. With PP
    or sharded weights, all collectives may be in any order, because the schedule or torch determines the order.
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
    return {part.parameter.name: part.view(s.tensor.grad) for s, part in _slices(model) if s.tensor.grad is not None}


def weights(model: Model) -> ByName:
    """Local shard of every weight."""
    return {part.parameter.name: part.view(s.tensor.detach()) for s, part in _slices(model)}


def local_parts(model: Model, whole: ByName) -> ByName:
    """This process's shards of unsharded tensors, which may lack indices, as gradients do."""
    shards = (
        (part, local_slice(part.parameter, model.layout, whole[part.parameter.name]))
        for _, part in _slices(model)
        if not part.parameter.is_index or part.parameter.name in whole
    )
    return {part.parameter.name: shard.narrow(0, part.offset, part.rows) for part, shard in shards}


def _slices(model: Model) -> Iterator[tuple[FusedParam, ParamSlice]]:
    """Every parameter of which this process holds a part, with its storage and location."""
    return ((fused, part) for fused in fused_params(model) for part in fused.local_slices())


def worst_error(actual: ByName, expected: ByName) -> float:
    """Largest relative error over all tensors: each tensor's maximum difference divided by its maximum expected magnitude."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[k] - expected[k]).abs().max() / expected[k].abs().max().clamp_min(1e-300)).item()
        for k in expected
        if expected[k].numel()
    )


def mean_error(actual: ByName, expected: ByName) -> float:
    """Norm of all differences relative to that of the expected values, because in low precision, single elements mean little."""
    squares = [
        ((actual[k].double() - expected[k].double()).square().sum(), expected[k].double().square().sum())
        for k in expected
    ]
    difference, total = (math.fsum(float(pair[i]) for pair in squares) for i in (0, 1))
    return math.sqrt(difference / total) if total else 0.0
