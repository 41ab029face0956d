"""The mesh for a run with in-step recovery. Groups inside a replica persist; groups across replicas are rebuilt for
each membership.

A replica consists of pp x cp x tp processes. Layouts and pipelines use its groups, which last as long as the replica. torch's
default group contains the processes of this replica. Legend: n replicas in a membership, in order.
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from boost.config.schema import ParallelConfig
from boost.elastic.groups import Membership, RecoverableGroup
from boost.elastic.membership import Decision, Member
from boost.parallel.mesh import Axis, Mesh, T, axes_of


@dataclass(frozen=True)
class Replica:
    """This process's position in its replica."""

    device: torch.device
    axes: Mapping[str, Axis]
    """Axes of the mesh except dp, by name."""
    process: int = 0
    """Index of this process in the replica: pp outermost, tp innermost."""
    size: int = 1


def replica_size(parallel: ParallelConfig) -> int:
    """Number of processes per replica."""
    return parallel.world_size // parallel.dp


def ranks_of_replicas(parallel: ParallelConfig) -> list[list[int]]:
    """Global ranks in a full run, by replica and process within it, in the order of `parallel.axes`."""
    ranks = torch.arange(parallel.world_size).view(tuple(parallel.axes.values()))
    result: list[list[int]] = ranks.movedim(list(parallel.axes).index("dp"), 0).flatten(1).tolist()
    return result


def replica_of_rank(parallel: ParallelConfig, rank: int) -> tuple[int, int]:
    """Maps a global rank in a full run to (replica, process within it)."""
    return next(
        (number, ranks.index(rank)) for number, ranks in enumerate(ranks_of_replicas(parallel)) if rank in ranks
    )


def open_replica(
    parallel: ParallelConfig, device: torch.device, store: dist.Store, process: int, timeout_s: float
) -> Replica:
    """Joins this process's replica, whose processes share `store`. Blocks until all of them have joined."""
    size = replica_size(parallel)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=process,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    sizes = {name: n for name, n in parallel.axes.items() if name != "dp"}
    if size == 1:
        return Replica(device, dict.fromkeys(sizes, Axis()))
    return Replica(device, axes_of(sizes, device, timeout_s)[1], process, size)


Together = Callable[[Callable[[], Any]], Any]
"""Runs an operation on all processes, and returns its result (`Mesh.together`)."""


@dataclass(eq=False)
class ElasticMesh(Mesh):
    """A mesh whose replicas change during the run."""

    members: tuple[str, ...] = ()
    """Names of the replicas along dp."""
    run: Together | None = None
    """Runs an operation and repeats it if a replica is lost meanwhile (`Recovery.run`); None: operations run once."""

    def together(self, operation: Callable[[], T]) -> T:
        """Runs an operation on all processes; if a replica is lost meanwhile, runs it again."""
        return self.run(operation) if self.run else operation()

    def become(self, other: "ElasticMesh") -> None:
        """Takes over the coordinates and groups of another mesh."""
        for own in fields(self):
            if own.name != "run":
                setattr(self, own.name, getattr(other, own.name))

    @property
    def update_axis(self) -> Axis:
        """The tensor-parallel processes of this replica, because other replicas can be lost in the middle of an update."""
        return self.tp


def waiting_mesh(replica: Replica, run: Together | None = None) -> ElasticMesh:
    """The mesh for a replica that is waiting to join: it contains no other replica, and its rank is never the main process's."""
    axes = {**replica.axes, "dp": Axis()}
    return ElasticMesh(replica.device, axes, rank=replica.process + 1, size=1, background=Axis(), run=run)


def join_members(
    replica: Replica, decision: Decision, member: Member, store: dist.Store, membership: Membership
) -> ElasticMesh:
    """Connects to the other processes of a membership and registers the new groups with `membership`. Raises PeersLostError."""
    d, n = decision.place(member), len(decision.members)
    assert d is not None, "a process can only join a membership that includes it"
    pp, cp, tp = (replica.axes.get(name, Axis()) for name in ("pp", "cp", "tp"))
    store = dist.PrefixStore(f"members/{decision.number}", store)

    def across(name: str, rank: int, size: int) -> Axis:
        if size == 1:
            return Axis()
        return Axis(
            rank, size, RecoverableGroup(name, store, rank, size, replica.device, membership), point_to_point=False
        )

    # `everyone` comes first because it is aborted first (`Membership.end`): on GPUs, this blocks statistics of aborted sums.
    rank, size = ((pp.rank * n + d) * cp.size + cp.rank) * tp.size + tp.rank, n * replica.size
    everyone = across("all", rank, size)
    background = across("saves", rank, size)
    copies = across(f"replicas of pp {pp.rank}", (d * cp.size + cp.rank) * tp.size + tp.rank, n * cp.size * tp.size)
    axes = {**replica.axes, "dp": across(f"dp of {replica.process}", d, n)}
    if "cp" in replica.axes:
        axes["dp_cp"] = across(f"dp_cp of pp {pp.rank} tp {tp.rank}", d * cp.size + cp.rank, n * cp.size)
    names = tuple(member.incarnation for member in decision.members)
    return ElasticMesh(replica.device, axes, copies, rank, size, world=everyone, background=background, members=names)
