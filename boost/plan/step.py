"""Everything that one process does in a training step, as counted operations: embedding, blocks, loss, and what stands between
the last backward pass and the next step. Arithmetic only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from boost.config.architecture import first_alike, groups
from boost.config.cuts import cut_of
from boost.config.factors import factor_shape, work_dtype
from boost.config.schema import Config, ModelConfig, RecomputeName
from boost.config.stages import Stage
from boost.config.traffic import ITEMSIZE, chunk_tokens, statistic_dtype
from boost.plan.block import BlockWork
from boost.plan.replicas import StoredTensor, stored_tensors
from boost.plan.work import LOOKUP, LOSS, OPTIMIZER, REDUCE, STREAM, Work, Works, gemm, moved, norm, norm_backward

Counted = Counter[Work]
"""How often each operation is done."""


def block_work(config: Config, layer: int, policy: RecomputeName, fused_norm: bool) -> Counted:
    """Operations of one block and micro-batch, with their phases. `fused_norm`: as `BlockWork` takes it."""
    block = BlockWork(config, layer, fused_norm)
    total: Counted = Counter()
    for phase, works in (
        ("forward", block.forward()),
        ("recompute", block.recomputed(policy)),
        ("backward", block.backward()),
    ):
        total.update(replace(work, phase=phase) for work in works)
    return total


def ends_work(config: Config, embeds: bool, predicts: bool, fused_norm: bool) -> Counted:
    """The same of embedding and loss."""
    total = _embedding(config) if embeds else Counter[Work]()
    return total + _loss(config, fused_norm) if predicts else total


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
    if config.optim.name == "muon":
        total.update(_newton_schulz(config, stages))
    return +total


def _travels(tensor: StoredTensor, config: Config) -> bool:
    """Whether gradients are copied into buckets, to be summed over processes."""
    parallel = config.parallel
    return parallel.dp > 1 or (tensor.cut.partial and parallel.tp > 1)


def _once(work: Work, place: str) -> Work:
    return replace(work, phase="step", place=place)


def _embedding(config: Config) -> Counted:
    model, parallel, train = config.model, config.parallel, config.train
    tokens, width = train.micro_batch * train.seq_len, model.dim // parallel.tp
    layout = parallel.layout if parallel.tp > 1 else "single"
    total: Counted = Counter()
    ratio = ITEMSIZE[train.param_dtype] / ITEMSIZE[train.compute_dtype]

    def add(work: Work, phase: str) -> None:
        total[replace(work, place="embed", phase=phase)] += 1

    add(moved(LOOKUP, tokens * width, 2, train.param_dtype), "forward")
    if ratio != 1:
        add(moved(STREAM, tokens * width, 1 + ratio, train.compute_dtype), "forward")
        add(moved(STREAM, tokens * width, 1 + ratio, train.compute_dtype), "backward")
    if layout not in ("single", "btp"):  # columns of each process, side by side
        rows = tokens // parallel.tp if layout in ("btp-sp", "megatron-sp") else tokens
        add(moved(STREAM, rows * model.dim, 2, train.compute_dtype), "forward")
        add(moved(STREAM, rows * (model.dim if rows < tokens else width), 2, train.compute_dtype), "backward")
    # The table's gradient is cleared, then a row is added for every token.
    add(moved(STREAM, model.vocab_size * width, 1, train.param_dtype), "backward")
    add(moved(LOOKUP, tokens * width, 3, train.param_dtype), "backward")
    return total


def _loss(config: Config, fused_norm: bool) -> Counted:
    """Norm, logits and cross-entropy; their gradients are formed in the forward pass, chunk by chunk (`parallel.loss`)."""
    model, parallel, train = config.model, config.parallel, config.train
    tokens, vocabulary, dtype = train.micro_batch * train.seq_len, model.vocab_size // parallel.tp, train.compute_dtype
    wide = statistic_dtype(dtype)
    own = tokens // parallel.tp if parallel.layout in ("btp-sp", "megatron-sp") else tokens
    total: Counted = Counter()

    def add(works: Works, phase: str, times: int = 1) -> None:
        for work in works:
            total[replace(work, place=work.place or "loss", phase=phase)] += times

    add(norm(own * model.dim, dtype, fused_norm), "forward")
    add(norm_backward(own * model.dim, dtype, fused_norm), "backward")
    if parallel.tp > 1 and parallel.layout == "btp":
        add(iter([moved(STREAM, tokens * model.dim, 2, dtype)]), "forward")
        add(iter([moved(STREAM, tokens * model.dim, 2, dtype)]), "backward")
    step = chunk_tokens(vocabulary)
    whole, rest = divmod(tokens, step)
    for rows, times in ((step, whole), (rest, 1)):
        if rows:
            add(_chunk(rows, vocabulary, model.dim, dtype), "forward", times)
    add(iter([moved(STREAM, vocabulary * model.dim, 1, wide)]), "forward")
    if dtype != wide:
        ratio = ITEMSIZE[wide] / ITEMSIZE[dtype]
        # The head is cast to compute with, its gradient cast back twice.
        add(iter([moved(STREAM, vocabulary * model.dim, 1 + ratio, dtype, calls=2)]), "forward")
        add(iter([moved(STREAM, vocabulary * model.dim, 1 + ratio, dtype)]), "backward")
    add(iter([moved(STREAM, n, 2, dtype) for n in (tokens * model.dim, vocabulary * model.dim)]), "backward")
    return total


def _chunk(rows: int, vocabulary: int, dim: int, dtype: str) -> Works:
    wide, logits = statistic_dtype(dtype), rows * vocabulary
    ratio = ITEMSIZE[wide] / ITEMSIZE[dtype]
    yield gemm(rows, vocabulary, dim, dtype)
    yield gemm(rows, dim, vocabulary, dtype)
    yield gemm(vocabulary, dim, rows, dtype)
    yield moved(LOSS, logits, 1, wide)
    yield moved(LOSS, logits, 2, wide)
    yield moved(STREAM, logits, 2, wide, calls=2)
    if dtype != wide:
        yield moved(STREAM, logits, 1 + ratio, dtype, calls=2)
        yield moved(STREAM, vocabulary * dim, 1 + 2 * ratio, dtype)


def _newton_schulz(config: Config, stages: Sequence[Stage]) -> Counted:
    """Muon: momentum of every factor, orthogonalised by way of its Gram matrix r x r (`optim.muon`), in fp32 at least."""
    model, parallel, optim = config.model, config.parallel, config.optim
    dtype, total = work_dtype(optim, config.train.param_dtype), Counter[Work]()
    for layer, count in kinds_of_blocks(model, (layer for stage in stages for layer in stage.numbers)).items():
        for group in groups(model, layer):
            for parameter in (*group.parameters("", "A"), *group.parameters("", "B")):
                shape = factor_shape(parameter, cut_of(parameter.role, model, parallel), parallel.tp)
                n, r = shape.wide, shape.rank
                total[_once(gemm(r, r, n, dtype), "optimizer")] += count
                # An iteration: g g, p q and, but for the last one, q g q.
                total[_once(gemm(r, r, r, dtype), "optimizer")] += count * (4 * optim.muon_steps - 2)
                total[_once(gemm(n, r, r, dtype), "optimizer")] += count
                total[_once(moved(STREAM, n * r, 8, dtype), "optimizer")] += count
    return total
