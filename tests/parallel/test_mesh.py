"""The mesh: coordinates, timeouts, backends."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import boost.parallel.mesh as mesh_module
from boost.config.schema import ParallelConfig
from boost.parallel.mesh import Mesh, mesh_of
from tests.distributed import run_distributed

CPU = torch.device("cpu")


def make_mesh() -> Mesh:
    return mesh_of(ParallelConfig(pp=2, dp=2, tp=2), CPU, timeout_s=123)


def places() -> tuple[int, int, int, int, bool]:
    mesh = make_mesh()
    return mesh.pp.rank, mesh.dp.rank, mesh.tp.rank, mesh.replicas.rank, mesh.is_main


def test_tp_is_the_innermost_axis_and_pp_the_outermost() -> None:
    expected = [(pp, dp, tp, 2 * dp + tp) for pp in range(2) for dp in range(2) for tp in range(2)]
    assert [place[:4] for place in run_distributed(8, places)] == expected
    assert [place[4] for place in run_distributed(8, places)] == [True] + [False] * 7


def time_limits() -> set[datetime.timedelta]:
    mesh = make_mesh()
    groups = [axis.group for axis in (mesh.tp, mesh.dp, mesh.pp, mesh.replicas)]
    return {group._get_backend(CPU).options._timeout for group in groups if group}


def test_every_group_has_the_configured_time_limit() -> None:
    for limits in run_distributed(8, time_limits):
        assert limits == {datetime.timedelta(seconds=123)}


def backends_on(device: str) -> set[str | None]:
    """Backends requested for the groups of a mesh on a type of device. Only requested: there is no GPU."""
    asked: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        make, new = mesh_module.init_device_mesh, dist.new_group

        def device_mesh(kind: str, *sizes: Any, backend_override: Any = None, **names: Any) -> DeviceMesh:
            asked.extend(backend_override.values() if backend_override else [None])
            return make("cpu", *sizes, **names)

        def group(ranks: list[int], timeout: Any, backend: str | None, **names: Any) -> Any:
            asked.append(backend)
            return new(ranks, timeout, **names)

        patch.setattr(mesh_module, "init_device_mesh", device_mesh)
        patch.setattr(dist, "new_group", group)
        mesh_of(ParallelConfig(dp=2, cp=2, tp=2), torch.device(device))
    return set(asked)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "nccl"), ("cpu", None)])
def test_the_groups_of_a_mesh_have_one_backend(device: str, expected: str | None) -> None:
    """With gloo in addition to NCCL, each group would need two sockets per pair of processes."""
    assert run_distributed(8, backends_on, device) == [{expected}] * 8
