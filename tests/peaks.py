"""What a function adds to the peak memory of a process of its own."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.commands import ForkedPython

STATUS = Path("/proc/self/status")
needs_proc = pytest.mark.skipif(not STATUS.is_file(), reason="the peak of a process is read from Linux's /proc")


def peak() -> int:
    """Bytes. Not getrusage's: a process begins with the ru_maxrss of the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def in_new_process(function: Callable[..., int], *arguments: Any) -> list[int]:
    """The numbers that it prints."""
    process = ForkedPython(function, arguments, os.environ)
    try:
        out, err = process.communicate()
    finally:
        process.close()
    assert process.returncode == 0, err
    return [int(word) for word in out.split()]
