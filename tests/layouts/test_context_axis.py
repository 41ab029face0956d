"""Sequences sharded over the context axis match one process, under every layout, with heads exchanged or keys gathered."""

from typing import Any

import pytest

from boost.config import Config
from boost.config.attention import crosses_as_heads
from boost.errors import ConfigError
from tests import toy
from tests.matrices import GROUPING, LAYOUTS, LOCAL, Row, config_of, each_value, family_of, first, ids, pairwise
from tests.trained import compare, require_one_process

SIZES = ((1, 2, 8), (1, 2, 2), (1, 4, 8), (1, 4, 1), (2, 2, 8), (2, 2, 1))
"""(TP, CP, key/value heads) with 8 heads: some exchange heads, some gather keys."""


def is_legal(row: Row) -> bool:
    if row["sizes"][0] == 1 and row["layout"] not in (LAYOUTS[0], LAYOUTS[-1]):
        return False  # without TP all layouts are the same
    if row["recompute"] == "low-rank-sharded":
        return row["layout"]["layout"] == "btp-sp"
    dense = family_of(row["layout"]) == "dense"
    return row["recompute"] not in LOCAL if dense else row["recompute"] != "full-block" or row["overlap"] == "none"


ROWS = pairwise(
    {
        "sizes": SIZES,
        "layout": LAYOUTS,
        "grouping": GROUPING,
        "recompute": ("none", "low-rank", "low-rank+attention-output", "low-rank-sharded", "full-block"),
        "overlap": ("none", "halves"),
        "micro_batch": (1, 2),
        "documents": (False, True),
    },
    is_legal,
)


def configured(row: Row) -> Config:
    tp, cp, kv_heads = row["sizes"]
    parallel = {**row["layout"], "grouping": row["grouping"], "overlap": row["overlap"], "cp": cp}
    model = {"family": family_of(row["layout"]), "kv_heads": kv_heads, "layers": 1}
    train = {"recompute": row["recompute"], "micro_batch": row["micro_batch"], "global_batch": 2, "seq_len": 32}
    return config_of(model, parallel, tp, "float64", train=train, data={"isolate_documents": row["documents"]})


@pytest.mark.parametrize("row", each_value(ROWS, ids([(row,) for row in ROWS])))
@pytest.mark.slow
def test_a_shared_sequence_is_the_function_of_one_process(row: Row) -> None:
    require_one_process(configured(row))


def test_rows_cover_heads_and_gathered_keys() -> None:
    ways = {crosses_as_heads(config.model, config.parallel) for config in map(configured, ROWS)}
    assert ways == {True, False}


COMPOSED: list[dict[str, Any]] = [
    {"parallel": {"cp": 2, "dp": 2, "shard": "full"}},
    {"parallel": {"cp": 2, "tp": 2, "layout": "btp-cp", "shard": "full", "shard_outer": True}},
    {"parallel": {"cp": 2, "tp": 2, "layout": "btp-sp"}, "model": {"family": "lax", "gate": "tensor", "rank": 16}},
    {"parallel": {"cp": 2, "dp": 2, "shard": "optimizer"}, "model": {"kv_heads": 8}},
    {"parallel": {"cp": 2, "pp": 2, "schedule": "interleaved-1f1b"}, "model": {"kv_heads": 8, "layers": 4}},
    {"parallel": {"cp": 2, "tp": 2}, "optim": {"name": "loro", "exact_every": 2}, "model": {"family": "svd"}},
    {"parallel": {"cp": 2, "dp": 2}, "optim": {"name": "muon"}},
    {"parallel": {"cp": 2, "pp": 2}},
]
COMPILED: list[dict[str, Any]] = [
    {"parallel": {"cp": 2}, "train": {"compile": "blocks"}, "model": {"kv_heads": kv_heads}} for kv_heads in (8, 2)
]
"""Each takes a minute or more in torch's compiler."""


@pytest.mark.parametrize("sections", first(3, [*COMPOSED, *COMPILED]))
@pytest.mark.slow
def test_it_composes(sections: dict[str, Any]) -> None:
    config = toy.toy_config("float64", **{**sections, "train": {"micro_batch": 1, **sections.get("train", {})}})
    require_one_process(config, compare)


@pytest.mark.parametrize(
    ("parallel", "train", "message"),
    [
        ({"cp": 3}, {}, r"train.seq_len = 16 must be divisible by 2 x parallel.cp = 6.*nearest valid value: 18"),
        (
            {"cp": 2, "tp": 4, "layout": "btp-sp"},
            {"seq_len": 12, "micro_batch": 1, "global_batch": 1},
            r"seq_len = 12 .* gives 6 tokens .*\(parallel.cp = 2\).* over parallel.tp = 4 processes; nearest valid value: 16",
        ),
        (
            {"cp": 2, "overlap": "halves"},
            {"seq_len": 18, "micro_batch": 3, "global_batch": 3},
            r"train.seq_len = 18 must be divisible by 2 x parallel.cp = 4",
        ),
    ],
    ids=["cp", "tokens", "halves"],
)
def test_what_does_not_divide_is_one_line(parallel: Row, train: Row, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toy.toy_config(parallel=parallel, train=train)
