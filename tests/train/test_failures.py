"""Classification of exceptions: a table of messages from torch, gloo, NCCL and the allocators."""

import errno
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost.cli.main import main
from boost.errors import BoostError, CheckpointError, HangError, StorageError, TrainingError
from boost.train import run
from boost.train.agreement import PeersLostError
from boost.train.failures import failure_report, out_of_memory
from tests import toy
from tests.train.commands import toml

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547]"


def nccl(what: str, name: str, more: str) -> Exception:
    text = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {what}, NCCL version 2.27.5"
    return dist.DistBackendError(f"{text}\n{name}: {more}")


LOST = [
    RuntimeError(
        f"{PAIR} Connection closed by peer [127.0.0.1]:1234. This means the remote side crashed or was killed"
    ),
    RuntimeError("[gloo/transport/tcp/pair.cc:553] Read error [::1]:1: Connection reset by peer"),
    RuntimeError("[gloo/transport/tcp/pair.cc:461] Write error [10.0.0.2]:29411: Broken pipe"),
    RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete."
    ),
    RuntimeError("[gloo/transport/tcp/pair.cc:1008] Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144] no error"),
    nccl(
        "remote process exited or there was a network error",
        "ncclRemoteError",
        "A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
        "NET/IB: Got completion from peer 10.0.0.2<35121> with status=12",
    ),
    nccl(
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "ncclSystemError",
        "System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n"
        "socketPollConnect: Connect to 10.0.0.3<43031> failed : Connection refused",
    ),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    dist.DistBackendError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=345, OpType=ALLREDUCE, NumelIn=1048576, "
        "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    ),
    dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg/0//cpu//0"),
    dist.DistNetworkError(
        "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29400)."
    ),
]

DEFECTS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
    RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:88] rp != nullptr. Unable to find interface for: eth9"),
    torch.AcceleratorError(
        "CUDA error: the launch timed out and was terminated\nCUDA kernel errors might be asynchronous"
    ),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    nccl(
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ncclInvalidUsage",
        "This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    ),
    nccl(
        "internal error",
        "ncclInternalError",
        "Internal check failed.\nLast error:\nAttribute busid of node nic not found",
    ),
    dist.DistNetworkError("The server socket has failed to listen on port 29500: EADDRINUSE, address already in use"),
    TimeoutError("_queue.Empty: a data loader timed out"),
]


@pytest.mark.parametrize("error", [*LOST, *DEFECTS], ids=lambda error: str(error)[:40])
def test_a_lost_connection_is_a_symptom_and_what_only_looks_like_one_is_not(error: Exception) -> None:
    wrapped = TrainingError("the step failed")
    wrapped.__cause__ = error
    for each in (error, wrapped):
        assert (failure_report(each, 0).kind == "lost") == (error in LOST)


def test_what_no_rule_names_keeps_its_traceback() -> None:
    for error in (*DEFECTS[:7], KeyError("x")):
        defect = failure_report(error, 0)
        assert (defect.kind, defect.exit_code) == ("defect", 1)
        assert str(error).split("\n")[0] in defect.message


def test_memory_that_ran_out_is_one_line_with_its_size() -> None:
    gpu = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.10 GiB is free."
    )
    assert out_of_memory(gpu) == "out of GPU memory: an allocation of 20.00 GiB failed (capacity 79.10 GiB)"
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as real:  # more than an address has bits for
        torch.empty(1 << 50, dtype=torch.uint8)
    assert out_of_memory(real.value) == "out of memory: an allocation of 1.13 PB failed"
    assert out_of_memory(MemoryError()) == "out of memory"
    assert out_of_memory(RuntimeError("something else")) is None
    for error in (gpu, real.value, MemoryError()):
        report = failure_report(error, 1)
        assert (report.kind, report.exit_code) == ("boost", 3)
        assert report.message.startswith("process 2 (rank 1): out of ")
    heartbeat: Any = SimpleNamespace(rank=0, size=2)
    said = str(run._explained(gpu, toy.toy_config(train={"micro_batch": 2}), heartbeat))
    assert said.startswith("process 1 of 2 (rank 0): out of GPU memory")
    assert all(word in said for word in ("train.micro_batch (now 2)", "train.recompute (now 'none')", "'boost plan'"))


class ChildOfCheckpointError(CheckpointError):
    """Not in boost.errors, so it is restored as its base class."""


def test_what_a_process_says_of_its_error() -> None:
    mended = failure_report(ChildOfCheckpointError("step 3"), 1)
    assert (mended.kind, mended.error, mended.message, mended.exit_code) == ("boost", "CheckpointError", "step 3", 2)
    hung = failure_report(HangError("process 2 is not responding"), 0)
    assert (hung.kind, hung.message, hung.exit_code) == ("hung", "process 2 is not responding", 3)
    disk = failure_report(OSError(errno.ENOSPC, "No space left on device", "/run"), 0)
    assert (disk.kind, disk.error, disk.message) == ("boost", "StorageError", "/run: No space left on device")


def getaddrinfo(host: str) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_the_network_is_no_file_system() -> None:
    """Another try may succeed, and the host is named."""
    with pytest.raises(socket.gaierror) as unknown:
        getaddrinfo("node-7")
    assert failure_report(unknown.value, 0).message == "network: Name or service not known ('node-7')"
    for error in (
        unknown.value,
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        ConnectionError("closed"),
        TimeoutError("timed out"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
    ):
        report = failure_report(error, 0)
        assert (report.kind, report.error, report.exit_code) == ("boost", "TrainingError", 3), error
        assert report.message.startswith("network: ")
    for error in (OSError(errno.EIO, "Input/output error"), TimeoutError(errno.ETIMEDOUT, "timed out", "/nfs/x")):
        report = failure_report(error, 0)
        assert (report.kind, report.error, report.exit_code) == ("boost", "StorageError", 2), error


@pytest.mark.parametrize("name", ["boost-run-lock", "save", "ThreadPoolExecutor"])
def test_a_system_without_another_thread_is_one_line(
    name: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, refused = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        usual(thread)

    monkeypatch.setattr("boost.data.verify._cache_folder", lambda: tmp_path)  # not verified before
    monkeypatch.setattr(threading.Thread, "start", start)
    config = tmp_path / "run.toml"
    config.write_text(f'{toml(store, tp=1, steps=3, save_every=1)}dir = "{tmp_path / "run"}"\n')
    code = main(["train", str(config)])
    err = capsys.readouterr().err
    assert refused and code in (2, 3) and err.count("error:") == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith(
        "boost: error: the system allows no more threads or processes; raise its limit"
    )


def test_a_system_without_another_process_or_thread_of_torch_or_open_file() -> None:
    error: Exception
    for error in (RuntimeError("Resource temporarily unavailable"), BlockingIOError(errno.EAGAIN, "no fork")):
        assert "allows no more threads" in failure_report(error, 1).message
    for error in (RuntimeError("another"), BlockingIOError(errno.EAGAIN, "locked", "a file")):
        assert "allows no more threads" not in failure_report(error, 1).message
    gloo = RuntimeError("[enforce fail at gloo/transport/tcp/loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files")
    caused = TrainingError("a process was lost")
    caused.__cause__ = gloo
    told = StorageError("'a file' cannot be read: Too many open files; check the disk")
    mute = dist.DistNetworkError("bind failed: too many open files")
    for error in (gloo, OSError(errno.EMFILE, "x", "a file"), caused, told, mute):
        report = failure_report(error, 1)
        assert "(rank 1): the system allows no more open files" in report.message and report.exit_code == 3
        assert not isinstance(error, BoostError) or str(error) in report.message, "what failed is not lost"


def test_a_lost_replica_is_a_lost_connection() -> None:
    """Before the first step, no other replica repeats the operation."""
    report = failure_report(PeersLostError("group 'dp of 0' did not connect"), 1)
    assert (report.kind, report.exit_code, report.message) == ("lost", 3, "group 'dp of 0' did not connect")
