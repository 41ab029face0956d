"""Reads results of the wire experiment: step seconds by group, wire and contender.

A result lists launches, each of one group of contenders on one wire, with the seconds of every round. Results of older versions
have one group without a name.
"""

from collections.abc import Sequence

from benchmarks.experiments.contest import Ratio, ratio, spread
from benchmarks.experiments.results import Facts
from benchmarks.experiments.wire_plan import BTP_CP, NO_LIMIT
from boost.errors import MeasurementError


def set_of(facts: Facts) -> str:
    """Name of the set that was measured."""
    return str(
        facts.get("set") or ("many" if any(row["name"] == BTP_CP for row in facts["groups"][0]["rows"]) else "main")
    )


def groups_of(facts: Facts) -> list[str]:
    """Names of the groups that have results, in order; '' in results of older versions."""
    return list(dict.fromkeys(launch.get("group", "") for launch in facts["groups"]))


def launches_of(facts: Facts, group: str) -> list[Facts]:
    """All launches of a group, on all wires."""
    return [launch for launch in facts["groups"] if launch.get("group", "") == group]


def wires(facts: Facts, group: str) -> dict[str, float | None]:
    """Mbit/s of every wire of a group by name, fastest first; None: no limit. Unmarked wires are named by their rate."""
    found = {_wire(facts, launch): launch["mbit"] for launch in launches_of(facts, group)}
    return dict(sorted(found.items(), key=lambda each: -(each[1] or float("inf"))))


def _wire(facts: Facts, launch: Facts) -> str:
    if "wire" in launch:
        return str(launch["wire"])
    marked = {mbit: name for name, mbit in facts["marked"].items()}
    return wire_name(launch["mbit"]) if launch["mbit"] not in marked else str(marked[launch["mbit"]])


def wire_name(mbit: float | None) -> str:
    """Name of an unmarked wire."""
    return NO_LIMIT if mbit is None else f"{mbit:g} Mbit/s"


def on_wire(facts: Facts, group: str, wire: str) -> list[Facts]:
    """Launches of a group on one wire."""
    return [launch for launch in launches_of(facts, group) if _wire(facts, launch) == wire]


def row_of(launch: Facts, name: str) -> Facts:
    """The row of a contender. Raises MeasurementError if the launch has none."""
    for row in launch["rows"]:
        if row["name"] == name:
            found: Facts = row
            return found
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
