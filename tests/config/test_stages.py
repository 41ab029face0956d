"""Pipeline stages: balanced by cost, every block once, each on its process."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost.config import load, presets
from boost.config.architecture import flops_per_token
from boost.config.stages import Costs, balanced, costs, stages, stages_of


def worst(parts: Costs, lengths: tuple[int, ...]) -> float:
    """Cost of the most expensive stage of a split."""
    blocks = iter(parts.blocks)
    each = [sum(itertools.islice(blocks, length)) for length in lengths]
    each[0] += parts.embedding
    each[-1] += parts.head
    return max(each)


COSTS = st.builds(
    Costs,
    st.integers(0, 30).map(float),
    st.lists(st.integers(1, 20).map(float), min_size=1, max_size=7).map(tuple),
    st.integers(0, 60).map(float),
)


@given(COSTS, st.integers(1, 4))
def test_no_split_has_a_cheaper_worst_stage(parts: Costs, count: int) -> None:
    layers = len(parts.blocks)
    count = min(count, layers)
    lengths = balanced(parts, count)
    assert (len(lengths), sum(lengths)) == (count, layers) and min(lengths) >= 1
    every = (s for s in itertools.product(range(1, layers + 1), repeat=count) if sum(s) == layers)
    assert worst(parts, lengths) == min(worst(parts, split) for split in every)


def test_of_equally_good_splits_the_evenest_is_taken() -> None:
    """The head alone is the most expensive stage; the rest is balanced over the others."""
    assert balanced(Costs(0.0, (1.0,) * 10, 20.0), 4) == (3, 3, 3, 1)


def test_the_head_counts() -> None:
    """A head that costs as much as twelve blocks, as in cola-60m: the last stage has one block."""
    assert stages(load("cola-60m", ["--parallel.pp", "2", "--parallel.tp", "1"]))[-1].layers == 1
    wide = load("boost-30b")
    assert [stage.layers for stage in stages(wide)] == [9, 9, 9, 9]


D, F, R, S = 4096, 11008, 1024, 4096
LINEAR, OUT_OF_LATENTS, ATTENTION = R * (11 * D + 3 * F), R * (3 * D + 2 * F), D * S
"""Multiply-adds a token of a block of boost-7b: all linears, B of q, k, v, gate and up, attention over half of the scores."""


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("none", 0),
        ("low-rank", 2 * OUT_OF_LATENTS + 2 * ATTENTION),
        ("low-rank+attention-output", 2 * OUT_OF_LATENTS),
        ("full-block", 2 * LINEAR + 2 * ATTENTION),
    ],
)
def test_a_block_costs_what_it_computes_twice_too(recompute: str, again: int) -> None:
    config = load("boost-7b", ["--train.recompute", recompute])
    parts = costs(config.model, config.train)
    tokens = config.train.micro_batch * config.train.seq_len
    assert parts.blocks == (tokens * (6 * LINEAR + 6 * ATTENTION + again),) * 32
    if recompute == "none":
        assert sum(parts.blocks) + parts.head == tokens * flops_per_token(config.model, config.train.seq_len)


def test_half_the_blocks_recompute() -> None:
    config = load("boost-7b", ["--train.recompute", "full-block", "--train.recompute_every", "2"])
    both = costs(config.model, config.train).blocks
    assert both[0] == pytest.approx(4 / 3 * both[1])


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("virtual", [1, 2])
def test_every_block_is_on_one_process(preset: str, virtual: int) -> None:
    schedule = "interleaved-1f1b" if virtual > 1 else "1f1b"
    words = f"--parallel.pp 2 --parallel.schedule {schedule} --parallel.virtual {virtual} --train.micro_batch 1"
    config = load(preset, words.split())
    held = [stages_of(config, rank) for rank in range(2)]
    numbers = sorted(n for process in held for stage in process for n in stage.numbers)
    assert numbers == list(range(config.model.layers))
    assert [stage.index % 2 for process in held for stage in process] == [0] * virtual + [1] * virtual
    assert held[0][0].has_embedding and held[1][-1].has_head
    assert sum(stage.has_embedding + stage.has_head for process in held for stage in process) == 2
