"""A GPU computes the same as a CPU: `pytest -m cuda`, or BOOST_TEST_DEVICE=cpu for a dry run that compares a CPU with itself."""

import os
from typing import Any

import pytest
import torch

from boost.measure.exactness import TrainedModel, relative_errors
from boost.models import kernels
from boost.parallel.mesh import Mesh
from tests import toy
from tests.matrices import policies

DEVICE = torch.device("cuda", 0) if os.environ.get("BOOST_TEST_DEVICE", "cuda") == "cuda" else toy.CPU

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"),
]

LIMITS = {"float64": 1e-9, "float32": 1e-4}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense"},
    "svd": {"family": "svd"},
    "cola": {"family": "cola"},
    "lax": {"family": "lax", "gate": "tensor", "rank": 16},
}
SIZES = {"dim": 64, "ffn_dim": 96, "heads": 4, "kv_heads": 2, "layers": 2}


CASES = [(dtype, isolate, "none") for dtype in LIMITS for isolate in (False, True)]
CASES += [("float32", False, "kernels"), ("float32", False, "blocks")]
"""(dtype, whether documents are isolated, train.compile). Compiled cases are slow, so they run with one policy."""


@pytest.mark.parametrize(("dtype", "isolate", "compile"), CASES)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_gpu_trains_what_a_cpu_does(family: str, isolate: bool, dtype: str, compile: str) -> None:
    """Every family under every policy; compiled code under one policy."""
    for policy in ("none", *policies(family, {}))[: 1 if compile == "blocks" else None]:
        train = {"recompute": policy, "seq_len": 32, "compile": compile}
        model = {**SIZES, **FAMILIES[family]}
        torch._dynamo.reset()
        config = toy.toy_config(dtype, model=model, train=train, data={"isolate_documents": isolate})
        eager = config.model_copy(update={"train": config.train.model_copy(update={"compile": "none"})})
        try:
            expected = TrainedModel(eager, Mesh(toy.CPU), 1).seen()
            found = TrainedModel(config, Mesh(DEVICE), 1)
        finally:
            kernels.use("eager")
        found.model.to(toy.CPU)
        errors = relative_errors(on_cpu(found), expected)
        assert max(errors["loss and norm"], errors["first gradients"]) <= LIMITS[dtype], (policy, errors)


def on_cpu(found: TrainedModel) -> TrainedModel:
    found.initial = {name: value.cpu() for name, value in found.initial.items()}
    found.gradients = [{name: value.cpu() for name, value in each.items()} for each in found.gradients]
    return found
