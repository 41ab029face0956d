"""Kills a process at each file-system event, to test which files survive."""

import os
import signal
import sys
from collections.abc import Callable

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def killed_at(event: int, action: Callable[[], object]) -> bool:
    """Whether a child that runs `action` was killed at its n-th file-system event; otherwise it finished."""
    child = os.fork()
    if child == 0:
        left = [event]

        def count(name: str, _: object) -> None:
            if name in FILE_EVENTS:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
