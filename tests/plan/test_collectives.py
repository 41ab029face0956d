"""Communication volumes of the collective table. Layout tests check that the runtime matches the table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments.computed import step_bytes
from boost.config import load
from boost.config.traffic import BUCKET_BYTES, Collective, bucket_bytes, bucket_lengths
from boost.plan.collectives import micro_batch_collectives


def test_bytes_that_one_process_sends() -> None:
    assert Collective("forward", "all-reduce", (10, 100), "bfloat16", 4).sent_bytes == 3000
    assert Collective("forward", "all-gather", (10, 100), "float32", 4).sent_bytes == 3000
    assert Collective("backward", "all-to-all", (10, 100), "float32", 4).sent_bytes == 3000
    assert Collective("forward", "reduce-scatter", (10, 100), "float32", 2).sent_bytes == 2000


@given(st.lists(st.integers(1, 2 * BUCKET_BYTES), max_size=40))
def test_buckets_hold_everything_in_order_and_are_no_smaller_than_needed(sizes: list[int]) -> None:
    lengths = bucket_lengths(sizes)
    assert sum(lengths) == len(sizes)
    buckets, rest = [], list(sizes)
    for length in lengths:
        buckets.append(rest[:length])
        rest = rest[length:]
    full = bucket_bytes(sum(sizes))
    assert all(sum(bucket) >= full for bucket in buckets[:-1])
    assert all(sum(bucket[:-1]) < full for bucket in buckets)


def test_a_small_model_has_several_buckets_too() -> None:
    assert bucket_bytes(10**12) == BUCKET_BYTES and bucket_bytes(1000) == 2**20
    assert len(bucket_lengths([2**20] * 32)) == 8


def block_bytes(*overrides: str) -> dict[str, float]:
    """Bytes sent by the blocks of boost-7b at TP 4, by phase, in units of one number per token and block, times (p-1)/p."""
    config = load("boost-7b", overrides)
    tokens = 4096
    table = micro_batch_collectives(config.model, config.parallel, tokens, "bfloat16")
    unit = 2 * tokens * 3 / 4 * config.model.layers
    return {
        phase: sum(c.sent_bytes for c in table if c.layer is not None and c.phase == phase) / unit
        for phase in ("forward", "backward")
    }


D, F, R = 4096, 11008, 1024


@pytest.mark.parametrize("grouping", ["true", "false"])
def test_btp_sp_sends_exactly_half_of_btps_latents(grouping: str) -> None:
    """layouts.md: 14 r against 28 r. btp also sends the RMSNorm statistic, which btp-sp does not need."""
    half = block_bytes("--parallel.layout", "btp-sp", "--parallel.grouping", grouping)
    btp = block_bytes("--parallel.norm", "online", "--parallel.grouping", grouping)
    sums = 2 if grouping == "true" else 5  # of two groups, or of q, k, v, gate and up
    statistics = 2 * sums * 3 * 4  # all-reduced with the latents: three bf16 numbers for each of four processes
    assert half == {"forward": 7 * R, "backward": 7 * R}
    assert btp == {"forward": 14 * R + statistics, "backward": 14 * R}
    sync = block_bytes("--parallel.norm", "sync", "--parallel.grouping", grouping)
    assert sum(sync.values()) == 28 * R + 16


@pytest.mark.parametrize("layout", ["megatron", "megatron-sp"])
def test_megatron_sends_8_d_a_token_and_block(layout: str) -> None:
    sent = block_bytes("--model.family", "dense", "--parallel.layout", layout)
    assert sent == {"forward": 4 * D, "backward": 4 * D}


def test_both_forms_of_vanilla_send_16_d_and_6_f_a_token_and_block() -> None:
    strong = block_bytes("--parallel.layout", "vanilla")
    published = block_bytes("--parallel.layout", "vanilla", "--parallel.vanilla", "published")
    assert strong == {"forward": 8 * D + 3 * F, "backward": 8 * D + 3 * F}
    assert published == {"forward": 10 * D + 4 * F, "backward": 6 * D + 2 * F}


def test_without_grouping_every_linear_has_its_own_collective() -> None:
    def kinds(layout: str, family: str, grouping: str) -> list[str]:
        overrides = ["--model.family", family, "--parallel.layout", layout, "--parallel.grouping", grouping]
        config = load("boost-7b", overrides)
        table = micro_batch_collectives(config.model, config.parallel, 16, "bfloat16")
        return [f"{c.phase} {c.kind}" for c in table if c.layer == 0]

    for layout, family, merged, apart in (
        ("btp", "cola", 8, 14),
        ("btp-sp", "cola", 8, 14),
        ("vanilla", "cola", 12, 21),
        ("megatron", "dense", 4, 7),
        ("megatron-sp", "dense", 8, 14),
    ):
        assert len(kinds(layout, family, "true")) == merged, layout
        assert len(kinds(layout, family, "false")) == apart, layout


@pytest.mark.parametrize(("tp", "kv_heads", "numbers", "bound"), [(4, 32, 8, 0.60), (8, 32, 4, 0.33), (4, 8, 5, 0.40)])
def test_btp_cp_sends_a_fraction_of_btp_sp(tp: int, kv_heads: int, numbers: float, bound: float) -> None:
    """layouts.md: 8 r, 4 r and 5 r per token and block against 14 r, plus bf16 gradient sums of weights that TP replicates."""
    words = ["--parallel.tp", str(tp), "--model.kv_heads", str(kv_heads)]
    config = load("boost-7b", ["--parallel.layout", "btp-cp", *words])
    table = [c for c in micro_batch_collectives(config.model, config.parallel, 4096, "bfloat16") if c.layer == 0]
    assert [c.phase for c in table] == ["forward"] * 2 + ["backward"] * 2
    assert sum(c.sent_bytes for c in table) == 2 * numbers * R * 4096 * (tp - 1) / tp
    words += ["--train.reduce_dtype", "bfloat16"]
    assert step_bytes("btp-cp", words) <= bound * step_bytes("btp-sp", words)
