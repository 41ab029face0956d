"""The membership protocol, with threads in place of processes and an in-memory store."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.elastic.membership import DEAD, SILENT, SLOW, Coordinator, Decision, Member, Report, deal, share
from boost.errors import ExcludedError, StoppedError, TrainingError
from boost.train.agreement import PeersLostError

MEMBERS = tuple(Member(replica, f"{replica}.0") for replica in range(4))
FOUNDED = Decision(0, MEMBERS)


@pytest.fixture
def store() -> dist.Store:
    found = dist.HashStore()
    Coordinator(found, 4, 1)._decide(FOUNDED)
    return found


def everyone(what: Callable[[int], Any], who: Iterable[int]) -> dict[int, Any]:
    """Calls a function in one thread per argument; returns results or raised exceptions."""
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        try:
            found[number] = what(number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in who]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def agree(
    store: dist.Store, reports: dict[int, Report], before: Decision = FOUNDED, silent: Any = (), restarted: Any = ()
) -> dict[int, Any]:
    """Outcomes for members that report at the same time."""

    def one(replica: int) -> Decision:
        status = {**dict.fromkeys(silent, SILENT), **dict.fromkeys(restarted, DEAD)}
        coordinator = Coordinator(store, 4, 1, lambda member: status.get(member.replica, ""))
        return coordinator.agree(before, MEMBERS[replica], 0, reports[replica])

    return everyone(one, reports)


def test_a_run_begins_when_all_replicas_are_there() -> None:
    store = dist.HashStore()

    def found(number: int) -> Decision | None:
        replica, process = divmod(number, 2)
        return Coordinator(store, 3, 2).form_first(MEMBERS[replica], process, 60, lambda: None)

    decisions = everyone(found, range(6))
    assert set(decisions) == set(range(6))
    assert {each.members for each in decisions.values()} == {MEMBERS[:3]}
    back = Coordinator(store, 3, 2).form_first(Member(1, "1.1"), 0, 60, lambda: None)
    assert back is None, "whoever starts later comes back"


def test_a_replica_that_does_not_start_is_named() -> None:
    with pytest.raises(TrainingError, match=r"replica 1 of 2 did not start within run\.startup_timeout_s = 0\.05"):
        Coordinator(dist.HashStore(), 2, 1).form_first(MEMBERS[0], 0, 0.05, lambda: None)


def test_a_stop_signal_ends_the_wait() -> None:
    def stop() -> None:
        raise StoppedError("SIGTERM")

    with pytest.raises(StoppedError):
        Coordinator(dist.HashStore(), 2, 1).form_first(MEMBERS[0], 0, 60, stop)


def test_a_dead_member_is_dropped_and_a_late_one_gets_the_result(store: dist.Store) -> None:
    Coordinator(store, 4, 1).exclude("1.0", DEAD, "SIGKILL")
    ahead, behind = Report(8, [1.5, 2.0], (0, 1)), Report(7, "of 6", (2, 3))
    found = agree(store, {0: behind, 2: ahead, 3: behind})
    (decision,) = {str(each): each for each in found.values()}.values()
    assert decision.members == (MEMBERS[0], MEMBERS[2], MEMBERS[3])
    assert (decision.operation, decision.result) == (8, [1.5, 2.0])
    assert decision.held == {"0.0": [], "2.0": [0, 1], "3.0": []}, "of operation 8 only"
    assert decision.lost == {"1.0": "dead: SIGKILL"}


def test_no_decision_before_every_possibly_alive_member_reported(store: dist.Store) -> None:
    waiting = threading.Thread(
        target=lambda: Coordinator(store, 4, 1).agree(FOUNDED, MEMBERS[0], 0, Report(3)), daemon=True
    )
    waiting.start()
    time.sleep(0.3)
    assert not store.check(["decision/1"])
    Coordinator(store, 4, 1).exclude("3.0", DEAD, "SIGKILL")
    found = agree(store, {1: Report(3), 2: Report(3)})
    waiting.join(60)
    assert found[1].members == MEMBERS[:3] and not waiting.is_alive()


@pytest.mark.parametrize(
    ("dead", "silent", "goes_on"),
    [
        ((1, 2, 3), (), True),
        ((), (3,), True),
        ((), (2, 3), True),  # the store breaks the tie
        ((), (1, 2, 3), False),
        ((1, 2), (3,), True),
        ((1,), (2, 3), False),
    ],
)
def test_a_minority_stops_but_the_dead_do_not_vote(
    store: dist.Store, dead: tuple[int, ...], silent: tuple[int, ...], goes_on: bool
) -> None:
    for replica in dead:
        Coordinator(store, 4, 1).exclude(f"{replica}.0", DEAD, "SIGKILL")
    here = [replica for replica in range(4) if replica not in (*dead, *silent)]
    found = agree(store, {replica: Report(5) for replica in here}, silent=silent)
    for outcome in found.values():
        if goes_on:
            assert [member.replica for member in outcome.members] == here
        else:
            assert isinstance(outcome, TrainingError) and "not a majority" in str(outcome)


def test_a_silent_member_has_no_vote_once_it_is_restarted(store: dist.Store) -> None:
    Coordinator(store, 4, 1, lambda member: SILENT).exclude_lost(MEMBERS, MEMBERS[0])
    decision = agree(store, {0: Report(5)}, restarted=(1, 2))[0]
    assert decision.members == MEMBERS[:1]
    assert decision.lost == {
        "1.0": "dead: was restarted",
        "2.0": "dead: was restarted",
        "3.0": "silent: does not answer",
    }


def test_there_is_one_history_no_matter_who_decides_first(store: dist.Store) -> None:
    """Each half believes that the other one is silent. The store accepts one decision, and the other half is out."""
    halves = everyone(
        lambda half: agree(store, {2 * half: Report(5), 2 * half + 1: Report(5)}, silent=(2 - 2 * half, 3 - 2 * half)),
        (0, 1),
    )
    outcomes = [outcome for half in halves.values() for outcome in half.values()]
    going_on = [outcome for outcome in outcomes if isinstance(outcome, Decision)]
    assert len({each.members for each in going_on}) == 1
    assert len(going_on) == len(going_on[0].members)
    assert all(isinstance(each, ExcludedError) for each in outcomes if not isinstance(each, Decision))


def test_of_two_that_take_each_other_for_silent_one_goes_on(store: dist.Store) -> None:
    """Marks are in the store before anybody decides: without an order of accusations both would be out."""
    here = threading.Barrier(2)

    def accuse(replica: int) -> None:
        here.wait(60)
        coordinator = Coordinator(store, 4, 1, lambda member: SILENT if member.replica != replica else "")
        coordinator.exclude_lost(MEMBERS, MEMBERS[replica])

    everyone(accuse, (0, 1))
    lost = [member.replica for member in MEMBERS if Coordinator(store, 4, 1).lost_reason(member.incarnation)]
    assert lost in ([0, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("why", [SILENT, SLOW])
def test_a_member_that_is_lost_itself_reports_restarts_only(store: dist.Store, why: str) -> None:
    coordinator = Coordinator(store, 4, 1, lambda member: {1: SILENT, 2: DEAD}.get(member.replica, ""))
    if why == SILENT:
        Coordinator(store, 4, 1, lambda member: SILENT).exclude_lost(MEMBERS[:1], MEMBERS[3])
    else:
        Coordinator(store, 4, 1).exclude("0.0", why, "x")
    coordinator.exclude_lost(MEMBERS, MEMBERS[0])
    reason = {SILENT: "silent: does not answer", SLOW: "slow: x"}[why]
    assert coordinator.lost_among(MEMBERS) == {MEMBERS[0]: reason, MEMBERS[2]: "dead: was restarted"}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_replica_judges_itself_by_its_other_processes(store: dist.Store, processes: int) -> None:
    """What is silent of a replica of one process is not the process that judges."""
    coordinator = Coordinator(store, 4, processes, lambda member: SILENT if member.replica < 2 else "")
    coordinator.exclude_lost(MEMBERS, MEMBERS[0])
    lost = [member.replica for member in MEMBERS if coordinator.lost_reason(member.incarnation)]
    assert lost == ([1] if processes == 1 else [0])


def test_a_silent_member_that_wakes_up_is_out(store: dist.Store) -> None:
    agree(store, {0: Report(5), 1: Report(5), 2: Report(5)}, silent=(3,))
    with pytest.raises(ExcludedError, match="silent: does not answer"):
        Coordinator(store, 4, 1).agree(FOUNDED, MEMBERS[3], 0, Report(5))


def test_a_last_member_without_weights_cannot_continue(store: dist.Store) -> None:
    for replica in (0, 1, 2):
        Coordinator(store, 4, 1).exclude(f"{replica}.0", DEAD, "SIGKILL")
    found = agree(store, {3: Report(5, has_state=False)})
    assert "no replica with weights is left" in str(found[3])


def test_a_replica_joins_once_all_admit_it(store: dist.Store) -> None:
    Coordinator(store, 4, 1).exclude("1.0", DEAD, "SIGKILL")
    three = agree(store, {replica: Report(5) for replica in (0, 2, 3)})[0]
    back, coordinator = Member(1, "1.1"), Coordinator(store, 4, 1)
    assert not coordinator.has_waiting(three)
    coordinator.announce(Member(1, "1.gone"))
    coordinator.exclude("1.gone", DEAD, "SIGKILL")
    coordinator.announce(back)
    assert coordinator.has_waiting(three)
    some = agree(store, {0: Report(6, admits=True), 2: Report(6), 3: Report(6, admits=True)}, three)[0]
    assert some.joined == () and coordinator.has_waiting(some)
    assert coordinator.latest() == some
    every = agree(store, {replica: Report(6, admits=True) for replica in (0, 2, 3)}, some)[0]
    assert every.members == (MEMBERS[0], MEMBERS[2], MEMBERS[3], back), "the oldest first"
    assert every.joined == ("1.1",) and not coordinator.has_waiting(every)
    assert coordinator.latest() == every


def test_a_membership_ends_if_a_member_dies_before_connecting(store: dist.Store) -> None:
    coordinator = Coordinator(store, 4, 1)
    coordinator.exclude("2.0", DEAD, "SIGKILL")
    with pytest.raises(PeersLostError):
        coordinator.wait_until_ready(FOUNDED, MEMBERS[0], 0)
    assert coordinator.is_over(0)


def test_a_member_that_is_lost_itself_does_not_wait_for_the_others(store: dist.Store) -> None:
    Coordinator(store, 4, 1, lambda member: SILENT).exclude_lost(MEMBERS[:1], MEMBERS[3])
    found = everyone(lambda process: Coordinator(store, 4, 1).wait_until_ready(FOUNDED, MEMBERS[0], process), (0,))
    assert isinstance(found.get(0), PeersLostError)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_every_micro_batch_is_dealt_once(count: int, members: int, data: st.DataObject) -> None:
    owner = data.draw(st.lists(st.integers(-1, members - 1), min_size=count, max_size=count))
    held = [[number for number in range(count) if owner[number] == member] for member in range(members)]
    dealt = deal(count, held)
    assert sorted(number for own, more in zip(held, dealt, strict=True) for number in (*own, *more)) == list(
        range(count)
    )
    assert [list(share(count, place, members)) for place in range(members)] == deal(count, [[]] * members)


def test_lost_micro_batches_go_to_the_least_loaded_members() -> None:
    assert deal(8, [[0, 1, 2, 3], [], [4]]) == [[], [5, 6], [7]]
