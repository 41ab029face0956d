"""Every layout computes the same function: loss, every gradient, three optimizer steps and generation match one process, and
collectives match the table."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.config import Config
from boost.measure.counting import CollectiveCounter
from boost.models.fused import fused_params
from boost.parallel.gradients import GradientReducer
from boost.plan.collectives import micro_batch_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import (
    DENSE,
    GROUPING,
    LAYOUTS,
    LOW_RANK,
    LOW_RANK_LAYOUTS,
    ONE_EACH,
    Row,
    chosen,
    config_of,
    each_value,
    first,
    ids,
    pairwise,
    suits,
)
from tests.trained import Trained, compare_with_table, matches_table, require_one_process

HEADS = ((2, 8), (2, 1), (4, 8), (4, 4), (4, 2), (4, 1))
"""(TP size, key/value heads) with 8 heads: as many key/value heads as heads, as many as processes, fewer, and one."""


CELLS = pairwise(
    {"layout": LAYOUTS, "heads": HEADS, "family": ("svd", "cola", "dense"), "grouping": GROUPING},
    lambda row: suits(row["family"], row["layout"]),
)
CROSSING = pairwise(
    {
        "layout": LOW_RANK_LAYOUTS,
        "gate": ("identity", "tensor", "dense"),
        "over": ("svd", "cola"),
        "grouping": GROUPING,
        "heads": ((2, 2), (4, 1)),
    }
)
"""Latents passed from block to block. vanilla shards them, and also the four rows of a tensor gate of 16 = 4 x 4."""


def require_cell(row: Row, **model: Any) -> None:
    tp, kv_heads = row["heads"]
    parallel = {**row["layout"], "grouping": row["grouping"]}
    require_one_process(config_of({"kv_heads": kv_heads, **model}, parallel, tp, "float64", train={"global_batch": 2}))


@pytest.mark.parametrize("row", each_value(CELLS, ids([(row,) for row in CELLS])))
@pytest.mark.slow
def test_a_layout_is_the_single_process_function(row: Row) -> None:
    require_cell(row, family=row["family"], layers=2 if row["heads"][0] == 2 else 1)


@pytest.mark.parametrize("row", first(4, CROSSING, ids([(row,) for row in CROSSING])))
@pytest.mark.slow
def test_latents_cross_blocks_as_on_one_process(row: Row) -> None:
    require_cell(row, family="lax", over=row["over"], gate=row["gate"], rank=16, layers=3)


RANKS = [
    ({"family": "cola", "ranks": {"attn": 10, "mlp": 12}, "mlp_silu": False}, {"layout": "btp"}),
    ({"family": "cola", "ranks": {"mlp.gate": 4, "layers.0.mlp.gate": 12}}, {"layout": "vanilla"}),
    ({"family": "lax", "gate": "dense", "ranks": {"attn": 12, "attn.v": 6}}, {"layout": "vanilla"}),
    (
        {"family": "svd", "ranks": {"attn": 10, "layers.1.attn.q": 4}, "factor_init": "spectral"},
        {"layout": "btp-sp"},
    ),
    ({"family": "lax", "gate": "tensor", "ranks": {"attn": 9, "attn.v": 6}}, {"layout": "btp-sp"}),
    ({"family": "lax", "ranks": {"attn.k": 6}}, {"layout": "btp", "grouping": False}),
    *(({"family": "cola", "kv_heads": 4, "ranks": {"kv": 4}}, layout) for layout in LOW_RANK_LAYOUTS),
]
"""Linears of different ranks in one group; a smaller rank for keys and values, with grouped heads."""


@pytest.mark.parametrize(("model", "parallel"), first(3, RANKS, ids(RANKS)))
@pytest.mark.slow
def test_linears_of_several_ranks(model: Row, parallel: Row) -> None:
    require_one_process(config_of(model, parallel, 2, "float64", train={"global_batch": 2}))


OF_EACH_STREAM = chosen(
    ["cola-4-btp-online-True", "cola-4-btp-sp-True", "dense-4-megatron-True"], ONE_EACH, ids(ONE_EACH)
)
"""btp, btp-sp and megatron: one for each kind of residual stream."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel"), OF_EACH_STREAM)
def test_a_layout_in_float32(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    for errors in run_distributed(
        2, compare_with_table, config_of(model, parallel, 2, "float32", train={"global_batch": 2})
    ):
        assert errors["initial"] == errors["table"] == 0
        assert max(errors["loss and norm"], errors["first gradients"]) <= 1e-5, errors


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    """Any small model under any layout that supports it, with any recomputation policy."""
    tp = draw(st.sampled_from((2, 4)))
    family = draw(st.sampled_from(("svd", "cola", "lax", "dense")))
    parallel = draw(st.sampled_from(DENSE if family == "dense" else LOW_RANK))
    multiple = {"vanilla": tp}.get(parallel["layout"], 1)
    heads = tp * draw(st.integers(1, 3))
    kv_heads = draw(
        st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0 and (k % tp == 0 or tp % k == 0)])
    )
    model: dict[str, Any] = {
        "family": family,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": heads * 2 * draw(st.integers(1, 4)),
        "ffn_dim": tp * draw(st.integers(4, 12)),
        "vocab_size": tp * draw(st.integers(4, 12)),
        "layers": draw(st.integers(1, 2)),
        "mlp_silu": draw(st.booleans()),
    }
    if family != "dense":
        # A LayerNorm over two latents is a sign function: its gradient is pure rounding error.
        least = -(-4 // multiple) if family == "lax" else 1
        model["rank"] = multiple * draw(st.integers(least, min(model["dim"], model["ffn_dim"]) // multiple))
    if family == "lax":
        model["over"] = draw(st.sampled_from(("svd", "cola")))
        gates = ("identity", "dense") if parallel["layout"] == "vanilla" else ("identity", "tensor", "dense")
        model["gate"] = draw(st.sampled_from(gates))
    policies = (
        ["none", "full-block"] if family == "dense" else ["none", "low-rank", "low-rank+attention-output", "full-block"]
    )
    train = {
        "seq_len": 4 * draw(st.integers(1, 4)),
        "micro_batch": draw(st.integers(1, 2)),
        "global_batch": 2,
        "recompute": draw(st.sampled_from(policies + ["low-rank-sharded"] * (parallel["layout"] == "btp-sp"))),
        "recompute_every": draw(st.integers(1, model["layers"])),
    }
    halves = train["micro_batch"] == 2 and train["seq_len"] % tp == 0
    parallel = {**parallel, "overlap": draw(st.sampled_from(("none", "halves") if halves else ("none",)))}
    return config_of(model, parallel, tp, "float64", train=train)


@given(configurations())
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@pytest.mark.slow
def test_any_model_under_any_layout(config: Config) -> None:
    require_one_process(config)


def gradient_error_in_bf16(config: Config) -> float:
    """Mean relative error of the gradients in bf16 against fp32 on one process. Collectives are those of the table."""
    assert matches_table(config, Trained(config, 0).collectives())
    exact = toy.single(config).model_copy(
        update={"train": config.train.model_copy(update={"compute_dtype": "float32"})}
    )
    reference, _ = toy.toy_decoder(exact)
    decoder, mesh = toy.toy_decoder(config)
    for model in (reference, decoder):
        (model(*toy.toy_tokens(config, batch=16)) / 256).backward()
    GradientReducer(list(fused_params(decoder)), mesh).finish()
    expected = toy.local_parts(decoder, toy.gradients(reference))
    errors = [((a - expected[k]).norm() / expected[k].norm()).item() for k, a in toy.gradients(decoder).items()]
    return sum(errors) / len(errors)


WIDER = {"dim": 128, "ffn_dim": 352}


@pytest.mark.slow
def test_online_norm_is_as_exact_as_sync_in_bf16() -> None:
    error = {}
    for norm in ("online", "sync"):
        config = config_of({"family": "cola", **WIDER, "rank": 32}, {"norm": norm}, 2, "bfloat16")
        error[norm] = sum(run_distributed(2, gradient_error_in_bf16, config)) / 2
    assert 0 < error["online"] <= 1.05 * error["sync"], error


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel"), ONE_EACH, ids=ids(ONE_EACH))
def test_a_layout_in_bfloat16_is_about_as_exact_as_one_process(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    config = config_of({**model, **WIDER}, parallel, 2, "bfloat16")
    alone = gradient_error_in_bf16(toy.single(config))
    for error in run_distributed(2, gradient_error_in_bf16, config):
        assert 0 < error <= 1.25 * alone


def test_btp_sends_what_the_paper_says() -> None:
    """7B at TP 4, batch 4, sequence 4096, bf16: 224 MB of all-reduce payload per block and forward pass (the paper's table)."""
    from boost.config import load

    config = load("boost-7b")
    table = micro_batch_collectives(config.model, config.parallel, 4 * 4096, "bfloat16", training=False)
    in_blocks = [c for c in table if c.kind == "all-reduce"]
    statistics = 2 * config.model.layers * 3 * 4 * 4 * 4096
    latents = sum(c.elements for c in in_blocks) - statistics
    assert len(in_blocks) == 4 * config.model.layers
    assert latents * 2 / config.model.layers / 2**20 == 224
    assert statistics < 0.004 * latents


def test_one_process_issues_no_collective_and_copies_no_weight() -> None:
    config = toy.toy_config("float32", model={"family": "cola"})
    decoder, mesh = toy.toy_decoder(config)
    assert decoder.layout.spec.name == "single"
    with CollectiveCounter() as counter:
        decoder(*toy.toy_tokens(config)).backward()
        GradientReducer(list(fused_params(decoder)), mesh).finish()
    assert counter.collectives == []
    group = decoder.blocks[0].qkv
    stored = [group.B_q, group.B_k, group.B_v]
    assert [used.data_ptr() for used in group.weights()] == [weight.data_ptr() for weight in stored]
