"""Optimizers of whole factors: under every cut, sharing and pipeline the step of one process, and what it sends in the table."""

from typing import Any

import pytest
import torch

from boost.config import Config
from boost.config.traffic import Collective
from boost.parallel.counting import CollectiveCounter
from boost.plan.collectives import step_collectives
from boost.plan.optimizer import optimizer_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.trained import Trained, errors_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "loro": {"name": "loro", "exact_every": 2, "eps": 1e-6, "weight_decay": 0.05},
    "muon": {"name": "muon", "muon_lr": 1e-2},
    "frobenius": {"frobenius_decay": 0.5},
}
STEPS = 4
"""Two exact steps of LORO among them, with a cleared and used state between."""

RANKS = {"attn.q": 4, "mlp.down": 12, "layers.1.attn.v": 16}
"""Linears of one input with different ranks, and one whose rank is its output's width (16 of key/value heads)."""


def config_of(optimizer: str, parallel: dict[str, Any], **sections: Any) -> Config:
    train = {"micro_batch": 1, "global_batch": 4, **sections.pop("train", {})}
    model = {"family": "svd", "kv_heads": 4, **sections.pop("model", {})}
    return toy.toy_config(model=model, parallel=parallel, optim=OPTIMIZERS[optimizer], train=train, **sections)


def run(config: Config) -> tuple[dict[str, float], list[Collective], list[Collective], dict[str, torch.Tensor]]:
    """Errors against one process, what the last step's update sent and what the table says, and weights that are whole here."""
    trained = Trained(config, STEPS - 1)
    with CollectiveCounter() as counter:
        trained.numbers.append(trained.step(STEPS - 1))
    whole = {
        piece.parameter.name: piece.view(s.tensor.detach()).clone()
        for s in trained.stored
        for piece in s.pieces()
        if s.cut.dim is None and s.shard is None
    }
    table = optimizer_collectives(config, trained.mesh.pp.rank)
    seen = counter.collectives[len(counter.collectives) - len(table) :] if table else []
    return errors_of(trained, STEPS), seen, table, whole


def check(config: Config) -> None:
    toy.skip_what_torch_cannot(config)
    results = run_distributed(config.parallel.world_size, run, config)
    for errors, seen, table, _ in results:
        assert max(errors.values()) <= 1e-9, errors
        assert [c.on_the_wire[1:] for c in seen] == [c.on_the_wire[1:] for c in table]
    for *_, whole in results:
        for *_, other in results:
            for name in whole.keys() & other.keys():
                assert torch.equal(whole[name], other[name]), name


CUTS: list[dict[str, Any]] = [
    {"tp": 2, "layout": "btp"},
    {"tp": 4, "layout": "btp", "grouping": False},
    {"tp": 2, "layout": "btp-sp"},
    {"tp": 4, "layout": "btp-sp"},
    {"tp": 2, "layout": "vanilla"},
    {"tp": 4, "layout": "vanilla"},
    {"tp": 2, "dp": 2, "layout": "btp"},
    {"pp": 2, "tp": 2, "layout": "btp-sp"},
    {"tp": 2, "dp": 2, "layout": "btp", "shard": "optimizer"},
    {"tp": 2, "dp": 2, "layout": "vanilla", "shard": "full"},
    {"tp": 2, "dp": 2, "layout": "btp-sp", "shard": "full", "shard_outer": True},
    {"dp": 3, "shard": "optimizer"},
]


@pytest.mark.parametrize("parallel", CUTS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_cut_is_one_process(optimizer: str, parallel: dict[str, Any]) -> None:
    """Fewer key/value heads than processes, held whole, at TP 4; ranks of single linears."""
    kv_heads = 2 if parallel.get("tp") == 4 else 4
    train = {"global_batch": 6} if parallel.get("dp") == 3 else {}
    ranks = {} if parallel.get("tp") == 4 else {"ranks": RANKS} if parallel.get("dp") else {}
    check(config_of(optimizer, parallel, model={"kv_heads": kv_heads, **ranks}, train=train))
