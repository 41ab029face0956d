"""The planner with CP: traces match the collective table and the memory of fake tensors; long sequences can be planned."""

from typing import Any

import pytest

from boost.config import Config, load
from boost.config.rules import check
from boost.plan.candidates import Request, structures
from boost.plan.categories import SAVED
from boost.plan.collectives import step_collectives
from boost.plan.hardware import load_hardware
from boost.plan.memory import memory, peak
from boost.plan.search import Search
from boost.plan.trace import pass_of_block
from tests.fake_memory import measure
from tests.matrices import LAYOUTS, Row, each_value, family_of, ids, memory_config, pairwise

SIZES = ((1, 2, 8), (1, 2, 2), (1, 4, 1), (2, 2, 8), (2, 2, 2))
"""(TP, CP, key/value heads) of 8 heads."""
ROWS = pairwise(
    {
        "sizes": SIZES,
        "layout": LAYOUTS,
        "recompute": ("none", "low-rank", "low-rank+attention-output", "full-block"),
        "overlap": ("none", "halves"),
    },
    lambda row: (
        (family_of(row["layout"]) != "dense" or not row["recompute"].startswith("low-rank"))
        and (row["sizes"][0] > 1 or row["layout"] == LAYOUTS[0])
    ),
)


def configured(row: Row) -> Config:
    tp, cp, kv_heads = row["sizes"]
    config = memory_config(
        family_of(row["layout"]), {**row["layout"], "overlap": row["overlap"]}, row["recompute"], "bfloat16",
        kv_heads=kv_heads, layers=2,
    )  # fmt: skip
    config = config.changed(parallel={"tp": tp, "cp": cp}, train={"seq_len": 48})
    check(config)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("row", each_value(ROWS, ids([(row,) for row in ROWS])))
def test_the_trace_is_the_table_and_keeps_what_fake_tensors_keep(row: Row) -> None:
    config = configured(row)
    traced = [c.on_the_wire for c in pass_of_block(config, 1).collectives]
    table = [c.on_the_wire for c in step_collectives(config) if c.layer == 1 and c.phase != "step"]
    if row["overlap"] == "halves":
        traced, table = sorted(traced), sorted(table)
    assert traced == table
    predicted = {name: size for name, size in memory(config).by_category.items() if name in SAVED and size}
    assert measure(config).activations == predicted


def test_masks_of_a_gpu_are_traced_on_a_machine_without_one() -> None:
    """In fp32 and with few key/value heads, attention on a GPU makes a mask, which is a real tensor."""
    config = load("demo", ["--parallel.cp", "4", "--model.kv_heads", "2"])
    assert peak(config, on_gpu=True).total == pytest.approx(peak(config).total, rel=0.5)


def request(seq_len: int, *fixed: str, **parallel: Any) -> Request:
    config = load(
        "boost-7b", [f"--train.seq_len={seq_len}", "--train.global_batch=8", "--parallel.tp=1", "--parallel.pp=1"]
    )
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    return Request(config, 8, load_hardware("h100-80g"), frozenset(fixed))


def test_only_long_sequences_use_cp() -> None:
    assert {parallel.cp for parallel in structures(request(4096))} == {1}
    assert {parallel.cp for parallel in structures(request(131_072))} == {1, 2, 4, 8}


def test_seven_billion_parameters_at_131072_tokens_on_eight_gpus() -> None:
    """The plan is a valid configuration."""
    fixed = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp", "parallel.layout", "parallel.overlap")
    plan = Search(request(131_072, *fixed, tp=2, cp=4, dp=1, layout="btp-cp")).fastest()
    assert plan is not None
    check(plan.config)
    assert plan.config.parallel.cp == 4
    assert plan.memory < plan.usable
