"""The reported size fits, and one more does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.experiments import fit
from boost.config import Config
from boost.config.load import from_tree
from boost.measure.memory import measure
from tests import toy


def make_config() -> Config:
    return toy.toy_config(
        "float32", model={"layers": 1, "rank": 8}, parallel={"tp": 2, "layout": "btp-sp"}, train={"global_batch": 2}
    )


@given(st.integers(0, 50), st.integers(1, 40), st.integers(0, 30), st.integers(0, 3000))
def test_largest_is_the_largest(fixed: int, slope: int, kink: int, limit: int) -> None:
    def size_of(n: int) -> int:
        return fixed + slope * n + max(n - kink, 0)

    found, size = fit.largest(size_of, limit, slope)
    if found == 0:
        assert size_of(1) > limit
    else:
        assert size == size_of(found) <= limit < size_of(found + 1)


def test_few_measurements_are_needed() -> None:
    asked = []
    found, _ = fit.largest(lambda n: asked.append(n) or 10**6 + 12345 * n, 10**9, 12000)  # type: ignore[func-returns-value]
    assert found == (10**9 - 10**6) // 12345
    assert len(asked) <= 5


def sized(batch: int, seq_len: int, policy: str = "low-rank", **model: int) -> Config:
    tree = make_config().model_dump()
    tree["model"] |= model
    tree["train"] |= {"micro_batch": batch, "global_batch": 2 * batch, "seq_len": seq_len, "recompute": policy}
    return from_tree(tree)


@pytest.mark.parametrize(
    ("policy", "vocab_size"), [("none", 64), ("low-rank", 4096), ("low-rank-sharded", 64), ("full-block", 64)]
)
def test_every_block_adds_the_same_to_the_peak(policy: str, vocab_size: int) -> None:
    config = sized(2, 16, policy, layers=6, vocab_size=vocab_size)
    assert fit.peak(config) == sum(measure(config).peak.values())


def test_what_fits_fits_and_one_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "SEQUENCE_STEP", 16)
    limit = 10**6
    found = fit.fits("btp-sp", make_config(), "low-rank", limit)
    assert found.batch > fit.LARGE and found.seq_len > 16 * fit.LARGE
    assert found.batch_peak_bytes == fit.peak(sized(found.batch, 16)) <= limit < fit.peak(sized(found.batch + 1, 16))
    assert found.seq_len_peak_bytes == fit.peak(sized(1, found.seq_len)) <= limit
    assert limit < fit.peak(sized(1, found.seq_len + 16))


def test_the_experiment_leaves_numbers_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "SEQUENCE_STEP", 16)
    monkeypatch.setattr(fit, "CONTEXT_SIZES", (1,))
    monkeypatch.setattr(fit, "policies", lambda _: ["none", "full-block"])
    monkeypatch.setattr(fit, "variants", lambda config: [("btp-sp", config)])
    assert fit.fit(make_config(), 0.0003, tmp_path / "out" / "f") == 0
    facts: dict[str, Any] = json.loads((tmp_path / "out" / "f.json").read_text())
    by_policy = {(row["layout"], row["policy"]): row for row in facts["rows"]}
    assert by_policy["btp-sp", "full-block"]["batch"] > by_policy["btp-sp", "none"]["batch"] > 0
    assert (tmp_path / "out" / "f.md").read_text() in capsys.readouterr().out


def test_twice_the_processes_hold_longer_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "SEQUENCE_STEP", 64)
    monkeypatch.setattr(fit, "LARGE", 2)
    alone, shared = (fit.fits("", fit._shared(make_config(), cp), "none", 10**6).seq_len for cp in (1, 2))
    assert shared > 1.5 * alone > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_every_row_has_a_name_of_its_own(tp: int) -> None:
    names = [name for name, _ in fit.variants(toy.toy_config(parallel={"tp": tp}))]
    assert len(set(names)) == len(names) >= 2
