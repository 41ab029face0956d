"""Process groups across replicas whose collectives can be abandoned, for in-step recovery (docs/recovery.md).

A collective that waits for a dead process must end, and gloo does not end it. Its `abort` does nothing (torch 2.13), a process
that is not the dead one's neighbor waits for the whole timeout, and a process that was stopped resets no connection. So a
waiting process checks every `POLL_S` whether its membership has ended, and if so abandons the collective. NCCL kernels end when
their communicator is aborted.
"""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Work
from torch.distributed import distributed_c10d as c10d

POLL_S = 0.1
"""Interval at which a waiting process checks whether its membership has ended, seconds."""

CONNECT_S = 20
"""Timeout for connecting the processes of a new membership, seconds. All of them have reported that they are ready."""

_abandoned: list["RecoverableGroup"] = []
"""Groups whose collectives may still run in gloo threads. Destroying such a group would wait for them."""
_abandoned_lock = threading.Lock()


class PeersLostError(Exception):
    """A process of another replica was lost; the collective will not complete."""


class Membership:
    """The replicas that train together, until one is lost or another one joins. Each change creates a new, numbered membership."""

    def __init__(self, number: int, end_membership: Callable[[str], None] = lambda reason: None) -> None:
        """`end_membership` tells the other processes that this membership has ended, and why."""
        self.number, self._end_membership = number, end_membership
        self.over = threading.Event()
        """Set as soon as this process knows that the membership has ended."""
        self.groups: list[RecoverableGroup] = []
        self.waiting_since: float | None = None
        """Time at which the main thread started waiting in a collective; None if it is not waiting."""

    def lost(self, reason: str) -> PeersLostError:
        """Ends this membership, locally and for the others. Returns the error to raise."""
        if not self.over.is_set():
            self.end()
            with contextlib.suppress(OSError, RuntimeError):  # unreachable store: the others find out by themselves
                self._end_membership(reason)
        return PeersLostError(reason)

    def end(self) -> None:
        """Ends the membership locally. Thread-safe."""
        self.over.set()
        for group in self.groups:
            group.abort()

    def leave(self) -> None:
        """Unregisters the groups. Call only when the main thread waits in none of them."""
        for group in self.groups:
            group.unregister()
        self.groups = []


class _Guarded(Work):
    """A collective in flight; waiting for it ends when its membership ends.

    Refers to c10d's object only through its group, so that a group that is left can be disconnected whoever holds this one.
    """

    def __init__(self, number: int, group: "RecoverableGroup", what: str, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._number, self._group, self._what, self._tensors = number, group, what, tensors
        self._is_done = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Raises PeersLostError if the membership ends first."""
        if not self._is_done:
            self._group.wait(self._number, self._what)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done or self._group.is_completed(self._number)


class RecoverableGroup(dist.ProcessGroup):
    """A process group of a membership: wraps a gloo group and, on GPUs, also an NCCL group."""

    def __init__(
        self, name: str, store: dist.Store, rank: int, size: int, device: torch.device, membership: Membership
    ) -> None:
        """Connects to the other processes. Raises PeersLostError if one of them does not connect within `CONNECT_S`."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        label: Any = f"{name}/{membership.number}"
        self._membership, self._label, self._what = membership, label, name
        self._in_flight: dict[int, Any] = {}
        """Collectives that have not been waited for, by number."""
        self._started = 0
        own = dist.PrefixStore(self._label, store)
        self._backends: dict[str, Any] = {"cpu": _connected(name, own, rank, size, membership)}
        self._has_nccl = device.type == "cuda"
        if self._has_nccl:
            options = dist.ProcessGroupNCCL.Options()
            options.config.blocking = False  # so that abort also works while a communicator is being created
            self._backends["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", own), rank, size, options)
        # With torch: by name for functional collectives, by object for object collectives.
        world = c10d._world
        c10d._register_process_group(self._label, self)
        world.pg_map[self] = (dist.Backend.GLOO, None)  # type: ignore[assignment]
        world.pg_names[self] = self._label
        world.pg_group_ranks[self] = {rank: rank for rank in range(self.size())}
        world.pg_backend_config[self] = str(c10d.BackendConfig(dist.Backend("gloo")))
        membership.groups.append(self)

    def unregister(self) -> None:
        """Removes the group from torch and disconnects. A group whose collectives still run is abandoned instead."""
        with contextlib.suppress(RuntimeError, KeyError):
            c10d._unregister_process_group(self._label)
        world = c10d._world
        for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            cast(dict[Any, Any], known).pop(self, None)
        with _abandoned_lock:
            _abandoned.append(self)
        disconnect_abandoned()

    def disconnect(self) -> None:
        """Closes the connections, which ends what other processes still wait for in this group. An open one costs CPU time: gloo's
        thread spins while data that nobody takes arrives."""
        self._backends.clear()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of collectives that start from now on."""
        self._backends["cpu"]._set_default_timeout(timeout)

    def is_busy(self) -> bool:
        """Whether a collective is still running. Call only when no other starts."""
        self._in_flight = {number: work for number, work in self._in_flight.items() if not work.is_completed()}
        return bool(self._in_flight)

    def is_completed(self, number: int) -> bool:
        """Whether a collective that has not been waited for is complete."""
        work = self._in_flight.get(number)
        return work is not None and bool(work.is_completed())

    def abort(self) -> None:
        """Aborts NCCL kernels. Thread-safe."""
        if nccl := self._backends.get("cuda"):
            nccl.abort()

    def wait(self, number: int, what: str) -> None:
        """Waits for a collective. Raises PeersLostError if it fails or if the membership ends first."""
        work = self._in_flight.get(number)
        if work is None:
            raise PeersLostError(f"{what}: the membership has ended")
        self._membership.waiting_since = self._membership.waiting_since or time.monotonic()
        try:
            while True:
                completed = work.is_completed()  # asked first: a wait may time out just before the collective completes
                try:
                    # NCCL's wait returns immediately; only the stream waits.
                    work.wait() if self._has_nccl else work.wait(datetime.timedelta(seconds=POLL_S))
                    self._in_flight.pop(number, None)
                    return
                except RuntimeError as error:
                    if completed or self._has_nccl:
                        raise self._membership.lost(f"{what} failed: {str(error).splitlines()[0]}") from error
                if self._membership.over.is_set():
                    raise PeersLostError(f"{what}: the membership has ended")
        finally:
            self._membership.waiting_since = None

    def _start(self, what: str, tensors: Sequence[Tensor], start: Callable[[Any], Any]) -> Work:
        """Starts a collective, unless the membership has ended. Never raises: a failing hook would stop a backward pass that is
        worth finishing."""
        self._started += 1
        number = self._started
        if self._backends and not self._membership.over.is_set():
            try:
                self._in_flight[number] = start(self._backends[tensors[0].device.type if tensors else "cpu"])
            except RuntimeError as error:
                self._membership.lost(f"{what} failed: {str(error).splitlines()[0]}")
        return _Guarded(number, self, f"{what} of '{self._what}'", tensors)

    # Overrides called by c10d.

    def getBackendName(self) -> str:
        return "boost-recoverable"

    def getGroupName(self) -> str:
        return self._label

    def setGroupName(self, name: str) -> None:
        self._label = name

    def getGroupDesc(self) -> str:
        return self._what

    def setGroupDesc(self, what: str) -> None:
        self._what = what

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._start("all-reduce", tensors, lambda backend: backend.allreduce(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        return self._start("broadcast", tensors, lambda backend: backend.broadcast(tensors, opts))

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        return self._start("all-gather", inputs, lambda backend: backend.allgather(outputs, inputs, opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """torch 2.15 gathers objects with it."""
        return self.allgather([list(output.view(self.size(), *input.shape).unbind())], [input], opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", [], lambda backend: backend.barrier(opts or dist.BarrierOptions()))


def _connected(name: str, store: dist.Store, rank: int, size: int, membership: Membership) -> Any:
    """Creates a gloo group in a thread, which is abandoned if the membership ends before all processes have connected."""
    made: list[Any] = []

    def connect() -> None:
        try:
            made.append(dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=CONNECT_S)))
        except (RuntimeError, dist.DistError) as error:
            made.append(error)

    thread = threading.Thread(target=connect, name=f"boost-connect-{name}", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        if thread.is_alive() and membership.over.is_set():
            raise PeersLostError(f"the membership ended while group '{name}' connected")
    (result,) = made
    if isinstance(result, Exception):
        raise membership.lost(f"a process did not connect to group '{name}': {str(result).splitlines()[0]}") from result
    return result


def disconnect_abandoned() -> None:
    """Disconnects abandoned groups whose collectives have ended. Thread-safe."""
    with _abandoned_lock:
        ended = [group for group in _abandoned if not group.is_busy()]
        _abandoned[:] = [group for group in _abandoned if group not in ended]
    for group in ended:
        group.disconnect()


def has_abandoned() -> bool:
    """Whether gloo threads still wait for lost processes. Interpreter shutdown would wait for them."""
    disconnect_abandoned()
    return bool(_abandoned)
