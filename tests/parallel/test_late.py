"""Training on groups that complete asynchronously, as NCCL's do: no result is used before it is waited for, no buffer is written
before it is sent, and all processes of a group issue the same collectives in the same order."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost.config import Config, load
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from boost.measure.exactness import TrainedModel, matches_table
from boost.measure.verify import layouts
from boost.measure.verify.layouts import Row, judged, rows, run_row
from boost.parallel import collectives
from boost.parallel.mesh import Axis, Mesh
from tests import late, toy
from tests.distributed import run_distributed
from tests.trained import relative_errors

pytestmark = pytest.mark.slow

PROCESSES = 4
MODELS = {family: load(None, [f"--model.family={family}"]).model for family in ("cola", "lax", "dense")}
AS_COLA = ("btp, online", "btp, sync", "vanilla, strong", "vanilla, published", "ulysses", "btp-cp", "megatron")
"""Rows that other families and rows cover too; run nightly."""
ALIKE = ("btp, sync", "vanilla, published")
"""Rows of cola that wait where others do, more often or less."""
FSDP_OF = ("cola", "btp-sp")
"""The row whose shards of replicated weights FSDP gathers as it gathers those of all others."""


def every_row() -> Iterator[Any]:
    """(family, row): low precision waits for the same collectives as high precision, and a step with whole micro-batches and no
    recomputation for none that those with halves and with recomputation do not wait for."""
    for family, model in MODELS.items():
        for row in rows(model, PROCESSES, False, "none"):
            if family == "cola" or "layout" in row.parallel:
                alike = ("float64", "float32", "bfloat16", *(("FSDP of TP",) if (family, row.name) != FSDP_OF else ()))
                cells = tuple(cell for cell in row.cells if cell.name not in alike)
                cells = cells or row.cells[:1]
                nightly = [pytest.mark.nightly] * (row.name in (ALIKE if family == "cola" else AS_COLA))
                yield pytest.param(family, replace(row, cells=cells), id=f"{family}-{row.name}", marks=nightly)


Outcome = tuple[Any, list[str], dict[str, list[tuple[Any, ...]]]]


def trained_late(family: str, row: Row) -> Outcome:
    """Results of a row, collectives that were never waited for, and the collectives of each group. fully_shard and torch's
    pipelines call Python process groups directly, so theirs cannot be counted."""

    def keeps(config: Config, *rest: Any) -> bool:
        return config.parallel.sharded or config.parallel.pp > 1 or matches_table(config, *rest)

    with late.late_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "matches_table", keeps)
        found = run_row(MODELS[family], row, toy.mesh(1, PROCESSES))
        return found, late.never_waited(), dict(late.orders)


def require_same_order(outcomes: list[Outcome]) -> None:
    """Every group issues the same collectives in the same order on all of its processes."""
    for name in {name for _, _, orders in outcomes for name in orders}:
        first, *others = (orders[name] for _, _, orders in outcomes if name in orders)
        assert all(other == first for other in others), name


@pytest.mark.parametrize(("family", "row"), list(every_row()))
def test_every_layout_schedule_and_sharding(family: str, row: Row) -> None:
    outcomes = run_distributed(PROCESSES, trained_late, family, row)
    found = judged(row.cells, [each for each, _, _ in outcomes])
    assert found.verdict == "ok", found.detail
    assert [waiting for _, waiting, _ in outcomes] == [[]] * PROCESSES
    require_same_order(outcomes)


def optimized_late(sections: dict[str, Any]) -> Outcome:
    with late.late_groups():
        config = toy.toy_config("float64", **sections)
        found = TrainedModel(config, toy.toy_mesh(config), 2)
        return max(relative_errors(found, 2).values()), late.never_waited(), dict(late.orders)


OPTIMIZED: list[dict[str, Any]] = [
    {"optim": {"name": "loro", "exact_every": 2}, "model": {"family": "svd"}, "parallel": {"tp": 2, "dp": 2}},
    {"optim": {"name": "muon"}, "parallel": {"tp": 2, "dp": 2, "layout": "vanilla", "shard": "optimizer"}},
    {"optim": {"name": "muon"}, "parallel": {"tp": 4, "layout": "btp-sp"}},
]


@pytest.mark.parametrize("sections", OPTIMIZED, ids=str)
def test_optimizers_of_whole_factors(sections: dict[str, Any]) -> None:
    outcomes = run_distributed(PROCESSES, optimized_late, sections)
    assert max(error for error, _, _ in outcomes) <= 1e-10
    assert [waiting for _, waiting, _ in outcomes] == [[]] * PROCESSES
    require_same_order(outcomes)


DEVICE = torch.device("cuda", 0) if os.environ.get("BOOST_TEST_DEVICE", "cuda") == "cuda" else toy.CPU


def shared_gpu(family: str, row: Row) -> Outcome:
    if DEVICE.type == "cuda":
        # torch's meshes would select a GPU for each process if the machine has as many.
        torch.cuda.set_device(DEVICE)
    with late.late_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "matches_table", lambda *_: True)
        found = run_row(MODELS[family], row, Mesh(DEVICE, size=PROCESSES, rank=dist.get_rank()))
        return found, late.never_waited(), dict(late.orders)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("family", "row"), list(every_row()))
def test_processes_that_share_a_gpu(family: str, row: Row) -> None:
    """Checks results only: communication goes through the host."""
    outcomes = run_distributed(PROCESSES, shared_gpu, family, row)
    found = judged(row.cells, [each for each, _, _ in outcomes])
    assert found.verdict == "ok", found.detail
    require_same_order(outcomes)


# The checking groups detect misuse.


def used_too_early(axis: Axis) -> str:
    x = torch.ones(4)
    y = collectives.start_plain(ALL_REDUCE, x, axis)
    early = y + 1
    collectives.wait(y)
    return f"{early.isnan().all()} {(y == axis.size).all()}"


def written_too_early(axis: Axis) -> str:
    x = torch.ones(2 * axis.size)
    y = collectives.start_plain(REDUCE_SCATTER, x, axis)
    x.zero_()
    try:
        collectives.wait(y)
    except Exception as error:
        return str(error)
    return ""


def never_waited(axis: Axis) -> str:
    collectives.start_plain(ALL_GATHER, torch.ones(2), axis)
    return ", ".join(late.never_waited())


def strided(axis: Axis) -> str:
    try:
        torch.ops._c10d_functional.all_reduce_(torch.ones(4, 4).t()[:2], "sum", axis.name)
    except Exception as error:
        return str(error)
    return ""


def misused(how: str) -> str:
    with late.late_groups():
        return globals()[how](toy.mesh(2).tp)


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("used_too_early", "True True"),
        ("written_too_early", "its input was changed before it was waited for"),
        ("never_waited", "all_gather [(2,)]"),
        ("strided", "NCCL wants contiguous tensors"),
    ],
)
def test_misuse_is_found(how: str, seen: str) -> None:
    for found in run_distributed(2, misused, how):
        assert seen in found, found
