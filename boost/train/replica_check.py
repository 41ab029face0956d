"""The error message of a failed replica check."""

from pathlib import Path

from boost.errors import TrainingError
from boost.parallel.replicas import Mismatch, ReplicaReport


def require_sound(report: ReplicaReport, step: int, latest: Path | None) -> None:
    """Raises TrainingError if replicas differ or a weight is not finite. `latest`: the newest checkpoint that passed this check."""
    if not report.mismatches and not report.not_finite:
        return
    found = [_mismatch(each, report.hosts) for each in report.mismatches[:3]]
    found += [
        f"weight '{name}' of {_named([rank], report.hosts)} is not finite" for rank, name in report.not_finite[:3]
    ]
    more = len(report.mismatches) + len(report.not_finite) - len(found)
    cause = "memory or arithmetic failed there" if report.mismatches else "optim.lr is too high, or memory failed there"
    advice = f"resume from '{latest}' with --resume auto" if latest else "there is no checkpoint: start over"
    raise TrainingError(
        f"at step {step}, {'; '.join(found)}{f' (and {more} more)' if more else ''}: {cause}; these weights were not "
        f"saved; {advice}, and exclude the machine if it happens again"
    )


def _mismatch(found: Mismatch, hosts: tuple[str, ...]) -> str:
    who = _named(found.processes, hosts)
    if not found.certain:
        return f"{who} should have the same weights but do not (without a majority, it is unknown which are right)"
    has = "has" if len(found.processes) == 1 else "have"
    same = found.copies - len(found.processes)
    return f"{who} {has} different weights than the {same} replicas that agree"


def _named(ranks: tuple[int, ...] | list[int], hosts: tuple[str, ...]) -> str:
    """'process 3 (host a)', 'processes 0 (host a) and 1 (host b)'."""
    *others, last = [f"{rank} (host {hosts[rank]})" for rank in ranks]
    return f"processes {', '.join(others)} and {last}" if others else f"process {last}"
