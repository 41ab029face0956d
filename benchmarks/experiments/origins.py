"""The commits that results are of, and which results do not belong to the same one."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from boost.measure.results import Facts

UNKNOWN = "unknown"
"""Commit of a result that was measured outside a git checkout."""


def commits(facts: Facts) -> set[tuple[str, bool]]:
    """(commit, whether there were uncommitted changes) of a result and of all runs inside it."""
    return set(map(_commit, _every_git(facts))) or {(UNKNOWN, False)}


def in_words(results: Mapping[str, Facts]) -> str:
    """One line: which commit(s) results are of. `results`: by name."""
    found = {commit for facts in results.values() for commit in commits(facts)}
    names = sorted({name for name, _ in found})
    dirty = sum(any(changed for _, changed in commits(facts)) for facts in results.values())
    words = f"commit {names[0][:10]}" if len(names) == 1 else f"{len(names)} commits"
    return f"{words}, {dirty} with uncommitted changes" if dirty else words


def strays(results: Mapping[str, Facts]) -> list[str]:
    """One line per result that has uncommitted changes, or is of another commit than most; [] if all are of one clean commit."""
    found = {name: commits(facts) for name, facts in results.items()}
    counted = Counter(commit for each in found.values() for commit, _ in each)
    if not counted:
        return []
    most = max(counted, key=lambda commit: (commit != UNKNOWN, counted[commit], commit))
    lines = []
    for name, each in found.items():
        other = sorted(commit[:10] for commit, _ in each if commit != most or commit == UNKNOWN)
        if other:
            lines.append(f"{name}: of commit {', '.join(other)}, most others of {most[:10]}; rerun it on one commit")
        elif any(changed for _, changed in each):
            lines.append(f"{name}: of commit {most[:10]} with uncommitted changes; commit them and rerun it")
    return lines


def _commit(git: Facts | None) -> tuple[str, bool]:
    return (git or {}).get("commit") or UNKNOWN, bool((git or {}).get("dirty"))


def _every_git(tree: Any) -> Iterator[Facts | None]:
    if isinstance(tree, dict):
        for key, below in tree.items():
            if key == "git":
                yield below
            elif key != "config":
                yield from _every_git(below)
    elif isinstance(tree, list):
        for below in tree:
            if isinstance(below, dict):
                yield from _every_git(below)
