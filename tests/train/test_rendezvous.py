"""Start of a run: each process chooses its device, and all agree on a name, or learn that one of them received a stop signal."""

import ctypes
import json
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from boost.config.schema import ParallelConfig
from boost.elastic.session import ElasticSession
from boost.errors import ConfigError, StoppedError, TrainingError
from boost.train import rendezvous
from boost.train.rendezvous import LOCAL_RANKS, agree_on_attempt, choose_device, open_mesh
from boost.train.run import Session
from tests import toy

LIMIT_S = 600.0


def start(rank: int, signal: str | None) -> str:
    store = rendezvous._connect(rank, LIMIT_S, lambda: signal)
    return agree_on_attempt(store, rank, 2, LIMIT_S, lambda: signal)


@pytest.mark.slow
@pytest.mark.parametrize("patience", [LIMIT_S, 0.0])
def test_a_process_stopped_before_rank_0_starts_still_tells_it_but_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.5)
    monkeypatch.setattr(rendezvous, "_LATE_S", patience)
    if not patience:
        with pytest.raises(StoppedError, match="SIGTERM"):
            start(1, "SIGTERM")
        return
    with ThreadPoolExecutor(2) as pool:
        told: Future[str] = pool.submit(start, 1, "SIGTERM")
        time.sleep(2)  # several attempts may fail; the outcome is the same either way
        assert not told.done(), "left without a word"
        late = pool.submit(start, 0, None)
        for each in (told, late):
            with pytest.raises(StoppedError, match="SIGTERM"):
                each.result(LIMIT_S)


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


def test_missing_processes_are_named() -> None:
    with pytest.raises(TrainingError, match=r"^ranks 1, 2 of 3 did not join within run\.startup_timeout_s"):
        agree_on_attempt(dist.HashStore(), 0, 3, 0.05)
    with pytest.raises(TrainingError, match=r"^not all 3 processes joined within run\.startup"):
        agree_on_attempt(dist.HashStore(), 1, 3, 0.05)


def test_a_store_that_never_answers_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's connection to it blocks in C++."""
    codes, ended = list[int](), threading.Event()
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_connect", lambda *_: ended.wait(600) and dist.HashStore())
    monkeypatch.setattr(rendezvous, "agree_on_attempt", lambda *_: "")
    monkeypatch.setattr(rendezvous, "MARGIN_S", 0.0)
    monkeypatch.setattr("boost.train.overdue.LOOK_S", 0.01)
    monkeypatch.setattr("boost.train.overdue.leave", lambda code: (codes.append(code), ended.set()))
    rendezvous.meet(0.1)
    assert codes == [3] and "the run's store did not respond within 0.2 s" in capsys.readouterr().err


def test_one_process_has_no_group() -> None:
    mesh = open_mesh(ParallelConfig(), "cpu")
    assert (mesh.size, mesh.tp.group, mesh.device_mesh) == (1, None, None)
    assert not dist.is_initialized()


def test_the_number_of_processes_must_be_that_of_the_mesh() -> None:
    with pytest.raises(ConfigError, match=r"parallel.pp x dp x tp = 1 x 1 x 2: the mesh has size 2, but .* is 1"):
        open_mesh(ParallelConfig(tp=2), "cpu")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "", "RANK": "0"}, "WORLD_SIZE = '' in the environment is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "node-0"}, "RANK = 'node-0' in the environment is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = 2 in the environment is not below WORLD_SIZE = 2"),
    ],
)
def test_what_a_launcher_says_of_processes_must_be_numbers(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        open_mesh(ParallelConfig(tp=2), "cpu", timeout_s=1)


def test_an_interface_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eht0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for recovery, join in (("restart", Session), ("in-step", ElasticSession)):
        config = toy.toy_config(parallel={"dp": 2}, run={"recovery": recovery, "device": "cpu"})
        with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME = 'lo,eht0': eht0 does not exist .*: .*lo"):
            join(config, lambda: None)


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
        (2, {"LOCAL_RANK": "2"}, "auto", "process 3 on this machine has no GPU: torch sees only 2; start at most 2"),
        (2, {}, "auto", "sees 2 GPUs but has no local rank by which to choose one.* set LOCAL_RANK"),
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
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=own))
        rendezvous._require_exclusive_gpu(gpu, store, rank, 2)

    store.set("gpu/1", json.dumps([socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), 0, "GPU-1"]))
    if shown == "their own":
        join(0, "GPU-0")
    else:
        with pytest.raises(ConfigError, match="ranks 0 and 1 see the same GPU, NVIDIA H100; start one process per GPU"):
            join(0, "GPU-1")


@pytest.mark.parametrize(
    ("built_for", "driver", "refused"), [("13.0", 12040, True), ("12.8", 12040, False), ("13.0", 0, False)]
)
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_driver_that_is_too_old_for_torch_does_not_mean_cpus(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: int, refused: bool, asked: str
) -> None:
    set_gpus(monkeypatch, 0, 1)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    if driver:  # otherwise this machine's, if it has one
        libcuda = SimpleNamespace(cuDriverGetVersion=lambda version: setattr(version._obj, "value", driver))
        monkeypatch.setattr(ctypes, "CDLL", lambda name: libcuda)
    if refused:
        with pytest.raises(ConfigError, match=r"torch is built for CUDA 13.0, .* driver supports CUDA 12.4"):
            choose_device(asked)
        assert choose_device("cpu").type == "cpu"
    elif asked == "auto":
        assert choose_device(asked).type == "cpu"
