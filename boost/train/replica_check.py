"""The check of replicas around a run: when it is made, and what a user reads when it fails."""

from pathlib import Path

from boost.errors import TrainingError
from boost.parallel.replicas import Mismatch, ReplicaReport


def require_sound(report: ReplicaReport, step: int, latest: Path | None) -> None:
    """Raises TrainingError if replicas differ or a weight is not finite; `latest`: the newest checkpoint, saved after a check."""
    if not report.mismatches and not report.not_finite:
        return
    found = [_mismatch(each, report.hosts) for each in report.mismatches[:3]]
    found += [
        f"weight '{name}' of {_named([rank], report.hosts)} is not finite" for rank, name in report.not_finite[:3]
    ]
    more = len(report.mismatches) + len(report.not_finite) - len(found)
    cause = "memory or arithmetic failed there" if report.mismatches else "optim.lr is too high, or memory failed there"
    way_out = f"resume from '{latest}' with --resume auto" if latest else "no checkpoint is there: start again"
    raise TrainingError(
        f"at step {step}, {'; '.join(found)}{f' (and {more} more)' if more else ''}: {cause}, and nothing of it was "
        f"saved; {way_out}, and leave out the machine if it happens again"
    )


def _mismatch(found: Mismatch, hosts: tuple[str, ...]) -> str:
    who = _named(found.processes, hosts)
    if not found.certain:
        return f"{who} should hold the same weights and do not (no majority tells which is right)"
    holds = "holds" if len(found.processes) == 1 else "hold"
    same = found.copies - len(found.processes)
    return f"{who} {holds} other weights than the {same} replicas that agree"


def _named(ranks: tuple[int, ...] | list[int], hosts: tuple[str, ...]) -> str:
    """'process 3 (host a)', 'processes 0 (host a) and 1 (host b)'."""
    *others, last = [f"{rank} (host {hosts[rank]})" for rank in ranks]
    return f"processes {', '.join(others)} and {last}" if others else f"process {last}"
