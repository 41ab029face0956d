"""The benchmark of generation: what it compares computes the same, and its limits are those of the model."""

from pathlib import Path

import pytest

from benchmarks import decode
from boost.config.architecture import parameter_count

SIZES = {"tiny": {"dim": 32, "ffn_dim": 48, "heads": 4, "layers": 2}}


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """By the worker that runs this file alone: every worker collects it, and the import takes seconds."""
    pytest.importorskip("transformers")


@pytest.mark.nightly
def test_a_tiny_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SIZES": SIZES, "VOCABULARY": 320, "BATCHES": {3: (5, 4)}, "READ_ROWS": 64, "GEMM_WIDTH": 64}
    for name, value in sizes.items():
        monkeypatch.setattr(decode, name, value)
    (result,) = decode.measure("tiny", "float32", [1], [3], 7, tmp_path)
    assert result["equal_greedy_tokens"] == {"cola": 1.0, "dense": 1.0}
    for phase, seconds in result["seconds"].items():
        assert {len(each) for each in seconds.values()} == {7} and min(min(each) for each in seconds.values()) > 0
        found = result["speedup"][phase][decode.LOW_RANK]
        assert found["low"] <= found["value"] <= found["high"]
    # By hand: weights but the embedding, and 3 sequences of 7 cached tokens on average; 2 layers of keys and values of width 32.
    model = decode.config_of("tiny", "cola", "float32").model
    limits = result["limits"][decode.LOW_RANK]
    assert limits["decode_bytes"] == 4 * (parameter_count(model) - 320 * 32 + 3 * 7 * 2 * 2 * 32)
    linears = parameter_count(model) - 2 * 320 * 32 - 5 * 32
    assert linears == 2 * (4 * (32 + 32) * 8 + 3 * (32 + 48) * 8)
    attention = 2 * 5 * 32 * 2
    assert limits["prefill_flops"] == 3 * (5 * (2 * linears + attention) + 2 * 320 * 32)
