"""Moments sharded over replicas that leave and join: the update always matches AdamW's."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boost.config import Config
from boost.elastic.groups import Membership, RecoverableGroup
from boost.elastic.membership import Decision, Member
from boost.elastic.mesh import Replica, join_members, waiting_mesh
from boost.elastic.optimizer import DividedAdamW, Division, build_optimizer, transfer_state
from boost.errors import TrainingError
from boost.measure.exactness import TrainedModel
from boost.models.fused import FusedParam, fused_params
from boost.optim.adamw import plain_adamw
from boost.parallel.mesh import Mesh
from boost.plan.collectives import step_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.trained import relative_errors


def config_of(dp: int, shard: str = "optimizer") -> Config:
    return toy.toy_config(
        model={"family": "cola"},
        parallel={"tp": 1, "dp": dp, "shard": shard},
        train={"global_batch": 4, "micro_batch": 1},
        run={"recovery": "in-step"},
    )


def member(rank: int) -> Member:
    return Member(rank, f"{rank}.0")


class Replicas:
    """Memberships for a process that is a whole replica."""

    def __init__(self, folder: Path) -> None:
        self.store, self.number = dist.FileStore(str(folder / "store"), -1), -1
        self.mesh = waiting_mesh(Replica(toy.CPU, {}))
        self.membership = Membership(-1)

    def become(self, *ranks: int) -> None:
        """Changes the members. All processes call this; those not named leave."""
        self.membership.leave()
        self.number += 1
        self.membership = Membership(self.number)
        if dist.get_rank() in ranks:
            decision = Decision(self.number, tuple(map(member, ranks)))
            replica = Replica(toy.CPU, {})
            self.mesh.become(join_members(replica, decision, member(dist.get_rank()), self.store, self.membership))


def gradients(params: list[FusedParam], step: int) -> None:
    """The gradient sums of a step, the same on every replica."""
    generator = torch.Generator().manual_seed(step)
    for fused in params:
        fused.tensor.grad = torch.randn(fused.tensor.shape, generator=generator, dtype=fused.tensor.dtype)


def model_of(config: Config) -> list[FusedParam]:
    return list(fused_params(toy.toy_decoder(toy.single(config))[0]))


def whole_moments(optimizer: DividedAdamW, params: list[FusedParam]) -> list[tuple[Tensor, Tensor]]:
    """A tensor's moment on the rows that this process holds, NaN elsewhere."""
    found = []
    for fused in params:
        held = torch.full_like(fused.tensor, torch.nan, requires_grad=False)
        for part in optimizer.parts():
            first, values = part.get(fused.tensor, (0, {}))
            for value in list(values.values())[:1]:
                held[first : first + len(value)] = value
        found.append((held, fused.tensor.detach().clone()))
    return found


def comes_and_goes(config: Config, folder: Path) -> list[list[tuple[Tensor, Tensor]]]:
    """(first moments held, weights) after each step, for steps with these replicas; one of them rejoins with different weights."""
    rank, replicas, seen = dist.get_rank(), Replicas(folder), []
    memberships = ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 2), (0, 2, 1), (2, 1), (1,))
    replicas.become(*memberships[0])
    params = model_of(config)
    optimizer: Any = build_optimizer(params, config, replicas.mesh)
    assert isinstance(optimizer, DividedAdamW)
    for step, ranks in enumerate(memberships):
        if step and ranks != memberships[step - 1]:
            replicas.become(*ranks)
            if step == 4:
                if rank == 1:
                    params = model_of(config)
                    optimizer = build_optimizer(params, config, replace(replicas.mesh, members=()))
                    optimizer._mesh = replicas.mesh  # type: ignore[attr-defined]
                    optimizer.take_division(["0.0", "2.0"])
                    optimizer.updates = step
                if rank in ranks:
                    for fused in params:
                        dist.broadcast(fused.tensor.detach(), group=replicas.mesh.dp.group, group_src=0)
                    transfer_state(optimizer, replicas.mesh, 0, rank == 1)
                    optimizer.commit_transfer()
        if rank in ranks:
            gradients(params, step)
            optimizer.step(step, 1e-2)
            seen.append(whole_moments(optimizer, params))
        else:
            seen.append([])
    replicas.membership.leave()
    dist.barrier()
    return seen


def test_replicas_come_and_go_and_the_update_is_that_of_adamw(tmp_path: Path) -> None:
    config = config_of(4)
    by_rank = run_distributed(4, comes_and_goes, config, tmp_path)
    params = model_of(config)
    plain = plain_adamw(params, config, Mesh(toy.CPU))
    for step in range(7):
        gradients(params, step)
        plain.step(step, 1e-2)
        there = [seen[step] for seen in by_rank if seen[step]]
        for i, fused in enumerate(params):
            for held, weight in (each[i] for each in there):
                torch.testing.assert_close(weight, fused.tensor.detach(), rtol=1e-13, atol=1e-15)
                assert torch.equal(weight, there[0][i][1]), "all replicas have the same bits"
                moment = plain.moments[fused.tensor]["exp_avg"]
                torch.testing.assert_close(held.nan_to_num(0), moment.where(~held.isnan(), 0), rtol=1e-12, atol=1e-15)
            copies = sum((~held.isnan()).int() for held, _ in (each[i] for each in there))
            assert torch.equal(torch.as_tensor(copies), torch.full_like(fused.tensor, min(len(there), 2)).int())


class Trained(TrainedModel):
    build_optimizer = staticmethod(build_optimizer)  # type: ignore[assignment]


def counted(config: Config, folder: Path) -> tuple[Counter[tuple[str, int, str]], dict[str, float]]:
    """Collectives of a step between replicas, and relative errors of the two steps before it."""
    replicas, found = Replicas(folder), Counter[tuple[str, int, str]]()
    replicas.become(0, 1)
    trained = Trained(config, replicas.mesh)
    errors = relative_errors(trained, 2)
    usual = RecoverableGroup._start

    def start(self: RecoverableGroup, what: str, tensors: Any, opts: Any, begin: Any) -> Any:
        elements = sum(x.numel() for x in tensors) * (self.size() if what == "all-gather" else 1)
        found[what, elements, str(tensors[0].dtype).removeprefix("torch.") if tensors else ""] += 1
        return usual(self, what, tensors, opts, begin)

    RecoverableGroup._start = start  # type: ignore[method-assign]
    try:
        trained.step(2)
    finally:
        RecoverableGroup._start = usual  # type: ignore[method-assign]
        replicas.membership.leave()
    dist.barrier()
    return found, errors


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_step_with_recovery_sends_what_the_table_says_and_no_more(shard: str, tmp_path: Path) -> None:
    config = config_of(2, shard)
    expected = Counter((c.kind, c.elements, c.dtype) for c in step_collectives(config))
    if shard == "optimizer":
        expected["barrier", 0, ""] += 1
    for found, errors in run_distributed(2, counted, config, tmp_path):
        assert found == expected
        assert max(errors.values()) < 1e-11


def test_two_replicas_hold_each_piece_rarely_neighbors() -> None:
    division = Division(("a", "b", "c", "d"))
    assert [division.holders(i) for i in range(4)] == [("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")]
    assert division.pieces_of("a") == [0, 2] and division.pieces_of(None) == [] and Division().pieces_of("a") == []
    assert Division(("a",)).holders(0) == ("a",)
    assert division.sources(["d", "c"]) == [1, 0, 1, 0]
    assert [list(division.rows(torch.empty(5, 2), i)) for i in range(4)] == [[0], [1], [2], [3, 4]]


def test_losing_both_copies_is_an_error() -> None:
    with pytest.raises(TrainingError, match=r"^2 of 4 parts of the moments are lost.*--resume auto$"):
        Division(("a", "b", "c", "d")).sources(["b", "d", "e"])
