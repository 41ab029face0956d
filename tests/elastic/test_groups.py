"""Groups across replicas that can be abandoned: no process waits for a lost one."""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from boost.config.schema import ParallelConfig
from boost.elastic.groups import CONNECT_S, Membership, RecoverableGroup, has_abandoned
from boost.elastic.mesh import replica_of_rank, replica_size
from boost.elastic.step import KeptBucket, restore_local
from boost.models.fused import fused_params
from boost.parallel.collectives import all_reduce
from boost.parallel.gradients import GradientReducer
from boost.parallel.mesh import ALONE, Axis, Mesh
from boost.train.agreement import PeersLostError
from boost.train.heartbeat import latest_collectives
from tests import toy
from tests.distributed import run_distributed


def group_of(path: Path, rank: int, size: int, membership: Membership) -> RecoverableGroup:
    store = dist.FileStore(str(path), -1)
    return RecoverableGroup("test", store, rank, size, toy.CPU, membership)


def collectives(path: Path) -> list[Any]:
    rank, membership = dist.get_rank(), Membership(0)
    group = group_of(path, rank, 3, membership)
    axis, objects = Axis(rank, 3, group, point_to_point=False), [None] * 3
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    smallest, first = torch.tensor(rank + 1), torch.tensor(rank)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    dist.broadcast(first, group=group, group_src=2)
    parts = [torch.zeros(1) for _ in range(3)]
    dist.all_gather(parts, torch.full((1,), float(rank)), group=group)
    dist.barrier(group=group)
    total = all_reduce(torch.full((2,), float(rank)), axis).tolist()
    membership.leave()
    return [objects, int(smallest), int(first), [float(x) for x in parts], total]


def test_collectives_are_those_of_any_group(tmp_path: Path) -> None:
    expected = [[{"rank": 0}, {"rank": 1}, {"rank": 2}], 1, 2, [0.0, 1.0, 2.0], [3.0, 3.0]]
    assert run_distributed(3, collectives, tmp_path / "store") == [expected] * 3


def one_stays_away(path: Path) -> list[Any]:
    """Rank 1 skips the second sum. The others are notified and continue without it."""
    rank, said = dist.get_rank(), list[str]()
    membership = Membership(0, said.append)
    group = group_of(path, rank, 3, membership)
    axis = Axis(rank, 3, group, point_to_point=False)
    found: list[Any] = [all_reduce(torch.ones(1000), axis)[0].item()]
    if rank != 1:
        timer = threading.Timer(0.5, membership.end)
        timer.start()
        with pytest.raises(PeersLostError):
            all_reduce(torch.ones(1000), axis)
        with pytest.raises(PeersLostError):  # raises immediately; nothing starts
            all_reduce(torch.ones(1000), axis)
        membership.leave()
        found.append(has_abandoned())
        again = Membership(1)
        group = group_of(path, rank // 2, 2, again)
        found.append(all_reduce(torch.ones(1000), Axis(rank // 2, 2, group, point_to_point=False))[0].item())
        again.leave()
    dist.barrier()
    membership.leave()
    return found


def test_a_wait_ends_with_the_membership(tmp_path: Path) -> None:
    left, absent, right = run_distributed(3, one_stays_away, tmp_path / "store")
    assert left == right == [3.0, True, 2.0] and absent == [3.0]


def threads() -> int:
    """Number of threads of this process, gloo's event loops included."""
    return len(list(Path("/proc/self/task").iterdir()))


def one_leaves(path: Path) -> tuple[int, int]:
    """Rank 0 waits for a sum that rank 1 never enters, and abandons it; then rank 1 leaves."""
    rank, membership = dist.get_rank(), Membership(0)
    before = threads()
    group = group_of(path, rank, 2, membership)
    connected = threads()
    if rank == 0:
        threading.Timer(0.5, membership.end).start()
        nobody_waits = group.allreduce([torch.ones(1000)])
        with pytest.raises(PeersLostError):
            all_reduce(torch.ones(1000), Axis(rank, 2, group, point_to_point=False))
        assert not nobody_waits.is_completed(), "but it is in flight"
    else:
        membership.over.wait(1.5)
    membership.leave()
    has_left_at = time.monotonic()
    deadline = time.monotonic() + 60
    while has_abandoned() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not has_abandoned() and time.monotonic() - has_left_at < 50, "it did not wait for a timeout"
    with pytest.raises(PeersLostError):
        group.allreduce([torch.ones(1)]).wait()
    return connected - before, threads() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_group_that_is_left_is_disconnected(tmp_path: Path) -> None:
    """An open connection would cost a thread that spins, and the others would wait for their timeout."""
    for added, left in run_distributed(2, one_leaves, tmp_path / "store"):
        assert added >= 1 and left == 0


class CompletesLate:
    """A collective that completes between the end of the first wait and whatever is asked next."""

    def __init__(self, error: str = "") -> None:
        self.completed, self.error = False, error

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: Any = None) -> bool:
        if not self.completed:
            self.completed = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


def completes_late(path: Path) -> str:
    membership = Membership(0)
    group = group_of(path, 0, 1, membership)
    late: dict[int, Any] = {1: CompletesLate(), 2: CompletesLate("connection reset")}
    group._in_flight = late
    group.wait(1, "sum", toy.CPU)
    assert not membership.over.is_set(), "it did not fail"
    with pytest.raises(PeersLostError, match="sum failed: connection reset") as error:
        group.wait(2, "sum", toy.CPU)
    assert membership.over.is_set()
    membership.leave()
    return str(error.value)


def test_a_collective_that_completes_as_a_wait_times_out_has_not_failed(tmp_path: Path) -> None:
    assert run_distributed(1, completes_late, tmp_path / "store")


def nobody_connects(path: Path) -> str:
    membership = Membership(0)
    threading.Timer(0.3, membership.end).start()
    with pytest.raises(PeersLostError) as error:
        group_of(path, 0, 2, membership)
    return str(error.value)


def test_a_failed_connection_is_abandoned(tmp_path: Path) -> None:
    assert run_distributed(1, nobody_connects, tmp_path / "store") == [
        "the membership ended while group 'test' was connecting"
    ]


def taken_back(path: Path) -> list[list[float]]:
    """Sums that are computed, discarded and recomputed, in a bucket of one tensor and in one of two."""
    rank, membership = dist.get_rank(), Membership(0)
    axis = Axis(rank, 2, group_of(path, rank, 2, membership), point_to_point=False)
    mesh = Mesh(toy.CPU, {"dp": axis}, axis, rank, 2, world=axis)
    model, _ = toy.toy_decoder(toy.toy_config())
    params = list(fused_params(model))
    reducer = GradientReducer(params, mesh, torch.float64, KeptBucket)
    found = []
    for _ in range(2):
        reducer.begin()
        for each in params:
            each.parameter.grad = torch.full_like(each.parameter, 10.0 * (rank + 1))
        reducer.finish()
        restore_local(reducer)
        mine = [float(each.parameter.grad.sum()) for each in params if each.parameter.grad is not None]
        for each in params:
            each.parameter.grad += 1.0  # type: ignore[operator]
        reducer.finish()
        sums = [float(each.tensor.grad.flatten()[0]) for each in params if each.tensor.grad is not None]
        found.append([min(sums), max(sums), min(mine) / max(mine) if rank else 1.0])
    restore_local(reducer)
    mesh.axes, mesh.replicas = {}, ALONE  # the other replica is lost
    reducer.finish()
    found.append([float(each.tensor.grad.flatten()[0]) for each in params if each.tensor.grad is not None][:1])
    membership.leave()
    return found


def test_sums_are_discarded_and_recomputed(tmp_path: Path) -> None:
    first, second = run_distributed(2, taken_back, tmp_path / "store")
    for found, own in ((first, 11.0), (second, 21.0)):
        assert [each[:2] for each in found[:2]] == [[32.0, 32.0]] * 2, "10 + 1 of one, 20 + 1 of the other"
        assert found[2] == [own], "alone, a sum is this process's own"


@pytest.mark.parametrize(
    "sizes", [{"dp": 4}, {"tp": 2, "dp": 3}, {"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "cp": 2}]
)
def test_every_process_has_one_place_in_one_replica(sizes: dict[str, int]) -> None:
    parallel = ParallelConfig.model_validate({"tp": 1, **sizes})
    places = [replica_of_rank(parallel, rank) for rank in range(parallel.world_size)]
    assert sorted(places) == [(r, p) for r in range(parallel.dp) for p in range(replica_size(parallel))]
    if parallel.pp == 1:
        assert places == sorted(places), "processes of a replica are neighbors"


# NCCL, without a GPU.


class FakeNccl:
    """Like ProcessGroupNCCL: a synchronous collective returns no work, and waiting for work does not wait for its kernel."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=True)
            self._timeout, self.group_name = timedelta(seconds=600), ""

    def __init__(self, store: dist.Store, rank: int, size: int, options: "FakeNccl.Options") -> None:
        self.options, self.aborted = options, threading.Event()
        self.waits_for: FakeNccl | None = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return mock.Mock() if opts.asyncOp else None

    broadcast = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self.allreduce(inputs, opts)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def abort(self) -> None:
        self.aborted.set()
        if self.waits_for is not None:
            assert self.waits_for.aborted.wait(60), "the kernel that this abort waits for was never aborted"


class Event:
    """A CUDA event. The test says when the stream has reached it."""

    reached = False

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return Event.reached


def group_on_gpu(path: Path, membership: Membership, name: str = "dp") -> RecoverableGroup:
    store = dist.FileStore(str(path), -1)
    with mock.patch.object(dist, "ProcessGroupNCCL", FakeNccl, create=True):
        return RecoverableGroup(name, store, 0, 1, torch.device("cuda"), membership)


def on_gpu(path: Path) -> None:
    """Synchronous collectives, which torch asks of every group; what waits for them; names and timeouts."""
    membership = Membership(3)
    group = group_on_gpu(path, membership)
    assert group.nccl.options.group_name == "dp/3", "hang reports name the group"
    dist.all_reduce(torch.ones(1), group=group)
    assert latest_collectives()[0] == "dp/3", "on CPUs too"
    group.set_timeout(timedelta(seconds=7))
    assert group.nccl.options._timeout == timedelta(seconds=7)

    gpu: Any = {"Event": Event, "current_stream": mock.Mock(), "get_device_capability": lambda device: (9, 0)}
    with mock.patch.multiple(torch.cuda, **gpu), FakeTensorMode():
        x = torch.empty(2, device="cuda")
        for collective in (
            lambda: dist.all_reduce(x, group=group),
            lambda: dist.broadcast(x, group=group, group_src=0),
            lambda: dist.all_gather([x], x, group=group),
        ):
            assert membership.waits_since() is None
            before = time.monotonic()
            collective()
            since = membership.waits_since()
            assert since is not None and since >= before, "the host will wait when it reads the result"
            Event.reached = True
            assert membership.waits_since() is None
            Event.reached = False
    membership.leave()


def test_collectives_on_gpus(tmp_path: Path) -> None:
    run_distributed(1, on_gpu, tmp_path / "store")


def a_barrier_ends(path: Path) -> None:
    """A barrier is gloo's on GPUs too, so it must be abandoned like any other of gloo's collectives."""
    rank, membership = dist.get_rank(), Membership(0)
    store = dist.FileStore(str(path), -1)
    with mock.patch.object(dist, "ProcessGroupNCCL", FakeNccl, create=True):
        group = RecoverableGroup("all", store, rank, 2, torch.device("cuda"), membership)
    if rank == 0:
        threading.Timer(0.3, membership.end).start()
        begun = time.monotonic()
        with pytest.raises(PeersLostError, match="the membership has ended"):
            dist.barrier(group=group)
        assert time.monotonic() - begun < CONNECT_S / 2, "it did not wait for gloo's timeout"
    dist.barrier()
    membership.leave()


def test_a_barrier_on_gpus_ends_with_the_membership(tmp_path: Path) -> None:
    run_distributed(2, a_barrier_ends, tmp_path / "store")


def aborts(path: Path) -> None:
    membership = Membership(0)
    first, second = (group_on_gpu(path, membership, name).nccl for name in ("all", "dp"))
    first.waits_for = second
    begun = time.monotonic()
    membership.end()
    assert first.aborted.is_set() and second.aborted.is_set() and time.monotonic() - begun < 30
    membership.end()
    membership.leave()


def test_an_abort_that_waits_for_another_group_does_not_delay_its_abort(tmp_path: Path) -> None:
    run_distributed(1, aborts, tmp_path / "store")
