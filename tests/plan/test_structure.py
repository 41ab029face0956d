"""The tensors that the planner says a process stores, against the runtime's modules."""

import pytest
import torch

from boost.config import load
from boost.config.stages import whole
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.optim.factors import _units
from boost.plan.structure import held_tensors
from boost.plan.tracer import Tracer
from tests.plan.toys import LAYOUTS

HEADS = "--model.attn_bias=qkvo --model.qk_norm=true"
MODELS = {
    "default": "",
    "few key/value heads": "--model.kv_heads=2",
    "heads with biases and norms": HEADS,
    "tied": "--model.tied=true",
    "latent gates": f"--model.family=lax --model.gate=dense {HEADS}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_stored_tensors_are_those_of_the_modules(layout: str, model: str) -> None:
    """Shapes, placements and factors, in the same order."""
    if "lax" in MODELS[model] and "dense" in " ".join(LAYOUTS[layout]):
        pytest.skip("dense linears have no latents")
    config = load("boost-7b", [*LAYOUTS[layout], "--model.layers=3", *MODELS[model].split()])
    stage, tracer = whole(config.model), Tracer(config, gathered=False, on_gpu=False)
    with torch.device("meta"):
        params = list(fused_params(Decoder(config.model, tracer.layout, stage=stage)))
    held = held_tensors(config, [stage])
    planned = [((t.rows, *([] if t.vector else [t.columns])), t.placement) for t in held.tensors]
    assert planned == [(tuple(p.parameter.shape), p.placement) for p in params]
    units = _units(params, tracer.layout.mesh)  # type: ignore[attr-defined]
    assert [unit.shapes for unit in held.factors] == [tuple(factor.shape for factor in unit.factors) for unit in units]
