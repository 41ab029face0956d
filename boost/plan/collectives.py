"""The collective table: every collective of a training step, computed. A test holds it equal to what the runtime counts.

A layout is a list of crossings in forward order, named like the functions of `boost.parallel.collectives` that the runtime
calls: each says which collective it is forward and which backward. The backward pass meets them in reverse.

Legend: T tokens of one micro-batch, p TP processes; a width is elements a token of the whole payload.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from boost.config.architecture import Group, crossed, groups
from boost.config.cuts import TOKEN_SHARDED, cut_of, wide_parts
from boost.config.factors import needs_whole_factors
from boost.config.schema import Config, LayoutName, ModelConfig, ParallelConfig, RecomputeName
from boost.config.stages import Stage, stages_of, whole
from boost.config.traffic import Collective, chunk_tokens, statistic_columns, statistic_dtype
from boost.plan.optimizer import optimizer_collectives
from boost.plan.replicas import gathers, gradient_collectives

_KINDS = {
    "sum_forward": ("all-reduce", None),
    "sum_backward": (None, "all-reduce"),
    "sum_both": ("all-reduce", "all-reduce"),
    "gather": ("all-gather", "reduce-scatter"),
    "gather_replicated": ("all-gather", None),
    "scatter_sum": ("reduce-scatter", "all-gather"),
    "exchange": ("all-to-all", "all-to-all"),
}


@dataclass(frozen=True)
class Crossing:
    """One differentiable collective of a layout."""

    function: str
    """Its name in `boost.parallel.collectives`."""
    width: int
    """Elements a token, of the whole payload."""
    forward_only: int = 0
    """Elements a token that travel with the payload forward and not backward."""
    dtype: str = ""
    """Empty: that of the activations."""
    place: str = ""
    layer: int | None = None


Crossings = Iterator[Crossing]


def micro_batch_collectives(
    model: ModelConfig,
    parallel: ParallelConfig,
    tokens: int,
    compute_dtype: str,
    training: bool = True,
    recompute: Sequence[RecomputeName] = (),
    stage: Stage | None = None,
) -> list[Collective]:
    """Collectives of one micro-batch of `tokens` tokens on one TP process, in the order in which they are issued.

    `recompute`: the policy of each block (empty: none); what a block sends again stands in phase 'recompute'. `stage`: the
    pipeline stage (None: all of the model).
    """
    stage = stage or whole(model)
    result = list(_forward(model, parallel, tokens, compute_dtype, stage))
    if training:
        result += _backward_of(model, parallel, tokens, compute_dtype, recompute, stage)
    return result


def step_collectives(config: Config, pp_rank: int = 0) -> list[Collective]:
    """Collectives of a whole optimizer step on one process of the first replica: micro-batches, gradients, and what all
    agree on. Of LORO it is a usual step: what the exact one adds is in `boost.plan.optimizer`.

    Sums of gradients (phase 'step') are under way while the last backward pass goes on; here they stand behind it. With a
    pipeline, in whose order micro-batches are is the schedule's affair; here they come one after the other.
    """
    model, parallel, train = config.model, config.parallel, config.train
    accumulated = train.global_batch // (parallel.dp * train.micro_batch)
    tokens = train.micro_batch * train.seq_len
    recompute = train.recompute_by_layer(model.layers)
    held = stages_of(config, pp_rank)
    gathered = gathers(config, held)
    of_one: list[Collective] = [c for c in gathered if c.phase == "forward"]
    for stage in held:
        of_one += micro_batch_collectives(model, parallel, tokens, train.compute_dtype, True, recompute, stage)
    of_one += [c for c in gathered if c.phase == "backward"]
    result = of_one * accumulated
    result += [c for c in gathered if c.phase == "step"]
    result += gradient_collectives(config, held)
    if parallel.world_size > 1:
        result.append(Collective("step", "all-reduce", (4,), "float64", parallel.world_size, "agreement", axis="world"))
    if needs_whole_factors(config.optim):
        result += optimizer_collectives(config, pp_rank)
    return result


def residual_cut(model: ModelConfig, parallel: ParallelConfig) -> str:
    """'tokens', 'hidden' or 'whole': along what the residual stream [T, d] is cut."""
    if parallel.tp > 1 and parallel.layout in TOKEN_SHARDED:
        return "tokens"
    # The gain of a block's norm lies as the residual's columns do: that is what it multiplies.
    return "hidden" if cut_of("norm", model, parallel).dim == 0 else "whole"


def residual_shape(model: ModelConfig, parallel: ParallelConfig, tokens: int) -> tuple[int, int]:
    """Shape of the residual stream of `tokens` tokens on one process."""
    p, cut = parallel.tp, residual_cut(model, parallel)
    return (tokens // p if cut == "tokens" else tokens, model.dim // p if cut == "hidden" else model.dim)


def latent_shape(parallel: ParallelConfig, tokens: int, rank: int) -> tuple[int, int]:
    """Shape of latents of a whole width `rank`, as one process holds those that cross to the next block."""
    p, layout = parallel.tp, parallel.layout
    return tokens // p if layout in TOKEN_SHARDED and p > 1 else tokens, rank // p if layout == "vanilla" else rank


def _forward(
    model: ModelConfig, parallel: ParallelConfig, tokens: int, dtype: str, stage: Stage
) -> Iterator[Collective]:
    if parallel.tp > 1:
        for place in _places(model, parallel, dtype, stage):
            yield from _issued("forward", place, tokens, dtype, parallel.tp)
        if stage.predicts:
            yield from _loss(model, parallel, tokens, dtype)
    if not stage.predicts:
        yield from _handed_on("forward", model, parallel, tokens, dtype, stage.numbers[-1])


def _backward_of(
    model: ModelConfig,
    parallel: ParallelConfig,
    tokens: int,
    dtype: str,
    recompute: Sequence[RecomputeName],
    stage: Stage,
) -> Iterator[Collective]:
    if parallel.tp > 1:
        embed, *blocks, head_place = _places(model, parallel, dtype, stage)
        yield from _issued("backward", head_place[::-1], tokens, dtype, parallel.tp)
        policies: list[RecomputeName] = [recompute[n] if recompute else "none" for n in stage.numbers]
        for crossings, policy in zip(blocks[::-1], policies[::-1], strict=True):
            for phase, crossing in _backward(crossings, policy, parallel.layout):
                yield from _issued(phase, [crossing], tokens, dtype, parallel.tp)
        yield from _issued("backward", embed[::-1], tokens, dtype, parallel.tp)
    if not stage.embeds:
        yield from _handed_on("backward", model, parallel, tokens, dtype, stage.numbers[0] - 1)


def _handed_on(
    phase: str, model: ModelConfig, parallel: ParallelConfig, tokens: int, dtype: str, layer: int
) -> Iterator[Collective]:
    """What is sent between stages behind block `layer`: the residual stream and latents that cross, or their gradients, as
    one process holds them."""
    yield Collective(phase, "send", residual_shape(model, parallel, tokens), dtype, 2, "pipeline", axis="pp")
    for group in groups(model, layer) if crossed(model, layer + 1) else ():
        for crossing in _merged("", list(group.ranks), parallel):
            shape = latent_shape(parallel, tokens, crossing.width)
            yield Collective(phase, "send", shape, dtype, 2, "pipeline", axis="pp")


def _places(model: ModelConfig, parallel: ParallelConfig, dtype: str, stage: Stage) -> Iterator[list[Crossing]]:
    """Crossings of the embedding, of each block, and of the head; none of the ends that are not in this stage."""
    embed, block, head_crossings = _LAYOUTS[parallel.layout]
    yield [Crossing(name, model.dim, place="embed") for name in embed if stage.embeds]
    for layer in stage.numbers:
        yield [
            replace(crossing, place=group.name, layer=layer)
            for group in groups(model, layer)
            for crossing in block(group, model, parallel, dtype, crossed(model, layer))
        ]
    yield [Crossing(name, model.dim, place="head") for name in head_crossings if stage.predicts]


def _backward(
    crossings: Sequence[Crossing], policy: RecomputeName, layout: LayoutName
) -> Iterator[tuple[str, Crossing]]:
    """The crossings of one block in the order in which its backward pass meets them, with those that it repeats.

    A whole block is repeated when the backward pass first needs something of it, up to the last thing that it needs: a
    collective at its very end comes before that in the backward pass, and is not repeated.
    """
    rest = list(crossings)
    if policy == "full-block":
        if layout in _ENDS_WITH_A_COLLECTIVE:
            yield "backward", rest.pop()
        yield from (("recompute", crossing) for crossing in rest)
    for _, alike in itertools.groupby(rest[::-1], lambda crossing: crossing.place):
        group = list(alike)
        if policy == "low-rank-sharded" and group[0].function == "gather":
            yield from (("recompute", crossing) for crossing in group[::-1])
        yield from (("backward", crossing) for crossing in group)


def _issued(phase: str, crossings: Sequence[Crossing], tokens: int, dtype: str, processes: int) -> Iterator[Collective]:
    for crossing in crossings:
        kind = _KINDS[crossing.function][phase == "backward"]
        if kind is None:
            continue
        width = crossing.width + (0 if phase == "backward" else crossing.forward_only)
        # Of an all-to-all one process holds its own part: all tokens of its columns, or its tokens of all columns.
        shape = (tokens, width // processes) if kind == "all-to-all" else (tokens, width)
        yield Collective(phase, kind, shape, crossing.dtype or dtype, processes, crossing.place, crossing.layer)


def _loss(model: ModelConfig, parallel: ParallelConfig, tokens: int, dtype: str) -> Iterator[Collective]:
    """One all-gather of (logsumexp, target logit) a chunk of tokens, the same under every layout."""
    step = chunk_tokens(model.vocab_size // parallel.tp)
    for start in range(0, tokens, step):
        shape = (parallel.tp, 2, min(step, tokens - start))
        yield Collective("forward", "all-gather", shape, statistic_dtype(dtype), parallel.tp, "loss")


def _merged(function: str, widths: list[int], parallel: ParallelConfig) -> Crossings:
    """One crossing for all slots of a group, or one a slot."""
    for width in [sum(widths)] if parallel.grouping else widths:
        yield Crossing(function, width)


def _column_row(enter: str, leave: str) -> "_Block":
    """Megatron's cut: one crossing of width d into a group and one out of it."""

    def block(group: Group, model: ModelConfig, parallel: ParallelConfig, dtype: str, crossed: bool) -> Crossings:
        if group.side == "leave":
            yield Crossing(leave, model.dim)
        else:
            yield from (Crossing(enter, model.dim) for _ in (group.slots[:1] if parallel.grouping else group.slots))

    return block


def _vanilla(group: Group, model: ModelConfig, parallel: ParallelConfig, dtype: str, crossed: bool) -> Crossings:
    cut = wide_parts(parallel) > 1
    arrived = list(_arrived(group, model, parallel, dtype)) if crossed else []
    if group.side == "leave":
        yield Crossing("gather" if cut else "sum_backward", group.slots[0].d_in)
        yield from arrived
        yield Crossing("sum_forward", model.dim)
        return
    for _ in group.slots[:1] if parallel.grouping else group.slots:
        yield Crossing("sum_backward", model.dim)
    yield from arrived
    if cut:  # key/value heads fewer than p are sent to every process that uses them
        least = parallel.tp * model.head_dim
        yield from _merged("scatter_sum", [max(s.d_out, least) if s.kv else s.d_out for s in group.slots], parallel)
    else:
        yield from (Crossing("sum_forward", slot.d_out) for slot in group.slots)


def _arrived(group: Group, model: ModelConfig, parallel: ParallelConfig, dtype: str) -> Crossings:
    """Of latents that are cut along the rank: those of the block before for a gate that mixes them, and LayerNorm's sums."""
    if model.mixes:
        yield from _merged("gather", list(group.ranks), parallel)
    for crossing in _merged("sum_both", [2] * len(group.slots), parallel):
        yield replace(crossing, dtype=statistic_dtype(dtype))


def _btp(group: Group, model: ModelConfig, parallel: ParallelConfig, dtype: str, crossed: bool) -> Crossings:
    statistic = 0
    if group.side == "enter" and parallel.norm == "sync":
        yield Crossing("sum_both", 1, dtype=statistic_dtype(dtype))
    elif group.side == "enter":
        statistic = statistic_columns(dtype, parallel.tp)
    for crossing in _merged("sum_forward", list(group.ranks), parallel):
        yield Crossing("sum_forward", crossing.width, forward_only=statistic)
        statistic = 0
    yield from _merged("sum_backward", list(group.ranks), parallel)


def _btp_sp(group: Group, model: ModelConfig, parallel: ParallelConfig, dtype: str, crossed: bool) -> Crossings:
    yield from _merged("gather" if group.side == "enter" else "scatter_sum", list(group.ranks), parallel)


_Block = Callable[[Group, ModelConfig, ParallelConfig, str, bool], Crossings]
_LAYOUTS: dict[str, tuple[tuple[str, ...], _Block, tuple[str, ...]]] = {
    "megatron": (("gather_replicated",), _column_row("sum_backward", "sum_forward"), ("sum_backward",)),
    "megatron-sp": (("exchange",), _column_row("gather", "scatter_sum"), ("gather",)),
    "vanilla": (("gather_replicated",), _vanilla, ("sum_backward",)),
    "btp": ((), _btp, ("gather",)),
    "btp-sp": (("exchange",), _btp_sp, ("gather",)),
}
"""Crossings of width d of the embedding, of each group, and of width d of the head."""

_ENDS_WITH_A_COLLECTIVE = ("megatron", "megatron-sp", "vanilla")
"""Layouts whose blocks do nothing behind their last collective that the backward pass needs."""
