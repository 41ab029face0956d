"""The mesh: places, devices, time limits."""

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.parallel.mesh import Mesh, choose_device, mesh_of, open_mesh
from boost.parallel.rendezvous import agree_on_attempt
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def make_mesh() -> Mesh:
    return mesh_of(ParallelConfig(pp=2, dp=2, tp=2), CPU, timeout_s=123)


def places() -> tuple[int, int, int, int, bool]:
    mesh = make_mesh()
    return mesh.pp.rank, mesh.dp.rank, mesh.tp.rank, mesh.replicas.rank, mesh.is_main


def test_tp_is_the_innermost_axis_and_pp_the_outermost() -> None:
    expected = [(pp, dp, tp, 2 * dp + tp) for pp in range(2) for dp in range(2) for tp in range(2)]
    assert [place[:4] for place in run_distributed(8, places)] == expected
    assert [place[4] for place in run_distributed(8, places)] == [True] + [False] * 7


def test_every_start_agrees_on_a_name_that_no_earlier_one_had() -> None:
    """In one store, as after an elastic restart: also after a start of which some processes only got as far as asking."""
    store = dist.HashStore()

    def start() -> str:
        with ThreadPoolExecutor(4) as pool:
            names = set(pool.map(lambda rank: agree_on_attempt(store, rank, 4, 30), range(4)))
        (name,) = names
        return name

    first = start()
    store.set("asks/2", "somebody who died while waiting")
    assert len({first, start(), start()}) == 3


def time_limits() -> set[datetime.timedelta]:
    mesh = make_mesh()
    groups = [axis.group for axis in (mesh.tp, mesh.dp, mesh.pp, mesh.replicas)]
    return {group._get_backend(CPU).options._timeout for group in groups if group}


def test_every_group_has_the_configured_time_limit() -> None:
    for limits in run_distributed(8, time_limits):
        assert limits == {datetime.timedelta(seconds=123)}


def test_one_process_has_no_group() -> None:
    mesh = open_mesh(ParallelConfig(), "cpu")
    assert (mesh.size, mesh.tp.group, mesh.device_mesh) == (1, None, None)
    assert not dist.is_initialized()


def test_the_number_of_processes_must_be_that_of_the_mesh() -> None:
    with pytest.raises(ConfigError, match=r"1 processes were started, but parallel.pp x dp x tp = 1 x 1 x 2 = 2"):
        open_mesh(ParallelConfig(tp=2), "cpu")


@pytest.mark.parametrize(
    ("gpus", "processes", "asked", "expected"),
    [
        (0, 2, "auto", "cpu"),
        (1, 2, "auto", "cpu"),
        (2, 2, "auto", "cuda:1"),
        (2, 2, "cuda", "cuda:1"),
        (2, 2, "cpu", "cpu"),
    ],
)
def test_a_process_takes_a_gpu_of_its_own_or_the_cpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, asked: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(choose_device(asked)) == expected


@pytest.mark.parametrize(("gpus", "words"), [(0, "sees no GPU"), (1, "1 GPUs for 2 processes")])
def test_a_gpu_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, gpus: int, words: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=words):
        choose_device("cuda")
