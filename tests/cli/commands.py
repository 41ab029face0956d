"""Commands of `boost`, called in this process."""

import pytest

from boost.cli.main import main


def say(capture: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command. `capfd` also sees what the processes say that it starts."""
    code = main([str(word) for word in words])
    out, err = capture.readouterr()
    return code, out, err
