"""Digests of weights and their comparison. Whole runs are in tests/train/test_replica_check.py."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boost.models.fused import fused_params
from boost.parallel.mesh import Axis
from boost.train import replicas
from boost.train.replicas import Mismatch, check_replicas, compare, digest
from tests import toy
from tests.distributed import run_distributed


def number(*tensors: Tensor) -> int:
    return int(digest(tensors, toy.CPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_every_bit_counts(dtype: torch.dtype, data: Any) -> None:
    x = torch.randn(37, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = number(x)
    toy.flip(x, data.draw(st.integers(0, x.numel() - 1)), data.draw(st.integers(0, x.element_size() * 8 - 1)))
    assert number(x) != before


def test_the_digest_depends_on_position_across_chunks_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", 4)
    x = torch.arange(10.0)
    for a, b in ((0, 1), (0, 4), (3, 8), (1, 9)):  # one chunk, adjacent chunks, same position of two, other
        swapped = x.clone()
        swapped[[a, b]] = x[[b, a]]
        assert number(swapped) != number(x)
    assert number(x, -x) != number(-x, x)
    assert number(x.view(2, 5).T) == number(x.view(2, 5).T.contiguous())
    assert number(torch.tensor([0.0])) != number(torch.tensor([-0.0]))


ALL = 7
"""The reference digest."""


@pytest.mark.parametrize(
    ("sizes", "column", "wrong", "expected"),
    [
        ((1, 2, 1), 1, {1: 5}, Mismatch((0, 1), 2, False)),
        ((1, 3, 1), 1, {1: 5}, Mismatch((1,), 3, True)),
        ((1, 4, 1), 1, {1: 5, 2: 6}, Mismatch((0, 1, 2, 3), 4, False)),
        ((1, 5, 1), 1, {1: 5, 2: 6}, Mismatch((1, 2), 5, True)),
        ((1, 2, 2), 0, {2: 5}, Mismatch((2,), 4, True)),
        ((2, 3, 2), 1, {11: 5}, Mismatch((11,), 3, True)),  # copies of rank 11 over dp: 7 and 9
        ((2, 2, 2), 1, {5: 5}, Mismatch((5, 7), 2, False)),
        ((2, 2, 2), 2, {6: 5}, Mismatch((6, 7), 2, False)),
        ((2, 2, 2), 0, {}, None),
    ],
)
def test_the_minority_is_named(
    sizes: tuple[int, int, int], column: int, wrong: dict[int, int], expected: Mismatch | None
) -> None:
    rows = [[ALL] * 3 for _ in range(torch.Size(sizes).numel())]
    for rank, value in wrong.items():
        rows[rank][column] = value
    assert compare(rows, sizes) == ([] if expected is None else [expected])


def unseen_flips(config: Any) -> list[str]:
    """Names of the fused parameters in which a flipped bit on the last process goes undetected; each process flips one bit at a
    time."""
    model, mesh = toy.toy_model(config)
    params = list(fused_params(model))
    assert check_replicas(params, mesh).mismatches == ()
    unseen = []
    for fused in params:
        last = mesh.rank == mesh.size - 1
        if last and fused.tensor.numel():
            toy.flip(fused.tensor, 0, 3)
        report = check_replicas(params, mesh)
        assert all(mesh.size - 1 in each.processes for each in report.mismatches)
        if not report.mismatches:
            unseen.append(fused.slices[0].parameter.name)
        if last and fused.tensor.numel():
            toy.flip(fused.tensor, 0, 3)
    return unseen


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["btp", "btp-sp", "vanilla"])
def test_a_flip_in_any_weight_of_two_replicas_is_found(layout: str) -> None:
    config = toy.toy_config("float32", model={"layers": 1}, parallel={"tp": 2, "dp": 2, "layout": layout})
    assert run_distributed(4, unseen_flips, config) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_rows_owned_by_one_process_have_no_copy(shard: str) -> None:
    """Norms are not sharded; factors that are replicated over TP have copies there."""
    parallel = {"tp": 2, "dp": 2, "layout": "btp-sp", "shard": shard}
    config = toy.toy_config("float32", model={"layers": 1}, parallel=parallel)
    unseen = run_distributed(4, unseen_flips, config)[0]
    inner = {"layers.0.attn.q.B", "layers.0.attn.o.A"}
    outer = {"layers.0.attn.q.A", "layers.0.attn.o.B", "layers.0.attn_norm"}
    assert inner <= set(unseen) and not outer & set(unseen)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found_and_its_weight_named(value: float) -> None:
    model, mesh = toy.toy_model(toy.toy_config("float32"))
    params = list(fused_params(model))
    assert not check_replicas(params, mesh).not_finite
    last = params[-1]
    last.tensor.data.view(-1)[-1] = value
    assert check_replicas(params, mesh).not_finite == ((0, last.slices[0].parameter.name),)


def test_only_identically_updated_copies_are_compared() -> None:
    """Each TP rank may sum the complete gradients of a replicated weight in another order, so it is compared over dp only."""
    model, mesh = toy.toy_model(toy.toy_config("float32"))
    fused = next(p for p in fused_params(model) if p.parameter.ndim == 1)
    several = dataclasses.replace(mesh, axes={"dp": Axis(0, 3), "tp": Axis(0, 2)})
    whole = dataclasses.replace(fused.placement, dim=None, partial=False)
    assert replicas._copies(dataclasses.replace(fused, placement=whole), several) == "dp"
    partial = dataclasses.replace(fused, placement=dataclasses.replace(whole, partial=True))
    assert replicas._copies(partial, several) == "replicas"
