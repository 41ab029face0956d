"""A single block matches the block of the model: the same function under every layout, and all its collectives are counted."""

import pytest
import torch
from torch import Tensor

from benchmarks.experiments import blocks
from benchmarks.experiments.blocks import BTP, BTP_SP, MEGATRON, MEGATRON_SP, PUBLISHED, VANILLA, BlockRun, block_config
from boost.config import Config
from boost.errors import ConfigError
from boost.plan.step import block_work
from boost.plan.work import GEMM
from tests import toy
from tests.distributed import run_distributed

SHAPE = {"dim": 32, "ffn_dim": 64, "heads": 4, "kv_heads": 4, "layers": 2, "rank": 8}


def make_config(dtype: str = "float64") -> Config:
    return toy.toy_config(dtype, model=SHAPE)


def outputs(configs: list[Config]) -> list[tuple[Tensor, Tensor, bool]]:
    found = []
    for config in configs:
        run = BlockRun(config, toy.toy_mesh(config))
        y, dx, *_ = run.both()
        counted, table = ([each.on_the_wire for each in of] for of in (run.collectives(), blocks.table_of(config)))
        found.append((y.detach(), dx, counted == table))
    return found


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, list[tuple[Tensor, Tensor, bool]]], dict[bool, tuple[Tensor, Tensor, bool]]]:
    every = (MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP)
    parts = run_distributed(2, outputs, [block_config(make_config(), each, 2, 2) for each in every])
    alone = {
        dense: outputs([block_config(make_config(), each, 1, 2)])[0] for dense, each in ((True, MEGATRON), (False, BTP))
    }
    return {each.name: [part[i] for part in parts] for i, each in enumerate(every)}, alone


@pytest.mark.parametrize("contender", [MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP], ids=lambda c: c.name)
def test_every_layout_computes_the_same_block(contender: blocks.BlockVariant, results: object) -> None:
    found, alone = results  # type: ignore[misc]
    dim = {"btp": 1, "btp-sp": 0, "megatron-sp": 0}.get(contender.name)
    for which in (0, 1):  # y, dx
        parts = [part[which] for part in found[contender.name]]
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        expected = alone[contender.dense][which]
        assert (whole - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert all(part[2] for part in found[contender.name]), "collectives are not those of the table"


@pytest.mark.parametrize("contender", [MEGATRON, VANILLA, BTP, BTP_SP], ids=lambda c: c.name)
def test_recorded_products_are_those_that_the_performance_model_counts(contender: blocks.BlockVariant) -> None:
    from benchmarks.experiments.gemms import recorded

    config = block_config(make_config("float32"), contender, 2, 2)
    products = recorded(config)
    work = block_work(config, 0, "none", on_gpu=False)
    places = {"attention": ("qkv", "o"), "MLP": ("gate_up", "down")}
    for half, theirs in places.items():
        counted = [p for p in products if p.half == half and p.phase == "forward"]
        wanted = {w: n for w, n in work.items() if w.kernel == GEMM and w.phase == "forward" and w.place in theirs}
        assert sum(p.flops for p in counted) == sum(n * w.flops for w, n in wanted.items()) > 0
        assert len(counted) == sum(wanted.values())
        back = [p for p in products if p.half == half and p.phase == "backward"]
        assert sum(p.flops for p in back) == 2 * sum(p.flops for p in counted)
        assert {p.place for p in counted} == set(theirs)


def test_an_operand_lies_as_it_was_recorded() -> None:
    made = blocks.Operand((4, 3), (1, 12)).filled(torch.float32, toy.CPU)
    assert (made.shape, made.stride()) == ((4, 3), (1, 12))


def test_a_dense_model_has_nothing_to_compare() -> None:
    config = toy.toy_config(model={"family": "dense"})
    with pytest.raises(ConfigError, match="no bottleneck"):
        block_config(config, BTP, 2, 1)
