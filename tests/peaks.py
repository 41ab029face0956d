"""Measures the peak memory that a function adds in a separate process."""

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
    """Bytes. Does not use getrusage, because a process starts with the ru_maxrss of its parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


def in_new_process(function: Callable[..., int], *arguments: Any) -> list[int]:
    """The numbers that the process prints."""
    process = ForkedPython(function, arguments, os.environ)
    try:
        out, err = process.communicate()
    finally:
        process.close()
    assert process.returncode == 0, err
    return [int(word) for word in out.split()]
