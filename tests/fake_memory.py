"""Measures the memory of one process on fake tensors: nothing is allocated, and a 7B model takes seconds."""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from boost.config import Config
from boost.measure.memory import MeasuredMemory, measure_step
from boost.parallel.mesh import Axis, Mesh
from boost.train.model import build_decoder


@dataclass(frozen=True)
class _FakeGroup:
    """Stands in for a process group, since fake tensors are not sent."""

    group_name: str = "nobody"


def fake_mesh(tp: int, cp: int = 1) -> Mesh:
    """The mesh of process 0 of `cp` x `tp` processes, for fake tensors."""

    def axis(size: int) -> Axis:
        return Axis(0, size, _FakeGroup() if size > 1 else None)  # type: ignore[arg-type]

    return Mesh(torch.device("cpu"), {"cp": axis(cp), "tp": axis(tp)})


def measure(config: Config) -> MeasuredMemory:
    """Measures the last micro-batch of a step: if it has several, gradients of the others already exist. Buckets of the gradient
    all-reduce are not included, since they replace the gradients."""
    train = config.train
    accumulated = train.global_batch // (config.parallel.dp * train.micro_batch)
    with FakeTensorMode():
        mesh = fake_mesh(config.parallel.tp, config.parallel.cp)
        decoder = build_decoder(config, mesh)
        for parameter in decoder.parameters() if accumulated > 1 else ():
            parameter.grad = torch.zeros_like(parameter)
        tokens_BS = torch.zeros(train.micro_batch, train.seq_len // config.parallel.cp, dtype=torch.long)
        return measure_step(decoder, config, (tokens_BS, tokens_BS), mesh)
