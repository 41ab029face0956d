"""The processes of a run as one mesh (pp, dp, cp, tp), TP innermost so that it stays inside a node."""

import datetime
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.parallel.recoverable import RecoverableGroup
from boost.parallel.rendezvous import Stopped, meet

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Environment variables that say the number of a process on its machine: of torchrun and us, Slurm, Open MPI, MPICH."""

GPUS_OF_A_NODE = 16
"""No machine has more."""


@dataclass(frozen=True)
class Axis:
    """This process's rank on one axis of the mesh. `group` is None if the axis has one process: no communication."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    recoverable: bool = False
    """Whether `group` can be given up (`boost.parallel.recoverable`): collectives only, no messages."""

    @property
    def name(self) -> str:
        """What torch calls the group of this axis."""
        assert self.group is not None, "an axis of one process does not communicate"
        return self.group.group_name


def _at_once(attempt: Callable[[], Any]) -> Any:
    return attempt()


@dataclass(frozen=True)
class Mesh:
    """This process's coordinates in the mesh. A single-process run has no process group.

    With in-step recovery what crosses replicas changes while a run lasts (`become`): whoever keeps a mesh asks it anew.
    """

    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """By name, the outermost first; one that is not there has one process. With cp also dp_cp, a group of its own for the reason
    below."""
    replicas: Axis = Axis()
    """dp x cp x tp: every process that holds a copy of a weight that is not sharded. A group of its own, so that sums of gradients
    on their way do not stand before the collectives of the backward pass."""
    rank: int = 0
    size: int = 1
    device_mesh: DeviceMesh | None = None
    weights_mesh: DeviceMesh | None = None
    """Of dp x cp."""
    world: Axis | None = None
    """All processes, where they are not torch's default group."""
    background: Axis | None = None
    """The same for a thread; None: it makes a group of its own."""
    members: tuple[str, ...] = ()
    """Names of the replicas along dp, where they change while a run lasts."""
    together: Callable[[Callable[[], Any]], Any] = _at_once
    """Runs what all processes do together, and again if some of them are lost meanwhile (`boost.train.recovery`)."""

    def become(self, other: "Mesh") -> None:
        """Takes the place that another mesh says."""
        for each in fields(self):
            if each.name != "together":
                object.__setattr__(self, each.name, getattr(other, each.name))

    @property
    def everyone(self) -> Axis:
        """All processes of the run."""
        return self.world or Axis(self.rank, self.size, dist.group.WORLD if self.size > 1 else None)

    def axis(self, name: str) -> Axis:
        """This process's place on one axis."""
        return self.axes.get(name, Axis())

    @property
    def tp(self) -> Axis:
        """Tensor parallelism."""
        return self.axis("tp")

    @property
    def dp(self) -> Axis:
        """Data parallelism: replicas that train on other sequences."""
        return self.axis("dp")

    @property
    def cp(self) -> Axis:
        """Context parallelism: processes that train on other tokens of the same sequences."""
        return self.axis("cp")

    @property
    def dp_cp(self) -> Axis:
        """dp x cp: the processes that hold the same weights for other tokens. Gradients are summed and weights sharded over it."""
        return self.axes.get("dp_cp", self.dp)

    @property
    def pp(self) -> Axis:
        """Pipeline parallelism."""
        return self.axis("pp")

    @property
    def solvers(self) -> Axis:
        """The processes that an update deals its work out to: those of `replicas`, or of one replica where others may be lost."""
        return self.tp if self.replicas.recoverable else self.replicas

    @property
    def is_main(self) -> bool:
        """Whether this is the main process of the run."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for every process of the run."""
        if self.size > 1:
            dist.barrier(group=self.everyone.group)


def world_size() -> int:
    """Number of processes that torchrun (or our launcher) started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(device: str) -> torch.device:
    """The device of this process for `run.device`: a GPU wherever one is visible, unless "cpu" is asked for.

    A process that sees one GPU takes it: srun --gpus-per-task=1, Kubernetes and MIG show each process its own. One that sees
    several takes that of its number on this machine.

    Raises ConfigError if there is no GPU for this process.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not visible:
        raise ConfigError("run.device = 'cuda', but torch sees no GPU; nearest valid value: 'cpu'")
    if device == "cpu" or not visible:
        return torch.device("cpu")
    if visible == 1 or world_size() == 1:
        return torch.device("cuda", 0)
    local = next((int(os.environ[name]) for name in LOCAL_RANKS if os.environ.get(name, "").isdecimal()), None)
    if local is None:
        raise ConfigError(
            f"this process sees {visible} GPUs and does not know which is its own; start with torchrun, set LOCAL_RANK, or show "
            "each process one GPU (CUDA_VISIBLE_DEVICES)"
        )
    if local >= visible:
        raise ConfigError(
            f"this is process {local + 1} on a machine with {visible} GPUs; start at most {visible} processes, or set "
            "run.device = 'cpu'"
        )
    return torch.device("cuda", local)


def _require_gpu_of_its_own(device: torch.device, store: dist.Store, rank: int, size: int) -> None:
    """Raises ConfigError if another process of this machine has the same GPU: NCCL would refuse it, much later."""
    gpu = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), device.index, _gpu_id(device)]
    store.set(f"gpu/{rank}", json.dumps(gpu))
    # TP ranks and the ranks of a node are neighbors: who is further away is on another machine.
    near = range(max(rank - GPUS_OF_A_NODE, 0), min(rank + GPUS_OF_A_NODE + 1, size))
    for other in near:
        if other != rank and json.loads(store.get(f"gpu/{other}")) == gpu:
            first, second = sorted((rank, other))
            raise ConfigError(
                f"ranks {first} and {second} see the same GPU, {torch.cuda.get_device_name(device)}; start one process per GPU, "
                "or set run.device = 'cpu'"
            )


def _gpu_id(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def open_mesh(
    parallel: ParallelConfig, device: str = "auto", timeout_s: int = 600, stopped: Stopped = lambda: None
) -> Mesh:
    """Joins the process group of this run (none for one process) and returns this process's place in it.

    Raises ConfigError if the number of processes is not pp x dp x cp x tp; TrainingError if some do not join within `timeout_s`;
    StoppedError if one of them receives a stop signal, which `stopped` names, before all have joined.
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
        _join(chosen, timeout_s, stopped)
    return mesh_of(parallel, chosen, timeout_s)


def mesh_of(parallel: ParallelConfig, device: torch.device, timeout_s: int = 600) -> Mesh:
    """This process's place, in a process group that exists already."""
    names, sizes = tuple(parallel.axes), tuple(parallel.axes.values())
    backend = _backend(device)
    of_axes: dict[int | str, Any] | None = dict.fromkeys(names, backend) if backend else None
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names, backend_override=of_axes)

    def axis(of: DeviceMesh) -> Axis:
        group = of.get_group() if of.size() > 1 else None
        if group is not None:  # init_device_mesh gives the groups it makes the backend's default, half an hour
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
        return Axis(of.get_local_rank(), of.size(), group)

    axes = {name: axis(device_mesh[name]) for name in names}
    weights_mesh = device_mesh["dp"]
    if "cp" in names:
        ranks = device_mesh.mesh.movedim(-1, 1).flatten(0, 1).flatten(1)
        axes["dp_cp"] = own = _own_group(ranks.tolist(), "dp_cp", timeout_s, backend)
        assert own.group is not None
        weights_mesh = DeviceMesh.from_group(own.group, device.type, mesh_dim_names=("dp_cp",))
    replicas = _own_group(device_mesh.mesh.flatten(1).tolist(), "replicas", timeout_s, backend)
    return Mesh(device, axes, replicas, dist.get_rank(), dist.get_world_size(), device_mesh, weights_mesh)


def _backend(device: torch.device) -> str | None:
    """Of the groups of a mesh: on GPUs NCCL alone. By default each would have gloo beside it, two sockets for each pair of its
    processes; CPU tensors travel in the group of the whole run. None: that of the whole run."""
    single_rank = dist.get_backend() == "fake"  # emulation of one TP rank (boost.measure.shares)
    return "nccl" if device.type == "cuda" and not single_rank else None


def _own_group(groups: list[list[int]], name: str, timeout_s: int, backend: str | None) -> Axis:
    """This process's place in one of these groups of ranks. Every process creates all of them, as torch requires."""
    place = Axis()
    for ranks in groups:
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(ranks, timeout, backend, group_desc=name) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            place = Axis(ranks.index(dist.get_rank()), len(ranks), group)
    return place


def set_timeout(timeout_s: float) -> None:
    """The timeout of what is issued from now on in any group of this process, in seconds."""
    if dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_s)
        for group in list(dist.distributed_c10d._world.pg_map):
            if isinstance(group, RecoverableGroup):
                group.set_timeout(timeout)
            else:
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def close_mesh() -> None:
    """Leaves the process group, when all of it does: with NCCL this waits for the others.

    Not to be called while an exception is on its way: the others stand in some other collective, and the error would be
    replaced by a time-out.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(device: torch.device, timeout_s: int, stopped: Stopped) -> None:
    """The group of the whole run: gloo on CPUs; on GPUs NCCL, and gloo for CPU tensors (checkpoints, digests of objects)."""
    store, rank, size = meet(timeout_s, stopped)
    if device.type == "cuda":
        _require_gpu_of_its_own(device, store, rank, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
