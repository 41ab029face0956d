"""`boost inspect` against the documented sharding of each layout (boost/layouts)."""

import math
from typing import Any

import pytest

from boost.plan.collectives import step_collectives
from boost.plan.inspection import Inspection
from tests.plan.toys import LAYOUTS, inspected

T, D, F, R = 16384, 4096, 11008, 1024
"""boost-7b."""


def forward_of_a_block(inspection: Inspection) -> list[tuple[Any, ...]]:
    block = [c for c in inspection.of_micro_batch if c.layer == 0]
    return [(c.place, c.kind, *c.shape) for c in block if c.phase == "forward"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("btp", [("qkv", "all-reduce", T, 3 * R + 12), ("o", "all-reduce", T, R),
                 ("gate_up", "all-reduce", T, 2 * R + 12), ("down", "all-reduce", T, R)]),
        ("btp, sync", [("qkv", "all-reduce", T, 1), ("qkv", "all-reduce", T, 3 * R), ("o", "all-reduce", T, R),
                       ("gate_up", "all-reduce", T, 1), ("gate_up", "all-reduce", T, 2 * R), ("down", "all-reduce", T, R)]),
        ("btp-sp", [("qkv", "all-gather", T, 3 * R), ("o", "reduce-scatter", T, R),
                    ("gate_up", "all-gather", T, 2 * R), ("down", "reduce-scatter", T, R)]),
        ("vanilla", [("qkv", "reduce-scatter", T, 3 * D), ("o", "all-gather", T, D), ("o", "all-reduce", T, D),
                     ("gate_up", "reduce-scatter", T, 2 * F), ("down", "all-gather", T, F), ("down", "all-reduce", T, D)]),
        ("megatron", [("o", "all-reduce", T, D), ("down", "all-reduce", T, D)]),
        ("megatron-sp", [("qkv", "all-gather", T, D), ("o", "reduce-scatter", T, D),
                         ("gate_up", "all-gather", T, D), ("down", "reduce-scatter", T, D)]),
    ],
)  # fmt: skip
def test_forward_collectives_of_a_block(name: str, expected: list[tuple[Any, ...]]) -> None:
    assert forward_of_a_block(inspected(name)) == expected


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tp", [2, 8])
def test_shards_add_up_to_the_whole(name: str, tp: int) -> None:
    inspection = inspected(name, f"--parallel.tp={tp}", "--model.kv_heads=4")
    layers, held, total = inspection.config.model.layers, 0, 0
    for weight in inspection.weights:
        copies = layers if weight.name.startswith("layers.N.") else 1
        part, whole = math.prod(weight.local), math.prod(weight.shape)
        held, total = held + copies * part, total + copies * whole
        assert part * (tp if weight.placement.dim is not None else 1) == whole
        if weight.placement.dim is not None:
            assert not weight.placement.partial
    assert held == inspection.parameters_per_process
    assert total == inspection.parameters


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_add_up_to_the_step(name: str) -> None:
    inspection = inspected(name, "--train.micro_batch=1", "--parallel.dp=2")
    assert inspection.micro_batches == 2
    assert [*inspection.of_micro_batch * 2, *inspection.of_step] == step_collectives(inspection.config)
    assert all((c.phase == "step") == (c in inspection.of_step) for c in step_collectives(inspection.config))
    of_step = sum(c.sent_bytes for c in inspection.of_step)
    assert inspection.bytes_per_step == 2 * inspection.bytes_per_micro_batch + of_step
    assert inspection.bytes_per_token * inspection.tokens == pytest.approx(inspection.bytes_per_micro_batch)
    assert sum(row.count for row in inspection.rows) == len(step_collectives(inspection.config))
    assert sum(row.total_bytes for row in inspection.rows) == inspection.bytes_per_step
    keys = [(c.phase, c.place, c.kind, c.shape) for c in (row.collective for row in inspection.rows)]
    assert len(set(keys)) == len(keys)


def test_one_process_holds_and_computes_everything() -> None:
    inspection = inspected("btp", "--parallel.tp=1")
    assert inspection.layout == "single"
    assert all(weight.local == weight.shape and weight.where == "replicated" for weight in inspection.weights)
    assert inspection.parameters_per_process == inspection.parameters
    assert (inspection.residual, inspection.rows, inspection.bytes_per_step) == ((T, D), (), 0)
