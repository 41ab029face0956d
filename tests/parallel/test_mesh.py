"""The mesh: coordinates, devices, timeouts."""

import datetime
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import boost.parallel.mesh as mesh_module
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.parallel.mesh import LOCAL_RANKS, Mesh, choose_device, mesh_of, open_mesh
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


def test_every_start_agrees_on_a_fresh_name() -> None:
    """All starts use one store, as after an elastic restart, including a start in which some processes only got as far as
    asking."""
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


def set_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int = 2, **variables: str) -> None:
    """Makes this process see `gpus` GPUs, as one of `processes`, with these environment variables."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("gpus", "processes", "variables", "asked", "expected"),
    [
        (0, 2, {"LOCAL_RANK": "1"}, "auto", "cpu"),
        (1, 2, {"LOCAL_RANK": "1"}, "auto", "cuda:0"),
        (1, 2, {"SLURM_LOCALID": "3"}, "auto", "cuda:0"),
        (1, 2, {}, "auto", "cuda:0"),
        (2, 2, {"LOCAL_RANK": "1"}, "auto", "cuda:1"),
        (2, 2, {"LOCAL_RANK": "1"}, "cuda", "cuda:1"),
        (2, 2, {"LOCAL_RANK": "1"}, "cpu", "cpu"),
        (4, 8, {"SLURM_LOCALID": "2"}, "auto", "cuda:2"),
        (4, 8, {"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, "auto", "cuda:3"),  # torchrun inside a Slurm task
        (8, 1, {}, "auto", "cuda:0"),
    ],
)
def test_a_process_takes_its_own_gpu_and_the_cpu_only_without_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, variables: dict[str, str], asked: str, expected: str
) -> None:
    set_gpus(monkeypatch, gpus, processes, **variables)
    assert str(choose_device(asked)) == expected


@pytest.mark.parametrize(
    ("gpus", "variables", "asked", "words"),
    [
        (0, {}, "cuda", "torch sees no GPU"),
        (2, {"LOCAL_RANK": "2"}, "auto", "process 3 on a machine with 2 GPUs; start at most 2 processes"),
        (2, {}, "auto", "sees 2 GPUs but has no local rank to choose one.* set LOCAL_RANK"),
    ],
)
def test_a_gpu_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, gpus: int, variables: dict[str, str], asked: str, words: str
) -> None:
    set_gpus(monkeypatch, gpus, 4, **variables)
    with pytest.raises(ConfigError, match=words):
        choose_device(asked)


@pytest.mark.parametrize("shown", ["the same", "their own"])
def test_two_processes_with_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    """Device 0 may be a different GPU for each process; its UUID tells."""
    store, gpu = dist.HashStore(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")

    def join(rank: int, own: str) -> None:
        monkeypatch.setattr(mesh_module, "_gpu_id", lambda device: own)
        mesh_module._require_exclusive_gpu(gpu, store, rank, 2)

    store.set("gpu/1", json.dumps([socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), 0, "GPU-1"]))
    if shown == "their own":
        join(0, "GPU-0")
    else:
        with pytest.raises(ConfigError, match="ranks 0 and 1 see the same GPU, NVIDIA H100; start one process per GPU"):
            join(0, "GPU-1")


def backends_on(device: str) -> set[str | None]:
    """Backends requested for the groups of a mesh on a type of device. Only requested: there is no GPU."""
    asked: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        make, new = mesh_module.init_device_mesh, dist.new_group

        def device_mesh(kind: str, *sizes: Any, backend_override: Any = None, **names: Any) -> DeviceMesh:
            asked.extend(backend_override.values() if backend_override else [None])
            return make("cpu", *sizes, **names)

        def group(ranks: list[int], timeout: Any, backend: str | None, **names: Any) -> Any:
            asked.append(backend)
            return new(ranks, timeout, **names)

        patch.setattr(mesh_module, "init_device_mesh", device_mesh)
        patch.setattr(dist, "new_group", group)
        mesh_of(ParallelConfig(dp=2, cp=2, tp=2), torch.device(device))
    return set(asked)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "nccl"), ("cpu", None)])
def test_the_groups_of_a_mesh_have_one_backend(device: str, expected: str | None) -> None:
    """With gloo in addition to NCCL, each group would need two sockets per pair of processes."""
    assert run_distributed(8, backends_on, device) == [{expected}] * 8


@pytest.mark.parametrize(
    ("built_for", "driver", "refused"), [("13.0", 12040, True), ("12.8", 12040, False), ("13.0", 0, False)]
)
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_driver_that_is_too_old_for_torch_does_not_mean_cpus(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: int, refused: bool, asked: str
) -> None:
    set_gpus(monkeypatch, 0, 1)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    if refused:
        with pytest.raises(ConfigError, match=r"torch is built for CUDA 13.0, .* driver supports CUDA 12.4"):
            choose_device(asked)
        assert choose_device("cpu").type == "cpu"
    elif asked == "auto":
        assert choose_device(asked).type == "cpu"
