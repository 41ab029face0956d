"""What all processes of a run decide together. A process that acted on a file or a clock that only it has read could continue from
another step than the others, or enter a collective that they do not enter.

`run_on_main`: one process looks, and all of them use its answer. `run_on_all`: every process looks, and all of them get every
answer. If one process fails, all of them raise the same error.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch.distributed as dist

from boost import errors
from boost.errors import BoostError, ConfigError, LostRunError
from boost.parallel.mesh import Mesh, T
from boost.text import brief


class ProcessFailure(Exception):
    """An action failed on at least one process. Raised on all processes."""


class PeersLostError(Exception):
    """A process in another replica was lost, so a collective will not complete. `Mesh.together` repeats the operation."""


def run_on_all(
    mesh: Mesh,
    action: Callable[[], T],
    failure: type[Exception] = ProcessFailure,
    group: dist.ProcessGroup | None = None,
) -> list[T]:
    """Runs `action` on every process and returns all results by rank. If it fails on any process, raises `failure` on all of them.

    Subclasses of `failure` keep their type (so BoostError keeps that of every error for users), and so does LostRunError, after
    which nothing may continue. An unexpected error (a bug) is re-raised unchanged on its own process, and as `failure` on the
    others. `group`: process group for the exchange, by default the run's (`Mesh.together`); a background thread needs its own.
    """

    def run_and_exchange(group: dist.ProcessGroup | None) -> list[T]:
        outcome: tuple[str, str, T | None] = ("", "", None)
        bug: BaseException | None = None
        try:
            outcome = ("", "", action())
        except Exception as error:
            outcome = (root_cause(error), type(error).__name__ if isinstance(error, BoostError) else "", None)
            if not isinstance(error, OSError | BoostError | MemoryError):
                bug = error
        outcomes = [outcome]
        if mesh.size > 1:
            outcomes = [outcome] * mesh.size
            dist.all_gather_object(outcomes, outcome, group=group)
        if bug:
            raise bug
        for message, kind, _ in outcomes:
            if message:
                known = getattr(errors, kind, failure)
                raise (known if issubclass(known, (failure, LostRunError)) else failure)(message)
        return [cast(T, result) for *_, result in outcomes]

    if group is not None:
        return run_and_exchange(group)
    return mesh.together(lambda: run_and_exchange(mesh.everyone.group))


def run_on_main(
    mesh: Mesh,
    action: Callable[[], T],
    failure: type[Exception] = ProcessFailure,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Runs `action` on the main process while the others wait. Returns its result, or raises `failure`, on all processes."""
    return cast(T, run_on_all(mesh, action if mesh.is_main else lambda: None, failure, group)[0])


def root_cause(error: BaseException) -> str:
    """The error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def require_same(mesh: Mesh, facts: Mapping[str, object]) -> None:
    """Raises ConfigError on every process if one of these facts, by name, differs between processes. Collective."""
    expected = run_on_main(mesh, lambda: facts, ConfigError)
    problem = difference(facts, expected, f"process {mesh.rank}", "process 0")
    if found := next((text for text in run_on_all(mesh, lambda: problem) if text), None):
        raise ConfigError(found)


def difference(facts: Mapping[str, object], expected: Mapping[str, object], here: str, there: str) -> str | None:
    """The first fact that differs, as an error message; None if all are equal. `here` and `there` name the processes."""
    for name in dict.fromkeys((*facts, *expected)):
        own, other = (values.get(name, "missing") for values in (facts, expected))
        if own != other:
            return (
                f"{name} is {brief(own)} on {here} and {brief(other)} on {there}; start all processes with the same configuration, "
                "software and data"
            )
    return None
