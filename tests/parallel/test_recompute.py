"""Every recomputation policy gives bitwise the gradients of `none` and communicates what the table says; low-rank policies add
nothing."""

import dataclasses
import functools

import pytest
import torch

from boost.config import Config
from boost.config.schema import RecomputeName
from boost.config.traffic import Collective
from boost.measure.counting import CollectiveCounter
from boost.plan.collectives import micro_batch_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import (
    GROUPING,
    LAYOUTS,
    LOCAL,
    LOW_RANK_LAYOUTS,
    Row,
    config_of,
    first,
    ids,
    pairwise,
    policies,
    suits,
)

SINGLE: Row = {}
"""One process."""
EVERY_POLICY: tuple[RecomputeName, ...] = (*LOCAL, "low-rank-sharded", "full-block")


def is_legal(row: Row) -> bool:
    """Whether the family supports the layout and the layout the policy; `single` is for one process only."""
    fits = row["layout"] == SINGLE or suits(row["family"], row["layout"])
    return fits and row["policy"] in policies(row["family"], row["layout"]) and (row["tp"] == 1) == (not row["layout"])


CELLS = pairwise(
    {
        "layout": (SINGLE, *LAYOUTS),
        "policy": EVERY_POLICY,
        "family": ("cola", "svd", "dense"),
        "dtype": ("float64", "bfloat16"),
        "grouping": GROUPING,
        "tp": (2, 4, 1),
    },
    is_legal,
)
"""Two key/value heads for four processes."""

CROSSING = pairwise(
    {
        "layout": (SINGLE, *LOW_RANK_LAYOUTS),
        "policy": EVERY_POLICY,
        "family": ("lax",),
        "gate": ("tensor", "dense", "identity"),
        "grouping": GROUPING,
        "tp": (2, 1),
    },
    is_legal,
)


@dataclasses.dataclass
class Backward:
    """A micro-batch through a toy model, on one process."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    collectives: list[Collective]


def backward(config: Config) -> Backward:
    decoder, _ = toy.toy_decoder(config)
    with CollectiveCounter() as counter:
        loss = decoder(*toy.toy_tokens(config))
        counter.phase = "backward"
        loss.backward()
    return Backward(loss.detach(), toy.gradients(decoder), counter.collectives)


@functools.cache
def without(description: str) -> Backward:
    """A model without recomputation; built once in each process of a pool."""
    return backward(Config.model_validate_json(description))


def compare(config: Config) -> dict[str, bool]:
    """What is bitwise the same as under policy none, and whether collectives match the table."""
    model, train = config.model, config.train
    plain = train.model_copy(update={"recompute": "none", "recompute_every": 1})
    actual, expected = backward(config), without(config.model_copy(update={"train": plain}).model_dump_json())
    tokens = train.micro_batch * train.seq_len
    recompute = train.recompute_by_layer(model.layers)
    table = micro_batch_collectives(model, config.parallel, tokens, train.compute_dtype, recompute=recompute)
    return {
        "loss": torch.equal(actual.loss, expected.loss),
        "gradients": all(torch.equal(value, expected.gradients[key]) for key, value in actual.gradients.items()),
        "collectives": [c.on_the_wire for c in actual.collectives] == [c.on_the_wire for c in expected.collectives],
        "table": [c.on_the_wire for c in actual.collectives] == [c.on_the_wire for c in table],
    }


@pytest.mark.slow
@pytest.mark.parametrize("row", first(18, CELLS, ids([(row,) for row in CELLS])))
def test_a_policy_changes_no_bit(row: Row) -> None:
    model = {"family": row["family"], "layers": 1 if row["tp"] == 4 else 2}
    verify(row, model, row["dtype"])


def verify(row: Row, model: Row, dtype: str) -> None:
    parallel = {**row["layout"], "grouping": row["grouping"]}
    config = config_of(model, parallel, row["tp"], dtype, train={"recompute": row["policy"]})
    for same in run_distributed(row["tp"], compare, config) if row["tp"] > 1 else [compare(config)]:
        assert same["loss"] and same["gradients"] and same["table"], same
        if row["policy"] in LOCAL:
            assert same["collectives"], "recomputation sends something"
        elif row["layout"]:
            assert not same["collectives"], "the table has nothing to count"


def test_every_second_block_recomputes() -> None:
    train = {"recompute": "full-block", "recompute_every": 2}
    config = config_of({"family": "cola"}, {"layout": "btp"}, 2, "float64", train=train)
    assert config.train.recompute_by_layer(5) == ("full-block", "none", "full-block", "none", "full-block")
    for same in run_distributed(2, compare, config):
        assert same["gradients"] and same["table"]


@pytest.mark.parametrize("row", first(9, CROSSING, ids([(row,) for row in CROSSING])))
@pytest.mark.slow
def test_latents_that_cross_blocks_are_those_of_the_forward_pass(row: Row) -> None:
    verify(row, {"family": "lax", "gate": row["gate"], "rank": 16, "layers": 3}, "float64")
