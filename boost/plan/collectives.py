"""The collective table: every collective of a training step, computed. A test holds it equal to what the runtime counts.

Legend: T tokens of one micro-batch, p TP processes, r latent width of one slot, D = d/p.
"""

from collections.abc import Callable, Iterator

from boost.config.architecture import Group, embedding, final_norm, groups, head
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.traffic import (
    ITEMSIZE,
    Collective,
    bucket_lengths,
    chunk_tokens,
    statistic_dtype,
    statistic_elements,
)

Table = Iterator[Collective]


def micro_batch_collectives(
    model: ModelConfig, parallel: ParallelConfig, tokens: int, compute_dtype: str, training: bool = True
) -> list[Collective]:
    """Collectives of one micro-batch of `tokens` tokens on one TP process, in the order in which they are issued."""
    if parallel.tp == 1:
        return []
    return list(_LAYOUTS[parallel.layout](model, parallel, tokens, compute_dtype, training))


def step_collectives(config: Config) -> list[Collective]:
    """Collectives of a whole optimizer step on one process: micro-batches, gradients, and what all agree on."""
    model, parallel, train = config.model, config.parallel, config.train
    accumulated = train.global_batch // (parallel.dp * train.micro_batch)
    tokens = train.micro_batch * train.seq_len
    result = micro_batch_collectives(model, parallel, tokens, train.compute_dtype) * accumulated
    if parallel.tp > 1:
        result += _PARTIAL[parallel.layout](model, parallel, train.param_dtype)
    if parallel.dp > 1:
        result += _data_parallel(model, parallel, train.param_dtype)
    if parallel.world_size > 1:
        result.append(Collective("step", "all-reduce", 3, "float64", parallel.world_size))
    return result


def _data_parallel(model: ModelConfig, parallel: ParallelConfig, dtype: str) -> list[Collective]:
    """Every gradient, summed over the replicas in buckets of stored tensors."""
    sizes = [elements // (parallel.tp if cut else 1) for elements, cut in _stored_tensors(model)]
    result = []
    for length in bucket_lengths([size * ITEMSIZE[dtype] for size in sizes]):
        result.append(Collective("step", "all-reduce", sum(sizes[:length]), dtype, parallel.dp))
        sizes = sizes[length:]
    return result


def _stored_tensors(model: ModelConfig) -> Iterator[tuple[int, bool]]:
    """(elements, whether btp cuts it) of every stored tensor, in the order of the decoder's modules."""
    yield embedding(model).size, True
    yield final_norm(model).size, False
    yield head(model).size, True
    for layer in range(model.layers):
        yield from ((model.dim, True), (model.dim, True))  # the block's two norms
        for group in groups(model):
            if model.low_rank:
                yield sum(a.size for a in group.parameters(f"layers.{layer}", "A")), True
                yield from ((b.size, True) for b in group.parameters(f"layers.{layer}", "B"))
            else:
                yield sum(w.size for w in group.parameters(f"layers.{layer}", "W")), True


def _btp(model: ModelConfig, parallel: ParallelConfig, tokens: int, dtype: str, training: bool) -> Table:
    p = parallel.tp

    def reduce(phase: str, elements: int, kind_dtype: str = dtype) -> Collective:
        return Collective(phase, "all-reduce", elements, kind_dtype, p)

    def widths(group: Group) -> list[int]:
        return [sum(group.ranks)] if parallel.grouping else list(group.ranks)

    def forward(group: Group) -> Table:
        statistic = 0
        if group.side == "enter" and parallel.norm == "sync":
            yield reduce("forward", tokens, statistic_dtype(dtype))
        elif group.side == "enter":
            statistic = statistic_elements(tokens, dtype, p)
        for width in widths(group):
            yield reduce("forward", tokens * width + statistic)
            statistic = 0

    def backward(group: Group) -> Table:
        for width in reversed(widths(group)):
            yield reduce("backward", tokens * width)
        if group.side == "enter" and parallel.norm == "sync":
            yield reduce("backward", tokens, statistic_dtype(dtype))

    block = groups(model)
    for _ in range(model.layers):
        for group in block:
            yield from forward(group)
    yield Collective("forward", "all-gather", tokens * model.dim, dtype, p)
    for start in range(0, tokens, chunk_tokens(model.vocab_size // p)):
        chunk = min(chunk_tokens(model.vocab_size // p), tokens - start)
        yield Collective("forward", "all-gather", 2 * chunk * p, statistic_dtype(dtype), p)
    if not training:
        return
    yield Collective("backward", "reduce-scatter", tokens * model.dim, dtype, p)
    for _ in range(model.layers):
        for group in reversed(block):
            yield from backward(group)


def _btp_partial(model: ModelConfig, parallel: ParallelConfig, dtype: str) -> list[Collective]:
    """The final norm, which every process applies whole to its own part of the vocabulary."""
    return [Collective("step", "all-reduce", model.dim, dtype, parallel.tp)]


_LAYOUTS: dict[str, Callable[[ModelConfig, ParallelConfig, int, str, bool], Table]] = {"btp": _btp}
_PARTIAL: dict[str, Callable[[ModelConfig, ParallelConfig, str], list[Collective]]] = {"btp": _btp_partial}
