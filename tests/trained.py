"""Trains a toy model on any mesh for tests: the trainer's steps on synthetic data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from boost.config import Config, traffic
from boost.measure import exactness
from boost.measure.exactness import Observed, TrainedModel, made_up_batches, matches_table
from boost.plan import replicas
from tests import toy
from tests.distributed import run_distributed

__all__ = [
    "Trained", "compare", "compare_with_table", "made_up_batches", "matches_table", "reference", "relative_errors",
    "require_one_process", "small_buckets",
]  # fmt: skip


class Trained(TrainedModel):
    """A toy model on the mesh of this process."""

    def __init__(self, config: Config, steps: int = 2, seed: int = 0) -> None:
        super().__init__(config, toy.toy_mesh(config), steps, seed)


_known: dict[tuple[str, int], Observed] = {}


def reference(config: Config, steps: int) -> Observed:
    """The same model on one process; one process per pool builds and broadcasts it. All processes must call this."""
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
    return relative_errors(Trained(config, steps), steps)


def relative_errors(actual: TrainedModel, steps: int) -> dict[str, float]:
    """The same for an already trained model."""
    return exactness.relative_errors(actual, reference(actual.config, steps))


def compare_with_table(config: Config, steps: int = 2) -> dict[str, float]:
    """The same, and whether the last step's collectives match the table ("table": 0)."""
    actual = Trained(config, steps - 1)  # the first step also makes connections
    matches = matches_table(config, actual.collectives(), actual.mesh.pp.rank)
    return {"table": float(not matches), **relative_errors(actual, steps)}


def require_one_process(
    config: Config, function: Callable[..., dict[str, float]] = compare_with_table, *more: Any
) -> None:
    """Asserts that on the mesh of `config` every process finds the whole model's results in `function`'s errors, to 1e-10."""
    for errors in run_distributed(config.parallel.world_size, function, config, *more):
        assert errors["initial"] == errors.get("table", 0.0) == 0, errors
        assert max(errors.values()) <= 1e-10, errors


@contextmanager
def small_buckets() -> Iterator[None]:
    """Splits gradient sums into many buckets, although the model is small."""
    usual, traffic.BUCKET_BYTES = traffic.BUCKET_BYTES, 1024
    replicas._buckets_of.cache_clear()
    try:
        yield
    finally:
        traffic.BUCKET_BYTES = usual
        replicas._buckets_of.cache_clear()
