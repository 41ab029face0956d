"""Runs a step of a save or load on every process and exchanges the outcomes: if one process fails, all of them raise."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from boost.errors import BoostError
from boost.parallel.mesh import Mesh


class ProcessFailure(Exception):
    """An action failed on some process. Raised on all of them."""


def run_on_all(
    mesh: Mesh,
    action: Callable[[], Any],
    failure: type[Exception] = ProcessFailure,
    group: dist.ProcessGroup | None = None,
) -> list[Any]:
    """Runs `action` on every process and returns all results by rank. If it fails on any process, raises `failure` on all of them.

    A bug (neither OSError nor BoostError) is re-raised unchanged where it happened, and as `failure` on the others. `group`:
    process group for the exchange, by default the run's (`Mesh.together`); a background thread needs its own.
    """
    if group is not None:
        return _run_once(mesh, action, failure, group)
    return mesh.together(lambda: _run_once(mesh, action, failure, mesh.everyone.group))


def _run_once(
    mesh: Mesh, action: Callable[[], Any], failure: type[Exception], group: dist.ProcessGroup | None
) -> list[Any]:
    outcome: tuple[str, Any] = ("", None)
    bug: BaseException | None = None
    try:
        outcome = ("", action())
    except (Exception, dcp.api.CheckpointException) as error:  # CheckpointException does not derive from Exception
        outcome = (root_cause(error), None)
        if not isinstance(error, OSError | BoostError | MemoryError | dcp.api.CheckpointException):
            bug = error
    outcomes = [outcome]
    if mesh.size > 1:
        outcomes = [outcome] * mesh.size
        dist.all_gather_object(outcomes, outcome, group=group)
    if bug:
        raise bug
    if message := next((message for message, _ in outcomes if message), None):
        raise failure(message)
    return [result for _, result in outcomes]


def run_on_main(
    mesh: Mesh,
    action: Callable[[], Any],
    failure: type[Exception] = ProcessFailure,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Runs `action` on the main process while the others wait. Returns its result, or raises `failure`, on all processes."""
    return run_on_all(mesh, action if mesh.is_main else lambda: None, failure, group)[0]


def root_cause(error: BaseException) -> str:
    """The error as one line, unwrapped from torch.distributed.checkpoint's exception."""
    if isinstance(error, dcp.api.CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"process {rank}: {root_cause(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
