"""Measures the memory of a full step on one process of a real gloo mesh, including stages, shards, buckets and the update."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param

from boost.config import Config
from boost.config.schema import TrainConfig
from boost.measure.memory import MemoryTracker
from boost.models.fused import fused_params
from boost.optim.adamw import build_optimizer
from boost.parallel.gradients import GradientReducer
from boost.parallel.pipeline import Pipeline
from boost.parallel.weights import WorkingCopies, last_backward
from boost.plan.categories import GRADIENTS, OPTIMIZER, WEIGHTS
from tests import toy


def step_peak(config: Config) -> tuple[int, int]:
    """Returns (pipeline rank, peak bytes) of a training step. All processes must call it."""
    model, mesh = toy.toy_model(config)
    params = list(fused_params(model))
    reducer = GradientReducer(params, mesh, getattr(torch, config.train.sum_dtype))
    optimizer = build_optimizer(params, config, mesh)
    train = config.train
    tokens, targets = toy.toy_tokens(config, 1, train.global_batch // config.parallel.dp)
    gc.collect()
    tracker = MemoryTracker()
    for fused in params:
        tracker.watch(fused.tensor, WEIGHTS)
        fused.tensor.register_post_accumulate_grad_hook(lambda p: tracker.watch(p.grad, GRADIENTS))

    def accumulated(parameter: Any) -> None:
        tracker.watch(parameter.grad, GRADIENTS)
        reducer.accumulated(parameter)

    copies = WorkingCopies(model, config, accumulated)
    for value in optimizer.state_tensors():
        tracker.watch(value, OPTIMIZER)
    with tracker, _resizing(tracker):
        reducer.begin(train.global_batch // (config.parallel.dp * train.micro_batch))
        with copies.in_use():
            _passes(model, config, tokens, targets, train)
        reducer.finish()
        optimizer.step(train.steps - 1, config.optim.lr)
    return mesh.pp.rank, sum(tracker.peak.values())


def _passes(model: Any, config: Config, tokens: Tensor, targets: Tensor, train: TrainConfig) -> None:
    if isinstance(model, Pipeline):
        model.backward(tokens, targets, None, 1)
        return
    pieces = list(zip(tokens.split(train.micro_batch), targets.split(train.micro_batch), strict=True))
    for number, (some, theirs) in enumerate(pieces, start=1):
        last_backward(model, number == len(pieces), config.parallel)
        model(some, theirs).backward()


@contextmanager
def _resizing(tracker: MemoryTracker) -> Iterator[None]:
    """Tracks storages that fully_shard frees and reallocates under live tensors, without any operation."""
    usual = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def alloc(tensor: Tensor) -> None:
        usual[0](tensor)
        tracker.watch(tensor, WEIGHTS)

    def free(tensor: Tensor) -> None:
        usual[1](tensor)
        tracker.watch(tensor, WEIGHTS)

    _fsdp_param.alloc_storage, _fsdp_param.free_storage = alloc, free
    try:
        yield
    finally:
        _fsdp_param.alloc_storage, _fsdp_param.free_storage = usual
