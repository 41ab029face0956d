"""Process groups across replicas whose collectives can be abandoned, for in-step recovery (docs/recovery.md).

A collective that waits for a dead process must end, but gloo does not end it. Its `abort` does nothing (torch 2.13), a
process that is not the dead process's neighbor waits for the whole timeout, and a suspended process resets no
connections. So a waiting process checks every `POLL_S` whether its membership has ended and, if so, abandons the
collective. NCCL kernels end when their communicator is aborted. All communicators in a process are aborted together,
because aborting one waits for the kernels of the others (pytorch issue 119797).
"""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Work
from torch.distributed import distributed_c10d as c10d

from boost.train.agreement import PeersLostError

POLL_S = 0.1
"""Interval at which a waiting process checks whether its membership has ended, in seconds."""

CONNECT_S = 20
"""Timeout for connecting the processes of a new membership, in seconds. By then, all of them have reported that they are ready."""

ABORT_FIRST_S = 0.5
"""Head start for the first group's abort, in seconds. An abort takes effect at once but may not return until all others start."""
ABORT_S = 20.0
"""Time for which a process waits for all aborts to finish, in seconds."""

_CPU = torch.device("cpu")

Options = dist.AllreduceOptions | dist.BroadcastOptions | AllgatherOptions | dist.BarrierOptions

_abandoned: list["RecoverableGroup"] = []
"""Groups whose collectives may still run in gloo threads. Destroying such a group would wait for these threads."""
_abandoned_lock = threading.Lock()


class Membership:
    """The replicas that train together until one is lost or another joins. Each change creates a new, numbered membership."""

    def __init__(self, number: int, end_membership: Callable[[str], None] = lambda reason: None) -> None:
        """`end_membership` tells the other processes that this membership has ended, and why."""
        self.number, self._end_membership = number, end_membership
        self.over = threading.Event()
        """Set as soon as this process knows that the membership has ended."""
        self.groups: list[RecoverableGroup] = []
        self.waiting: dict[int, float] = {}
        """For each thread that is waiting in a collective, by identifier: when its wait started."""
        self._aborts: list[threading.Thread] = []
        self._ending = threading.Lock()

    def waits_since(self) -> float | None:
        """The time at which this process started waiting in a collective, or for its result on the GPU; None if it is
        not waiting. Thread-safe."""
        begun = [*self.waiting.values(), *(group.stream_waits_since() for group in self.groups)]
        return min((since for since in begun if since is not None), default=None)

    def lost(self, reason: str) -> PeersLostError:
        """Ends this membership, locally and on the other processes. Returns the error to raise."""
        if not self.over.is_set():
            self._start_aborts()
            with contextlib.suppress(OSError, RuntimeError):  # if the store is unreachable, the others detect the loss
                self._end_membership(reason)
            self.end()
        return PeersLostError(reason)

    def end(self) -> None:
        """Ends the membership locally and aborts its NCCL kernels. Thread-safe."""
        self._start_aborts()
        deadline = time.monotonic() + ABORT_S
        for thread in self._aborts:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_aborts(self) -> None:
        with self._ending:
            if self.over.is_set():
                return
            self.over.set()
            self._aborts = [
                threading.Thread(target=group.abort, name="boost-abort", daemon=True)
                for group in self.groups
                if group.nccl is not None
            ]
            for thread in self._aborts:
                thread.start()
                if thread is self._aborts[0]:
                    thread.join(ABORT_FIRST_S)

    def leave(self) -> None:
        """Unregisters the groups. Call only while the main thread is not waiting in any of them."""
        for group in self.groups:
            group.unregister()
        self.groups = []


class _Guarded(Work):
    """A collective in flight. Waiting for it ends when its membership ends.

    It refers to c10d's object only through its group, so an abandoned group can be disconnected while this object is still in use.
    """

    def __init__(self, number: int, group: "RecoverableGroup", what: str, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._number, self._group, self._what, self._tensors = number, group, what, tensors
        self._is_done = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Raises PeersLostError if the membership ends first."""
        if not self._is_done:
            self._group.wait(self._number, self._what, self._tensors[0].device if self._tensors else _CPU)
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
        self._in_flight: dict[int, Work] = {}
        """Collectives that have not been waited for, by number."""
        self._started = 0
        self._on_stream: dict[int, tuple[float, torch.cuda.Event]] = {}
        """NCCL collectives that the stream waits for, by number, oldest first: start of the wait, and an event after each."""
        own = dist.PrefixStore(self._label, store)
        gloo = _connected(name, own, rank, size, membership)
        # Hang reports name a backend's group, and only a `dist.ProcessGroup` can set that name.
        named = dist.ProcessGroup(own, rank, size)
        named._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        named._set_group_name(label)
        self._backends: dict[str, Any] = {"cpu": gloo}
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.blocking = False  # so that abort also works while a communicator is being created
            options._timeout = datetime.timedelta(seconds=CONNECT_S)
            options.group_name = label
            self._backends["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", own), rank, size, options)
        # Register with torch: by name for functional collectives, by object for object collectives.
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
            cast(dict[dist.ProcessGroup, object], known).pop(self, None)
        with _abandoned_lock:
            _abandoned.append(self)
        disconnect_abandoned()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        for backend in self._backends.values():
            backend._set_default_timeout(timeout)

    def is_busy(self) -> bool:
        """Whether a collective is still running. Call only when no new one can start."""
        self._in_flight = {number: work for number, work in self._in_flight.items() if not work.is_completed()}
        return bool(self._in_flight)

    def is_completed(self, number: int) -> bool:
        """Whether a collective that has not been waited for is complete."""
        work = self._in_flight.get(number)
        return work is not None and bool(work.is_completed())

    @property
    def nccl(self) -> Any:
        """The NCCL group; None on CPUs."""
        return self._backends.get("cuda")

    def abort(self) -> None:
        """Aborts NCCL kernels. Might not return until this process's other groups are aborted too. Thread-safe."""
        if (nccl := self.nccl) is not None:
            with contextlib.suppress(RuntimeError):  # the kernels had already failed
                nccl.abort()

    def stream_waits_since(self) -> float | None:
        """The time at which the stream started waiting for the oldest incomplete NCCL collective; None if all are
        complete. The host waits too as soon as it reads a result. Thread-safe."""
        for number, (since, reached) in list(self._on_stream.items()):
            if not reached.query():
                return since
            self._on_stream.pop(number, None)
        return None

    def wait(self, number: int, what: str, device: torch.device) -> None:
        """Waits for a collective on tensors on `device`. Raises PeersLostError if it fails or the membership ends first."""
        work = self._in_flight.get(number)
        if work is None:
            raise PeersLostError(f"{what}: the membership has ended")
        with self._marked():
            while True:
                completed = work.is_completed()  # checked first: a wait may time out just before the end
                try:
                    if device.type == "cuda":  # returns immediately; only the stream waits
                        work.wait()
                        reached = torch.cuda.Event()
                        reached.record(torch.cuda.current_stream(device))
                        self._on_stream[number] = time.monotonic(), reached
                    else:
                        work.wait(datetime.timedelta(seconds=POLL_S))
                    self._in_flight.pop(number, None)
                    return
                except RuntimeError as error:
                    if completed or device.type == "cuda":
                        raise self._membership.lost(f"{what} failed: {str(error).splitlines()[0]}") from error
                if self._membership.over.is_set():
                    raise PeersLostError(f"{what}: the membership has ended")

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Marks this thread as waiting for other processes."""
        thread, waiting = threading.get_ident(), self._membership.waiting
        waiting[thread] = time.monotonic()
        try:
            yield
        finally:
            del waiting[thread]

    def _start(self, what: str, tensors: Sequence[Tensor], opts: Options, start: Callable[[Any], Work]) -> Work:
        """Starts a collective, unless the membership has ended. Never raises, because an error in a gradient hook would stop a
        backward pass that is worth finishing."""
        self._started += 1
        number = self._started
        opts.asyncOp = True  # otherwise NCCL returns no work to wait for
        if self._backends and not self._membership.over.is_set():
            backend = self._backends[tensors[0].device.type if tensors else "cpu"]
            try:
                with self._marked():  # NCCL connects in the first collective
                    self._in_flight[number] = start(backend)
            except RuntimeError as error:
                self._membership.lost(f"{what} failed: {str(error).splitlines()[0]}")
        return _Guarded(number, self, f"{what} of '{self._what}'", tensors)

    # Overrides that c10d calls.

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

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions | None = None) -> Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._start("all-reduce", tensors, opts, lambda backend: backend.allreduce(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> Work:  # type: ignore[override]
        return self._start("broadcast", tensors, opts, lambda backend: backend.broadcast(tensors, opts))

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        return self._start("all-gather", inputs, opts, lambda backend: backend.allgather(outputs, inputs, opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None) -> Work:
        """torch 2.15 uses this to gather objects."""
        return self.allgather([list(output.view(self.size(), *input.shape).unbind())], [input], opts)

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._start("barrier", [], opts, lambda backend: backend.barrier(opts))


def _connected(name: str, store: dist.Store, rank: int, size: int, membership: Membership) -> dist.ProcessGroupGloo:
    """Creates a gloo group in a thread and abandons the thread if the membership ends before all processes have connected."""
    made: list[dist.ProcessGroupGloo | Exception] = []

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
            raise PeersLostError(f"the membership ended while group '{name}' was connecting")
    (result,) = made
    if isinstance(result, Exception):
        raise membership.lost(f"a process did not connect to group '{name}': {str(result).splitlines()[0]}") from result
    return result


def disconnect_abandoned() -> None:
    """Disconnects abandoned groups whose collectives have ended. Thread-safe."""
    with _abandoned_lock:
        ended = [group for group in _abandoned if not group.is_busy()]
        _abandoned[:] = [group for group in _abandoned if group not in ended]
    # So that other processes stop waiting, and gloo's thread does not spin when unclaimed data arrives.
    for group in ended:
        group._backends.clear()


def has_abandoned() -> bool:
    """Whether gloo threads are still waiting for lost processes. Interpreter shutdown would wait for these threads."""
    disconnect_abandoned()
    return bool(_abandoned)
