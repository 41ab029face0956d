"""Two results are compared row by row, and only if experiment, dimensions and machine match."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.compare import compare, timed_rows
from boost.config import load
from boost.errors import ConfigError, MeasurementError
from boost.measure.results import Facts, facts_of

EIGHT = [0.101, 0.099, 0.1, 0.102, 0.098, 0.1, 0.1, 0.101]
FACTS = facts_of("toy", load("demo"))


def write(
    path: Path, commit: str = "a" * 40, dirty: bool = False, environment: Facts | None = None, **facts: Any
) -> Path:
    git = {"commit": commit, "dirty": dirty}
    whole = FACTS | {"environment": FACTS["environment"] | {"git": git} | (environment or {})} | facts
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def times(*factors: float) -> list[Facts]:
    """Rows of three contenders, slowed down by these factors."""
    names = ("btp", "btp-sp", "vanilla")
    return [
        {"name": name, "batch": 4, "kept_bytes": int(9 * factor), "seconds": [factor * s for s in EIGHT]}
        for name, factor in zip(names, factors, strict=True)
    ]


def test_rows_are_found_wherever_they_stand() -> None:
    facts = {
        "environment": {"seconds": EIGHT},
        "rounds": 8,
        "tp": 2,
        "rows": [{"name": "btp", "share": False, "fraction": 0.5, "sent_bytes": 7, "seconds": EIGHT}],
        "timing": {"seconds": {"dense": {"usual": EIGHT, "exact": []}}, "probe_s": EIGHT},
        "runs": [{"name": "one", "seconds": 201.5}],
    }
    found = {row.title: row for row in timed_rows(facts)}
    assert list(found) == ["tp 2, btp, no share", "tp 2, timing, dense, usual"]
    assert found["tp 2, btp, no share"].dimensions == {"tp": 2, "name": "btp", "share": False}
    assert found["tp 2, btp, no share"].seconds == EIGHT


def test_faster_slower_and_what_cannot_be_told(tmp_path: Path) -> None:
    old = write(tmp_path / "old.json", rows=[*times(1, 1, 1), {"name": "few", "seconds": EIGHT[:4]}])
    new = write(
        tmp_path / "new.json", "b" * 40, rows=[*times(0.8, 1.001, 1.3)[::-1], {"name": "few", "seconds": EIGHT[:4]}]
    )
    text = compare(old, new)
    verdicts = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "| 0.800 (0.7" in verdicts["| btp, batch 4"] and verdicts["| btp, batch 4"].endswith("| faster |")
    assert verdicts["| btp-sp, batch 4"].endswith("no difference seen |")
    assert "| 1.300 (1." in verdicts["| vanilla, batch 4"] and verdicts["| vanilla, batch 4"].endswith("| slower |")
    assert "| 4, 4 |  | fewer than 7 rounds |" in verdicts["| few"]
    assert "Not interleaved" in text and "Warning" not in text and "Only in" not in text


def test_what_makes_a_change_unclear_is_one_line(tmp_path: Path) -> None:
    old = write(tmp_path / "old.json", rows=times(1, 1, 1), environment={"torch": "2.0"})
    new = write(tmp_path / "new.json", dirty=True, rows=times(1, 1, 1)[:2])
    lines = compare(old, new).splitlines()
    (warning,) = [line for line in lines if line.startswith("Warning")]
    assert "both are from commit aaaaaaaaaa" in warning and "tree of new had uncommitted changes" in warning
    assert "tree of old" not in warning
    assert any(line.startswith("Also different: torch 2.0, then") for line in lines)
    assert "Only in old: vanilla, batch 4." in lines


def other_batch(rows: list[Facts]) -> list[Facts]:
    return [row | {"batch": 8} if row["name"] == "btp-sp" else row for row in rows]


SAME = times(1, 1, 1)
SHAPE = FACTS["config"] | {"model": FACTS["config"]["model"] | {"dim": 1024}}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"experiment": "other"}, "a result of 'other', not of 'toy'"),
        ({"config": SHAPE}, r"model.dim is \d+ in the old result and 1024 in the new one"),
        ({"rows": other_batch(SAME)}, "btp-sp, batch 4: batch is 4 in the old result and 8 in the new one"),
        ({"rows": [{"name": "mine", "seconds": EIGHT}]}, "no row in common"),
        ({"rows": [{"name": "mine", "seconds": 3.0}]}, "new.json has no timings"),
        ({"rows": [*SAME, SAME[0]]}, "new.json: two rows are named 'btp, batch 4'"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, facts: Facts, said: str) -> None:
    old = write(tmp_path / "old.json", rows=SAME)
    with pytest.raises(ConfigError, match=said):
        compare(old, write(tmp_path / "new.json", **{"rows": SAME} | facts))


def test_machines_are_not_compared(tmp_path: Path) -> None:
    old = write(tmp_path / "old.json", rows=SAME)
    with pytest.raises(MeasurementError, match="different machines cannot be compared: cores"):
        compare(old, write(tmp_path / "new.json", rows=SAME, environment={"cores": 640}))
