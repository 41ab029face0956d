"""Membership protocol: through a store, replicas agree on which are lost, which rejoin, and where to resume (docs/recovery.md).

Memberships are numbered. Each ends when one of its processes ends it (`Coordinator.end_membership`), or when all of its processes
propose the next one to admit a replica. Each process then reports its state and waits for the decision on the next membership.
The first process that sees all reports writes the decision with one compare-and-set. The store accepts only one
decision per number, so a run cannot split into two histories.

Survivors need a majority of the votes. Every member of the previous membership has one vote, unless it is known to be dead. The
store breaks ties. If members consider each other silent, the first one to report this wins, because a member on the list of silent
members cannot add other members to it.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist
from pydantic import TypeAdapter

from boost.errors import ExcludedError, TrainingError
from boost.parallel.mesh import share
from boost.train.agreement import PeersLostError

DEAD, SILENT, SLOW = "dead", "silent", "slow"
"""Why a member was lost: its processes died, stopped responding, or slowed the others down (`run.exclude_slow`)."""
STATUS_TEXT = {DEAD: "was restarted", SILENT: "does not answer"}
"""How messages describe a member that its heartbeats show to be lost."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1
"""Polling interval of the store, in seconds: initial value, and the limit of its backoff."""


@dataclass(frozen=True, order=True)
class Member:
    """One incarnation of a replica. A restarted replica becomes a new member."""

    replica: int
    incarnation: str


@dataclass(frozen=True)
class Report:
    """The state of a process when its membership ends."""

    operation: int
    """The number of the first operation that the process has not completed."""
    result: object = None
    """Result of the previous operation, JSON-serializable."""
    held: tuple[int, ...] = ()
    """Micro-batches in the current step whose gradients the process holds."""
    has_state: bool = True
    """Whether the process holds weights and moments."""
    admits: bool = False
    """Whether waiting replicas may join."""


@dataclass(frozen=True)
class Decision:
    """A membership, the same for all of its processes."""

    number: int
    members: tuple[Member, ...]
    """Oldest first. The main process belongs to the first member as long as that member is alive."""
    operation: int = 0
    """The operation at which all processes resume."""
    result: object = None
    """Result of the previous operation, for processes that did not receive it."""
    held: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Micro-batches of the step whose gradients all processes of a member hold, by incarnation."""
    joined: tuple[str, ...] = ()
    """Incarnations that receive weights and moments from the others."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Members of the previous membership that are not in this one: reason by incarnation."""
    seen: int = 0
    """Number of announcements processed so far."""
    refused: str = ""
    """Why training cannot continue; empty if it can."""

    def place(self, member: Member) -> int | None:
        """The member's index; None if it is not in this membership."""
        return self.members.index(member) if member in self.members else None


_REPORT, _DECISION = TypeAdapter(Report), TypeAdapter(Decision)


class Coordinator:
    """One process's view of the store. Not thread-safe."""

    def __init__(
        self, store: dist.Store, replicas: int, processes: int, status: Callable[[Member], str] = lambda member: ""
    ) -> None:
        """`replicas`: number of replicas in a full run. `processes`: processes per replica. `status`: a member's state according
        to its heartbeats: DEAD if a newer incarnation of its replica runs, SILENT if it has stopped responding, else ''."""
        self.store, self._replicas, self._processes, self._status = store, replicas, processes, status

    # Announcements.

    def end_membership(self, number: int, reason: str) -> None:
        """Ends a membership for all of its processes."""
        self.store.set(f"over/{number}", reason)

    def is_over(self, number: int) -> bool:
        return self.store.check([f"over/{number}"])

    def exclude(self, incarnation: str, why: str, text: str) -> None:
        """Marks a member as lost. It can only rejoin as a new incarnation.

        `why`: DEAD or SLOW; `exclude_lost` marks silent members. The first mark stays, except that DEAD replaces any other.
        """
        known = self.lost_reason(incarnation)
        if known is None or (why == DEAD and not known.startswith(DEAD)):
            self.store.set(f"gone/{incarnation}", f"{why}: {text}")

    def exclude_lost(self, members: Iterable[Member], accuser: Member) -> None:
        """Marks as lost the `members` that heartbeats report as restarted or silent.

        A member that is itself marked as lost marks no other member as silent. Otherwise, members that lost contact
        would exclude each other until none is left. A replica marks itself if one of its other processes is silent.
        """
        judged = [member for member in members if member != accuser or self._processes > 1]
        statuses = {member.incarnation: why for member in judged if (why := self._status(member))}
        for name, why in statuses.items():
            if why == DEAD:
                self.exclude(name, DEAD, STATUS_TEXT[DEAD])
        silent = {name for name, why in statuses.items() if why == SILENT}
        if accuser.incarnation in silent:
            silent = {accuser.incarnation}
        # Mark all at once, and only while this member is not itself marked as lost.
        while silent and not self.store.check([f"gone/{accuser.incarnation}"]):
            text, known = self._silent()
            if accuser.incarnation in known or silent <= known:
                return
            self.store.compare_set("silent", text, json.dumps(sorted(known | silent)))

    def _silent(self) -> tuple[str, set[str]]:
        """The list of silent incarnations, as stored and as a set."""
        text = self.store.get("silent").decode() if self.store.check(["silent"]) else ""
        return text, set(json.loads(text)) if text else set()

    def lost_reason(self, incarnation: str) -> str | None:
        """Why a member is marked as lost; None if it is not marked."""
        return self._lost([incarnation]).get(incarnation)

    def lost_among(self, members: Iterable[Member]) -> dict[Member, str]:
        """Which of `members` are marked as lost, and why. Reads the list of silent members once."""
        by_name = {member.incarnation: member for member in members}
        return {by_name[name]: why for name, why in self._lost(by_name).items()}

    def _lost(self, incarnations: Collection[str]) -> dict[str, str]:
        silent = dict.fromkeys(self._silent()[1].intersection(incarnations), f"{SILENT}: {STATUS_TEXT[SILENT]}")
        gone = [name for name in incarnations if self.store.check([f"gone/{name}"])]
        return silent | {name: self.store.get(f"gone/{name}").decode() for name in gone}

    def announce(self, member: Member) -> None:
        """Announces that this replica is ready to join. One of its processes calls this after all of them are ready."""
        self.store.set(f"join/{self.store.add('joins', 1)}", json.dumps(asdict(member)))

    def has_waiting(self, decision: Decision) -> bool:
        """Whether a replica has announced itself since a decision."""
        return self.store.check([f"join/{decision.seen + 1}"])

    # Decisions.

    def form_first(
        self, member: Member, process: int, timeout_s: float, stopped: Callable[[], None]
    ) -> Decision | None:
        """Forms the first membership, with all replicas. Returns None if one already exists and this replica restarted.

        `stopped` raises if this process received a stop signal. Raises TrainingError if replicas are missing after `timeout_s`.
        """
        if not self.store.check(["decision/0"]):
            self.store.set(f"founds/{member.replica}/{process}", member.incarnation)
        deadline, pauses = time.monotonic() + timeout_s, _pauses()
        while not self.store.check(["decision/0"]):
            stopped()
            founders = list[Member]()
            for replica in range(self._replicas):
                keys = [f"founds/{replica}/{one}" for one in range(self._processes)]
                names = {self.store.get(key).decode() for key in keys} if self.store.check(keys) else set()
                if len(names) == 1:  # all of its processes have started, in the same incarnation
                    founders.append(Member(replica, names.pop()))
            if missing := sorted(set(range(self._replicas)) - {founder.replica for founder in founders}):
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"replica {missing[0]} of {self._replicas} did not start within run.startup_timeout_s = {timeout_s:g}; "
                        "start it, or check why it exited"
                    )
                time.sleep(next(pauses))
                continue
            self._decide(Decision(0, tuple(founders)))
        decision = self.decision(0)
        return decision if decision.place(member) is not None else None

    def decision(self, number: int) -> Decision:
        return _DECISION.validate_json(self.store.get(f"decision/{number}"))

    def latest(self, since: int = 0) -> Decision | None:
        """The newest decision; the search starts at number `since`."""
        latest = None
        while self.store.check([f"decision/{since}"]):
            latest, since = self.decision(since), since + 1
        return latest

    def agree(self, before: Decision, member: Member, process: int, report: Report) -> Decision:
        """Writes this process's report and waits for the decision that follows `before`.

        Raises ExcludedError if the others continue without this member, and TrainingError if training cannot continue.
        """
        number = before.number + 1
        self.store.set(f"report/{number}/{member.incarnation}/{process}", json.dumps(asdict(report)))
        pauses = _pauses()
        while not self.store.check([f"decision/{number}"]):
            if why := self.lost_reason(member.incarnation):
                raise ExcludedError(f"the other replicas continue without this one ({why})")
            if proposal := self._proposal(before, member):
                self._decide(proposal)
            else:
                time.sleep(next(pauses))
        decision = self.decision(number)
        if decision.refused:
            raise TrainingError(decision.refused)
        if decision.place(member) is None:
            raise ExcludedError(
                f"the other replicas continue without this one ({decision.lost.get(member.incarnation, 'lost')})"
            )
        return decision

    def wait_until_ready(self, decision: Decision, member: Member, process: int) -> None:
        """Waits until all processes of a membership are ready to connect. Raises PeersLostError if the membership ends first."""
        self.store.set(f"ready/{decision.number}/{member.incarnation}/{process}", "")
        waiting = [
            (other, f"ready/{decision.number}/{other.incarnation}/{number}")
            for other in decision.members
            for number in range(self._processes)
        ]
        pauses = _pauses()
        while waiting := [(other, key) for other, key in waiting if not self.store.check([key])]:
            missing = {other for other, _ in waiting}
            self.exclude_lost(missing, member)
            for other in self.lost_among(missing | {member}):
                self.end_membership(decision.number, f"replica {other.replica} is lost")
            if self.is_over(decision.number):
                raise PeersLostError(f"membership {decision.number} ended before all of its processes were ready")
            time.sleep(next(pauses))

    def _decide(self, decision: Decision) -> None:
        """Writes a decision. The first decision with a given number wins."""
        self.store.compare_set(f"decision/{decision.number}", "", json.dumps(asdict(decision)))

    def _proposal(self, before: Decision, proposer: Member) -> Decision | None:
        """The decision that follows from all reports; None while a member that may be alive has not reported."""
        number, reports = before.number + 1, dict[Member, list[Report]]()
        self.exclude_lost(before.members, proposer)
        gone = self.lost_among(before.members)
        for member in before.members:
            if member in gone:
                continue
            keys = [f"report/{number}/{member.incarnation}/{process}" for process in range(self._processes)]
            if not self.store.check(keys):
                return None
            reports[member] = [_REPORT.validate_json(self.store.get(key)) for key in keys]
        with_state = {member: own for member, own in reports.items() if all(report.has_state for report in own)}
        lost = {
            member.incarnation: gone.get(member, "did not receive the state")
            for member in before.members
            if member not in with_state
        }
        survivors = len(with_state)
        voters = sum(not why.startswith(DEAD) for why in lost.values()) + survivors
        refused = ""
        if not survivors:
            count = len(before.members)
            refused = f"no replica with weights is left (replicas before the loss: {count}); resume with --resume auto"
        elif 2 * survivors < voters:
            refused = (
                f"{survivors} of {voters} replicas respond, which is not a majority: the other {voters - survivors} may be "
                "training elsewhere; find out why they do not respond, then resume with --resume auto"
            )
        if refused:
            return Decision(number, (), refused=refused, lost=lost)
        all_reports = [report for own in with_state.values() for report in own]
        newest = max(all_reports, key=lambda report: report.operation)
        admits = all(report.admits for report in all_reports)
        joining, seen = self._waiting(before.seen, set(with_state), proposer) if admits else ([], before.seen)
        # Count only micro-batches that all processes of a member hold for the operation at which all resume.
        held = {
            member.incarnation: sorted(
                set.intersection(*(set(r.held if r.operation == newest.operation else ()) for r in own))
            )
            for member, own in with_state.items()
        }
        members, joined = (*with_state, *joining), tuple(member.incarnation for member in joining)
        return Decision(number, members, newest.operation, newest.result, held, joined, lost, seen)

    def _waiting(self, seen: int, inside: set[Member], proposer: Member) -> tuple[list[Member], int]:
        """The announced replicas, each listed once, and the number of the last announcement."""
        waiting: dict[int, Member] = {}
        while self.store.check([f"join/{seen + 1}"]):
            seen += 1
            member = Member(**json.loads(self.store.get(f"join/{seen}")))
            self.exclude_lost([member], proposer)
            if not self.lost_reason(member.incarnation) and member.replica not in {m.replica for m in inside}:
                waiting[member.replica] = member
        return list(waiting.values()), seen


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(pause * 1.3, _LONGEST_PAUSE_S)


def deal(count: int, held: Sequence[Sequence[int]]) -> list[list[int]]:
    """Deals out the micro-batches of a step, 0 to `count` - 1, that no member holds.

    `held`: micro-batches per member. Each missing micro-batch goes to the member with the fewest. If no micro-batches are held,
    members get contiguous shares in order.
    """
    missing = sorted(set(range(count)).difference(*held))
    if len(missing) == count:
        return [list(share(count, place, len(held))) for place in range(len(held))]
    dealt: list[list[int]] = [[] for _ in held]
    for number in missing:
        loads = [len(own) + len(more) for own, more in zip(held, dealt, strict=True)]
        dealt[loads.index(min(loads))].append(number)
    return dealt
