"""Time limits for requests that may block, with a clock that is set."""

import threading
from typing import Any

import pytest

from boost.train import overdue


class Over(threading.Event):
    """An event that is never set: each wait lets the time of the next entry pass. The last wait ends the watch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
        super().__init__()
        self.now, self._waits = 100.0, waits
        monkeypatch.setattr(overdue.time, "monotonic", lambda: self.now)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._waits:
            return True
        self.now += self._waits.pop(0)
        return False


@pytest.mark.parametrize(
    ("seconds", "limit", "ends"),
    [
        ([0.5] * 20, 9.0, True),
        ([0.5] * 20, 11.0, False),
        ([60.0, *[0.5] * 5], 9.0, False),  # suspended, perhaps with the process that should answer
        ([60.0, *[0.5] * 20], 9.0, True),
    ],
)
def test_a_wait_that_exceeds_its_limit_ends_the_process(
    seconds: list[float], limit: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    overdue._watch(Over(monkeypatch, seconds), lambda: (100.0, limit), lambda: ended.append(1))
    overdue._watch(Over(monkeypatch, [0.5] * 99), lambda: None, lambda: pytest.fail("it waits for nothing"))
    assert bool(ended) == ends


def test_the_process_ends_with_one_line_that_asks_for_another_try(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    left, ended = list[int](), threading.Event()
    monkeypatch.setattr(overdue, "LOOK_S", 0.01)
    monkeypatch.setattr(overdue, "leave", lambda code: (left.append(code), ended.set()))
    with overdue.time_limit(600, "nothing answers"):
        pass
    with overdue.time_limit(0.0, "nothing answers"):
        assert ended.wait(600)
    assert left == [3] and capsys.readouterr().err == "boost: error: nothing answers\n"
