"""The whole mesh: pipeline x data x tensor, every sharding and schedule, against one process."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from boost.config import Config
from boost.data.batches import Batch
from boost.models.stored import storages
from boost.optim.adamw import build_adamw
from boost.parallel.gradients import GradientReducer, agree, clip
from boost.train.model import backward
from tests import toy
from tests.distributed import run_distributed


class Trained:
    """A toy model after some optimizer steps with clipping."""

    def __init__(self, config: Config, steps: int = 2) -> None:
        self.model, self.mesh = toy.toy_model(config)
        self.initial = {name: value.clone() for name, value in toy.weights(self.model).items()}
        self.config, self.stored = config, list(storages(self.model))
        self.reducer = GradientReducer(self.stored, self.mesh)
        self.optimizer = build_adamw(self.stored, config.optim)
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.numbers = [self.step(step) for step in range(steps)]

    def step(self, step: int) -> tuple[float, float]:
        batches = list(micro_batches(self.config, step, self.mesh.dp.rank))
        positions = self.config.train.global_batch * self.config.train.seq_len
        self.reducer.begin(len(batches))
        loss = backward(self.model, batches, self.config, positions)
        self.reducer.finish()
        targets = sum(int((batch.targets != -100).sum()) for batch in batches)
        agreement = agree(self.stored, loss, targets, positions, False, self.mesh)
        clip((s.tensor for s in self.stored), agreement, self.config.optim.clip)
        self.gradients.append({name: value.clone() for name, value in toy.gradients(self.model).items()})
        self.optimizer.step()
        return agreement.loss, agreement.gradient_norm


def micro_batches(config: Config, step: int, dp_rank: int) -> Iterator[Batch]:
    """Of one replica; rows have different numbers of targets."""
    train = config.train
    tokens, targets = (x.numpy().copy() for x in toy.toy_tokens(config, seed=step, batch=train.global_batch))
    for row in range(train.global_batch):
        targets[row, : (3 * row) % train.seq_len] = -100
    share = train.global_batch // config.parallel.dp
    for start in range(dp_rank * share, (dp_rank + 1) * share, train.micro_batch):
        rows = slice(start, start + train.micro_batch)
        yield Batch(tokens[rows], targets[rows], np.zeros_like(tokens[rows], dtype=np.int32))


@functools.cache
def reference(description: str) -> Trained:
    return Trained(Config.model_validate_json(description))


def compare(config: Config) -> dict[str, float]:
    expected = reference(toy.single(config).model_dump_json())
    actual = Trained(config)
    model = actual.model
    local = toy.local_parts(model, expected.initial)
    numbers = zip(actual.numbers, expected.numbers, strict=True)
    return {
        "initial": 0.0 if all(torch.equal(v, actual.initial[k]) for k, v in local.items()) else 1.0,
        "loss and norm": max(abs(a - e) / abs(e) for pair in numbers for a, e in zip(*pair, strict=True)),
        "gradients": max(
            toy.worst_error(ours, toy.local_parts(model, theirs))
            for ours, theirs in zip(actual.gradients, expected.gradients, strict=True)
        ),
        "weights": toy.worst_error(toy.weights(model), toy.local_parts(model, toy.weights(expected.model))),
    }


def config_of(**parallel: Any) -> Config:
    return toy.toy_config(
        "float64",
        model={"layers": 4},
        parallel=parallel,
        train={"micro_batch": 1, "global_batch": 8, "seq_len": 16},
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 2, "schedule": "interleaved-1f1b"},
        {"pp": 2, "schedule": "zero-bubble"},
        {"dp": 2, "shard": "optimizer"},
        {"dp": 2, "shard": "full"},
        {"tp": 2, "pp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "dp": 2, "layout": "btp-sp", "shard": "full", "shard_outer": True},
        {"tp": 2, "dp": 2, "layout": "btp-sp", "shard": "optimizer"},
    ],
    ids=str,
)
def test_any_mesh_is_one_process(parallel: dict[str, Any]) -> None:
    config = config_of(**parallel)
    for errors in run_distributed(config.parallel.world_size, compare, config):
        assert max(errors.values()) <= 1e-10, errors
