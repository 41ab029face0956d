"""Predicted memory matches live memory to the byte, on fake and on real tensors."""

from typing import Any

import pytest
import torch

from boost.config import Config
from boost.config.schema import OptimConfig, RecomputeName
from boost.measure.memory import MemoryTracker
from boost.plan.categories import GRADIENTS, OPTIMIZER, SAVED, WEIGHTS
from boost.plan.memory import memory
from boost.plan.trace import pass_of_block
from tests import toy
from tests.distributed import run_distributed
from tests.fake_memory import MeasuredMemory, measure, measure_step
from tests.matrices import LOCAL, Row
from tests.matrices import MEMORY_CELLS as CELLS
from tests.matrices import MEMORY_CROSSING as CROSSING
from tests.matrices import memory_config as config_of


def kept(config: Config) -> dict[str, int]:
    return {category: size for category, size in memory(config).by_category.items() if category in SAVED and size}


def wrong(cells: list[tuple[str, Row, str, Row]], **model: Any) -> list[Any]:
    """Cells whose live memory differs from the prediction."""
    found = []
    for family, parallel, policy, gates in cells:
        config = config_of(family, parallel, policy, "bfloat16", kv_heads=2, **model, **gates)
        if (actual := measure(config).activations) != kept(config):
            found.append((family, *parallel.values(), policy, *gates.values(), actual, kept(config)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_cell_keeps_what_is_predicted(every: int) -> None:
    """In bf16 with fp32 weights, and fewer key/value heads than processes; on every commit, each layout and each policy, nightly
    all cells."""
    assert wrong(CELLS[::every]) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.nightly)])
def test_latents_that_cross_are_kept_as_predicted(every: int) -> None:
    """The second of two blocks uses the latents of the first."""
    assert wrong(CROSSING[::every], layers=2) == []


def test_every_nth_block_recomputes() -> None:
    config = config_of("cola", {"layout": "btp"}, "low-rank", "float32", layers=5)
    config = config.changed(train={"recompute_every": 2})
    assert [layer for layer in range(5) if pass_of_block(config, layer).by_category["wide activations"]] == [1, 3]
    assert measure(config).activations == kept(config)


def on_real_tensors(config: Config) -> tuple[MeasuredMemory, int]:
    decoder, mesh = toy.toy_decoder(config)
    decoder(*toy.toy_tokens(config, 0)).backward()
    return measure_step(decoder, config, toy.toy_tokens(config, 1), mesh), sum(
        p.grad.nbytes for p in decoder.parameters() if p.grad is not None
    )


@pytest.mark.parametrize("policy", ["none", *LOCAL, "low-rank-sharded", "full-block"])
@pytest.mark.slow
def test_fake_tensors_keep_what_real_ones_do(policy: RecomputeName) -> None:
    config = config_of("cola", {"layout": "btp-sp"}, policy, "bfloat16")
    config = config.changed(train={"global_batch": 4}, parallel={"tp": 2})
    fake = measure(config)
    for real, gradients in run_distributed(2, on_real_tensors, config):
        assert real.activations == fake.activations == kept(config)
        states = memory(config).states
        assert states.keys() == {WEIGHTS, GRADIENTS, OPTIMIZER}
        assert {c: real.kept[c] for c in states} == {c: fake.kept[c] for c in states} == states
        assert gradients == memory(config).states["gradients"]
        assert sum(real.peak.values()) == pytest.approx(sum(fake.peak.values()), rel=0.01)
        assert sum(real.peak.values()) > sum(real.kept.values()), "the peak is in the backward pass"


@pytest.mark.parametrize("name", ["muon", "loro"])
def test_what_other_optimizers_hold(name: str) -> None:
    """Linears with the same input but different ranks, which LORO updates separately."""
    config = config_of("svd", {"layout": "btp"}, "none", "bfloat16", ranks={"attn.q": 8})
    config = config.model_copy(update={"optim": OptimConfig.model_validate({"name": name})})
    assert measure(config).kept["optimizer"] == memory(config).states["optimizer"]


def test_a_tracker_forgets_what_dies() -> None:
    with MemoryTracker() as tracker:
        x = torch.ones(100)
        y = x + x
        assert sum(tracker.live.values()) == 800
        del x
        assert sum(tracker.live.values()) == 400
        z = y.view(10, 10)
        del y
        assert sum(tracker.live.values()) == 400, "a view keeps its storage alive"
        del z
        assert sum(tracker.live.values()) == 0
        assert sum(tracker.peak.values()) == 800
