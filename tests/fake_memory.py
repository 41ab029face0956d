"""Measures the memory of one process's step, also on fake tensors, which allocate nothing: a 7B model takes seconds."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from boost.config import Config
from boost.measure.memory import MemoryTracker
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.models.kernels import BACKENDS, using
from boost.optim.adamw import build_optimizer
from boost.parallel.mesh import Axis, Mesh
from boost.parallel.weights import WorkingCopies
from boost.plan.categories import GRADIENTS, LOGITS, OPTIMIZER, SAVED, WEIGHTS, WORK, short_role
from boost.train.model import build_decoder


@dataclass(frozen=True)
class MeasuredMemory:
    """Live memory of one process in bytes."""

    kept: dict[str, int]
    """Bytes by category between the forward and the backward pass of a micro-batch; for gradients, after the backward pass."""
    peak: dict[str, int]
    """Bytes by category at the peak of the step."""

    @property
    def activations(self) -> dict[str, int]:
        """The part of `kept` that is saved for the backward pass."""
        return {category: size for category, size in self.kept.items() if category in SAVED}


@dataclass(frozen=True)
class _FakeGroup:
    """Stands in for a process group, because fake tensors are not sent."""

    group_name: str = "nobody"


def fake_mesh(tp: int, cp: int = 1) -> Mesh:
    """The mesh of process 0 of `cp` x `tp` processes, for fake tensors."""

    def axis(size: int) -> Axis:
        return Axis(0, size, _FakeGroup() if size > 1 else None)  # type: ignore[arg-type]

    return Mesh(torch.device("cpu"), {"cp": axis(cp), "tp": axis(tp)})


def measure_step(decoder: Decoder, config: Config, batch: tuple[Tensor, Tensor], mesh: Mesh) -> MeasuredMemory:
    """Measures a micro-batch, which accumulates gradients, and an update of an existing decoder, on real or fake tensors."""
    params = list(fused_params(decoder))
    optimizer = build_optimizer(params, config, mesh)
    tracker = MemoryTracker()
    for storage in params:
        first = storage.slices[0].parameter
        tracker.watch(storage.tensor, WEIGHTS, short_role(first.role, first.makes_outputs))
        if storage.tensor.grad is not None:
            tracker.watch(storage.tensor.grad, GRADIENTS)
    for value in optimizer.state_tensors():
        tracker.watch(value, OPTIMIZER)

    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        tracker.watch(parameter.grad, GRADIENTS)

    hooks = [s.tensor.register_post_accumulate_grad_hook(accumulated) for s in params if s.tensor.requires_grad]
    copies = WorkingCopies(decoder, config, accumulated)
    usual = decoder._loss

    def loss(*arguments: Any) -> Iterator[None]:
        tracker.scope = LOGITS
        return usual(*arguments)

    decoder._loss = loss  # type: ignore[method-assign]
    try:
        with tracker, using(BACKENDS["eager"]):  # fake tensors cannot be compiled
            with copies.in_use():
                total = decoder(*batch)
                if not isinstance(total, FakeTensor):
                    before = None
                    while before != tracker.live:  # gloo's threads release sent tensors with a delay
                        before = +tracker.live
                        time.sleep(0.1)
                kept = dict(+tracker.live)
                tracker.scope = WORK
                total.backward()
                kept[GRADIENTS] = tracker.live[GRADIENTS]
            optimizer.step(0, config.optim.lr)
    finally:
        decoder._loss = usual  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return MeasuredMemory(kept, dict(tracker.peak))


def measure(config: Config) -> MeasuredMemory:
    """Measures the last micro-batch of a step: if it has several, gradients of the others already exist. Buckets of the gradient
    all-reduce are not included, because they replace the gradients."""
    train = config.train
    accumulated = train.global_batch // (config.parallel.dp * train.micro_batch)
    with FakeTensorMode():
        mesh = fake_mesh(config.parallel.tp, config.parallel.cp)
        decoder = build_decoder(config, mesh)
        for parameter in decoder.parameters() if accumulated > 1 else ():
            parameter.grad = torch.zeros_like(parameter)
        tokens_BS = torch.zeros(train.micro_batch, train.seq_len // config.parallel.cp, dtype=torch.long)
        return measure_step(decoder, config, (tokens_BS, tokens_BS), mesh)
