"""The processes of a run as one mesh (pp, dp, cp, tp). TP is innermost so that it stays inside a node."""

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.parallel.rendezvous import Stopped, meet

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Environment variables that hold a process's local rank on its machine: torchrun and our launcher, Slurm, Open MPI, MPICH."""

T = TypeVar("T")

GPUS_OF_A_NODE = 16
"""Upper bound on the GPUs of one machine."""


@dataclass(frozen=True)
class Axis:
    """This process's rank on one axis of the mesh. `group` is None if the axis has one process: no communication."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    point_to_point: bool = True
    """Whether the processes of `group` can send each other messages (`boost.parallel.collectives`)."""
    name: str = field(init=False)
    """torch's name of the group; empty without one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.group.group_name if self.group is not None else "")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # a copied module runs on the same processes


ALONE = Axis()
"""An axis of one process."""


@dataclass(eq=False)
class Mesh:
    """This process's coordinates in the mesh. A single-process run has no process group.

    A run may lose and gain replicas: read axes across replicas from the mesh each time instead of caching them.
    """

    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """By name, outermost first. A missing axis has one process. With cp there is also dp_cp, which has its own group for the
    same reason as `replicas`."""
    replicas: Axis = ALONE
    """dp x cp x tp: every process that holds a copy of an unsharded weight. It has its own group, so that gradient sums in
    flight do not block the collectives of the backward pass."""
    rank: int = 0
    size: int = 1
    device_mesh: DeviceMesh | None = None
    weights_mesh: DeviceMesh | None = None
    """Device mesh of dp x cp."""
    world: Axis | None = None
    """All processes, if they are not torch's default group."""

    def together(self, operation: Callable[[], T]) -> T:
        """Runs an operation of all processes of the run: an evaluation, a save. Returns its result.

        A mesh that can lose processes repeats the operation if it does, so everything that all processes do between two steps goes
        through here.
        """
        return operation()

    @property
    def everyone(self) -> Axis:
        """All processes of the run."""
        return self.world or Axis(self.rank, self.size, dist.group.WORLD if self.size > 1 else None)

    def axis(self, name: str) -> Axis:
        """This process's coordinate on one axis."""
        return self.axes.get(name, ALONE)

    @property
    def tp(self) -> Axis:
        """Tensor parallelism."""
        return self.axis("tp")

    @property
    def dp(self) -> Axis:
        """Data parallelism: replicas that train on different sequences."""
        return self.axis("dp")

    @property
    def cp(self) -> Axis:
        """Context parallelism: processes that train on different tokens of the same sequences."""
        return self.axis("cp")

    @property
    def dp_cp(self) -> Axis:
        """dp x cp: processes that hold the same weights for different tokens. Gradients are summed and weights are sharded over
        it."""
        return self.axes.get("dp_cp", self.dp)

    @property
    def pp(self) -> Axis:
        """Pipeline parallelism."""
        return self.axis("pp")

    @property
    def update_axis(self) -> Axis:
        """Processes that share the work of an optimizer update."""
        return self.replicas

    @property
    def is_main(self) -> bool:
        """Whether this is the main process of the run."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for every process of the run."""
        if self.size > 1:
            dist.barrier(group=self.everyone.group)


def share(count: int, place: int, places: int) -> range:
    """The contiguous share of `count` things (micro-batches, rows) for index `place` of `places`; shares are equal if `places`
    divides `count`."""
    return range(place * count // places, (place + 1) * count // places)


def world_size() -> int:
    """Number of processes that torchrun (or our launcher) started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(device: str) -> torch.device:
    """Chooses this process's device for `run.device`: a GPU if one is visible, unless "cpu" is requested.

    A process that sees one GPU takes it: srun --gpus-per-task=1, Kubernetes and MIG show each process only its own. A process
    that sees several takes the one of its local rank.

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
            f"this process sees {visible} GPUs but has no local rank to choose one; start with torchrun, set LOCAL_RANK, or show "
            "each process one GPU (CUDA_VISIBLE_DEVICES)"
        )
    if local >= visible:
        raise ConfigError(
            f"this is process {local + 1} on a machine with {visible} GPUs; start at most {visible} processes, or set "
            "run.device = 'cpu'"
        )
    return torch.device("cuda", local)


def _require_driver() -> None:
    """Raises ConfigError if torch sees no GPU because NVIDIA's driver is too old for it: it would only train on CPUs."""
    built_for = torch.version.cuda
    if built_for is None:
        return
    # The newest CUDA version that the driver supports, such as 12040 for 12.4; 0 without a driver.
    supported: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    if 0 < supported // 1000 < int(built_for.partition(".")[0]):
        version = f"{supported // 1000}.{supported % 1000 // 10}"
        raise ConfigError(
            f"torch is built for CUDA {built_for}, but this machine's driver supports CUDA {version}, so torch sees no GPU; update "
            f"the driver, install torch for CUDA {version}, or set run.device = 'cpu'"
        )


def _require_exclusive_gpu(device: torch.device, store: dist.Store, rank: int, size: int) -> None:
    """Raises ConfigError if another process on this machine uses the same GPU. NCCL would reject it too, but much later."""
    gpu = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), device.index, _gpu_id(device)]
    store.set(f"gpu/{rank}", json.dumps(gpu))
    # Ranks of a node are neighbors, so ranks farther away are on other machines.
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
    """Joins the process group of this run (none for one process) and returns this process's mesh.

    Raises ConfigError if the number of processes is not pp x dp x cp x tp, TrainingError if some do not join within
    `timeout_s`, and StoppedError if one of them receives a stop signal (named by `stopped`) before all have joined.
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
        store, rank, size = meet(timeout_s, stopped)
        if chosen.type == "cuda":
            _require_exclusive_gpu(chosen, store, rank, size)
        # On GPUs CPU tensors have gloo: checkpoints, object digests.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return mesh_of(parallel, chosen, timeout_s)


def mesh_of(parallel: ParallelConfig, device: torch.device, timeout_s: int = 600) -> Mesh:
    """Builds this process's mesh on an existing process group."""
    backend = _backend(device)
    device_mesh, axes = axes_of(dict(parallel.axes), device, timeout_s)
    weights_mesh = device_mesh["dp"]
    if "cp" in axes:
        ranks = device_mesh.mesh.movedim(-1, 1).flatten(0, 1).flatten(1)
        axes["dp_cp"] = own = _own_group(ranks.tolist(), "dp_cp", timeout_s, backend)
        assert own.group is not None
        weights_mesh = DeviceMesh.from_group(own.group, device.type, mesh_dim_names=("dp_cp",))
    replicas = _own_group(device_mesh.mesh.flatten(1).tolist(), "replicas", timeout_s, backend)
    return Mesh(device, axes, replicas, dist.get_rank(), dist.get_world_size(), device_mesh, weights_mesh)


def axes_of(sizes: dict[str, int], device: torch.device, timeout_s: float) -> tuple[DeviceMesh, dict[str, Axis]]:
    """Divides all processes into axes of these sizes, outermost first. Returns torch's mesh and this process's coordinates."""
    backend = _backend(device)
    override: dict[int | str, Any] | None = dict.fromkeys(sizes, backend) if backend else None
    device_mesh = init_device_mesh(
        device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=override
    )
    axes = {}
    for name in sizes:
        own = device_mesh[name]
        group = own.get_group() if own.size() > 1 else None
        if group is not None:  # init_device_mesh sets the backend's default timeout, half an hour
            set_group_timeout(group, timeout_s)
        axes[name] = Axis(own.get_local_rank(), own.size(), group)
    return device_mesh, axes


def _backend(device: torch.device) -> str | None:
    """Backend of the mesh's groups: NCCL alone on GPUs. By default each group would also have gloo, which needs two sockets per
    pair of processes. CPU tensors use the group of the whole run. None: the backend of the whole run."""
    return "nccl" if device.type == "cuda" else None


def _own_group(groups: list[list[int]], name: str, timeout_s: int, backend: str | None) -> Axis:
    """Creates these groups of ranks, all of them on every process as torch requires. Returns this process's position in its
    group."""
    place = Axis()
    for ranks in groups:
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(ranks, timeout, backend, group_desc=name) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            place = Axis(ranks.index(dist.get_rank()), len(ranks), group)
    return place


def set_timeout(timeout_s: float) -> None:
    """Sets the timeout, in seconds, of everything issued from now on in any group of this process."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            set_group_timeout(group, timeout_s)


def set_group_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Sets the timeout of everything issued from now on in one group, in seconds. Does nothing if its backend has no timeout."""
    with contextlib.suppress(RuntimeError):
        group.set_timeout(datetime.timedelta(seconds=timeout_s))


@contextlib.contextmanager
def temporary_groups() -> Iterator[None]:
    """Destroys the process groups that are created inside, unless an exception leaves them in different collectives. Each NCCL
    group would keep its communicator, most of a GB of GPU memory. All processes must take part."""
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in before:
            dist.destroy_process_group(group)


def close_mesh() -> None:
    """Destroys the process group. With NCCL this waits for the other processes, so all of them must call it.

    Do not call it while an exception propagates: the others are in a different collective, and a timeout would replace the
    error.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
