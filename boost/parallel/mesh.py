"""The processes of a run as one mesh (pp, dp, tp), TP innermost so that it stays inside a node."""

import datetime
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError, TrainingError


@dataclass(frozen=True)
class Axis:
    """This process's rank on one axis of the mesh. `group` is None if the axis has one process: no communication."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def name(self) -> str:
        """What torch calls the group of this axis."""
        assert self.group is not None, "an axis of one process does not communicate"
        return self.group.group_name


@dataclass(frozen=True)
class Mesh:
    """This process's coordinates in the mesh. A single-process run has no process group."""

    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """By name, the outermost first; one that is not there has one process."""
    replicas: Axis = Axis()
    """dp x tp: every process that holds a copy of a weight that is not sharded. A group of its own, so that sums of gradients
    on their way do not stand before the collectives of the backward pass."""
    rank: int = 0
    size: int = 1
    device_mesh: DeviceMesh | None = None

    def axis(self, name: str) -> Axis:
        """This process's place on one axis."""
        return self.axes.get(name, Axis())

    @property
    def tp(self) -> Axis:
        """Tensor parallelism."""
        return self.axis("tp")

    @property
    def dp(self) -> Axis:
        """Data parallelism."""
        return self.axis("dp")

    @property
    def pp(self) -> Axis:
        """Pipeline parallelism."""
        return self.axis("pp")

    @property
    def is_main(self) -> bool:
        """Whether this is the main process of the run."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for every process of the run."""
        if self.size > 1:
            dist.barrier()


def world_size() -> int:
    """Number of processes that torchrun (or our launcher) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(device: str) -> torch.device:
    """The device of this process for `run.device`: 'auto' is the CPU unless each local process has a GPU of its own.

    Raises ConfigError if a GPU is asked for and missing.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda', but torch sees no GPU; nearest valid value: 'cpu'")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > gpus:
        if device == "auto":
            return torch.device("cpu")
        raise ConfigError(
            f"run.device = 'cuda', but this machine has {gpus} GPUs for {processes} processes; "
            "start as many processes as GPUs, or set run.device = 'cpu'"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def open_mesh(parallel: ParallelConfig, device: str = "auto", timeout_s: int = 600) -> Mesh:
    """Joins the process group of this run (none for one process) and returns this process's place in it.

    Raises ConfigError if the number of processes is not tp x pp x dp.
    """
    size = world_size()
    if size != parallel.world_size:
        raise ConfigError(
            f"{size} processes were started, but parallel.{' x '.join(parallel.axes)} = "
            f"{' x '.join(str(n) for n in parallel.axes.values())} = {parallel.world_size}; start {parallel.world_size}"
        )
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        return Mesh(chosen)
    if not dist.is_initialized():
        _join(chosen, timeout_s)
    return mesh_of(parallel, chosen, timeout_s)


def mesh_of(parallel: ParallelConfig, device: torch.device, timeout_s: int = 600) -> Mesh:
    """This process's place, in a process group that exists already."""
    names, sizes = tuple(parallel.axes), tuple(parallel.axes.values())
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)

    def axis(name: str) -> Axis:
        size = device_mesh[name].size()
        group = device_mesh.get_group(name) if size > 1 else None
        if group is not None:  # init_device_mesh gives the groups it makes the backend's default, half an hour
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
        return Axis(device_mesh.get_local_rank(name), size, group)

    axes = {name: axis(name) for name in names}
    replicas = _replicas(device_mesh, timeout_s)
    return Mesh(device, axes, replicas, dist.get_rank(), dist.get_world_size(), device_mesh)


def _replicas(device_mesh: DeviceMesh, timeout_s: int) -> Axis:
    """This process's dp x tp axis. Every process creates the groups of all pipeline stages, as torch requires."""
    place = Axis()
    for stage in device_mesh.mesh.flatten(1).tolist():
        group = dist.new_group(stage, timeout=datetime.timedelta(seconds=timeout_s)) if len(stage) > 1 else None
        if dist.get_rank() in stage:
            place = Axis(stage.index(dist.get_rank()), len(stage), group)
    return place


def close_mesh() -> None:
    """Leaves the process group, when all of it does: with NCCL this waits for the others.

    Not to be called while an exception is on its way: the others stand in some other collective, and the error would be
    replaced by a time-out.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(device: torch.device, timeout_s: int) -> None:
    """Gloo on CPU, NCCL on GPUs (plus gloo where CPU tensors are communicated)."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    attempt = agree_on_attempt(store, rank, size, timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore(attempt, store), rank=rank, world_size=size, timeout=timeout
    )


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """A name that the processes of this start have in common, and no earlier one had: a prefix for what they store.

    After an elastic restart torchrun's store still holds the addresses of processes that are gone, and gloo would connect
    to them. TORCHELASTIC_RESTART_COUNT does not tell starts apart: it is each node's own, and a node that restarts because
    another one did does not count it. So rank 0 makes the name up and tells it to whoever asks, under the asker's own
    name made up a moment ago; what an earlier start left in the store is answered too, but nobody reads that.
    """
    ours = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", ours)
        attempt = store.get(f"answer/{ours}").decode()
        store.set(f"{attempt}/knows/{rank}", "")
        return attempt
    answered: dict[int, bytes] = {}
    waiting, deadline = set(range(1, size)), time.monotonic() + timeout_s
    while waiting:
        for other in sorted(waiting):
            key = f"asks/{other}"
            if store.check([key]) and (asked := store.get(key)) != answered.get(other):
                store.set(f"answer/{asked.decode()}", ours)
                answered[other] = asked
        waiting = {other for other in waiting if not store.check([f"{ours}/knows/{other}"])}
        if waiting and time.monotonic() > deadline:
            raise TrainingError(f"processes {sorted(waiting)} did not join within run.timeout_s = {timeout_s}")
        time.sleep(0.02)
    return ours
