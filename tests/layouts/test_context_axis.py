"""Sequences sharded over the context axis, together with several other options. Every pair of options is in test_options.py."""

from typing import Any

import pytest

from boost.errors import ConfigError
from tests import toy
from tests.matrices import Row, first
from tests.trained import compare, require_one_process

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
