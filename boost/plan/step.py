"""Everything that one process does in a training step, as counted operations: embedding, blocks, loss, and what stands between
the last backward pass and the next step. Arithmetic only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from boost.config.architecture import first_alike, groups
from boost.config.factors import factor_shape, work_dtype
from boost.config.layouts import placement_of
from boost.config.optimizers import MuonConfig
from boost.config.schema import Config, ModelConfig, RecomputeName
from boost.config.stages import Stage
from boost.plan.replicas import StoredTensor, stored_tensors
from boost.plan.trace import trace_block, trace_embedding, trace_loss
from boost.plan.work import OPTIMIZER, REDUCE, STREAM, Counted, Work, gemm, moved


def block_work(config: Config, layer: int, policy: RecomputeName, fused_norm: bool) -> Counted:
    """Operations of one block and micro-batch, with their phases. `fused_norm`: as of `boost.plan.trace.trace_block`."""
    return trace_block(as_stored(config), layer, policy, fused_norm).work


def ends_work(config: Config, has_embedding: bool, has_head: bool, fused_norm: bool) -> Counted:
    """The same of embedding and loss."""
    stored, total = as_stored(config), Counter[Work]()
    if has_embedding:
        total.update(trace_embedding(stored).work)
    if has_head:
        total.update(trace_loss(stored, fused_norm).work)
    return total


def as_stored(config: Config) -> Config:
    """The same with weights as they are stored. Gathered ones arrive cast, but are copied out of what arrives, and their gradients
    into what is sent: about what casts move, which are counted for it."""
    if not config.parallel.sharded:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"shard": "none"})})


def kinds_of_blocks(model: ModelConfig, layers: Iterable[int]) -> Counter[int]:
    """How many of these blocks are like each of some of them."""
    return Counter(first_alike(model, layer) for layer in layers)


def step_work(config: Config, stages: Sequence[Stage]) -> Counted:
    """Operations of one process once an optimizer step, and those that add gradients up over micro-batches."""
    model, parallel, train = config.model, config.parallel, config.train
    stored: Counter[StoredTensor] = Counter()
    for stage in stages:
        for layer, count in kinds_of_blocks(model, stage.numbers).items():
            for tensor in stored_tensors(model, parallel, Stage(1, 3, layer, 1)):
                stored[tensor] += count
        stored.update(stored_tensors(model, parallel, Stage(stage.index, stage.count)))
    total: Counted = Counter()
    accumulated = train.global_batch // (parallel.dp * train.micro_batch)
    for tensor, count in stored.items():
        total[_once(moved(STREAM, tensor.elements, 3, train.param_dtype), "weights")] += count * (accumulated - 1)
        if _travels(tensor, config):
            total[_once(moved(STREAM, tensor.elements, 2, train.param_dtype), "weights")] += count
        held = tensor.shard(parallel)
        total[_once(moved(REDUCE, held, 1, train.param_dtype), "optimizer")] += count
        total[_once(moved(STREAM, held, 2, train.param_dtype), "optimizer")] += count * (config.optim.clip > 0)
        # Reads weight, gradient and two moments, writes all but the gradient.
        total[_once(moved(OPTIMIZER, held, 7, train.param_dtype), "optimizer")] += count
    if isinstance(config.optim, MuonConfig):
        total.update(_newton_schulz(config, stages))
    return +total


def _travels(tensor: StoredTensor, config: Config) -> bool:
    """Whether gradients are copied into buckets, to be summed over processes."""
    parallel = config.parallel
    return parallel.dp > 1 or (tensor.placement.partial and parallel.tp > 1)


def _once(work: Work, place: str) -> Work:
    return replace(work, phase="step", place=place)


def _newton_schulz(config: Config, stages: Sequence[Stage]) -> Counted:
    """Muon: momentum of every factor, orthogonalised by way of its Gram matrix r x r (`optim.muon`), in fp32 at least."""
    model, parallel, optim = config.model, config.parallel, config.optim
    assert isinstance(optim, MuonConfig)
    dtype, total = work_dtype(optim, config.train.param_dtype), Counter[Work]()
    for layer, count in kinds_of_blocks(model, (layer for stage in stages for layer in stage.numbers)).items():
        for group in groups(model, layer):
            for parameter in (*group.parameters("", "A"), *group.parameters("", "B")):
                shape = factor_shape(parameter, placement_of(parameter.role, model, parallel), parallel.tp)
                n, r = shape.rows, shape.rank
                total[_once(gemm(r, r, n, dtype), "optimizer")] += count
                # An iteration: g g, p q and, but for the last one, q g q.
                total[_once(gemm(r, r, r, dtype), "optimizer")] += count * (4 * optim.muon_steps - 2)
                total[_once(gemm(n, r, r, dtype), "optimizer")] += count
                total[_once(moved(STREAM, n * r, 8, dtype), "optimizer")] += count
    return total
