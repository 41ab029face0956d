"""torchrun for `boost launch`: torch's own launcher and elastic agent, but with exit codes and errors of ours.

torchrun exits with 1 whatever happened, restarts its processes after a mistake that no restart can fix, prints each process's
error and a report of its own, abandons its processes at the third signal, and waits for a rendezvous host that does not respond
until TCP gives up. The agent below changes these five things.
It overrides only what torch 2.13 to 2.15 have in common.
"""

import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, cast

from torch.distributed import DistError, Store, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from boost.errors import TRY_AGAIN, BoostError, ConfigError, TrainingError
from boost.files import require_open_files
from boost.text import LAUNCHED, print_error
from boost.train.failures import how_it_ended
from boost.train.heartbeat import process_name
from boost.train.overdue import MARGIN_S, end_overdue, end_process, leave
from boost.train.signals import STOP_SIGNALS

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that the agent forwards: torchrun's, and SIGUSR1, which would end torchrun and leave its processes behind."""

_LOGGERS = ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api")
_ERROR, _LEFT = "boost/error", "boost/left"
_FILES = 20
"""Number of files that the agent opens for a single process: sockets of its stores, pipes, logs."""

_LEAVE_S = 10.0
"""How long, in seconds, a node waits until the others know of an error that ends the run: it may host their store."""

_NOTE_S = 10.0
"""Time, in seconds, after which a node says that it waits for the rendezvous."""
_FINISH_S = 300.0
"""How long, in seconds, torch waits until all nodes have finished."""


class _EndedElsewhere(BoostError):
    """Another node prints the error that ends this run."""


def torchrun(options: Sequence[str], command: Sequence[str]) -> int:
    """Runs `torchrun OPTIONS -m boost.cli.main COMMAND`. Returns the exit code: 0, or 75 after a signal.

    Raises BoostError for the failure that ended the run, as soon as it is final. Call it on the main thread.
    """
    args = run.parse_args(["--signals-to-handle", SIGNALS, *options, "-m", "boost.cli.main", *command])
    if args.training_script != "boost.cli.main":
        raise ConfigError(
            f"boost launch: '{args.training_script}' is not an option of torchrun; write options before -- with their values"
        )
    os.environ[LAUNCHED] = "1"
    if "LOGLEVEL" not in os.environ:
        for name in _LOGGERS:
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    require_open_files(_FILES)
    agents: list[Agent] = []
    rendezvous = f"the rendezvous at {run.get_rdzv_endpoint(args)}"

    def agent(*arguments: object, **options: object) -> Agent:
        agents.append(Agent(*arguments, **options))  # type: ignore[arg-type]
        agents[0].meet_s = seconds("(?:join_)?timeout", 900) + connect_s  # torch's own limits end it earlier
        return agents[0]

    def seconds(option: str, default: float) -> float:
        """A time limit of torchrun's, in seconds."""
        given = re.search(rf"\b{option}=(\d+)", args.rdzv_conf)
        return float(given[1]) if given else default

    def end() -> None:
        if agents:
            agents[0].end_alone(rendezvous)
        end_process(f"{rendezvous} does not respond")

    def tell() -> None:
        if not (agents and agents[0].handlers()):
            print(f"waiting for {rendezvous}", file=sys.stderr, flush=True)

    over, begun, connect_s = threading.Event(), time.monotonic(), 2 * seconds("read_timeout", 60)
    end_overdue(over, lambda: agents[0].waits() if agents else (begun, connect_s), end)
    note = threading.Timer(_NOTE_S, tell)
    note.daemon = True
    note.start()

    api.LocalElasticAgent = agent  # type: ignore[misc, assignment]
    # Until the processes start. The rendezvous stays open for other nodes, as after a signal to torch's agent.
    for number in STOP_SIGNALS:
        signal.signal(number, _raise_signal)
    try:
        run.run(args)
    except _EndedElsewhere as error:
        return error.exit_code
    except SignalException as stop:
        if agents and (ended := agents[0].ended):  # srun ends its tasks when the first exits
            if isinstance(ended, _EndedElsewhere):
                return ended.exit_code
            raise ended from stop
        failures = agents[0].failures() if agents else {}
        if any(_code(failure) != TRY_AGAIN and failure.exitcode != -signal.SIGTERM for failure in failures.values()):
            raise agents[0].root_cause(failures, stop.sigval) from stop
        return TRY_AGAIN  # with 0, Kubernetes would count a drained pod as complete
    except (RendezvousError, DistError) as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise TrainingError(f"the nodes lost each other or did not meet at {args.rdzv_endpoint}: {reason}") from error
    finally:
        over.set()
        note.cancel()
    return 0


def _raise_signal(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))


class Agent(LocalElasticAgent):
    """Starts the processes of a node, and restarts them unless that would not help."""

    ended: BoostError | None = None
    """Why no restart would help, if this node has told the others or has been told."""
    meet_s = math.inf
    """How long it may take until all nodes have met, in seconds."""
    _wait: tuple[float, float] | None = None
    """When the current request to the rendezvous began, and its time limit, in seconds."""

    def waits(self) -> tuple[float, float] | None:
        """When this node started to wait for the rendezvous, and its limit (`end_overdue`). None while its processes run: training
        does not depend on the rendezvous."""
        handlers = self.handlers().values()
        return None if any(handler.proc.poll() is None for handler in handlers) else self._wait

    def end_alone(self, rendezvous: str) -> None:
        """Ends this node, whose processes have ended and which cannot reach the others."""
        if self._worker_group.state == WorkerState.SUCCEEDED:
            leave(0)
        failures = self.failures()
        error = self.ended or (self.root_cause(failures) if failures else None)
        if isinstance(error, _EndedElsewhere):
            leave(error.exit_code)
        reason = f"{error}; {rendezvous} does not respond" if error else f"{rendezvous} does not respond"
        end_process(reason, error.exit_code if error else TrainingError.exit_code)

    def _limit(self, seconds: float) -> None:
        """Limits the time that the requests to the rendezvous may take until the next call."""
        self._wait = time.monotonic(), seconds

    def run(self, *role: str) -> RunResult:
        self._limit(self.meet_s)
        try:
            return super().run(*role)
        finally:
            self._limit(MARGIN_S)  # until torch has left the rendezvous

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended, self._wait = self.failures(), None
        result = super()._monitor_workers(worker_group)
        self._limit(MARGIN_S + worker_group.spec.monitor_interval)
        if not result.is_failed():
            self._raise_if_ended(worker_group)
            if result.state == WorkerState.SUCCEEDED:
                self._limit(_FINISH_S + MARGIN_S)
            return result
        # After the first failure, torch ends the others, if need be with SIGKILL, and lists them too.
        failures = {
            rank: failure
            for rank, failure in result.failures.items()
            if not ended or rank in ended or failure.exitcode != -signal.SIGKILL
        }
        error = self.root_cause(failures)
        if error.exit_code == BoostError.exit_code:
            self._end_all(worker_group, error)
            raise error
        self._raise_if_ended(worker_group)
        if not self._remaining_restarts:
            raise error
        print_error(f"{error}; restarting the processes (restarts left: {self._remaining_restarts - 1})")
        return result

    def _end_all(self, group: Any, error: BoostError) -> None:
        """Tells the other nodes that no restart would help. Raises _EndedElsewhere if another node was first."""
        self.ended = error
        if group.group_world_size == 1:
            return
        mine, store = f"{group.group_rank}: {error}", cast(Store, self._store)
        first = bytes(store.compare_set(_ERROR, "", mine)).decode()
        self._leave(group, store)
        if first != mine:
            self.ended = _EndedElsewhere(first)
            raise self.ended

    def _raise_if_ended(self, group: Any) -> None:
        store = cast(Store, self._store)
        if group.group_world_size > 1 and store.check([_ERROR]):
            self.ended = _EndedElsewhere(store.get(_ERROR).decode())
            self._leave(group, store)
            raise self.ended

    def _leave(self, group: Any, store: Store) -> None:
        self._limit(_LEAVE_S + MARGIN_S)
        store.add(_LEFT, 1)
        deadline = time.monotonic() + _LEAVE_S
        while store.add(_LEFT, 0) < group.group_world_size and time.monotonic() < deadline:
            time.sleep(0.05)

    def _shutdown(self, *arguments: object, **options: object) -> None:
        if isinstance(sys.exception(), SignalException):
            # The processes have the signal and are saving. Slurm repeats it, and each repetition would cut the wait short.
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        self._wait = None
        super()._shutdown(*arguments, **options)  # type: ignore[arg-type]
        self._limit(self.meet_s)

    def handlers(self) -> dict[int, Any]:
        """torch's handlers of this node's processes, by local rank."""
        context: Any = self._pcontext
        return context.subprocess_handlers if context else {}

    def failures(self) -> dict[int, ProcessFailure]:
        """The processes that have ended with an error, by global rank."""
        context: Any = self._pcontext
        found = {}
        for local, handler in self.handlers().items():
            if code := handler.proc.poll():
                rank = self._worker_group.workers[local].global_rank
                found[rank] = ProcessFailure(local, handler.proc.pid, code, context.error_files[local])
        return found

    def root_cause(self, failures: Mapping[int, ProcessFailure], stop: signal.Signals | None = None) -> BoostError:
        """The error of the process that explains the others' errors, as in `boost.train.failures.root_cause`.

        `stop`: the signal after which they failed, if there was one.
        """

        def order(rank: int) -> tuple[int, float]:
            code = failures[rank].exitcode
            symptom = code in (TRY_AGAIN, -signal.SIGTERM)  # after the first failure, torch sends SIGTERM to the others
            precedence = (code == BoostError.exit_code, code < 0 and not symptom, code == 1, not symptom, True)
            return precedence.index(True), float(failures[rank].error_file_data.get("timestamp", time.time()))

        rank = min(failures, key=order)
        failure, who = failures[rank], process_name(rank, self._worker_group.workers[0].world_size)
        if "timestamp" in failure.error_file_data:
            message = str(failure.message)
        elif failure.exitcode == -signal.SIGKILL and stop:
            message = (
                f"{who} was still saving when torchrun's time limit after {stop.name} ended it; set "
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT to more seconds than a step and a save take"
            )
        elif failure.exitcode == TRY_AGAIN:
            message = "a signal to another node stopped the run"
        else:
            message = f"{who} {how_it_ended(failure.exitcode)}"
        error = BoostError(message)
        error.exit_code = _code(failure)
        return error


def _code(failure: ProcessFailure) -> int:
    return TrainingError.exit_code if failure.exitcode < 0 else failure.exitcode
