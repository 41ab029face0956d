"""Receive-first collectives: results match gloo's own, immediately and split; errors are reported."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boost.config.traffic import ALL_GATHER, ALL_REDUCE
from boost.parallel import collectives
from boost.parallel.mesh import Axis
from tests import toy
from tests.distributed import run_distributed

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def gloo(call: Callable[[Tensor, Axis], Tensor], x: Tensor, axis: Axis) -> Tensor:
    """Result of torch's functional collective."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "RECEIVES_FIRST", set())
        return call(x, axis)


def compared(size: int) -> list[tuple[str, str, bool]]:
    """Whether each collective matches gloo's result: bitwise if nothing is added, or only two terms."""
    axis, found = toy.mesh(tp=size).tp, []
    for dtype in DTYPES:
        x = (8 * torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(axis.rank))).to(dtype)
        for sent in (x, torch.stack((x, x)).transpose(0, 1), x[:, :1], x[:0]):
            for call in (
                collectives.all_reduce,
                collectives.all_gather,
                collectives.reduce_scatter,
                collectives.all_to_all,
            ):
                ours, theirs = call(sent, axis), gloo(call, sent, axis)
                # gloo rounds a bf16 sum after each term; we round once.
                tolerance = {"rtol": 2e-2, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
                close = torch.allclose(ours.double(), theirs.double(), **tolerance)
                exact = size == 2 or call in (collectives.all_gather, collectives.all_to_all)
                found.append((call.__name__, str(dtype), torch.equal(ours, theirs) if exact else close))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_match_gloos_own(size: int) -> None:
    for results in run_distributed(size, compared, size):
        assert [case for case in results if not case[2]] == []


def overlapped() -> list[bool]:
    """Several collectives in flight, waited for in a different order. Inputs may be freed immediately."""
    axis = toy.mesh(tp=2).tp
    terms = [torch.full((6, 2), float(number + axis.rank)) for number in range(4)]
    started = [collectives.start_plain(ALL_REDUCE, x.clone(), axis) for x in terms]
    gathered = collectives.start_plain(ALL_GATHER, terms[3].clone(), axis)
    found = [torch.equal(collectives.wait(started[i]), torch.full((6, 2), 2.0 * i + 1)) for i in (2, 0, 3, 1)]
    expected = torch.cat([torch.full((6, 2), 3.0), torch.full((6, 2), 4.0)])
    return [*found, torch.equal(collectives.wait(gathered), expected)]


def test_several_are_in_flight_and_end_in_any_order() -> None:
    assert run_distributed(2, overlapped) == [[True] * 5] * 2


def late() -> Any:
    """The second process does not arrive in time."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    axis = Axis(dist.get_rank(), 2, group)
    message = ""
    if axis.rank == 0:
        try:
            collectives.all_gather(torch.ones(2), axis)
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


@pytest.mark.slow
def test_the_timeout_is_that_of_the_group() -> None:
    from boost.train.failures import is_lost_connection

    message = run_distributed(2, late)[0]
    assert "500ms" in message, message
    assert is_lost_connection(RuntimeError(message))
