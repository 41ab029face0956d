"""TensorBoard's event files, written in the calling thread.

`torch.utils.tensorboard.SummaryWriter` writes in a thread of its own. That thread prints a traceback when a write fails (a full
disk, a renamed folder), and it needs a thread that the system may not have. Here each event is one write, which raises OSError.
"""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

_numbers = itertools.count()


class EventFile:
    """One event file in a folder, which it creates. TensorBoard hides earlier events from `purge_step` on."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._records = RecordWriter(self)
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(session_log=SessionLog(status=SessionLog.START), step=purge_step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds one point of a curve."""
        self.add_summary(scalar(name, value), step)

    def add_text(self, name: str, content: str, step: int) -> None:
        """Adds Markdown."""
        self.add_summary(text(name, content), step)

    def add_summary(self, summary: Any, step: int) -> None:
        """Adds a `Summary` of torch.utils.tensorboard."""
        self._add(Event(summary=summary, step=step))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, record: bytes) -> None:
        """Called by the RecordWriter. An almost full disk takes only part of a record before it reports the error."""
        left = memoryview(record)
        while left:
            left = left[self._file.write(left) :]

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
