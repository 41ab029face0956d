"""The environment of a launch, and the comparison of calls, on made-up logs: needs no software GPU."""

from pathlib import Path

import pytest

from tests.softgpu.run import differences, environment

SUM, GATHER, SEND, RECEIVE, END = (
    "all-reduce 8 7 -1",
    "all-gather 4 7 -1",
    "send 8 7 1",
    "recv 8 7 0",
    "destroy 0 -1 -1",
)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([SUM, GATHER, END], [SUM, GATHER, END], ""),
        ([SUM, GATHER], [GATHER, SUM], "call 0 is"),
        ([SUM, GATHER, END], [SUM, END], "call 1 is"),
        ([SUM, GATHER, "abort 0 -1 -1"], [SUM], ""),
        ([SUM, GATHER, "abort 0 -1 -1"], [GATHER], "call 0 is"),
        ([SEND, SUM, END], [SUM, RECEIVE, END], ""),
        ([SEND, SUM, END], [SUM, END], "sent"),
        ([SUM], None, "1 of 2 processes took part"),
    ],
)
def test_different_calls_are_found(tmp_path: Path, first: list[str], second: list[str] | None, message: str) -> None:
    for rank, calls in enumerate((first, second)):
        if calls is not None:
            (tmp_path / f"calls.{100 + rank}").write_text("".join(f"a1 {rank} 2 {call}\n" for call in calls))
    found = differences(tmp_path)
    assert len(found) == bool(message) and all(message in text for text in found), found


def test_a_launch_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although compiling sets the cache's folder in the environment of the process that starts the launch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with environment(tmp_path) as (shared, variables):
        assert all(shared in Path(variables[f"{name}_CACHE_DIR"]).parents for name in ("TORCHINDUCTOR", "TRITON"))
