"""Describes which commits results come from, and finds results from stray commits."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.experiments.results import Facts

UNKNOWN = "unknown"
"""Commit of a result that was measured outside a git checkout."""


SEPARATE = ("modeled", "record", "validation", "single", "wire halves")
"""Experiments (and sets of the wire) whose numbers are compared within one file only, or recomputed whenever the performance model
changes. Each may come from a clean commit of its own."""


def commits(facts: Facts) -> set[tuple[str, bool]]:
    """(commit, whether there were uncommitted changes) of a result and all runs in it."""
    return set(map(_commit, _every_git(facts))) or {(UNKNOWN, False)}


def in_words(results: Mapping[str, Facts]) -> str:
    """Describes in one line which commits results come from. `results`: by name."""
    of_evaluation, separate = _split(results)
    words = _commits_in_words(of_evaluation or separate)
    if of_evaluation and separate:
        names = sorted({_name(facts) for facts in separate.values()})
        words += f"; {', '.join(names)} from {_commits_in_words(separate)}"
    return words


def strays(results: Mapping[str, Facts]) -> list[str]:
    """One line per result that has uncommitted changes or, unless it is SEPARATE, comes from another commit than most results."""
    of_evaluation = _split(results)[0]
    counted = Counter(commit for facts in of_evaluation.values() for commit, _ in commits(facts))
    most = max(counted, key=lambda commit: (commit != UNKNOWN, counted[commit], commit), default=UNKNOWN)
    lines = []
    for name, facts in results.items():
        found = commits(facts)
        others = {commit for commit, _ in found if commit == UNKNOWN or (name in of_evaluation and commit != most)}
        if others:
            words = ", ".join(sorted(commit[:10] for commit in others))
            lines.append(f"{name}: from commit {words}, most others from {most[:10]}; rerun it on one commit")
        elif changed := sorted({commit[:10] for commit, dirty in found if dirty}):
            lines.append(f"{name}: from commit {', '.join(changed)} with uncommitted changes; commit them and rerun it")
    return lines


def _split(results: Mapping[str, Facts]) -> tuple[dict[str, Facts], dict[str, Facts]]:
    """The evaluation's results, and the separate ones."""
    separate = {name: facts for name, facts in results.items() if _name(facts) in SEPARATE}
    return {name: facts for name, facts in results.items() if name not in separate}, separate


def _name(facts: Facts) -> str:
    return f"wire {facts['set']}" if facts["experiment"] == "wire" and "set" in facts else str(facts["experiment"])


def _commits_in_words(results: Mapping[str, Facts]) -> str:
    names = sorted({name for facts in results.values() for name, _ in commits(facts)})
    dirty = sum(any(changed for _, changed in commits(facts)) for facts in results.values())
    words = f"commit {names[0][:10]}" if len(names) == 1 else f"{len(names)} commits"
    return f"{words}, {dirty} with uncommitted changes" if dirty else words


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
