"""The arithmetic of the wire. That the runtime does what the table says is tested with the layouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost.config import load
from boost.config.traffic import BUCKET_BYTES, Collective, bucket_lengths
from boost.plan.collectives import micro_batch_collectives, step_collectives


def test_bytes_that_one_process_sends() -> None:
    assert Collective("forward", "all-reduce", 1000, "bfloat16", 4).sent_bytes == 3000
    assert Collective("forward", "all-gather", 1000, "float32", 4).sent_bytes == 3000
    assert Collective("forward", "reduce-scatter", 1000, "float32", 2).sent_bytes == 2000


@given(st.lists(st.integers(1, 2 * BUCKET_BYTES), max_size=40))
def test_buckets_hold_everything_in_order_and_are_no_smaller_than_needed(sizes: list[int]) -> None:
    lengths = bucket_lengths(sizes)
    assert sum(lengths) == len(sizes)
    buckets, rest = [], list(sizes)
    for length in lengths:
        buckets.append(rest[:length])
        rest = rest[length:]
    assert all(sum(bucket) >= BUCKET_BYTES for bucket in buckets[:-1])
    assert all(sum(bucket[:-1]) < BUCKET_BYTES for bucket in buckets)


@pytest.mark.parametrize("norm", ["online", "sync"])
def test_btp_sends_28_r_a_token_and_block(norm: str) -> None:
    """layouts.md: 28 r of all-reduced latents a token, forward and backward together, beside the statistics."""
    config = load("boost-7b", ["--parallel.norm", norm])
    model, tokens = config.model, 4096
    table = micro_batch_collectives(model, config.parallel, tokens, "bfloat16")
    assert model.rank is not None
    sent = sum(c.sent_bytes for c in table if c.kind == "all-reduce") / model.layers
    latents = 28 * model.rank * tokens * (4 - 1) / 4 * 2
    statistics = 2 * 2 * 0.75 * (2 * 3 * 4 * tokens if norm == "online" else 2 * 2 * 2 * tokens)
    assert sent == pytest.approx(latents + statistics)


def test_one_process_sends_nothing() -> None:
    assert step_collectives(load("boost-1b")) == []
