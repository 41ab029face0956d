"""Compares two results of one experiment, before and after a change: what got faster, what got slower.

The two runs were not interleaved, so ratios include machine noise between them, which the intervals do not cover. Use this to
find regressions, and `benchmarks.experiments.contest` to make claims.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.contest import LEAST_ROUNDS, Ratio, Seconds, Spread, pooled, ratio_of_runs, spread
from boost.errors import ConfigError
from boost.measure.results import Facts, differences, origin, read, require_one_machine, table

COUNTED = re.compile(
    r"(^|_)(s|ms|us|bytes|flops|elements|parameters|collectives|count|rounds|launches|repeats|in_blocks)$"
)
"""Suffixes of keys whose integers are measurements or counts, not dimensions of a row."""

DIMENSIONS = ("model", "parallel", "train")
"""Configuration sections that must be equal."""

NOT_NUMBERS = ("experiment", "environment", "config", "settings", "git")
"""Keys of a result that are not searched for timings."""


@dataclass(frozen=True)
class TimedRow:
    """Timings of one row of an experiment, and what identifies it."""

    names: tuple[str, ...]
    """Keys on the path to it, without `seconds`."""
    dimensions: dict[str, str | int]
    """Strings, booleans and integers of the enclosing objects, by key; inner ones override outer ones."""
    seconds: Seconds
    """One per round."""

    @property
    def called(self) -> tuple[Any, ...]:
        """The identity without sizes: rows of different sizes share it."""
        words = tuple(sorted((key, value) for key, value in self.dimensions.items() if not _is_size(value)))
        return (self.names, words)

    @property
    def sizes(self) -> dict[str, int]:
        """The integer dimensions."""
        return {key: int(value) for key, value in self.dimensions.items() if _is_size(value)}

    @property
    def title(self) -> str:
        """Human-readable name."""
        return ", ".join([*(_words(*each) for each in self.dimensions.items()), *self.names])


def timed_rows(facts: Facts) -> list[TimedRow]:
    """Every row of a result that has raw seconds; `boost.measure.results` defines rows."""
    return list(_timed(facts, (), {}))


def _timed(value: Any, names: tuple[str, ...], around: dict[str, str | int]) -> Iterator[TimedRow]:
    if isinstance(value, dict):
        own = {
            key: each
            for key, each in value.items()
            if key not in NOT_NUMBERS
            and (isinstance(each, str | bool) or (isinstance(each, int) and not COUNTED.search(key)))
        }
        for key, each in value.items():
            if key == "seconds":
                yield from _by_name(each, names, around | own)
            elif key not in NOT_NUMBERS:
                yield from _timed(each, names if isinstance(each, list) else (*names, key), around | own)
    elif isinstance(value, list):
        for each in value:
            yield from _timed(each, names, around)


def _by_name(seconds: Any, names: tuple[str, ...], around: dict[str, str | int]) -> Iterator[TimedRow]:
    """One row per list of seconds, for a list or a dict of lists; none for a single number, which has no rounds."""
    if isinstance(seconds, dict):
        for name, each in seconds.items():
            yield from _by_name(each, (*names, name), around)
    elif (
        isinstance(seconds, list) and len(seconds) > 1 and all(isinstance(each, float | int | list) for each in seconds)
    ):
        yield TimedRow(names, around, seconds)


def _words(key: str, value: str | int) -> str:
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return value if isinstance(value, str) else f"{key} {value}"


def _is_size(value: str | int) -> bool:
    return not isinstance(value, str | bool)


@dataclass(frozen=True)
class Pair:
    """One row that both results have."""

    title: str
    old: Spread
    new: Spread
    ratio: Ratio | None
    """New / old seconds; None if either has too few rounds."""

    @property
    def verdict(self) -> str:
        """'faster', 'slower', or 'no difference seen' if the interval contains 1."""
        if self.ratio is None:
            return f"fewer than {LEAST_ROUNDS} rounds"
        if self.ratio.high < 1:
            return "faster"
        return "slower" if self.ratio.low > 1 else "no difference seen"


def compare(old: Path, new: Path) -> str:
    """Compares all common rows. Returns Markdown, with caveats.

    Raises ConfigError if the experiments or dimensions differ or no row is in common, and MeasurementError if the machines
    differ.
    """
    first = read(old)
    second = read(new, first["experiment"])
    require_one_machine([first, second])
    _require_same_dimensions(first, second)
    before, after = _by_key(timed_rows(first), old), _by_key(timed_rows(second), new)
    for rows, path in ((before, old), (after, new)):
        if not rows:
            raise ConfigError(f"{path} has no timings; use a result of an experiment that measures time")
    gone = [row for key, row in before.items() if key not in after]
    fresh = [row for key, row in after.items() if key not in before]
    _require_same_sizes(gone, fresh)
    pairs = [_pair(before[key], after[key]) for key in before if key in after]
    if not pairs:
        raise ConfigError(f"{old} and {new} have no row in common; use two results with the same contenders")
    lines = [f"# {first['experiment']}: {old.name} and {new.name}"]
    lines += [f"{words}: {origin(facts['environment'])}." for words, facts in (("old", first), ("new", second))]
    lines += list(_warnings(first["environment"], second["environment"]))
    lines.append(table(_HEADINGS, map(_cells, pairs)).strip())
    for words, alone in (("old", gone), ("new", fresh)):
        if alone:
            lines.append(f"Only in {words}: {'; '.join(row.title for row in alone)}.")
    return "\n\n".join(lines) + "\n"


_HEADINGS = ("what", "old ms (quartiles):", "new ms (quartiles):", "rounds:", "new / old (95% interval):", "verdict")


def _cells(pair: Pair) -> list[str]:
    times = [f"{1e3 * s.median:.4g} ({1e3 * s.low:.4g} to {1e3 * s.high:.4g})" for s in (pair.old, pair.new)]
    quotient = "" if pair.ratio is None else f"{pair.ratio.value:.3f} ({pair.ratio.low:.3f} to {pair.ratio.high:.3f})"
    return [pair.title, *times, f"{pair.old.rounds}, {pair.new.rounds}", quotient, pair.verdict]


def _pair(old: TimedRow, new: TimedRow) -> Pair:
    enough = min(len(pooled(old.seconds)), len(pooled(new.seconds))) >= LEAST_ROUNDS
    found = ratio_of_runs(new.seconds, old.seconds) if enough else None
    return Pair(new.title, spread(old.seconds), spread(new.seconds), found)


def _warnings(old: Facts, new: Facts) -> Iterator[str]:
    """Yields caveats: other possible causes of the ratios, and why the change may be unknown."""
    yield "Not interleaved: ratios include machine noise between the two runs; intervals do not cover it."
    commits = [(environment["git"] or {}).get("commit") for environment in (old, new)]
    unclear = [f"both are from commit {commits[0][:10]}"] if commits[0] and commits[0] == commits[1] else []
    unclear += [
        f"the working tree of {name} {'is unknown' if not git else 'had uncommitted changes'}"
        for name, git in (("old", old["git"]), ("new", new["git"]))
        if not git or git.get("dirty")
    ]
    if unclear:
        yield f"Warning: {'; '.join(unclear)}: the change between them is unknown."
    if other := differences(old, new):
        yield f"Also different: {'; '.join(other)}."


def _require_same_dimensions(first: Facts, second: Facts) -> None:
    """Raises ConfigError if a common field differs. (Versions add and remove fields.)"""
    for section in DIMENSIONS:
        ours, theirs = (facts.get("config", {}).get(section, {}) for facts in (first, second))
        for field in ours.keys() & theirs.keys():
            if ours[field] != theirs[field]:
                raise ConfigError(
                    f"{section}.{field} is {ours[field]!r} in the old result and {theirs[field]!r} in the new one; compare results "
                    "with the same dimensions"
                )


def _require_same_sizes(old: list[TimedRow], new: list[TimedRow]) -> None:
    """Raises ConfigError if unmatched rows have the same name and different sizes."""
    for ours in old:
        for theirs in new:
            if ours.called != theirs.called:
                continue
            here, there = ours.sizes, theirs.sizes
            key = next(key for key in (*here, *there) if here.get(key) != there.get(key))
            raise ConfigError(
                f"{ours.title}: {key} is {here.get(key)} in the old result and {there.get(key)} in the new one; compare results "
                "with the same dimensions"
            )


def _key(row: TimedRow) -> tuple[Any, ...]:
    return (row.called, tuple(sorted(row.sizes.items())))


def _by_key(rows: list[TimedRow], path: Path) -> dict[tuple[Any, ...], TimedRow]:
    """The rows of a result by identity. Raises ConfigError if two rows have the same name and sizes."""
    result: dict[tuple[Any, ...], TimedRow] = {}
    for row in rows:
        if _key(row) in result:
            raise ConfigError(
                f"{path}: two rows are named '{row.title}'; use a result whose rows differ in name or size"
            )
        result[_key(row)] = row
    return result
