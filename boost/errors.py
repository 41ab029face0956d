"""Errors that a user can fix. Each message is one line with the field, its value, and the fix.

The command line prints the message of a `BoostError` and exits with its `exit_code`; it shows a traceback only with `--debug`. Any
other exception is a bug in BOOST and keeps its traceback.
"""

import errno
import os
import socket
import traceback
from typing import Any

TRY_AGAIN = 75
"""Exit code after a signal to another node, to `boost launch` or to a script made the run save and stop: EX_TEMPFAIL, so that the
scheduler retries."""

_NO_THREAD = "can't start new thread"

_NETWORK = {
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EADDRINUSE,
    errno.EADDRNOTAVAIL,
}


class BoostError(Exception):
    """Base class for errors that a user can fix. The message is one line that says how to fix it."""

    exit_code = 2


class ConfigError(BoostError):
    """An unknown key, a value of the wrong type, or a value that conflicts with others."""


class DataError(BoostError):
    """A corpus, tokenizer or token store that is missing, empty, damaged or incompatible with the model."""

    is_temporary = False
    """Whether running the same command again later can succeed."""


class UnreadableDataError(DataError):
    """The system failed to read a file, which says nothing about the file's content."""

    is_temporary = True


class CheckpointError(BoostError):
    """A checkpoint that is missing, incomplete, damaged or from a different model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files have changed since it was saved. An earlier one may be intact."""


class RemovedCheckpointError(DamagedCheckpointError):
    """A checkpoint that its run, which is still training, removed while it was read."""


class StorageError(BoostError):
    """The disk is full, or a path cannot be written."""


class LostRunError(BoostError):
    """The run directory was deleted, replaced, renamed or taken over by another run. This run must not write to it any more."""


class TrainingError(BoostError):
    """Training cannot continue: the loss is not finite, or a process was lost."""

    exit_code = 3


class NonFiniteError(TrainingError):
    """A weight or optimizer moment is not finite. No checkpoint is saved; earlier ones are kept."""


class HangError(TrainingError):
    """A process in the run is not responding, or has not reached the collective that the others are waiting in."""


class ExcludedError(TrainingError):
    """The other replicas continue without this process's replica, or no replica is left to join (run.recovery = "in-step")."""


class StoppedError(BoostError):
    """A stop signal arrived before the first step, so no work is lost. The message is the signal's name."""

    exit_code = 0


class Stopped(SystemExit):
    """A signal stopped `boost.Trainer.fit` before its last step. The message names the signal, the step and the checkpoint.

    As with KeyboardInterrupt, `except Exception` does not catch it, so a script does not go on to its next model. Uncaught, it ends
    the script with exit code 75, after which a scheduler starts it again.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.code = TRY_AGAIN
        self.result = result
        """The `TrainResult`; None if the signal arrived before the first step."""


def system_limit(error: BaseException) -> str | None:
    """A description if the system refused to start a thread or a process, or to open a file, for this error or for one that
    caused it; else None."""
    refused = type(error) is RuntimeError and str(error) in (_NO_THREAD, os.strerror(errno.EAGAIN))
    if refused or (isinstance(error, BlockingIOError) and error.filename is None):
        return "the system allows no more threads or processes; raise its limit (ulimit -u, or the pids limit of a container)"
    # torch, safetensors, agreement between processes and our own errors repeat the reason in their words.
    if "too many open files" in str(error).lower() or (
        isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    ):
        return "the system allows no more open files; raise its limit (ulimit -n)"
    return system_limit(error.__cause__) if error.__cause__ else None


def explained(error: BoostError) -> str:
    """Its message, after the limit of the system that caused it, if one did."""
    limit = system_limit(error)
    return str(error) if limit is None or limit in str(error) else f"{limit} ({error})"


def system_error(error: OSError) -> BoostError:
    """The error to report for one of the system: a StorageError that names the file, or, for the network, a TrainingError, because
    another try may succeed. It names the host whose name cannot be resolved."""
    reason = error.strerror or str(error) or type(error).__name__
    is_network = isinstance(error, socket.gaierror | ConnectionError | TimeoutError) or error.errno in _NETWORK
    if not is_network or error.filename:
        return StorageError(f"{error.filename or 'file system'}: {reason}")
    calls = traceback.walk_tb(error.__traceback__)
    hosts = [frame.f_locals.get("host") for frame, _ in calls if frame.f_code.co_name == "getaddrinfo"]
    return TrainingError(f"network: {reason}" + (f" ('{hosts[-1]}')" if hosts else ""))
