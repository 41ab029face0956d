"""Which commits results are of, and which results are astray."""

from typing import Any

from benchmarks.experiments.origins import SEPARATE, UNKNOWN, commits, in_words, strays

A, B = "a" * 40, "b" * 40


def facts(commit: str | None, dirty: bool = False, **more: Any) -> dict[str, Any]:
    git = {"commit": commit, "dirty": dirty} if commit else None
    return {"experiment": "steps", "environment": {"git": git}, **more}


def test_another_commit_and_changes_are_named() -> None:
    assert strays({}) == strays({"x.json": facts(A), "y.json": facts(A)}) == []
    results = {"x.json": facts(A), "y.json": facts(A, dirty=True), "z.json": facts(B)}
    y, z = strays(results)
    assert y.startswith("y.json: ") and "uncommitted" in y and z.startswith("z.json: from commit bbbbbbbbbb,")
    assert in_words(results) == "2 commits, 1 with uncommitted changes"
    resumed = facts(A, runs=[{"git": {"commit": B, "dirty": False}}, {"git": {"commit": A, "dirty": False}}])
    assert commits(resumed) == {(A, False), (B, False)}, "runs inside a result count"
    assert strays({"x.json": facts(A), "y.json": resumed}) != []
    assert commits(facts(None)) == {(UNKNOWN, False)}
    assert len(strays({"x.json": facts(None), "y.json": facts(None), "z.json": facts(A)})) == 2


def test_separate_experiments_have_commits_of_their_own() -> None:
    record = {"experiment": SEPARATE[1], "environment": {"git": {"commit": B, "dirty": False}}}
    results = {"x.json": facts(A), "record.json": record}
    assert strays(results) == [] and in_words(results) == f"commit {A[:10]}; record from commit {B[:10]}"
    halves, main = ({**facts(B), "experiment": "wire", "set": name} for name in ("halves", "main"))
    assert strays({"x.json": facts(A), "halves.json": halves}) == [] and strays({"x.json": facts(A), "main.json": main})
    record["environment"] = {"git": {"commit": B, "dirty": True}}
    (line,) = strays(results)
    assert line.startswith(f"record.json: from commit {B[:10]} with uncommitted changes")
