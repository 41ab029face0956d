"""Results that an experiment keeps while it runs: the same command resumes it, and other settings are refused."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boost.errors import ConfigError
from boost.measure.results import Facts
from boost.train.rundir import storage_errors


def keep(out: Path, facts: Facts) -> None:
    """Writes the results so far to `out`.json, atomically. Raises StorageError."""
    with storage_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".json.partial")
        partial.write_text(json.dumps(facts) + "\n", encoding="utf-8")
        os.replace(partial, out.with_suffix(".json"))


def resumed(out: Path, fresh: Facts, *names: str) -> Facts:
    """`fresh`, empty results with their `settings`, or the same with the fields `names` of an earlier call.

    Raises ConfigError if `out`.json is not JSON, or has results with other settings.
    """
    fresh = {**fresh, "settings": json.loads(json.dumps(fresh["settings"]))}
    path = out.with_suffix(".json")
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return fresh
    except ValueError:
        raise ConfigError(f"--out = '{out}': {path} is not JSON; remove it or choose another --out") from None
    before = kept.get("settings") if isinstance(kept, dict) else None
    if before is None:
        raise ConfigError(f"--out = '{out}': {path} cannot be resumed; remove it or choose another --out")
    if (different := next(differences(before, fresh["settings"]), None)) is not None:
        raise ConfigError(
            f"--out = '{out}' has results with other settings: {different}; use those settings, choose another --out, "
            f"or remove {path}"
        )
    return {**fresh, **{name: kept.get(name, fresh[name]) for name in names}}


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yields a message such as 'config.train.steps is 300 there and 400 here' for each setting that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} is {json.dumps(before)} there and {json.dumps(now)} here"
