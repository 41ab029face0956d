"""Results of experiments that take hours: kept after every run, and resumed by the same command."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.experiments.results import Facts
from boost.errors import ConfigError
from boost.train.rundir import storage_errors

JSON = ".json"
"""Suffix of results."""


def keep(out: Path, facts: Facts, suffix: str = JSON) -> None:
    """Writes the results so far to `out` with this suffix, atomically. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        written = out.with_suffix(f"{suffix}.tmp")
        written.write_text(json.dumps(facts) + "\n", encoding="utf-8")
        os.replace(written, out.with_suffix(suffix))


def resumed(fresh: Facts, results: Mapping[str, Any], out: Path, suffix: str = JSON) -> Facts:
    """`fresh` with its `results` (name: value without results) as kept in `out` with this suffix, or empty if that does not exist.

    `fresh["settings"]` says what may be resumed. Raises ConfigError if the file has results with other settings or is not a result
    of a resumable experiment.
    """
    fresh = {**fresh, "settings": json.loads(json.dumps(fresh["settings"]))}  # as it is read back: lists, not tuples
    path = out.with_suffix(suffix)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {**fresh, **results}
    except ValueError:
        raise ConfigError(f"--out = '{out}': {path} is not JSON; remove it or choose another --out") from None
    if not isinstance(kept, dict) or "settings" not in kept:
        raise ConfigError(
            f"--out = '{out}': {path} has no settings, so it cannot be resumed (it is of an older version or another experiment); "
            "remove it or choose another --out"
        )
    if (different := next(differences(kept["settings"], fresh["settings"]), None)) is not None:
        raise ConfigError(
            f"--out = '{out}' has results with other settings: {different}; use those settings, choose another --out, "
            f"or remove {path}"
        )
    return {**fresh, **{name: kept.get(name, empty) for name, empty in results.items()}}


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yields a message such as 'config.train.steps is 300 there and 400 here' for each setting that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} is {json.dumps(before)} there and {json.dumps(now)} here"
