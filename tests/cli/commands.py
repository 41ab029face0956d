"""Commands of `boost`, called in this process."""

import pytest

from boost.cli.main import main


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err
