"""Several launches of one experiment as one result: seconds of every launch, everything else of the first.

Processes, memory layout and kernel choices stay the same within a launch, so an experiment that runs once measures them too.
`contest.bootstrap` resamples launches before rounds.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.results import Facts, require_one_machine
from boost.errors import MeasurementError


def merged(results: Sequence[Facts]) -> Facts:
    """One result from those of several launches: each list of seconds becomes a list of launches.

    Raises MeasurementError if the launches are of different experiments, machines, commits, configurations or contenders.
    """
    first = results[0]
    require_one_machine(results)
    for other in results[1:]:
        for what, ours, theirs in (
            ("experiment", first["experiment"], other["experiment"]),
            ("commit", first["environment"]["git"], other["environment"]["git"]),
            ("config", first["config"], other["config"]),
            ("rounds", first["rounds"], other["rounds"]),
        ):
            if ours != theirs:
                raise MeasurementError(f"launches differ in {what}: {ours} and {theirs}; run all launches again")
    whole: Facts = _merged("", results)
    return {**whole, "launches": len(results)}


def _merged(key: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        if any(not isinstance(value, dict) or value.keys() != first.keys() for value in values):
            raise MeasurementError(f"launches differ in the names below {key or 'the result'}; run all launches again")
        return {name: _merged("seconds" if key == "seconds" else name, [v[name] for v in values]) for name in first}
    if isinstance(first, list):
        if any(not isinstance(value, list) or len(value) != len(first) for value in values):
            raise MeasurementError(f"launches differ in the length of {key}; run all launches again")
        if key == "seconds" and all(isinstance(each, int | float) for each in first):
            return list(values)
        return [_merged(key, parts) for parts in zip(*values, strict=True)]
    return first
