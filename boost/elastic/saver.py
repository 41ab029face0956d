"""Saves of a run whose replicas change. A save in flight is abandoned when they do, and the remaining replicas repeat it."""

from typing import cast

import torch.distributed as dist

from boost.elastic.groups import PeersLostError
from boost.elastic.mesh import ElasticMesh
from boost.elastic.optimizer import DividedAdamW, Division
from boost.train.checkpoint.saver import CheckpointSaver
from boost.train.checkpoint.snapshot import HostBuffer, SaveShare

ABANDON_S = 5.0
"""Seconds to wait for an abandoned save to end; it may be writing a file."""


class ElasticSaver(CheckpointSaver):
    """A `CheckpointSaver` of the current replicas."""

    expected_errors = (PeersLostError,)
    _division: Division | None = None
    """The division of the moments that the share of this process belongs to."""

    def abandon(self) -> int | None:
        """Abandons the save in flight because the replicas changed. Returns its step, or None if there was none."""
        step, thread = self.in_flight, self._thread
        self._thread = self._share = self._group = None
        if thread is not None:
            thread.join(ABANDON_S)
            self._buffer = HostBuffer()  # the thread may still read the old one
        return step

    def _open_group(self) -> dist.ProcessGroup | None:
        return cast(ElasticMesh, self._mesh).background.group

    def _close_group(self, group: dist.ProcessGroup) -> None:
        """Nothing: the group belongs to the membership."""

    def _current_share(self) -> SaveShare:
        optimizer = self._optimizer
        if isinstance(optimizer, DividedAdamW) and (self._share is None or self._division != optimizer.division):
            optimizer.require_whole()
            self._share, self._division = None, optimizer.division
        return super()._current_share()
