"""Unbiased held-out loss: the sum of the loss over all tokens divided by their number, on any number of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from boost.config.architecture import IGNORED
from boost.data.batches import EvaluationBatches
from boost.data.document_batches import DocumentBatches
from boost.data.store import Split
from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Mesh
from boost.train.console import progress
from boost.train.model import Model, to_device

STOP_CHECK_EVERY = 4
"""Interval between checks of the stop flags, batches."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss of a model."""

    tokens: int
    """Number of targets; each one is evaluated once."""
    loss: float
    """Mean cross-entropy, nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """loss / ln 2 x tokens of the split / bytes of its text: comparable across tokenizers."""


class EvaluationStopped(Exception):
    """An evaluation was stopped early; its partial result is discarded."""


@torch.no_grad()
def evaluate(
    model: Model,
    split: Split,
    seq_len: int,
    batch: int,
    isolate: bool,
    mesh: Mesh,
    max_tokens: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    by_document: bool = False,
) -> Evaluation:
    """Evaluates on the whole split, or on about `max_tokens` spread evenly over it. All processes return the same result.

    `stopped` is called every few batches and must return the same value on all processes. Raises EvaluationStopped if it returns
    True. `by_document`: on the first `seq_len` tokens of each document, as in publications (`boost.data.document_batches`).
    """
    total = torch.zeros(2, dtype=torch.double, device=mesh.device)
    rows = DocumentBatches if by_document else EvaluationBatches
    batches = rows(split, seq_len, batch, mesh.dp.rank, mesh.dp.size, max_tokens)
    for index, part in enumerate(progress(batches, "evaluate", enabled=mesh.is_main)):
        if index % STOP_CHECK_EVERY == 0 and stopped():
            raise EvaluationStopped
        tokens, targets, documents = to_device(part.share(mesh.cp.rank, mesh.cp.size), isolate, mesh.device)
        total[0] += model(tokens, targets, documents).double()
        total[1] += (targets != IGNORED).sum()
    total[1] /= mesh.pp.size  # every stage counts targets, but only one has the loss
    for axis in (mesh.dp_cp, mesh.pp):
        if axis.size > 1:
            total = all_reduce(total, axis)
    nats, count = total.tolist()
    loss = nats / count
    bits_per_byte = loss / math.log(2) * split.n_tokens / split.n_bytes
    return Evaluation(round(count), loss, math.exp(min(loss, 700)), bits_per_byte)
