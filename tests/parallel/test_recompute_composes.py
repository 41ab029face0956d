"""Blocks with recomputation inside FSDP units and pipeline stages: gradients match those without either."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from boost.config import Config
from boost.config.schema import RecomputeName
from boost.models.attention import make_context
from boost.models.decoder import Decoder, TransformerBlock
from boost.models.interface import Stream
from tests import toy
from tests.distributed import run_distributed

POLICIES: tuple[RecomputeName, ...] = ("low-rank", "low-rank+attention-output", "full-block")
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def config_of(policy: RecomputeName = "none") -> Config:
    return toy.toy_config("float64", train={"recompute": policy, "micro_batch": 4, "global_batch": 4})


def sharded_error(policy: RecomputeName) -> float:
    """Worst relative error of the gradients of blocks under fully_shard, with a different batch on every process."""
    reference, _ = toy.toy_decoder(config_of())
    for seed in range(2):
        (reference(*toy.toy_tokens(config_of(), seed)) / 2).backward()
    decoder, _ = toy.toy_decoder(config_of(policy))
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*decoder.blocks, decoder):
        fully_shard(unit, mesh=mesh).set_force_sum_reduction_for_comms(True)  # gloo has no average
    decoder(*toy.toy_tokens(config_of(), torch.distributed.get_rank())).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    actual = {name: p.grad.full_tensor() for name, p in decoder.named_parameters() if isinstance(p.grad, DTensor)}
    return toy.worst_error(actual, expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_inside_fsdp(policy: RecomputeName) -> None:
    assert max(run_distributed(2, sharded_error, policy)) <= 1e-12


class Stage(nn.Module):
    """Some blocks of a decoder, from residual stream to residual stream."""

    def __init__(self, decoder: Decoder, blocks: list[int], config: Config) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(decoder.blocks[i] for i in blocks)
        self.layout, self.config = decoder.layout, config

    def forward(self, x_BSD: Tensor) -> Tensor:
        model, batch = self.config.model, x_BSD.shape[0]
        positions = torch.arange(x_BSD.shape[1])
        context = make_context(batch, positions, model, torch.float64)
        stream = Stream(x_BSD.reshape(-1, model.dim))
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            (stream,) = block(self.layout.with_options(policy=block.policy), [stream], [context])
        return stream.x.view(x_BSD.shape).clone()  # detached in place later, which fails on views


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def pipeline_error(policy: RecomputeName, schedule: str) -> float:
    """Worst relative error of the gradients of this process's stage, one of two."""
    config, plain = config_of(policy), config_of()
    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(3)
    x, target = (torch.randn(4, 16, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    whole = Stage(toy.toy_decoder(plain)[0], [0, 1], plain)
    loss_of(whole(x), target).backward()
    decoder, _ = toy.toy_decoder(config)
    stage = PipelineStage(Stage(decoder, [rank], config), rank, 2, torch.device("cpu"))
    runner: Any = SCHEDULES[schedule](stage, n_microbatches=4, loss_fn=loss_of, scale_grads=False)
    runner.step(*([x] if rank == 0 else []), **({"target": target} if rank == 1 else {}))
    expected, actual = (
        {name: p.grad for name, p in of.blocks[rank].named_parameters() if p.grad is not None}
        for of in (whole, decoder)
    )
    return toy.worst_error(actual, expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_inside_pipeline_stages(policy: RecomputeName, schedule: str) -> None:
    assert max(run_distributed(2, pipeline_error, policy, schedule)) <= 1e-12
