"""Who trains together: replicas agree through a store on who is left, who comes back, and where they go on (docs/recovery.md).

A membership has a number. It ends when one of its processes says so (`Coordinator.give_up`), or when all of its processes propose
the next one, to admit a replica. Each then reports where it stands and waits for the decision on the next one, which whoever sees
all reports first writes with one compare-and-set: the store is the only place where two histories could begin, and it takes one.

The store is also a vote, beside one for each member of the membership before that is not known to be dead: a majority goes on. So
one replica of two goes on when the other dies, and of two halves that do not reach each other the one that reaches the store;
the other half, and a minority that reaches the store while the majority is silent, stop.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from boost.errors import TrainingError
from boost.parallel.recoverable import PeersLostError

DEAD, SILENT, SLOW = "dead", "silent", "slow"
"""Why a member is gone: its processes have ended, do not answer, or hold up the others (`run.put_out_slow`)."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Seconds between two looks into the store, longer each time."""


class PutOutError(TrainingError):
    """The others go on without this process's replica."""


@dataclass(frozen=True, order=True)
class Member:
    """The processes of one start of a replica. One that comes back is another member."""

    replica: int
    incarnation: str


@dataclass(frozen=True)
class Report:
    """Where a process stands when its membership ends."""

    operation: int
    """Number of the operation that it is in and has not completed."""
    result: Any = None
    """Of the operation before it, as JSON."""
    held: tuple[int, ...] = ()
    """Micro-batches of the step whose gradients it holds."""
    has_state: bool = True
    """Whether it holds weights and moments."""
    admits: bool = False
    """Whether replicas that wait may come in."""


@dataclass(frozen=True)
class Decision:
    """A membership, the same for all of its processes."""

    number: int
    members: tuple[Member, ...]
    """The oldest first: the main process is of the first one, and stays it as long as it lives."""
    operation: int = 0
    """Where all go on."""
    result: Any = None
    """Of the operation before: for those that did not get it any more."""
    held: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Micro-batches of the step that all processes of a member hold, by incarnation."""
    joined: tuple[str, ...] = ()
    """Incarnations that get weights and moments from the others."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Members of the membership before that are not in this one: why, by incarnation."""
    seen: int = 0
    """Announcements that were considered so far."""
    refused: str = ""
    """Why nobody may go on."""

    @classmethod
    def parse(cls, text: str) -> "Decision":
        """Inverse of `json.dumps(asdict(decision))`."""
        values = json.loads(text)
        members = tuple(Member(**one) for one in values.pop("members"))
        return cls(**values | {"members": members, "joined": tuple(values["joined"])})

    def place(self, member: Member) -> int | None:
        """Index of a member; None if it is not in."""
        return self.members.index(member) if member in self.members else None


class Coordinator:
    """One process's view of the store. For one thread."""

    def __init__(
        self,
        store: dist.Store,
        replicas: int,
        processes: int,
        is_silent: Callable[[Member], bool] = lambda member: False,
    ) -> None:
        """`replicas`: of a full run; `processes`: of a replica; `is_silent`: whether a member does not answer."""
        self.store, self._replicas, self._processes, self._is_silent = store, replicas, processes, is_silent

    # What is said.

    def give_up(self, number: int, reason: str) -> None:
        """Ends a membership for all of its processes."""
        self.store.set(f"over/{number}", reason)

    def is_over(self, number: int) -> bool:
        """Whether a process has ended it."""
        return self.store.check([f"over/{number}"])

    def put_out(self, incarnation: str, why: str, text: str) -> None:
        """Says that a member is gone: it may not come back, only as another one. `why`: DEAD, SILENT or SLOW. The first word
        counts, but one that was only silent may be found dead."""
        key = f"gone/{incarnation}"
        known = self.why_gone(incarnation)
        if known is None or (why == DEAD and not known.startswith(DEAD)):
            self.store.set(key, f"{why}: {text}")

    def why_gone(self, incarnation: str) -> str | None:
        """What `put_out` has said of it; None if nobody did."""
        key = f"gone/{incarnation}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def announce(self, member: Member) -> None:
        """This replica is ready to come in: to be called by one of its processes, when all are."""
        self.store.set(f"join/{self.store.add('joins', 1)}", json.dumps(asdict(member)))

    def someone_waits(self, decision: Decision) -> bool:
        """Whether a replica has announced itself since a decision."""
        return self.store.check([f"join/{decision.seen + 1}"])

    # What is agreed on.

    def found(self, member: Member, process: int, timeout_s: float, stopped: Callable[[], None]) -> Decision | None:
        """The first membership, of all replicas; None if there has been one, so that this replica comes back.

        `stopped` raises if this process is to stop. Raises TrainingError if replicas are missing after `timeout_s`.
        """
        if self.store.check(["decision/0"]):
            return self._founded(member)
        self.store.set(f"founds/{member.replica}/{process}", member.incarnation)
        deadline, pauses = time.monotonic() + timeout_s, _pauses()
        while not self.store.check(["decision/0"]):
            stopped()
            found = {replica: self._founder(replica) for replica in range(self._replicas)}
            if missing := [replica for replica, incarnation in found.items() if incarnation is None]:
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"replica {missing[0]} of {self._replicas} did not start within run.startup_timeout_s = {timeout_s:g}"
                    )
                time.sleep(next(pauses))
                continue
            self._decide(Decision(0, tuple(Member(replica, name) for replica, name in sorted(found.items()) if name)))
        return self._founded(member)

    def _founder(self, replica: int) -> str | None:
        """The incarnation that all processes of a replica have said; None if not all have."""
        keys = [f"founds/{replica}/{process}" for process in range(self._processes)]
        if not self.store.check(keys):
            return None
        said = {self.store.get(key).decode() for key in keys}
        return said.pop() if len(said) == 1 else None

    def _founded(self, member: Member) -> Decision | None:
        decision = self.decision(0)
        return decision if decision.place(member) is not None else None

    def decision(self, number: int) -> Decision:
        """A decision that was made."""
        return Decision.parse(self.store.get(f"decision/{number}").decode())

    def latest(self, since: int = 0) -> Decision | None:
        """The newest decision, of those from number `since` on."""
        found = None
        while self.store.check([f"decision/{since}"]):
            found, since = self.decision(since), since + 1
        return found

    def admitted(self, member: Member, since: int) -> Decision | None:
        """The decision that admits a member that has announced itself, if it was made."""
        latest = self.latest(since)
        return latest if latest is not None and latest.place(member) is not None else None

    def agree(self, before: Decision, member: Member, process: int, report: Report) -> Decision:
        """Reports, and waits for the decision that follows `before`.

        Raises PutOutError if the others go on without this member, TrainingError if nobody may go on.
        """
        number = before.number + 1
        self.store.set(_report_key(number, member, process), json.dumps(asdict(report)))
        pauses = _pauses()
        while not self.store.check([f"decision/{number}"]):
            if why := self.why_gone(member.incarnation):
                raise PutOutError(f"the others go on without this replica ({why})")
            if proposal := self._proposal(before):
                self._decide(proposal)
            else:
                time.sleep(next(pauses))
        decision = self.decision(number)
        if decision.refused:
            raise TrainingError(decision.refused)
        if decision.place(member) is None:
            raise PutOutError(
                f"the others go on without this replica ({decision.lost.get(member.incarnation, 'gone')})"
            )
        return decision

    def wait_until_ready(self, decision: Decision, member: Member, process: int) -> None:
        """Returns once all processes of a membership are about to connect. Raises PeersLostError if it is over before."""
        self.store.set(f"ready/{decision.number}/{member.incarnation}/{process}", "")
        waiting = [
            (other, f"ready/{decision.number}/{other.incarnation}/{each}")
            for other in decision.members
            for each in range(self._processes)
        ]
        pauses = _pauses()
        while waiting := [(other, key) for other, key in waiting if not self.store.check([key])]:
            for other in {other for other, _ in waiting}:
                if self._is_gone(other):
                    self.give_up(decision.number, f"replica {other.replica} is gone")
            if self.is_over(decision.number):
                raise PeersLostError(f"membership {decision.number} was over before it began")
            time.sleep(next(pauses))

    def _decide(self, decision: Decision) -> None:
        """The first decision with a number stays."""
        self.store.compare_set(f"decision/{decision.number}", "", json.dumps(asdict(decision)))

    def _is_gone(self, member: Member) -> bool:
        if self.why_gone(member.incarnation) is not None:
            return True
        if self._is_silent(member):
            self.put_out(member.incarnation, SILENT, "does not answer")
            return True
        return False

    def _proposal(self, before: Decision) -> Decision | None:
        """What follows from all reports; None as long as a member that may be alive has not reported."""
        number, reports = before.number + 1, dict[Member, list[Report]]()
        for member in before.members:
            keys = [_report_key(number, member, process) for process in range(self._processes)]
            if self._is_gone(member):
                continue
            if not self.store.check(keys):
                return None
            reports[member] = [_parse_report(self.store.get(key)) for key in keys]
        with_state = {member: each for member, each in reports.items() if all(report.has_state for report in each)}
        lost = {
            member.incarnation: self.why_gone(member.incarnation) or "did not get the state"
            for member in before.members
            if member not in with_state
        }
        if refused := _refusal(before, lost, len(with_state)):
            return Decision(number, (), refused=refused, lost=lost)
        every = [report for each in with_state.values() for report in each]
        newest = max(every, key=lambda report: report.operation)
        admits = all(report.admits for report in every)
        joining, seen = self._waiting(before.seen, set(with_state)) if admits else ([], before.seen)
        return Decision(
            number,
            (*with_state, *joining),
            newest.operation,
            newest.result,
            {member.incarnation: _held_by_all(each, newest.operation) for member, each in with_state.items()},
            tuple(member.incarnation for member in joining),
            lost,
            seen,
        )

    def _waiting(self, seen: int, inside: set[Member]) -> tuple[list[Member], int]:
        """The replicas that have announced themselves, each once, and the number of the last announcement."""
        found: dict[int, Member] = {}
        while self.store.check([f"join/{seen + 1}"]):
            seen += 1
            member = Member(**json.loads(self.store.get(f"join/{seen}")))
            if not self._is_gone(member) and member.replica not in {each.replica for each in inside}:
                found[member.replica] = member
        return list(found.values()), seen


def _refusal(before: Decision, lost: Mapping[str, str], survivors: int) -> str:
    """Why nobody may go on, if so."""
    voters = sum(not why.startswith(DEAD) for why in lost.values()) + survivors
    if not survivors:
        return f"no replica with weights is left of {len(before.members)}; resume with --resume auto"
    if 2 * survivors < voters:
        silent = voters - survivors
        return (
            f"{survivors} of {voters} replicas answer and are no majority: the {silent} others may go on elsewhere; see why "
            "they do not answer, then resume with --resume auto"
        )
    return ""


def _held_by_all(reports: Iterable[Report], operation: int) -> list[int]:
    """The micro-batches that all processes of a member hold, of the operation where all go on."""
    each = [set(report.held) if report.operation == operation else set[int]() for report in reports]
    return sorted(set.intersection(*each))


def _report_key(number: int, member: Member, process: int) -> str:
    return f"report/{number}/{member.incarnation}/{process}"


def _parse_report(text: bytes) -> Report:
    values = json.loads(text)
    return Report(**values | {"held": tuple(values["held"])})


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(pause * 1.3, _LONGEST_PAUSE_S)


def deal(count: int, held: Sequence[Sequence[int]]) -> list[list[int]]:
    """The micro-batches of a step, 0 to `count` - 1, that nobody holds, dealt to the members, whose `held` are in their order: each
    to the one that then has the fewest; with nothing held, contiguous shares in order."""
    missing = sorted(set(range(count)).difference(*held))
    if len(missing) == count:
        return [list(share(count, place, len(held))) for place in range(len(held))]
    dealt: list[list[int]] = [[] for _ in held]
    for number in missing:
        loads = [len(own) + len(more) for own, more in zip(held, dealt, strict=True)]
        dealt[loads.index(min(loads))].append(number)
    return dealt


def share(count: int, place: int, places: int) -> range:
    """The contiguous share of `count` micro-batches of one of several places: of equal length if `places` divides `count`."""
    return range(place * count // places, (place + 1) * count // places)
