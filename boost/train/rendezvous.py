"""Connects the processes in a run: each one chooses its device, all join through a store, and the mesh is built.

On one machine, the store is a file; on several machines, it is torchrun's or rank 0's TCP store.
torch's TCP store listens on all interfaces without a password, so the single-machine launcher uses a file in a folder that only
the user can read. Processes poll in Python at short intervals, so that they notice a stop signal while others are
missing.
"""

import contextlib
import ctypes
import datetime
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError, StoppedError, TrainingError, system_limit
from boost.files import require_open_files
from boost.machine import launcher_number
from boost.parallel.mesh import Mesh, mesh_of
from boost.train.overdue import MARGIN_S, time_limit

LAUNCH_DIR = "BOOST_LAUNCH_DIR"
"""Environment variable: the folder that the single-machine launcher shares with its processes."""

_CONNECT_S = 5.0
"""Timeout for one attempt to reach the TCP store, in seconds. Signals are checked between attempts."""

_LIBC = ctypes.CDLL(None)
_KEEP_SIZE = 1
"""Linux's FALLOC_FL_KEEP_SIZE."""

_GOODBYE_S = 3.0
"""How long rank 0 keeps answering late processes after a stop signal, in seconds."""

_LATE_S = 20.0
"""How long, in seconds, a process that received a stop signal waits for rank 0 to start, so that it can report the signal."""

_FILES = 30
"""Number of files that a process opens to meet a single peer: gloo's sockets and pipes, the store."""

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Environment variables with a process's local rank on its machine, set by torchrun and our launcher, Slurm, Open MPI and MPICH."""

GPUS_OF_A_NODE = 16
"""Upper bound on the number of GPUs in one machine."""

Stopped = Callable[[], str | None]
"""Returns the name of the stop signal that this process has received, or None."""


def world_size() -> int:
    """Number of processes that torchrun (or our launcher) started; 1 without a launcher."""
    return launcher_number("WORLD_SIZE", "1")


def choose_device(device: str) -> torch.device:
    """Chooses this process's device for `run.device`: a GPU if one is visible, unless "cpu" is requested.

    A process that sees one GPU uses it, because srun --gpus-per-task=1, Kubernetes and MIG show each process only its own GPU.
    A process that sees several GPUs uses the one whose index is its local rank.

    Raises ConfigError if there is no GPU for this process.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and not visible:
        _require_driver()
    if device == "cuda" and not visible:
        raise ConfigError("run.device = 'cuda', but torch sees no GPU; nearest valid value: 'cpu'")
    if device == "cpu" or not visible:
        return torch.device("cpu")
    if visible == 1 or world_size() == 1:
        return torch.device("cuda", 0)
    local = next((int(os.environ[name]) for name in LOCAL_RANKS if os.environ.get(name, "").isdecimal()), None)
    if local is None:
        raise ConfigError(
            f"this process sees {visible} GPUs but has no local rank by which to choose one; start with torchrun, set LOCAL_RANK, "
            "or make only one GPU visible to each process (CUDA_VISIBLE_DEVICES)"
        )
    if local >= visible:
        raise ConfigError(
            f"process {local + 1} on this machine has no GPU: torch sees only {visible}; start at most {visible} processes, or "
            "set run.device = 'cpu'"
        )
    return torch.device("cuda", local)


def _require_driver() -> None:
    """Raises ConfigError if torch sees no GPU because NVIDIA's driver is too old. Otherwise, the run would silently use CPUs."""
    built_for = torch.version.cuda
    if built_for is None:
        return
    # The newest CUDA version that the driver supports, such as 12040 for 12.4; 0 without a driver.
    supported = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(supported))
    if 0 < supported.value // 1000 < int(built_for.partition(".")[0]):
        version = f"{supported.value // 1000}.{supported.value % 1000 // 10}"
        raise ConfigError(
            f"torch is built for CUDA {built_for}, but this machine's driver supports CUDA {version}, so torch sees no GPU; update "
            f"the driver, install torch for CUDA {version}, or set run.device = 'cpu'"
        )


def require_interface() -> None:
    """Raises ConfigError if gloo cannot use this machine's network, and OSError if it cannot open its sockets. Otherwise, it would
    raise what looks like a bug, or wait."""
    require_open_files(_FILES)
    for name in (named := os.environ.get("GLOO_SOCKET_IFNAME", "")).split(","):
        try:
            gloo = dist.ProcessGroupGloo
            gloo.create_device(interface=name) if name else gloo.create_default_device()
        except RuntimeError as error:
            if system_limit(error):
                raise
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME = '{named}': {name or 'the default network interface'} does not exist or has no address; "
                f"interfaces of this machine: {', '.join(name for _, name in socket.if_nameindex())}"
            ) from None


def _require_exclusive_gpu(device: torch.device, store: dist.Store, rank: int, size: int) -> None:
    """Raises ConfigError if another process on this machine uses the same GPU. NCCL would also reject it, but much later."""
    gpu_id = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    gpu = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), device.index, gpu_id]
    store.set(f"gpu/{rank}", json.dumps(gpu))
    # Ranks on a node are consecutive, so ranks farther away are on other machines.
    near = range(max(rank - GPUS_OF_A_NODE, 0), min(rank + GPUS_OF_A_NODE + 1, size))
    for other in near:
        if other != rank and json.loads(store.get(f"gpu/{other}")) == gpu:
            first, second = sorted((rank, other))
            raise ConfigError(
                f"ranks {first} and {second} see the same GPU, {torch.cuda.get_device_name(device)}; start one process per GPU "
                "(with one GPU, set parallel.tp, pp, dp and cp to 1), or set run.device = 'cpu'"
            )


def open_mesh(
    parallel: ParallelConfig, device: str = "auto", timeout_s: int = 600, stopped: Stopped = lambda: None
) -> Mesh:
    """Joins this run's process group (none for one process) and returns this process's mesh.

    Raises ConfigError if the number of processes is not pp x dp x cp x tp or the network cannot be used, TrainingError if some do
    not join within `timeout_s`, and StoppedError if one of them receives a stop signal (named by `stopped`) before all have joined.
    """
    size = world_size()
    if size != parallel.world_size:
        raise ConfigError(
            f"parallel.{' x '.join(parallel.axes)} = {' x '.join(str(n) for n in parallel.axes.values())}: the mesh has size "
            f"{parallel.world_size}, but the number of started processes is {size}; start {parallel.world_size}"
        )
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        return Mesh(chosen)
    if not dist.is_initialized():
        require_interface()
        store, rank, size = meet(timeout_s, stopped)
        if chosen.type == "cuda":
            _require_exclusive_gpu(chosen, store, rank, size)
        # On GPUs, gloo handles CPU tensors, such as those of object collectives.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return mesh_of(parallel, chosen, timeout_s)


def close_mesh() -> None:
    """Destroys the process group. With NCCL, this waits for the other processes, so all of them must call it.

    Do not call it while an exception propagates, because the others are in a different collective, and a timeout would
    replace the error.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def launch_dir() -> Path | None:
    """The folder that the single-machine launcher shares with this process; None without such a launcher."""
    folder = os.environ.get(LAUNCH_DIR)
    return Path(folder) if folder else None


def file_store(path: Path, size: int = -1) -> dist.FileStore:
    """A store in a local file, with space reserved for later writes (by process groups), because the run must not
    depend on free space in the temporary folder."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform == "linux":  # os.posix_fallocate would change the length of the file
            start, *lengths = (ctypes.c_int64(number) for number in (0, 1 << 20, 1 << 16))
            with contextlib.suppress(AttributeError):  # another C library
                any(_LIBC.fallocate64(descriptor, _KEEP_SIZE, start, length) == 0 for length in lengths)
    finally:
        os.close(descriptor)
    return dist.FileStore(str(path), size)


def meet(timeout_s: float, stopped: Stopped = lambda: None) -> tuple[dist.Store, int, int]:
    """Returns (store for this start of the run, global rank, world size) after all processes have joined.

    Raises TrainingError if processes are missing after `timeout_s`, and StoppedError if one of them receives a stop signal first.
    """
    size, rank = launcher_number("WORLD_SIZE"), launcher_number("RANK")
    if rank >= size:
        raise ConfigError(f"RANK = {rank} in the environment is not below WORLD_SIZE = {size}; start with torchrun")
    if folder := launch_dir():
        return file_store(folder / "store", size), rank, size
    limit_s = 2 * timeout_s + MARGIN_S
    with time_limit(
        limit_s, f"the run's store did not respond within {limit_s:g} s (run.startup_timeout_s = {timeout_s:g})"
    ):
        store = _connect(rank, timeout_s, stopped)
        attempt = agree_on_attempt(store, rank, size, timeout_s, stopped)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return dist.PrefixStore(attempt, store), rank, size


def _connect(rank: int, timeout_s: float, stopped: Stopped) -> dist.Store:
    """Connects to the TCP store at MASTER_ADDR:MASTER_PORT: torchrun's or, if there is none, rank 0's."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"MASTER_ADDR = {host!r} and MASTER_PORT = {port!r} are not a valid address; start with torchrun, or set both"
        )
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline, attempt = time.monotonic() + timeout_s, datetime.timedelta(seconds=min(_CONNECT_S, timeout_s))
    leaving_at: float | None = None
    while True:
        try:
            return dist.TCPStore(
                host, int(port), is_master=hosts, timeout=attempt, wait_for_workers=False, multi_tenant=True
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if hosts:
                reason = str(error).strip().partition("\n")[0]
                raise TrainingError(f"cannot listen on MASTER_PORT = {port}: {reason}") from error
            if name := stopped():
                # Rank 0 may still be starting, and would wait for this process if it left without a message.
                leaving_at = leaving_at or time.monotonic() + _LATE_S
                if time.monotonic() > leaving_at:
                    raise StoppedError(name) from error
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"the store at MASTER_ADDR = {host}, MASTER_PORT = {port} did not respond within "
                    f"run.startup_timeout_s = {timeout_s:g}; was rank 0 started?"
                ) from error


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout_s: float, stopped: Stopped = lambda: None) -> str:
    """Agrees on a name that is unique to this start of the run, used as the prefix for its keys in the store.

    After an elastic restart, torchrun's store still holds the addresses of dead processes, and gloo would connect to them.
    TORCHELASTIC_RESTART_COUNT does not distinguish starts, because each node counts separately, and a node that restarts because
    of another node does not count that restart. So rank 0 generates the name and answers every process that asks, under a
    key that contains the request's ID. Requests from an earlier start are also answered, but no process reads those answers.
    After every process has the name, rank 0 tells them to continue, or that one of them received a stop signal.
    """
    return (_answer if rank == 0 else _ask)(store, rank, size, timeout_s, stopped)


def _ask(store: dist.Store, rank: int, size: int, timeout_s: float, stopped: Stopped) -> str:
    ours = uuid.uuid4().hex
    store.set(f"asks/{rank}", ours)
    deadline = time.monotonic() + timeout_s
    signaled = False
    pause = 0.02

    def wait_for(key: str) -> str:
        nonlocal deadline, signaled, pause
        while not store.check([key]):
            if (name := stopped()) and not signaled:
                store.set(f"{ours}/stop", name)
                signaled, deadline = True, min(deadline, time.monotonic() + _GOODBYE_S)
            if time.monotonic() > deadline:
                if name:
                    raise StoppedError(name)
                raise TrainingError(f"not all {size} processes joined within run.startup_timeout_s = {timeout_s:g}")
            time.sleep(pause)
            pause = min(0.25, pause * 1.1)  # frequent polling by many processes would keep rank 0 from answering
        return store.get(key).decode()

    attempt = wait_for(f"answer/{ours}")
    store.set(f"{attempt}/knows/{rank}", "")
    if name := wait_for(f"{attempt}/go"):
        store.set(f"{attempt}/stops/{rank}", "")
        raise StoppedError(name)
    return attempt


def _answer(store: dist.Store, rank: int, size: int, timeout_s: float, stopped: Stopped) -> str:
    ours = uuid.uuid4().hex
    answered: dict[int, str] = {}

    def answer(others: set[int]) -> set[int]:
        """Answers pending requests; returns the processes that do not know the name yet."""
        for other in sorted(others):
            key = f"asks/{other}"
            if store.check([key]) and (asked := store.get(key).decode()) != answered.get(other):
                store.set(f"answer/{asked}", ours)
                answered[other] = asked
        return {other for other in others if not store.check([f"{ours}/knows/{other}"])}

    waiting, deadline = set(range(1, size)), time.monotonic() + timeout_s
    stop = ""
    while waiting and not stop:
        waiting = answer(waiting)
        told = [f"{asked}/stop" for asked in answered.values()]
        stop = stopped() or next((store.get(key).decode() for key in told if store.check([key])), "")
        if waiting and time.monotonic() > deadline:
            missing = f"{'rank' if len(waiting) == 1 else 'ranks'} {', '.join(map(str, sorted(waiting)))}"
            raise TrainingError(
                f"{missing} of {size} did not join within run.startup_timeout_s = {timeout_s:g}; start every missing process, "
                "or check why it exited"
            )
        time.sleep(0.02)
    store.set(f"{ours}/go", stop)
    if not stop:
        return ours
    # This process may host the store, so it stays until the others have read the message.
    deadline, reading = time.monotonic() + _GOODBYE_S, set(range(1, size))
    while reading and time.monotonic() < deadline:
        waiting = answer(waiting)
        reading = {other for other in reading if not store.check([f"{ours}/stops/{other}"])}
        time.sleep(0.02)
    raise StoppedError(stop)
