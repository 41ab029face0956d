"""DLR together with everything that runs, saves or shards B in another way: the function of one process."""

from typing import Any

import pytest
import torch

from boost.config import Config
from tests import toy
from tests.distributed import run_distributed
from tests.trained import compare

MODEL = {"family": "cola", "rank": 6, "dlr_alpha": 0.7, "layers": 4, "kv_heads": 2}
COMPOSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pp": 2, "tp": 2, "layout": "btp", "schedule": "zero-bubble"}, {}),
    ({"tp": 2, "dp": 2, "layout": "btp-sp", "shard": "full", "shard_outer": True}, {"recompute": "low-rank-sharded"}),
    ({"tp": 2, "dp": 2, "layout": "vanilla", "shard": "optimizer"}, {"recompute": "low-rank"}),
    ({"tp": 4, "layout": "btp", "overlap": "halves"}, {"recompute": "low-rank+attention-output"}),
    ({"tp": 2, "cp": 2, "layout": "btp-cp"}, {"recompute": "full-block"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("parallel", "train"), COMPOSED, ids=str)
def test_it_composes(parallel: dict[str, Any], train: dict[str, Any]) -> None:
    config = toy.toy_config(model=MODEL, parallel=parallel, train={"micro_batch": 2, "global_batch": 8, **train})
    toy.skip_what_torch_cannot(config)
    for errors in run_distributed(4, compare, config):
        assert errors["initial"] == 0
        assert max(errors.values()) <= 1e-10, errors


def compiled_errors(config: Config) -> tuple[float, float]:
    """Relative errors of loss and gradients of compiled blocks against eager ones."""
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        decoder, _ = toy.toy_decoder(config)
        for block in decoder.blocks if compiles else ():
            block.compile(fullgraph=True, backend="aot_eager")
        loss = decoder(*toy.toy_tokens(config))
        loss.backward()
        found.append((loss.item(), {name: value.clone() for name, value in toy.gradients(decoder).items()}))
    (loss, gradients), (compiled_loss, compiled_gradients) = found
    return abs(compiled_loss / loss - 1), toy.worst_error(compiled_gradients, gradients)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["btp", "vanilla"])
def test_a_compiled_block_is_the_same(layout: str) -> None:
    config = toy.toy_config(model={**MODEL, "layers": 1}, parallel={"tp": 2, "layout": layout})
    for loss, gradients in run_distributed(2, compiled_errors, config):
        assert max(loss, gradients) <= 1e-12
