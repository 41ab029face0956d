"""All operations of one process in a training step: embedding, blocks, loss, and the work after the last backward pass."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from boost.config.architecture import first_alike, groups
from boost.config.copies import has_working_copies
from boost.config.factors import FactorShape, factor_shape, work_dtype
from boost.config.layouts import placement_of
from boost.config.optimizers import MuonConfig
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName
from boost.config.stages import Stage
from boost.config.traffic import ITEMSIZE
from boost.plan.optimizer import iterations
from boost.plan.replicas import StoredTensor, stored_tensors
from boost.plan.trace import trace_block, trace_embedding, trace_loss
from boost.plan.work import (
    OPTIMIZER,
    REDUCE,
    STREAM,
    Counted,
    Work,
    gemm,
    moved,
)


def block_work(config: Config, layer: int, policy: RecomputeName, on_gpu: bool) -> Counted:
    """Operations of one block and micro-batch, with their phases. `on_gpu`: see `boost.plan.trace.trace_block`."""
    return trace_block(as_stored(config), layer, policy, on_gpu).work


def ends_work(config: Config, has_embedding: bool, has_head: bool, on_gpu: bool) -> Counted:
    """Operations of the embedding and the loss for one micro-batch."""
    stored, total = as_stored(config), Counter[Work]()
    if has_embedding:
        total.update(trace_embedding(stored).work)
    if has_head:
        total.update(trace_loss(stored, on_gpu).work)
    return total


def as_stored(config: Config) -> Config:
    """Returns the configuration without sharding, whose passes do the same work.

    Gathered weights arrive cast, so passes use them like working copies. Without working copies, gathered weights are copied out of
    the receive buffer and their gradients into the send buffer. These copies move about as many bytes as casts at each use, which
    are counted instead.
    """
    if not config.parallel.sharded:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"shard": "none"})})


def kinds_of_blocks(model: ModelConfig, layers: Iterable[int]) -> Counter[int]:
    """Counts the blocks of each kind; keys are the first block of each kind."""
    return Counter(first_alike(model, layer) for layer in layers)


def step_work(config: Config, stages: Sequence[Stage]) -> Counted:
    """Operations of one process once per optimizer step, and gradient accumulation over micro-batches.

    For weights with working copies, this includes the casts of weights and gradients, which otherwise belong to a micro-batch.
    """
    model, parallel, train = config.model, config.parallel, config.train
    stored: Counter[StoredTensor] = Counter()
    for stage in stages:
        for layer, count in kinds_of_blocks(model, stage.numbers).items():
            for tensor in stored_tensors(model, parallel, Stage(1, 3, layer, 1)):
                stored[tensor] += count
        stored.update(stored_tensors(model, parallel, Stage(stage.index, stage.count)))
    total: Counted = Counter()
    dtype, of_step = train.param_dtype, functools.partial(Work.of, phase="step")
    accumulated = train.global_batch // (parallel.dp * train.micro_batch)
    # Gradients are copied into a bucket for an all-reduce; if that has another dtype, also copied out of it.
    copied = 2 if train.sum_dtype == dtype else 2 * (1 + ITEMSIZE[train.sum_dtype] / ITEMSIZE[dtype])
    has_copies, narrow = has_working_copies(as_stored(config)), ITEMSIZE[train.compute_dtype] / ITEMSIZE[dtype]
    gathers_each = parallel.sharded and parallel.shard == "full"
    for tensor, count in stored.items():
        elements, held = (tensor.elements,), (tensor.shard(parallel),)
        has_copy = has_copies and tensor.may_have_copy
        if has_copy and gathers_each:
            # In each micro-batch: copies out of two gather buffers and into one reduce-scatter buffer.
            total[of_step(STREAM, elements, dtype, 4 * narrow + 1 + narrow, "weights")] += count * accumulated
        elif has_copy:
            # The weight is cast (or gathered) once, and so is the first gradient; the others are accumulated in one pass each.
            total[of_step(STREAM, elements, dtype, 1 + narrow, "weights")] += 2 * count
        added = 2 + narrow if has_copy and not gathers_each else 3
        total[of_step(STREAM, elements, dtype, added, "weights")] += count * (accumulated - 1)
        if parallel.dp_cp > 1 or (tensor.placement.partial and parallel.tp > 1):
            total[of_step(STREAM, elements, dtype, copied, "weights")] += count
        total[of_step(REDUCE, held, dtype, 1, "optimizer")] += count
        total[of_step(STREAM, held, dtype, 2, "optimizer")] += count * (config.optim.clip > 0)
        # Reads the weight, gradient and two moments; writes all but the gradient.
        total[of_step(OPTIMIZER, held, dtype, 7, "optimizer")] += count
    if isinstance(config.optim, MuonConfig):
        total.update(_newton_schulz(config, stages))
    return +total


def _newton_schulz(config: Config, stages: Sequence[Stage]) -> Counted:
    """Muon orthogonalizes the momentum of every factor through its r x r Gram matrix (`optim.muon`), in fp32 or higher
    precision. Replicas divide the iterations, and the Gram matrices that need no sum over TP."""
    model, parallel, optim = config.model, config.parallel, config.optim
    assert isinstance(optim, MuonConfig)
    dtype, total = work_dtype(optim, config.train.param_dtype), Counter[Work]()

    def add(work: Work, times: int) -> None:
        total[replace(work, phase="step", place="optimizer")] += times

    for layer, count in kinds_of_blocks(model, (layer for stage in stages for layer in stage.numbers)).items():
        for group in groups(model, layer):
            for parameter in (*group.parameters("", "A"), *group.parameters("", "B")):
                shape = factor_shape(parameter, placement_of(parameter.role, model, parallel), parallel.tp)
                n, r = shape.rows, shape.rank
                add(gemm(r, r, n, dtype), count * _is_summed(shape, parallel))
                add(gemm(n, r, r, dtype), count)
                add(moved(STREAM, n * r, 8, dtype), count)
    for shape, count in iterations(config, stages).items():
        n, r = shape.rows, shape.rank
        add(gemm(r, r, n, dtype), count * (not _is_summed(shape, parallel)))
        # Each iteration computes g g, p q and, except in the last one, q g q.
        add(gemm(r, r, r, dtype), count * (4 * optim.muon_steps - 2))
    return total


def _is_summed(shape: FactorShape, parallel: ParallelConfig) -> bool:
    """Whether its Gram matrix is a sum over TP processes."""
    return shape.gram > 0 and parallel.tp > 1
