"""The processes in a run as one mesh (pp, dp, cp, tp). TP is innermost so that it stays inside a node."""

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from boost.config.schema import ParallelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """This process's rank on one axis of the mesh. `group` is None if the axis has one process (no communication)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    point_to_point: bool = True
    """Whether the processes in `group` can send messages to each other (`boost.parallel.collectives`)."""
    name: str = field(init=False)
    """torch's name for the group; empty if there is no group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.group.group_name if self.group is not None else "")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # a copied module runs on the same processes


ALONE = Axis()
"""An axis with one process."""


@dataclass(eq=False)
class Mesh:
    """This process's coordinates in the mesh. A single-process run has no process group.

    A run may lose and gain replicas: read axes across replicas from the mesh each time instead of caching them.
    """

    device: torch.device
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """Axes by name, outermost first. A missing axis has one process. With cp, there is also dp_cp, which has its own group for the
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
    background: Axis | None = None
    """All processes, for a background thread; None: the thread opens a group of its own. Set if replicas change."""

    def together(self, operation: Callable[[], T]) -> T:
        """Runs an operation, such as an evaluation or a save, on all processes in the run. Returns its result.

        A mesh that can lose processes repeats the operation if any are lost, so every collective operation between two steps
        uses this method.
        """
        return operation()

    @property
    def everyone(self) -> Axis:
        """All processes in the run."""
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
        """Context parallelism: processes that train on different tokens in the same sequences."""
        return self.axis("cp")

    @property
    def dp_cp(self) -> Axis:
        """dp x cp: processes with the same weights but different tokens. Gradients are summed and weights sharded over this
        axis."""
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
        """Whether this is the run's main process."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for every process in the run."""
        if self.size > 1:
            dist.barrier(group=self.everyone.group)


def share(count: int, place: int, places: int) -> range:
    """The contiguous share of `count` items (micro-batches, rows) at index `place` among `places` shares; shares are
    equal if `places` divides `count`."""
    return range(place * count // places, (place + 1) * count // places)


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
    """Divides all processes into axes with these sizes, outermost first. Returns torch's mesh and this process's coordinates."""
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
    """Backend for the mesh's groups: only NCCL on GPUs. By default, each group would also have gloo, which needs two
    sockets per pair of processes. CPU tensors use the whole run's group. None: the whole run's backend."""
    return "nccl" if device.type == "cuda" else None


def _own_group(groups: list[list[int]], name: str, timeout_s: int, backend: str | None) -> Axis:
    """Creates these groups of ranks; torch requires every process to create all of them. Returns this process's position in
    its group."""
    place = Axis()
    for ranks in groups:
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(ranks, timeout, backend, group_desc=name) if len(ranks) > 1 else None
        if dist.get_rank() in ranks:
            place = Axis(ranks.index(dist.get_rank()), len(ranks), group)
    return place


def set_timeout(timeout_s: float) -> None:
    """Sets the timeout, in seconds, for later operations in all groups of this process."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            set_group_timeout(group, timeout_s)


def set_group_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Sets the timeout, in seconds, for later operations in one group. Does nothing if its backend has no timeout."""
    with contextlib.suppress(RuntimeError):
        group.set_timeout(datetime.timedelta(seconds=timeout_s))


@contextlib.contextmanager
def temporary_groups() -> Iterator[None]:
    """Context manager that destroys process groups created in it, unless an exception leaves processes in different collectives.
    If kept, each NCCL group's communicator would use most of a GB of GPU memory. All processes must take part."""
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in before:
            dist.destroy_process_group(group)
