"""Commands of `boost`, called in this process."""

import pytest

from boost.cli.main import main


def say(capture: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Runs a command; returns exit code, stdout and stderr. `capfd` also captures the output of its child processes."""
    code = main([str(word) for word in words])
    out, err = capture.readouterr()
    return code, out, err
