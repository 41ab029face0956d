"""In-step recovery (run.recovery = "in-step"): the current step completes without the lost replica, which rejoins between two
steps after a restart. docs/recovery.md explains the design; `boost.elastic.membership` implements the agreement protocol.

All processes run the same sequence of collective operations, and a process completes one only after all have entered it. So if a
replica is lost, the survivors are in the same operation or in two consecutive ones: those behind take its result, or all repeat it.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist

from boost import errors
from boost.config import Config
from boost.config.schema import ParallelConfig
from boost.elastic.beats import WAITS_S, WATCH_S, MemberBeats
from boost.elastic.groups import Membership, disconnect_abandoned, has_abandoned
from boost.elastic.hooks import LOOK_S, MembershipChange
from boost.elastic.membership import DEAD, SLOW, Coordinator, Decision, Member, Report, deal
from boost.elastic.mesh import join_members, open_replica, replica_of_rank, replica_size, waiting_mesh
from boost.elastic.optimizer import divided, transfer_state
from boost.errors import BoostError, ConfigError, ExcludedError, StoppedError, TrainingError
from boost.parallel.mesh import T
from boost.text import JsonObject
from boost.train.agreement import PeersLostError, difference
from boost.train.checkpoint import Position, SavedCheckpoint
from boost.train.evaluate import Evaluation
from boost.train.failures import first_sentence, is_lost_connection
from boost.train.heartbeat import SILENCE_S, Beat, apply_timeout, board_of
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.overdue import MARGIN_S, end_overdue, end_process, leave, time_limit
from boost.train.rendezvous import Stopped, choose_device, file_store, launch_dir, meet, require_interface
from boost.train.replicas import Mismatch, ReplicaReport, digest

log = logging.getLogger("boost")

INCARNATION = "BOOST_INCARNATION"
"""Environment variable set by the single-machine launcher: name of this incarnation of the replica."""
REPLICA, COORDINATOR = "BOOST_REPLICA", "BOOST_COORDINATOR"
"""Environment variables of a replica under torchrun or a similar launcher: its number, and host:port of `boost coordinate`."""

PATIENCE = 2
"""A remote store may be silent for this multiple of run.heartbeat_timeout_s while this process waits for other processes."""
EXCLUDED_GRACE_S = 5.0
"""Time that a process has to exit on its own once the others continue without it, in seconds."""

_REPEAT = object()


class Recovery:
    """In-step recovery on one process: its replica and its current membership.

    Training does not depend on the run's store. Only a change of membership waits for it; between changes, a thread asks.
    """

    _asks_since: float | None = None
    """When this process started to ask the store for what it cannot continue without; None if it does not."""
    _waiting_for = -1
    """The latest membership that a replica waits to join."""
    _is_told = False
    """Whether the user has been told that the store does not respond."""

    def __init__(self, config: Config, stopped: Stopped) -> None:
        """Joins this process's replica and, unless the replica is a restart (`is_restart`), the first membership.

        Raises TrainingError if processes are missing after run.startup_timeout_s, and StoppedError on a stop signal.
        """
        run, parallel = config.run, config.parallel
        device = choose_device(run.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # A failed communicator must not end the process: the process aborts it, and the next membership creates a new one.
            # torchrun sets the opposite, so this overwrites any earlier value.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(run.timeout_s))  # torch's default: 30 minutes
        number, process, store, self.store, incarnation = _start(parallel, run.startup_timeout_s, stopped)
        self.replica = open_replica(parallel, device, store, process, run.startup_timeout_s)
        self.member = Member(number, incarnation)
        self.slot, self.slots = number * replica_size(parallel) + process, parallel.world_size
        self.operation = 0
        self._last: object = None
        self.micro_batches = config.train.global_batch // config.train.micro_batch
        """Micro-batches in a step, on all processes."""
        self.held: list[int] = []
        """Micro-batches in the current step whose gradients this process holds."""
        self.repeats = False
        """Whether the current operation is being repeated."""
        self._depth, self._admits, self._closed = 0, False, threading.Event()
        self.trainer: Trainer | None = None
        self._is_fitting, self._early = False, list[MembershipChange]()
        self._repeats_save = False
        """Whether a save was abandoned, which the remaining replicas repeat."""
        self._beats = MemberBeats(board_of(self.store), self.slots, replica_size(parallel), run.heartbeat_timeout_s)
        self._coordinator = Coordinator(self.store, parallel.dp, replica_size(parallel), self._beats.status)
        self.membership = Membership(-1)
        self._where = "" if launch_dir() else os.environ[COORDINATOR]
        self._patience_s, self._answered = PATIENCE * run.heartbeat_timeout_s, time.monotonic()
        self._looks_at_pace, self.beats, self._slow = run.slow_steps > 0, list[Beat](), dict[Member, str]()
        self.warnings: list[str] = []
        """Warnings of other threads, for the main thread to pass on."""

        self._stopped = stopped
        with _startup_limit(self._where, run.startup_timeout_s):
            founded = self._coordinator.form_first(
                self.member, process, run.startup_timeout_s, self._require_not_stopped
            )
        self.is_restart = founded is None
        decision = founded or self._coordinator.latest()
        assert decision is not None, "a restarted replica finds a membership"
        self.decision = self._connected = decision
        self._lost_reasons: dict[str, str] = {}
        self.mesh = waiting_mesh(self.replica, self.run)
        if founded is not None:
            try:
                self._connect(founded)
            except PeersLostError as error:
                raise TrainingError(f"a process was lost during startup ({error}); start the run again") from error
        if self._where:
            end_overdue(self._closed, self._waits, self._end_alone)
        threading.Thread(target=self._watch, name="boost-recovery", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether any process has completed the last operation in the run."""
        return self.store.check(["done"])

    def exclude_slow(self, member: Member, text: str) -> None:
        """Excludes a slow member, soon; the others continue without it."""
        self._slow[member] = text

    # Operations.

    def run(self, attempt: Callable[[], T]) -> T:
        """Runs one collective operation. If a replica is lost, the survivors repeat it or take the result from a process
        that has already completed it.

        Raises what `attempt` raises; ExcludedError if the others continue without this replica; TrainingError if training cannot
        continue.
        """
        if self._depth or self.trainer is None or threading.current_thread() is not threading.main_thread():
            return attempt()
        self._depth += 1
        try:
            while True:
                outcome: T | BoostError
                try:
                    try:
                        outcome = attempt()
                    except BoostError as error:
                        outcome = error
                    if self.mesh.device.type == "cuda" and self.membership.over.is_set():
                        raise PeersLostError("the membership ended: the output of an aborted kernel is invalid")
                except PeersLostError as lost:
                    log.info("membership %d is over: %s", self.decision.number, lost)
                    of_others = self._recover()
                    if of_others is _REPEAT:
                        continue
                    self._complete(of_others)
                    return cast(T, decode(of_others))
                self._complete(encode(outcome))
                if isinstance(outcome, BoostError):
                    raise outcome
                return outcome
        finally:
            self._depth -= 1

    def _complete(self, result: object) -> None:
        self.operation, self._last, self.held, self.repeats = self.operation + 1, result, [], False

    def assigned(self) -> list[int]:
        """This process's micro-batches in the current step, in addition to those that it already holds.

        They are not the usual share if a replica was lost in this step, because the members keep the micro-batches that they
        hold."""
        decision = self.decision
        known = decision.held if self.operation == decision.operation else {}
        place = decision.place(self.member)
        assert place is not None, "a process only trains as a member"
        return deal(self.micro_batches, [known.get(member.incarnation, ()) for member in decision.members])[place]

    def _recover(self) -> object:
        """Joins the next membership. Returns the result of the current operation if another process has it, else _REPEAT."""
        begun = time.monotonic()
        with self._asking():
            while not self.is_over:
                report = Report(self.operation, self._last, tuple(self.held), admits=self._admits)
                decision = self._coordinator.agree(self.decision, self.member, self.replica.process, report)
                try:
                    self._adopt(decision, begun)
                except PeersLostError as again:
                    log.info("membership %d is over: %s", self.decision.number, again)
                    continue
                self.repeats = True
                return self.decision.result if self.operation < self.decision.operation else _REPEAT
            return None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Context manager around requests to the store on the main thread. The process ends if the store does not respond."""
        self._asks_since = time.monotonic()
        try:
            yield
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise TrainingError(
                f"the run's store at {self._where} does not respond ({first_sentence(error)}), so the replicas cannot agree on how "
                "to continue; start a new 'boost coordinate' and resume with --resume auto"
            ) from None
        finally:
            self._asks_since = None

    def _adopt(self, decision: Decision, begun: float) -> None:
        # A membership may end before it is connected, so report all changes since the last connected one.
        self._lost_reasons |= decision.lost
        self._connect(decision)
        assert self.trainer is not None, "memberships only change during training"
        before, after = set(self._connected.members), set(decision.members)
        event = MembershipChange(
            step=self.trainer.position.step + 1,
            replicas=len(after),
            of=self.trainer.config.parallel.dp,
            lost=tuple((member.replica, self._lost_reasons[member.incarnation]) for member in sorted(before - after)),
            joined=tuple(member.replica for member in sorted(after - before)),
            seconds=time.monotonic() - begun,
        )
        self._connected, self._lost_reasons = decision, {}
        self._tell(self.trainer, event)

    def _tell(self, trainer: Trainer, event: MembershipChange) -> None:
        """Continues with a new set of replicas: `mesh` is already up to date, and this process may now be the main one."""
        trainer.stepper.prefetcher.close()
        trainer.takes_over = True
        promoted = [hook for hook in trainer.all_hooks if hook not in trainer.hooks] if self.mesh.is_main else []
        if not self._is_fitting:  # this replica has just rejoined: `fit` sets up all hooks
            trainer.hooks[:0] = promoted
            self._early.append(event)
            return
        trainer.add_hooks(promoted)
        trainer.notify("on_event", event)
        if self._repeats_save:
            self._repeats_save = False
            trainer.request_save()

    def on_train_start(self, trainer: Trainer) -> None:
        """Tells the hooks, which have started, of changes since this replica has rejoined."""
        self._is_fitting = True
        for event in self._early:
            trainer.notify("on_event", event)

    def _connect(self, decision: Decision) -> None:
        """Replaces the previous membership's process groups with those of this one. Raises PeersLostError."""
        self.membership.end()
        if self.trainer is not None and self.trainer.saves.saver.abandon():
            self._repeats_save = True
        self.membership.leave()
        number, self.decision = decision.number, decision
        self.membership = Membership(number, lambda reason: self._coordinator.end_membership(number, reason))
        self._coordinator.wait_until_ready(decision, self.member, self.replica.process)
        self.mesh.become(join_members(self.replica, decision, self.member, self.store, self.membership))
        apply_timeout()

    # Rejoining replicas.

    def has_waiting(self) -> bool:
        """Whether a replica waits to join, as far as this process knows."""
        return self._waiting_for == self.decision.number

    def admit(self) -> None:
        """Admits the waiting replicas. Collective; called between two steps."""
        assert self.trainer is not None, "replicas are only admitted during training"

        def admit() -> None:
            if not self.repeats:  # a repeated attempt is already in a new membership
                begun = time.monotonic()
                with self._asking():
                    self.membership.lost("a replica joins")
                    report = Report(self.operation, self._last, admits=True)
                    decision = self._coordinator.agree(self.decision, self.member, self.replica.process, report)
                    self._adopt(decision, begun)
            self._transfer_state()

        self._admits = True
        try:
            self.run(admit)
        finally:
            self._admits = False
        if own := divided(self.trainer.optimizer):
            own.commit_transfer()
        self.trainer.check_replicas(again=True)
        self.trainer.signals_to_reduce = True  # must match rejoined replicas, which start with True

    def enter(self, trainer: Trainer) -> None:
        """Waits until the others admit this replica, then receives weights, moments and position from one of them.

        Raises ExcludedError on failure, so that the replica is restarted, and StoppedError if the run ends first, or on a
        stop signal to a process in this replica.
        """
        if self.replica.size > 1:
            dist.barrier()
        if self.replica.process == 0:
            self._coordinator.announce(self.member)
        try:
            with self._asking():
                decision = self._admission()
                self._connect(decision)
            self._transfer_state(trainer)
        except PeersLostError as error:
            self._coordinator.exclude(self.member.incarnation, DEAD, "had not joined yet")
            raise ExcludedError(f"the membership ended before this replica had joined ({error})") from error
        if own := divided(trainer.optimizer):
            own.commit_transfer()
        self.trainer, self.operation, self._connected = trainer, decision.operation, decision
        self._complete(None)
        trainer.check_replicas(again=True)

    def _admission(self) -> Decision:
        """Waits for the decision that admits this replica."""
        decision = self.decision
        while True:
            decision = self._coordinator.latest(decision.number) or decision
            if decision.place(self.member) is not None:
                return decision
            if self.is_over:
                raise StoppedError("the end of the run")
            self._require_not_stopped()
            if why := self._coordinator.lost_reason(self.member.incarnation):
                raise ExcludedError(f"the other replicas did not admit this replica ({why})")
            # Under torchrun, if no member is left, only heartbeats show that members were lost.
            lost = [self._coordinator.lost_reason(m.incarnation) or self._beats.status(m) for m in decision.members]
            if decision.refused or all(lost):
                self._coordinator.exclude_lost(decision.members, self.member)  # so that launchers end hung processes
                raise ExcludedError(decision.refused or "no replica with weights is left; resume with --resume auto")
            time.sleep(0.02)

    def _require_not_stopped(self) -> None:
        """Raises StoppedError after a stop signal to this process or another one in a waiting replica."""
        key = f"stopped/{self.member.incarnation}"
        if name := self._stopped():
            self.store.set(key, name)
            raise StoppedError(name)
        if self.store.check([key]):
            raise StoppedError(self.store.get(key).decode())

    def _transfer_state(self, newcomer: Trainer | None = None) -> None:
        """Sends weights, moments and position to joining replicas from the first replica that has them. Collective.

        Raises TrainingError if the replicas' states are not bitwise identical afterwards.
        """
        trainer = newcomer or self.trainer
        assert trainer is not None, "a joining replica passes its trainer"
        if own := divided(trainer.optimizer):
            own.discard_transfer()
        if not self.decision.joined:
            self.mesh.barrier()
            return
        donor = next(i for i, m in enumerate(self.decision.members) if m.incarnation not in self.decision.joined)
        dp, key = self.mesh.dp, f"state/{self.decision.number}"
        if dp.rank == donor and self.replica.process == 0:
            self.store.set(key, json.dumps(state_of(trainer)))
        if newcomer is not None:
            while not self.store.check([key]):
                if self.membership.over.is_set():
                    raise PeersLostError("the membership ended before this replica received the training position")
                time.sleep(0.01)
            take_state(newcomer, json.loads(self.store.get(key)))
        weights, takes = [fused.tensor.detach() for fused in trainer.fused_params], newcomer is not None
        for tensor in weights:
            sent = tensor if takes or dp.rank == donor else torch.empty_like(tensor)
            dist.broadcast(sent, group=dp.group, group_src=donor)
        of_optimizer = transfer_state(trainer.optimizer, self.mesh, donor, takes or dp.rank == donor)
        mine = torch.stack([digest(weights, self.mesh.device), *of_optimizer])
        digests = [torch.empty_like(mine) for _ in range(dp.size)]
        dist.all_gather(digests, mine, group=dp.group)
        if any(len(set(copies) - {0}) > 1 for copies in zip(*(own.tolist() for own in digests), strict=True)):
            raise TrainingError(
                f"replica {self.member.replica} differs from the other replicas after the state was transferred: memory or the "
                "network failed; resume with --resume auto"
            )
        self.mesh.barrier()

    # Background checks.

    def _watch(self) -> None:
        """Detects the end of the membership, in a separate thread, while the main thread computes or waits."""
        store = self.store if launch_dir() else self.store.clone()  # type: ignore[attr-defined]
        coordinator = Coordinator(store, self.slots, 1, self._beats.status)
        excluded_at: float | None = None
        looked = 0.0
        while not self._closed.wait(WATCH_S):
            disconnect_abandoned()
            try:
                excluded_at = self._check_membership(coordinator, excluded_at)
                for member, text in list(self._slow.items()):
                    coordinator.exclude(member.incarnation, SLOW, text)
                    del self._slow[member]
                if self._looks_at_pace and self.mesh.is_main and time.monotonic() - looked > LOOK_S:
                    self.beats, looked = self._beats.board.read(self.slots), time.monotonic()
                self._answered, self._is_told = time.monotonic(), False
            except (OSError, RuntimeError) as error:
                self._tell_silence(first_sentence(error))
                if self._where:  # c10d does not reconnect, and prints a C++ stack for each further request
                    self._answered = math.inf  # requests fail at once, so nothing blocks
                    return

    def _tell_silence(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            at = f" at {self._where}" if self._where else ""
            self.warnings.append(
                f"the run's store{at} does not respond ({why}); the run continues until its next failure"
            )

    def _waits(self) -> tuple[float, float] | None:
        """When this process started waiting, for others in a collective or for a decision, or when the store responded, whichever
        is later, and how long the store may be silent; None if this process is not waiting."""
        if time.monotonic() - self._answered > self._patience_s:
            self._tell_silence(f"silent for {self._patience_s:g} s")
        since = self._asks_since or self.membership.waits_since()
        return None if since is None else (max(since, self._answered), self._patience_s)

    def _end_alone(self) -> None:
        """Ends this process. It cannot tell whether the other replicas continue, so it must not continue training."""
        end_process(
            f"the run's store at {self._where} has not responded for {self._patience_s:g} s: this replica cannot tell whether the "
            "other replicas continue, so it stops"
        )

    def _check_membership(self, coordinator: Coordinator, excluded_at: float | None) -> float | None:
        """Checks once. Returns the time at which this process learned that the others continue without it; None if they do not."""
        membership, decision = self.membership, self.decision
        if membership.number != decision.number:  # the main thread is switching memberships
            return excluded_at
        if self._waiting_for != decision.number and coordinator.has_waiting(decision):
            self._waiting_for = decision.number
        if membership.number >= 0 and not membership.over.is_set() and coordinator.is_over(membership.number):
            membership.end()
        if why := coordinator.lost_reason(self.member.incarnation):
            excluded_at = excluded_at or time.monotonic()
            membership.end()
            if time.monotonic() - excluded_at > EXCLUDED_GRACE_S:  # the main thread is hung
                end_process(f"the other replicas continue without this one ({why})")
        since = membership.waits_since()
        if since is not None and time.monotonic() - since > WAITS_S and not membership.over.is_set():
            coordinator.exclude_lost([member for member in decision.members if member != self.member], self.member)
        if not membership.over.is_set():
            for member, why in coordinator.lost_among(decision.members).items():
                membership.lost(f"replica {member.replica} is lost ({why})")
        return excluded_at

    def failed(self, error: BaseException) -> None:
        """Tells the others that this process has failed, so that they need not wait to detect the failure. Under the single-machine
        launcher, a lost connection is not reported: it is only a symptom, and the launcher knows which process ended first."""
        symptom = launch_dir() and (is_lost_connection(error) or is_lost_connection(error.__cause__))
        if not isinstance(error, ExcludedError) and not symptom:

            def tell() -> None:
                what = f"{type(error).__name__} in one of its processes"
                self._coordinator.exclude(self.member.incarnation, DEAD, what)
                self.membership.lost(f"replica {self.member.replica} failed")

            _briefly(tell)

    def close(self) -> None:
        """Call when the run is complete, after its last operation."""
        _briefly(lambda: self.store.set("done", ""))  # for replicas that want to rejoin
        self._closed.set()
        self.membership.end()  # torch warns about communicators that are still open
        self.membership.leave()
        if has_abandoned() and not launch_dir():
            leave(0)


def _briefly(tell: Callable[[], object]) -> None:
    """Calls `tell`, which sends requests to the store, but waits only briefly, because they may block."""

    def attempt() -> None:
        try:
            tell()
        except (OSError, RuntimeError) as error:
            log.info("the store is not responding: %s", error)

    thread = threading.Thread(target=attempt, name="boost-tell", daemon=True)
    thread.start()
    thread.join(SILENCE_S)


def _startup_limit(where: str, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Ends the process if the run's store at `where` blocks it for much longer than the startup may take."""
    text = f"the run's store at {where} did not respond within run.startup_timeout_s = {timeout_s:g}"
    return time_limit(timeout_s + MARGIN_S, text) if where else contextlib.nullcontext()


def _start(
    parallel: ParallelConfig, timeout_s: float, stopped: Stopped
) -> tuple[int, int, dist.Store, dist.Store, str]:
    """(replica, process within it, the replica's store, the run's store, incarnation), read from the environment."""
    own: dist.Store
    require_interface()
    if folder := launch_dir():
        replica, process = replica_of_rank(parallel, int(os.environ["RANK"]))
        incarnation = os.environ.get(INCARNATION, f"{replica}.0")
        own, all_of_run = (file_store(folder / name) for name in (f"replica.{incarnation}", "members"))
        return replica, process, own, all_of_run, incarnation
    number, (host, _, port) = os.environ.get(REPLICA, ""), os.environ.get(COORDINATOR, "").partition(":")
    if not number.isdecimal() or not port.isdecimal():
        raise ConfigError(
            f"run.recovery = 'in-step' under torchrun needs the environment variables {REPLICA} = replica number (now {number!r}) "
            f"and {COORDINATOR} = host:port of 'boost coordinate'; start one torchrun per replica (docs/recovery.md)"
        )
    own, process, size = meet(timeout_s, stopped)
    if size != replica_size(parallel):
        raise ConfigError(
            f"replica {number} was started with {size} processes, but needs {replica_size(parallel)} (parallel.pp x cp x tp)"
        )
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        with _startup_limit(f"{COORDINATOR} = '{host}:{port}'", timeout_s):
            members = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise TrainingError(
            f"{COORDINATOR} = '{host}:{port}' did not respond within run.startup_timeout_s = {timeout_s:g}; start "
            "'boost coordinate' there first, and check that the port is reachable"
        ) from error
    if process == 0:
        own.set("incarnation", f"{number}.{uuid.uuid4().hex[:8]}")
    return int(number), process, dist.PrefixStore("replica", own), members, own.get("incarnation").decode()


# Messages between processes are JSON, so that reading one never executes code.


def state_of(trainer: Trainer) -> JsonObject:
    """The state that a rejoining replica needs besides weights and moments: the trainer's position, the state of its hooks, and
    what the others have read from files."""
    hooks = [hook for hook in trainer.hooks if isinstance(hook, Hook)]
    own = divided(trainer.optimizer)
    return {
        "facts": trainer.facts(),
        "token": trainer.run.token,
        "inherited": trainer.inherited,
        "position": dataclasses.asdict(trainer.position),
        "judge": trainer.judge.state(),
        "division": list(own.division.names) if own else [],
        "updates": trainer.optimizer.updates,
        "hooks": {type(hook).__name__: hook.state() for hook in hooks if not hook.main_only},
    }


def take_state(trainer: Trainer, state: JsonObject) -> None:
    """Inverse of `state_of`. Raises ConfigError if this replica was started with another configuration, software or data."""
    if problem := difference(trainer.facts(), state["facts"], "this replica", "the others"):
        raise ConfigError(problem)
    trainer.run.token = state["token"]
    trainer.inherit(state["inherited"])
    trainer.position = Position(**state["position"])
    trainer.judge.take_state(state["judge"])
    if own := divided(trainer.optimizer):
        own.take_division(state["division"])
    trainer.optimizer.updates = state["updates"]
    for hook in trainer.hooks:
        if isinstance(hook, Hook) and (found := state["hooks"].get(type(hook).__name__)):
            hook.take_state(found)


Result = Evaluation | SavedCheckpoint | ReplicaReport | Mismatch
_KINDS: dict[str, Callable[..., Result]] = {kind.__name__: kind for kind in get_args(Result)}


def encode(value: object) -> object:
    """Encodes an operation's result, or the error that it raised, for processes that are one operation behind: a scalar as itself,
    anything else as [type, content]. The content of an unknown type is None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return ["Path", str(value)]
    if isinstance(value, BoostError):
        return [type(value).__name__, str(value)]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [encode(each) for each in value]]
    if isinstance(value, dict | Result):
        named = value if isinstance(value, dict) else vars(value)
        return [type(value).__name__, {name: encode(each) for name, each in named.items()}]
    return [type(value).__name__, None]


def decode(value: Any) -> object:
    """Inverse of `encode`. If the operation raised an error, raises it again."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if isinstance(content, list):
        parts = [decode(each) for each in content]
        return tuple(parts) if kind == "tuple" else parts
    if isinstance(content, dict):
        named = {name: decode(each) for name, each in content.items()}
        return _KINDS[kind](**named) if kind in _KINDS else named
    if kind == "Path":
        return Path(content)
    if content is not None:
        raise getattr(errors, kind, TrainingError)(content)
    raise TrainingError(f"a replica was lost during the exchange of a result of type {kind}; resume with --resume auto")
