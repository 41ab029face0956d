"""Prefetched batches: same data as without prefetching, errors raised where the batch is used, and a thread that ends."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from boost.data.batches import Batch, Batches
from boost.errors import DataError
from boost.parallel.mesh import Axis, Mesh
from boost.train.loop import Trainer
from boost.train.prefetch import Prefetcher, host_batch
from tests import toy
from tests.train.runs import RATE, Do, fitted, make_config, started


class Counted:
    """Batches whose tokens all contain their step; some steps cannot be read."""

    def __init__(self, broken: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.broken, self.read = broken, list[int]()

    def numbered(self, step: int, numbers: Iterable[int], micro_batch: int) -> Iterator[Batch]:
        self.read.append(step)
        if step in self.broken:
            raise DataError(f"step {step} cannot be read")
        for _ in numbers:
            tokens = np.full((micro_batch, 4), step)
            yield Batch(tokens, np.where(np.arange(4) < 3, tokens, -100), np.zeros((micro_batch, 4), np.int32))


def prefetcher(batches: Any, **parallel: Any) -> Prefetcher:
    return Prefetcher(
        batches, toy.toy_config(train={"micro_batch": 2, "global_batch": 4}, parallel=parallel), Mesh(toy.CPU)
    )


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("boost-data")]


def test_a_step_gets_its_own_data_whatever_was_read_ahead() -> None:
    """In order, after a jump (rollback), and without prefetching."""
    batches = Counted()
    data = prefetcher(batches)
    for step, following in ((0, [1]), (1, [2]), (7, [8]), (8, []), (3, [4])):
        found = data.take(step, following)
        assert {int(x) for batch in found.batches for x in batch.tokens.flatten()} == {step}
        assert (found.micro_batches, found.targets) == (2, 12)
    data.close()
    pipeline = prefetcher(Counted(), pp=2)
    found = pipeline.take(5)
    pipeline.close()
    assert [batch.tokens.shape for batch in found.batches] == [(4, 4)] and found.micro_batches == 2
    # Step 2 was read ahead and dropped, or dropped before the thread came to it; so is step 4.
    assert [step for step in batches.read if step not in (2, 4)] == [0, 1, 7, 8, 3]


def test_processes_of_a_context_axis_share_every_sequence() -> None:
    """Each process has two mirrored chunks; targets belong to its own tokens."""
    tokens = np.arange(16).reshape(2, 8)
    batch = Batch(tokens, np.where(tokens < 2, -100, tokens), np.zeros((2, 8), np.int32))
    batches: Any = SimpleNamespace(numbered=lambda *_: iter([batch]))
    shares = []
    for rank in range(2):
        mesh = Mesh(toy.CPU, {"cp": Axis(rank, 2)})
        data = Prefetcher(batches, toy.toy_config(parallel={"cp": 2}), mesh)
        shares.append(data.take(0))
        data.close()
    held = [share.batches[0] for share in shares]
    assert [x.tokens[0].tolist() for x in held] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [x.tokens[1].tolist() for x in held] == [[8, 9, 14, 15], [10, 11, 12, 13]]
    assert [share.targets for share in shares] == [6, 8]
    assert all(x.document_ids.shape == (2, 8) for x in held)


def test_an_error_is_raised_by_the_step_that_uses_the_batch() -> None:
    data = prefetcher(Counted({1}))
    assert data.take(0, [1]).targets == 12
    with pytest.raises(DataError, match="step 1 cannot be read"):
        data.take(1, [2])
    assert data.take(2).targets == 12, "an error that is over is forgotten"
    data.take(0, [1])
    assert data.take(4).targets == 12, "as is that of a step which is not used"
    data.close()


def test_the_thread_ends_with_a_run_that_ends_and_with_one_that_fails(store: Path, tmp_path: Path) -> None:
    def fail(_: Trainer) -> None:
        assert len(set(threads()) - before) == 1  # those of other tests may end meanwhile
        raise ZeroDivisionError

    before = set(threads())
    trainer = started(make_config(store, tmp_path), Do("after_step", 2, fail))
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    for thread in set(threads()) - before:
        thread.join(60)
        assert not thread.is_alive()
    trainer.step(RATE)
    assert trainer.position.step == 3, "and starts again"


def test_steps_are_read_by_a_thread_one_ahead_and_none_beyond_the_last(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    usual = Batches.numbered

    def noted(batches: Batches, step: int, *rest: Any) -> Iterator[Batch]:
        asked.append((step, threading.current_thread() is threading.main_thread()))
        return usual(batches, step, *rest)

    monkeypatch.setattr(Batches, "numbered", noted)
    fitted(make_config(store, tmp_path, train={"steps": 3}))
    assert asked == [(step, False) for step in range(3)]


def test_batches_become_tensors_without_a_copy() -> None:
    batch = next(Counted().numbered(3, range(2), 2))
    tensors = host_batch(batch)
    assert [x.dtype for x in tensors] == [torch.int64, torch.int64, torch.int32]
    assert all(x.data_ptr() == y.ctypes.data for x, y in zip(tensors, vars(batch).values(), strict=True))
