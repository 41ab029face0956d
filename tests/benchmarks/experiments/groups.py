"""Tiny groups for the experiments that time whole steps."""

from typing import Any

import pytest

from benchmarks.commands import LEAST_ROUNDS
from benchmarks.experiments import side_by_side
from benchmarks.experiments.results import Facts
from benchmarks.experiments.side_by_side import TimingGroup
from boost.config import Config
from tests import toy
from tests.distributed import run_distributed


def tiny(parallel: dict[str, Any], family: str = "cola", tp: int = 2, layers: int = 1, **train: Any) -> Config:
    """A model whose steps take milliseconds."""
    model = {"family": family, "vocab_size": 32, "layers": layers, "kv_heads": 8}
    train = {"micro_batch": 2, "global_batch": 2, **train}
    return toy.toy_config("float32", model=model, train=train, parallel={**parallel, "tp": tp}, run={"device": "cpu"})


def _measured(found: list[TimingGroup]) -> list[Facts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "open_mesh", lambda *_: toy.mesh(tp=2))
        patch.setattr(side_by_side, "close_mesh", lambda: None)
        return [side_by_side.measured(group, LEAST_ROUNDS, 1, None) for group in found]


def measured(found: list[TimingGroup]) -> list[Facts]:
    """Measures on two processes of the test pool; returns the main one's result."""
    facts: list[Facts] = run_distributed(2, _measured, found)[0]
    return facts
