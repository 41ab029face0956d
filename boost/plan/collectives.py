"""The collective table: every collective in a training step, derived from the configuration. Tests check it against real runs.

A layout's spec (`boost.config.layouts`) lists its differentiable collectives in forward order, with their forward and backward
kinds. The backward pass issues them in reverse.

Legend: T tokens per micro-batch, p TP processes; a width is the number of elements per token in the full payload.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from boost.config.architecture import groups, taken
from boost.config.attention import context_comms
from boost.config.layouts import spec_of
from boost.config.layouts.spec import GroupContext, PlannedComm
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName
from boost.config.stages import Stage, stages_of, whole
from boost.config.traffic import ALL_TO_ALL, Collective, chunk_tokens, statistic_dtype
from boost.plan.optimizer import optimizer_collectives
from boost.plan.replicas import exchange_collectives, gathers, gradient_collectives, with_whole_weights
from boost.plan.structure import held_tensors


def micro_batch_collectives(
    model: ModelConfig,
    parallel: ParallelConfig,
    tokens: int,
    compute_dtype: str,
    training: bool = True,
    recompute: Sequence[RecomputeName] = (),
    stage: Stage | None = None,
) -> list[Collective]:
    """Collectives for one micro-batch of `tokens` tokens on one TP process, in order of issue.

    `recompute`: the policy for each block (empty: none); the collectives that recomputation repeats have phase 'recompute'.
    `stage`: the pipeline stage (None: the whole model).
    """
    stage, spec = stage or whole(model), spec_of(parallel)
    embed, *blocks, head = _places(model, parallel, compute_dtype, stage)
    # Parts of a micro-batch communicate separately. They interleave at run time but are listed one after another here.
    parts = [tokens] if parallel.overlap == "none" else [tokens // 2] * 2
    if parallel.tp * parallel.cp == 1:
        parts = []
    result: list[Collective] = []
    for part in parts:
        for place in (embed, *blocks, head):
            result += _issued("forward", place, part, compute_dtype, parallel)
        if stage.has_head and parallel.tp > 1:
            # Every layout issues one all-gather of (logsumexp, target logit) per chunk of tokens.
            step, dtype = chunk_tokens(model.vocab_size // parallel.tp), statistic_dtype(compute_dtype)
            shapes = [(parallel.tp, 2, min(step, part - start)) for start in range(0, part, step)]
            result += [Collective("forward", "all-gather", shape, dtype, parallel.tp, "loss") for shape in shapes]
    result += stage_sends("forward", model, parallel, tokens, compute_dtype, stage)
    if not training:
        return result
    for part in parts:
        result += _issued("backward", head[::-1], part, compute_dtype, parallel)
        for layer, comms in zip(stage.numbers[::-1], blocks[::-1], strict=True):
            policy = recompute[layer] if recompute else "none"
            # Halves are recomputed to the end, and a block's outputs are combined with those of the previous block at its end.
            goes_on = parallel.overlap == "halves" or any(g.kind.carries == "outputs" for g in taken(model, layer))
            ends_with_comm = not goes_on and spec.ends_with_comm(groups(model, layer)[-1])
            for phase, comm in spec.backward(comms, policy, ends_with_comm):
                result += _issued(phase, [comm], part, compute_dtype, parallel)
        result += _issued("backward", embed[::-1], part, compute_dtype, parallel)
    result += stage_sends("backward", model, parallel, tokens, compute_dtype, stage)
    return result


def step_collectives(config: Config, pp_rank: int = 0) -> list[Collective]:
    """Collectives in a full optimizer step on one process of the first replica: micro-batches, gradient reduction and step stats.

    For LORO this is a regular step; `boost.plan.optimizer` lists the collectives that an exact step adds. Gradient reductions
    (phase 'step') overlap the last backward pass at run time, but are listed after it. Micro-batches are listed one after
    another, regardless of the pipeline schedule.
    """
    if config.divides_moments:
        config = with_whole_weights(config)
        exchanged = exchange_collectives(config, held_tensors(config, stages_of(config, pp_rank)))
        return step_collectives(config, pp_rank) + exchanged
    model, parallel, train = config.model, config.parallel, config.train
    accumulated = train.global_batch // (parallel.dp * train.micro_batch)
    tokens = train.micro_batch * train.seq_len // parallel.cp
    recompute = train.recompute_by_layer(model.layers)
    held = held_tensors(config, stages_of(config, pp_rank))
    gathered = [c for c, times in gathers(config, held) for _ in range(times)]
    of_one: list[Collective] = [c for c in gathered if c.phase == "forward"]
    for stage in held.stages:
        of_one += micro_batch_collectives(model, parallel, tokens, train.compute_dtype, True, recompute, stage)
    of_one += [c for c in gathered if c.phase == "backward"]
    result = of_one * accumulated
    result += [c for c in gathered if c.phase == "step"]
    result += gradient_collectives(config, held)
    if parallel.world_size > 1:
        result.append(
            Collective("step", "all-reduce", (4,), "float64", parallel.world_size, "step stats", axis="world")
        )
    if config.optim.whole_factors:
        result += optimizer_collectives(config, pp_rank)
    return result


def stage_sends(
    phase: str, model: ModelConfig, parallel: ParallelConfig, tokens: int, dtype: str, stage: Stage
) -> Iterator[Collective]:
    """Sends from a stage in one pass of a micro-batch: this process's shards of the residual stream and of what is carried to the
    next block (forward, to the next stage), or of their gradients (backward, to the previous stage)."""
    if stage.has_head if phase == "forward" else stage.has_embedding:
        return
    layer, spec = stage.numbers[-1] if phase == "forward" else stage.numbers[0] - 1, spec_of(parallel)
    carried = (spec.carried_shapes(group, model, parallel, tokens) for group in taken(model, layer + 1))
    for shape in (spec.residual_shape(model, parallel, tokens), *itertools.chain(*carried)):
        yield Collective(phase, "send", shape, dtype, 2, "pipeline", axis="pp")


def _places(model: ModelConfig, parallel: ParallelConfig, dtype: str, stage: Stage) -> Iterator[list[PlannedComm]]:
    """Yields lists of collectives for the embedding, each block, and the head; the list is empty for an end on another stage."""
    spec = spec_of(parallel)
    yield [PlannedComm(comm, model.dim, place="embed") for comm in spec.table_comms(model) if stage.has_embedding]
    for layer in stage.numbers:
        before = {group.name: group for group in taken(model, layer)}
        contexts = (
            GroupContext(group, model, parallel, dtype, before.get(group.name)) for group in groups(model, layer)
        )
        qkv, *others = (spec.comms(context) for context in contexts)
        attention = context_comms(model, parallel)
        yield [replace(comm, layer=layer) for comm in itertools.chain(qkv, attention, *others)]
    yield [PlannedComm(comm, model.dim, place="head") for comm in spec.head_comms if stage.has_head]


def _issued(
    phase: str, comms: Sequence[PlannedComm], tokens: int, dtype: str, parallel: ParallelConfig
) -> Iterator[Collective]:
    for planned in comms:
        kind = planned.comm.backward if phase == "backward" else planned.comm.forward
        if kind is None:
            continue
        width = planned.width + (0 if phase == "backward" else planned.forward_only)
        if planned.axis == "cp":
            processes = parallel.cp
            shape = (tokens, width) if kind == ALL_TO_ALL else (tokens * processes, width)
        else:
            # In an all-to-all, a process holds one shard: all tokens for its columns, or all columns for its tokens.
            processes = parallel.tp
            shape = (tokens, width // processes) if kind == ALL_TO_ALL else (tokens, width)
        yield Collective(
            phase, kind, shape, planned.dtype or dtype, processes, planned.place, planned.layer, planned.axis
        )
