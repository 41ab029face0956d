"""Reads results of the wire experiment: step seconds by group, wire and contender.

A result lists launches, each of one group of contenders on one wire, with the seconds of every round.
"""

from collections.abc import Sequence

from benchmarks.experiments.contest import Ratio, ratio, spread
from benchmarks.experiments.results import Facts
from benchmarks.experiments.wire_plan import NO_LIMIT
from boost.errors import MeasurementError


def groups_of(facts: Facts) -> list[str]:
    """Names of the groups that have results, in order."""
    return list(dict.fromkeys(launch["group"] for launch in facts["groups"]))


def launches_of(facts: Facts, group: str) -> list[Facts]:
    """All launches of a group, on all wires."""
    return [launch for launch in facts["groups"] if launch["group"] == group]


def wires(facts: Facts, group: str) -> dict[str, float | None]:
    """Mbit/s of every wire of a group by name, fastest first; None: no limit. Unmarked wires are named by their rate."""
    rates = {launch["wire"]: launch["mbit"] for launch in launches_of(facts, group)}
    return dict(sorted(rates.items(), key=lambda wire: -(wire[1] or float("inf"))))


def wire_name(mbit: float | None) -> str:
    """Name of an unmarked wire."""
    return NO_LIMIT if mbit is None else f"{mbit:g} Mbit/s"


def on_wire(facts: Facts, group: str, wire: str) -> list[Facts]:
    """Launches of a group on one wire."""
    return [launch for launch in launches_of(facts, group) if launch["wire"] == wire]


def row_of(launch: Facts, name: str) -> Facts:
    """The row of a contender. Raises MeasurementError if the launch has none."""
    for row in launch["rows"]:
        if row["name"] == name:
            return dict(row)
    raise MeasurementError(f"'{name}' was not measured; contenders: {', '.join(row['name'] for row in launch['rows'])}")


def names_of(facts: Facts, group: str) -> list[str]:
    """Names of a group's contenders, in order."""
    return [row["name"] for row in launches_of(facts, group)[0]["rows"]]


def seconds_of(facts: Facts, group: str, wire: str, name: str) -> list[list[float]]:
    """Step seconds of a contender: launches with their rounds."""
    return [row_of(launch, name)["seconds"] for launch in on_wire(facts, group, wire)]


def collective_seconds(facts: Facts, group: str, wire: str, name: str) -> list[list[float]]:
    """Seconds of a bare collective or a copy: launches with their rounds."""
    return [launch["collectives"][name] for launch in on_wire(facts, group, wire)]


def faster(facts: Facts, group: str, wire: str, ours: str, theirs: str) -> Ratio:
    """How many times as fast `ours` is as `theirs`."""
    return ratio(seconds_of(facts, group, wire, theirs), seconds_of(facts, group, wire, ours))


def fastest(facts: Facts, group: str, wire: str, names: Sequence[str]) -> str:
    """The contender with the shortest median step, of those that were measured."""
    measured = set(names_of(facts, group))
    found = [name for name in names if name in measured]
    return min(found, key=lambda name: spread(seconds_of(facts, group, wire, name)).median)
