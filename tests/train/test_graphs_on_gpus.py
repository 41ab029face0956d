"""What only a driver can say of captures: `pytest -m cuda`, or BOOST_TEST_DEVICE=cpu for a dry run, whose graphs are recorded."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from boost.errors import TrainingError
from boost.measure.exactness import TrainedModel
from boost.models import kernels
from boost.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from boost.parallel.mesh import Axis, Mesh
from boost.train import graphs
from boost.train.step import Stepper
from tests import toy
from tests.recorded import recorded_graphs

DEVICE = torch.device("cuda", 0) if os.environ.get("BOOST_TEST_DEVICE", "cuda") == "cuda" else toy.CPU
ON_GPU = DEVICE.type == "cuda"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="there is no GPU"),
]

SIZES = {"dim": 64, "ffn_dim": 96, "heads": 4, "kv_heads": 2, "rank": 16}


@pytest.fixture(autouse=True)
def recorded_without_a_gpu() -> Iterator[None]:
    torch._dynamo.reset()
    with nullcontext() if ON_GPU else recorded_graphs():
        yield
    kernels.use("eager")


@pytest.mark.parametrize("part", ["none", "kernels", "blocks"] if ON_GPU else ["none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_train_the_same_to_the_bit(dtype: str, part: str) -> None:
    for policy in ("none", "low-rank", "full-block")[: 2 if part == "blocks" else None]:
        train = {"recompute": policy, "seq_len": 32, "global_batch": 6, "compile": part}
        config = toy.toy_config(dtype, model=SIZES, train=train)
        usual, captured = (
            TrainedModel(config.changed(train={"cuda_graphs": each}), Mesh(DEVICE), 20).seen() for each in ("off", "on")
        )
        assert captured.numbers == usual.numbers, policy
        assert all(torch.equal(value, captured.weights[name]) for name, value in usual.weights.items()), policy


@contextmanager
def one_rank(folder: Path) -> Iterator[Axis]:
    """A group of one process, whose collectives NCCL runs all the same."""
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(folder / "store")), rank=0, world_size=1)
    try:
        yield Axis(0, 1, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_collectives_are_captured_while_another_thread_pins_memory(tmp_path: Path) -> None:
    """As the prefetcher does; NCCL's watchdog queries events, too."""
    ended = threading.Event()

    def pin() -> None:
        while not ended.wait(1e-3):
            torch.ones(2**20, pin_memory=ON_GPU).to(DEVICE, non_blocking=True)

    thread = threading.Thread(target=pin)
    with one_rank(tmp_path) as axis:
        x = torch.ones(64, device=DEVICE)
        functions = all_reduce, all_gather, reduce_scatter, all_to_all
        for function in functions:
            function(x, axis)  # creates the communicator
        thread.start()
        try:
            for _ in range(20):
                graph = graphs.GRAPHS[DEVICE.type]()
                with graph.capture():
                    results = [function(x * 2, axis) + 1 for function in functions]
                for value in (1.0, 5.0):
                    x.fill_(value)
                    graph.replay()
                    assert all((y == 2 * value + 1).all() for y in results)
        finally:
            ended.set()
            thread.join()


def test_a_host_read_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this process: a failed capture leaves torch's stream as it is."""
    usual = Stepper._run_passes

    def run_passes(stepper: Stepper, *arguments: object) -> torch.Tensor:
        loss = usual(stepper, *arguments)  # type: ignore[arg-type]
        loss.item()
        return loss

    monkeypatch.setattr(Stepper, "_run_passes", run_passes)
    config = toy.toy_config("float32", train={"cuda_graphs": "on"})
    with pytest.raises(TrainingError, match="operation not permitted when stream is capturing"):
        TrainedModel(config, Mesh(DEVICE), graphs.WARM_UP + 1)
