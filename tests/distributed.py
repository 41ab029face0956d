"""The helper for multi-process tests: pools of gloo processes that persist across tests, with a time limit for each call.

    results = run_distributed(2, function, *arguments)      # one result per process, by rank

`function` is a module-level function of a test file. Every process of an open process group calls it, with one thread. An
exception in any process fails the test with its traceback. A timeout or a dead process ends the whole pool, and the next call
starts a new one. No process outlives the test session.
"""

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIME_LIMIT_S = 600.0
"""Only prevents endless hangs: no verdict depends on the machine's speed."""

MOST_THREADS = 32
"""Threads of a process between calls: 4 in a new one. gloo's threads wake a hundred times a second, and torch 2.11 keeps threads of
groups that FSDP has used, which add up to 200 a process."""


def run_distributed(
    size: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIME_LIMIT_S
) -> list[Any]:
    """Calls `function(*arguments)` in each of `size` processes; returns their results by rank."""
    pool = _pools.get(size)
    if pool is not None and (pool.threads > MOST_THREADS or not pool.alive()):
        _pools.pop(size).close()
        pool = None
    if pool is None:
        pool = _pools[size] = _Pool(size)
    if sys.platform == "linux":  # gloo's threads wake a hundred times a second, even in an idle pool
        for other in _pools.values():
            other.send_signal(signal.SIGCONT if other is pool else signal.SIGSTOP)
    try:
        return pool.call(function, arguments, timeout)
    except BaseException:
        _pools.pop(size).close()
        raise


def fork_server() -> Any:
    """The `multiprocessing` context of processes forked from a server that has only imported torch and boost:
    they start in milliseconds, not seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def end_with_parent() -> None:
    """Kills this process when the thread that started it ends for any reason, even if this process is suspended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class _Pool:
    def __init__(self, size: int) -> None:
        context = fork_server()
        self._rendezvous = tempfile.mkdtemp(prefix="boost-test-")
        self._connections: list[Connection] = []
        self._processes = []
        self.threads = 0
        """The most threads that a process had before its last call."""
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, f"{self._rendezvous}/store", theirs), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def send_signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        for connection in self._connections:
            connection.send((function, arguments))
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            for rank, connection in enumerate(self._connections):
                if rank in results or not connection.poll(0.01):
                    continue
                try:
                    failed, value, threads = connection.recv()
                    self.threads = max(self.threads, threads)
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode  # -11: a crash in native code, in any thread
                    raise AssertionError(f"process {rank} ended in {function.__name__}, exit code {code}") from None
                if failed:
                    raise AssertionError(f"process {rank} in {function.__name__}:\n{value}")
                results[rank] = value
            if time.monotonic() > deadline:
                silent = [rank for rank in range(len(self._connections)) if rank not in results]
                raise AssertionError(f"{function.__name__}: no answer from processes {silent} within {timeout} s")
        return [results[rank] for rank in range(len(self._connections))]

    def close(self) -> None:
        for process in self._processes:  # kill all first: one whose partner is gone prints a traceback
            process.kill()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._rendezvous, ignore_errors=True)


GROUP_TIMEOUT_S = 1800


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    end_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    sys.dont_write_bytecode = False  # as in tests/conftest.py, for the test files
    torch.set_num_threads(1)
    faulthandler.enable()  # report the location of a crash in native code
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0
        try:
            answer = (False, function(*arguments), threads)
        except BaseException:
            answer = (True, traceback.format_exc(), threads)
        connection.send(answer)
        dist.barrier()  # the first process to finish would close connections that another still reads
        _leave_groups()


def _leave_groups() -> None:
    """Destroys all groups except the default one. gloo has threads for each group, which wake a hundred times a second: with
    hundreds of groups, they take more time than the tests."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from boost.parallel.exchange import last_exchanges
    from boost.parallel.mesh import set_timeout
    from tests import toy

    toy.mesh.cache_clear()
    _clear_sharding_prop_cache()  # it holds meshes
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    set_timeout(GROUP_TIMEOUT_S)  # a test may have set seconds, which later tests on a busy machine exceed
    last_exchanges.clear()
    gc.collect()
    gc.freeze()  # the live objects are modules and caches, which take a tenth of a second to scan after each call


_pools: dict[int, _Pool] = {}


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()
