"""What a step is predicted to keep is what is seen to be alive, to the byte; on fake tensors as on real ones."""

from typing import Any

import pytest
import torch

from boost.bench.memory import Measured, MemoryTracker, measure, measure_step
from boost.config import Config
from boost.config.schema import RecomputeName
from boost.plan.memory import KEPT, OPTIMIZER, STATES, WEIGHTS, memory
from tests import toy
from tests.distributed import run_distributed
from tests.parallel.test_layouts import DENSE, LOW_RANK
from tests.parallel.test_recompute import LOCAL, policies

CELLS = [
    (family, parallel, policy)
    for family, variants in (("cola", [{}, *LOW_RANK]), ("svd", [{}, *LOW_RANK]), ("dense", [{}, *DENSE]))
    for parallel in variants
    for policy in (*policies(family, parallel), "none")
]


def config_of(family: str, parallel: dict[str, Any], policy: str, dtype: str, **model: Any) -> Config:
    """Sizes of which no two are alike, so that one tensor in the place of another is seen."""
    sizes = {"dim": 96, "ffn_dim": 160, "heads": 8, "layers": 1, "vocab_size": 56, **model}
    if family != "dense":
        sizes["rank"] = 20
    parallel = {**parallel, "tp": 4} if parallel else {}
    train = {"seq_len": 12, "micro_batch": 2, "global_batch": 2, "recompute": policy}
    return toy.toy_config(dtype, model={"family": family, **sizes}, parallel=parallel, train=train)


def kept(config: Config) -> dict[str, int]:
    return {category: size for category, size in memory(config).by_category.items() if category in KEPT and size}


def seen(measured: Measured) -> dict[str, int]:
    return {category: size for category, size in measured.kept.items() if category in KEPT}


def wrong(cells: list[tuple[str, dict[str, Any], str]], dtype: str, kv_heads: int) -> list[Any]:
    """The cells of which something else is alive than is predicted."""
    found = []
    for family, parallel, policy in cells:
        config = config_of(family, parallel, policy, dtype, kv_heads=kv_heads)
        actual = seen(measure(config))
        if actual != kept(config):
            found.append((family, *parallel.values(), policy, actual, kept(config)))
    return found


def test_every_cell_keeps_what_is_predicted() -> None:
    """In bf16 with fp32 weights, and fewer key/value heads than processes."""
    assert wrong(CELLS, "bfloat16", 2) == []


def test_other_numbers_and_heads_keep_what_is_predicted() -> None:
    assert wrong([cell for cell in CELLS if cell[0] != "svd" and cell[2] == "none"], "float32", 8) == []


def test_latents_are_kept_once() -> None:
    """Under btp: the payload of a collective and nothing beside it, wide activations not at all."""
    config = config_of("cola", {"layout": "btp"}, "low-rank", "float32")
    held, tokens = memory(config).by_category, 24
    assert held["wide activations"] == held["weight copies"] == 0
    assert held["latents"] == 4 * tokens * (7 * 20 + 2)
    assert held["residual stream"] == 4 * tokens * 2 * 96 // 4
