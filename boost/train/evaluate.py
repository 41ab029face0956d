"""Unbiased held-out loss: the sum of the loss over all tokens divided by their number, on any number of processes.

For a mixture of stores, it is the weighted mean of the stores' losses.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from boost.config.architecture import IGNORED
from boost.data.batches import Batch, DocumentBatches, EvaluationBatches
from boost.data.mixture import AnySplit
from boost.data.store import Split
from boost.errors import DataError
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Mesh
from boost.train.agreement import run_on_all
from boost.train.model import Model
from boost.train.prefetch import to_device
from boost.train.progress import progress

STOP_CHECK_EVERY = 4
"""Interval between checks of the stop flags, in batches."""


@dataclass(frozen=True)
class Evaluation:
    """A model's held-out loss."""

    tokens: int
    """Number of targets, each evaluated once."""
    loss: float
    """Mean cross-entropy, in nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """loss / ln 2 / bytes of text per token in the split. Comparable across tokenizers."""
    sources: "Mapping[str, Evaluation]" = field(default_factory=dict)
    """Evaluations of a mixture's stores by name; `loss` is the mean of their losses, weighted as in training."""


class EvaluationStopped(Exception):
    """An evaluation was stopped early; its partial result is discarded."""


@torch.no_grad()
def evaluate(
    model: Model,
    split: AnySplit,
    seq_len: int,
    batch: int,
    isolate: bool,
    mesh: Mesh,
    max_tokens: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    by_document: bool = False,
) -> Evaluation:
    """Evaluates on the whole split, or on about `max_tokens` spread evenly over it. All processes return the same result.

    The stores of a mixture are evaluated one after another. They split `max_tokens` by weight, but each store gets at
    least one sequence. `stopped` is called every few batches and must return the same value on all processes. Raises
    EvaluationStopped if it returns True, and DataError if no evaluated token counts toward the loss. `by_document`: uses
    only the first `seq_len` tokens in each document, as published evaluations do (`DocumentBatches`).
    """

    def of_store(part: Split, limit: int | None, label: str) -> Evaluation:
        of_rank = part, seq_len, batch, mesh.dp.rank, mesh.dp.size, limit
        opened = list[DocumentBatches | EvaluationBatches]()
        run_on_all(
            mesh,
            lambda: opened.append(DocumentBatches(*of_rank) if by_document else EvaluationBatches(*of_rank, isolate)),
            DataError,
        )
        (batches,) = opened
        reading, ahead = iter(progress(batches, label, enabled=mesh.is_main)), list[Batch]()

        def read() -> None:
            ahead[:] = itertools.islice(reading, STOP_CHECK_EVERY)

        total = torch.zeros(2, dtype=torch.double, device=mesh.device)
        for _ in range(0, len(batches), STOP_CHECK_EVERY):
            if stopped():
                raise EvaluationStopped
            run_on_all(mesh, read, DataError)  # otherwise the others would wait for a process that cannot read its data
            for whole in ahead:
                tokens, targets, documents = to_device(whole.share(mesh.cp.rank, mesh.cp.size), isolate, mesh.device)
                total[0] += model(tokens, targets, documents).double()
                total[1] += (targets != IGNORED).sum()
        total[1] /= mesh.pp.size  # every stage counts targets, but only one has the loss
        for axis in (mesh.dp_cp, mesh.pp):
            if axis.size > 1:
                total = all_reduce(total, axis)
        nats, count = total.tolist()
        if not count:
            raise DataError(
                f"{part.path}: none of the evaluated tokens counts toward the loss; evaluate more tokens, or whole documents"
            )
        loss = nats / count
        bits_per_byte = loss / math.log(2) / part.bytes_per_token
        return Evaluation(round(count), loss, _perplexity(loss), bits_per_byte)

    if isinstance(split, Split):
        return of_store(split, max_tokens, "evaluate")
    of_stores: dict[str, Evaluation] = {}
    loss = bytes_per_token = 0.0
    for name, part, weight in zip(split.names, split.parts, split.weights, strict=True):
        share = None if max_tokens is None else max(round(max_tokens * weight), 1)
        of_stores[name] = of_store(part, share, f"evaluate {name}")
        loss += float(weight) * of_stores[name].loss
        bytes_per_token += float(weight) * part.bytes_per_token
    tokens = sum(evaluation.tokens for evaluation in of_stores.values())
    return Evaluation(tokens, loss, _perplexity(loss), loss / math.log(2) / bytes_per_token, of_stores)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))
