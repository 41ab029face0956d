import os
import signal
import threading
from collections.abc import Iterator

import pytest

from boost.train import signals
from boost.train.signals import StopRequest


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", signals.STOP_SIGNALS)
def test_a_stop_signal_only_sets_the_flag_and_says_its_name(number: signal.Signals) -> None:
    with StopRequest() as request:
        seen = [(request.requested, request.name)]
        os.kill(os.getpid(), number)
        seen.append((request.requested, request.name))
    assert seen == [(False, None), (True, number.name)]


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
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            now += 10
        assert request.name == "SIGTERM", "the first one"


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


def test_sigusr2_asks_for_a_save_once_and_not_for_a_stop() -> None:
    with StopRequest() as request:
        assert not request.take_save_request()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not request.requested
        assert request.take_save_request()
        assert not request.take_save_request()


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """As under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_arrived_before_an_inner_request_is_known_inside_and_what_arrived_inside_is_known_outside() -> None:
    with StopRequest() as outer:
        os.kill(os.getpid(), signal.SIGUSR2)
        with StopRequest() as inner:
            assert inner.take_save_request()
            os.kill(os.getpid(), signal.SIGTERM)
        assert (outer.requested, outer.name) == (True, "SIGTERM")
        assert not outer.take_save_request()
        with StopRequest() as second:
            assert second.name == "SIGTERM"


def test_an_inner_request_catches_signals_again_after_someone_else_did() -> None:
    with StopRequest() as outer:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with StopRequest():
            os.kill(os.getpid(), signal.SIGTERM)
        assert outer.requested


def test_a_request_on_another_thread_catches_nothing() -> None:
    """Handlers belong to the main thread."""
    handlers: list[object] = []

    def enter() -> None:
        with StopRequest():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested


def test_a_signal_that_was_held_back_is_delivered_to_the_request() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        # To this thread: other threads of a test worker do not block it, and would end the process.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        with StopRequest() as request:
            assert request.name == "SIGTERM"
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_an_interrupt_is_answered_once_and_only_by_the_main_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping after this step; press Ctrl-C again to abort\n"
    monkeypatch.setenv("RANK", "1")
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


def test_streams_whose_other_end_is_gone_are_muted() -> None:
    kept = os.dup(1)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    try:
        os.write(1, b"x")
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            os.write(1, b"x")
        signals.mute_closed_streams()
        os.write(1, b"x")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
