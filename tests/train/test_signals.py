import os
import signal
from collections.abc import Iterator

import pytest

from boost.train import signals
from boost.train.signals import StopRequest


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_signal_only_sets_the_flag_and_says_its_name(number: signal.Signals) -> None:
    with StopRequest() as request:
        seen = [(request.requested, request.name)]
        os.kill(os.getpid(), number)
        seen.append((request.requested, request.name))
    assert seen == [(False, None), (True, number.name)]


def test_the_first_signal_gives_the_name() -> None:
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.name == "SIGUSR1"


def test_handlers_of_before_come_back_also_after_an_error() -> None:
    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    replaced: list[object] = []

    def fail_inside() -> None:
        with StopRequest():
            replaced.extend(signal.getsignal(number) for number in signals.STOP_SIGNALS)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert not set(replaced) & set(before.values())
    assert {number: signal.getsignal(number) for number in signals.STOP_SIGNALS} == before


def test_two_interrupts_at_once_are_one_and_a_later_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        now += signals.SECOND_INTERRUPT_S
        os.kill(os.getpid(), signal.SIGINT)
        assert request.requested
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_never_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with StopRequest() as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now += 10
        assert request.name == "SIGTERM"


def test_what_a_launcher_still_sends_of_one_interrupt_does_not_hurt_after_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
    now += signals.SECOND_INTERRUPT_S
    os.kill(os.getpid(), signal.SIGINT)
    now += 0.1
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
