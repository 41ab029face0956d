"""A toy model in training on any mesh, for tests: steps as the trainer makes them, on data made up."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.config.traffic import Collective
from boost.data.batches import Batch
from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.parallel.counting import CollectiveCounter
from boost.parallel.gradients import GradientReducer, StepStats, clip_gradients, reduce_step_stats
from boost.parallel.working import WorkingCopies
from boost.plan.collectives import step_collectives
from boost.train.model import backward
from tests import toy


class Trained:
    """A toy model after some optimizer steps with clipping, and what was seen on the way."""

    def __init__(self, config: Config, steps: int = 2, seed: int = 0) -> None:
        self.model, self.mesh = toy.toy_model(config, seed)
        self.initial = {name: value.clone() for name, value in toy.weights(self.model).items()}
        self.config, self.fused_params = config, list(fused_params(self.model))
        self.reducer = GradientReducer(self.fused_params, self.mesh, getattr(torch, config.train.sum_dtype))
        self.copies = WorkingCopies(self.model, config, self.reducer.accumulated)
        self.optimizer = build_optimizer(self.fused_params, config, self.mesh)
        self.gradients: list[dict[str, torch.Tensor]] = []
        """After clipping, of each step."""
        self.numbers = [self.step(step) for step in range(steps)]
        """(loss, gradient norm) of each step."""

    def step(self, step: int) -> tuple[float, float]:
        stats = self.passes(step)
        clip_gradients((s.tensor for s in self.fused_params), stats, self.config.optim.clip)
        self.gradients.append({name: value.clone() for name, value in toy.gradients(self.model).items()})
        self.optimizer.step(step, self.config.optim.lr)
        return stats.loss, stats.gradient_norm

    def passes(self, step: int) -> StepStats:
        """All of a step but the update."""
        cp = self.mesh.cp
        batches = [each.share(cp.rank, cp.size) for each in micro_batches(self.config, step, self.mesh.dp.rank)]
        positions = self.config.train.global_batch * self.config.train.seq_len
        self.reducer.begin(len(batches))
        with self.copies.in_use():
            loss = backward(self.model, batches, self.config, positions)
        self.reducer.finish()
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        return reduce_step_stats(self.fused_params, loss, targets, positions, self.mesh)

    def collectives(self) -> list[Collective]:
        """Those of a step, without its update. Without a pipeline each bears its phase."""
        groups = [axis.name for axis in (self.mesh.replicas, self.mesh.dp_cp) if axis.size > 1]
        counter = CollectiveCounter(step_groups=groups)

        def enter(phase: str) -> Callable[..., None]:
            return lambda *_: setattr(counter, "phase", phase)

        hooks = [
            self.model.register_forward_pre_hook(enter("forward")),
            self.model.register_forward_hook(enter("backward")),
        ]
        with counter, pytest.MonkeyPatch.context() as patch:
            finish = self.reducer.finish
            patch.setattr(self.reducer, "finish", lambda: (enter("step")(), finish()))
            self.passes(0)
        for hook in hooks:
            hook.remove()
        return counter.collectives


def micro_batches(config: Config, step: int, dp_rank: int) -> Iterator[Batch]:
    """Of one replica; rows have different numbers of targets, and documents of seven tokens."""
    train = config.train
    tokens, targets = (x.numpy().copy() for x in toy.toy_tokens(config, seed=step, batch=train.global_batch))
    for row in range(train.global_batch):
        targets[row, : (3 * row) % train.seq_len] = IGNORED
    share = train.global_batch // config.parallel.dp
    for start in range(dp_rank * share, (dp_rank + 1) * share, train.micro_batch):
        rows = slice(start, start + train.micro_batch)
        documents = np.broadcast_to(np.arange(train.seq_len, dtype=np.int32) // 7, tokens[rows].shape).copy()
        yield Batch(tokens[rows], targets[rows], documents)


@functools.cache
def reference(description: str, steps: int) -> Trained:
    """The same model on one process; made once in each process of a pool."""
    return Trained(Config.model_validate_json(description), steps)


def compare(config: Config, steps: int = 2) -> dict[str, float]:
    """Relative errors of what this process has against the whole model in one process."""
    return errors_of(Trained(config, steps), steps)


def errors_of(actual: Trained, steps: int) -> dict[str, float]:
    """The same of a model that has made its steps."""
    expected = reference(toy.single(actual.config).model_dump_json(), steps)
    model = actual.model
    local = toy.local_parts(model, expected.initial)
    numbers = zip(actual.numbers, expected.numbers, strict=True)
    gradients = [
        toy.worst_error(ours, toy.local_parts(model, theirs))
        for ours, theirs in zip(actual.gradients, expected.gradients, strict=True)
    ]
    return {
        "initial": 0.0 if all(torch.equal(v, actual.initial[k]) for k, v in local.items()) else 1.0,
        "loss and norm": max(abs(a - e) / abs(e) for pair in numbers for a, e in zip(*pair, strict=True)),
        "first gradients": gradients[0],
        "gradients": max(gradients),
        "weights": toy.worst_error(toy.weights(model), toy.local_parts(model, toy.weights(expected.model))),
    }


def keeps_table(config: Config, counted: list[Collective]) -> bool:
    """Whether a step issued the collectives of the table: those of micro-batches in order (of interleaved halves, in any), sums
    of gradients in any."""
    table = step_collectives(config)
    seen, expected = ([c.on_the_wire for c in side if c.phase != "step"] for side in (counted, table))
    gradients = [Counter(c.on_the_wire for c in side if c.phase == "step") for side in (counted, table)]
    if config.parallel.overlap != "none":
        seen, expected = sorted(seen), sorted(expected)
    return seen == expected and gradients[0] == gradients[1]
