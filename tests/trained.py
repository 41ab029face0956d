"""Trains a toy model on any mesh for tests: the trainer's steps on synthetic data."""

from typing import Any

import torch.distributed as dist

from boost.config import Config
from boost.measure import exactness
from boost.measure.exactness import Seen, TrainedModel, keeps_table, made_up_batches
from tests import toy

__all__ = ["Trained", "compare", "errors_of", "keeps_table", "made_up_batches", "reference"]


class Trained(TrainedModel):
    """A toy model on the mesh of this process."""

    def __init__(self, config: Config, steps: int = 2, seed: int = 0) -> None:
        super().__init__(config, toy.toy_mesh(config), steps, seed)


_known: dict[tuple[str, int], Seen] = {}


def reference(config: Config, steps: int) -> Seen:
    """The same model on one process; built once per pool, on one process that broadcasts it. All processes must call this."""
    key = toy.single(config).model_dump_json(), steps
    if key not in _known:
        outcome: list[Any] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                outcome = [Trained(toy.single(config), steps).seen()]
            except Exception as error:
                outcome = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome, 0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        _known[key] = outcome[0]
    return _known[key]


def compare(config: Config, steps: int = 2) -> dict[str, float]:
    """Relative errors of this process's results against the whole model on one process."""
    return errors_of(Trained(config, steps), steps)


def errors_of(actual: TrainedModel, steps: int) -> dict[str, float]:
    """The same for a model that has already taken its steps."""
    return exactness.errors_of(actual, reference(actual.config, steps))
