"""What one process stores, what it shares with its replicas, and what they send each other. Arithmetic only.

Where replicas share weights (`parallel.shard`), each keeps an equal number of consecutive rows of every stored matrix; where
rows do not divide, the last ones keep fewer. Numbers here are those of the first replica, which has the most.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from boost.config.architecture import (
    Parameter,
    embedding,
    final_norm,
    groups,
    has_latent_gate,
    head,
    latent_gate_parameters,
)
from boost.config.layouts import Placement, local_shape, placement_of
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.stages import Stage, whole
from boost.config.traffic import ITEMSIZE, Collective, bucket_lengths


@dataclass(frozen=True)
class StoredTensor:
    """One stored tensor of one process; it may hold several parameters, stacked along its rows."""

    rows: int
    columns: int
    """1 for a vector."""
    vector: bool
    placement: Placement
    unit: int | None
    """The block that it is gathered with; None: with the embedding and the head of its stage."""

    @property
    def elements(self) -> int:
        """All of it, gathered."""
        return self.rows * self.columns

    def sharers(self, parallel: ParallelConfig) -> int:
        """Number of processes that share its rows: 1 if every one keeps all of it."""
        if not parallel.sharded or self.vector:
            return 1
        return parallel.dp * (parallel.tp if self.over_replicas(parallel) else 1)

    def over_replicas(self, parallel: ParallelConfig) -> bool:
        """Whether TP processes share it too."""
        return parallel.sharded and parallel.shard_outer and self.placement.partial and not self.vector

    def shard(self, parallel: ParallelConfig) -> int:
        """Elements of one share, the first and largest."""
        return -(-self.rows // self.sharers(parallel)) * self.columns


def stored_tensor(
    model: ModelConfig, parallel: ParallelConfig, unit: int | None, *parameters: Parameter
) -> StoredTensor:
    """One stored tensor of one process, which holds these parameters; `unit` as in `StoredTensor`."""
    placement = placement_of(parameters[0].role, model, parallel)
    shapes = [local_shape(parameter, placement, parallel.tp) for parameter in parameters]
    rows, columns = sum(shape[0] for shape in shapes), math.prod(shapes[0][1:])
    return StoredTensor(rows, columns, len(shapes[0]) == 1, placement, unit)


def stored_tensors(model: ModelConfig, parallel: ParallelConfig, stage: Stage | None = None) -> Iterator[StoredTensor]:
    """Every stored tensor of one process, in the order in which a token meets them."""
    stage = stage or whole(model)
    stored = functools.partial(stored_tensor, model, parallel)

    if stage.has_embedding:
        yield stored(None, embedding(model))
    for layer in stage.numbers:
        prefix = f"layers.{layer}"
        for _ in ("attn_norm", "mlp_norm"):
            yield stored(layer, Parameter(prefix, (model.dim,), "norm"))
        for group in groups(model, layer):
            if model.low_rank:
                yield stored(layer, *group.parameters(prefix, "A"))
                yield from (stored(layer, b) for b in group.parameters(prefix, "B"))
                if has_latent_gate(model, layer):
                    yield from (stored(layer, *each) for each in latent_gate_parameters(model, group, prefix).values())
            else:
                weights = group.parameters(prefix, "W")
                for _, alike in itertools.groupby(weights, lambda weight: placement_of(weight.role, model, parallel)):
                    yield stored(layer, *alike)
    if stage.has_head:
        yield stored(None, final_norm(model))
        yield stored(None, head(model))


def gradient_collectives(config: Config, stages: Sequence[Stage]) -> list[Collective]:
    """All-reduces of gradients of one optimizer step, in buckets: partial ones over TP and DP, complete ones over DP, and of
    what replicas share the partial ones over TP."""
    parallel, dtype = config.parallel, config.train.param_dtype
    stored = [t for stage in stages for t in stored_tensors(config.model, parallel, stage)][::-1]
    held = [t for t in stored if t.vector or not parallel.sharded]
    late = [
        t for t in stored if parallel.sharded and not t.vector and t.placement.partial and not t.over_replicas(parallel)
    ]
    result = []
    for tensors, processes, axis in (
        ([t for t in held if t.placement.partial], parallel.tp * parallel.dp, "replicas"),
        ([t for t in held if not t.placement.partial], parallel.dp, "dp"),
        (late, parallel.tp, "tp"),
    ):
        sizes = [t.shard(parallel) for t in tensors]
        for length in bucket_lengths([size * ITEMSIZE[dtype] for size in sizes]) if processes > 1 else ():
            result.append(
                Collective("step", "all-reduce", (sum(sizes[:length]),), dtype, processes, "gradients", axis=axis)
            )
            sizes = sizes[length:]
    return result


def gathers(config: Config, stages: Sequence[Stage]) -> list[Collective]:
    """All-gathers of weights that replicas share, and reduce-scatters of their gradients, one a block and one for the ends.

    ZeRO-1 gathers and scatters once a step. FSDP gathers a block before its forward and before its backward pass and scatters
    behind it, in phases 'forward' and 'backward' of each micro-batch. In a pipeline, where passes of several micro-batches
    alternate, it keeps a block that was gathered for a backward pass until the next forward pass is through, and scatters
    once a step: one gather for each micro-batch and one more, whatever the schedule, all in phase 'step'. (Of up to three stages
    a process; torch's schedules let go of more of them.)
    """
    parallel, train = config.parallel, config.train
    if not parallel.sharded:
        return []
    micro_batches = train.global_batch // (parallel.dp * train.micro_batch)
    full, piped = parallel.shard == "full", parallel.pp > 1
    result: list[Collective] = []
    for stage in stages:
        for unit, elements, processes, axis in _units(config, stage):
            gather = Collective(
                "step", "all-gather", (elements,), train.compute_dtype, processes, "weights", unit, axis
            )
            scatter = Collective(
                "step", "reduce-scatter", (elements,), train.param_dtype, processes, "gradients", unit, axis
            )
            between = full and unit is not None  # let go of between the two passes
            if full and not piped:
                result.append(replace(gather, phase="forward"))
                result += [replace(gather, phase="backward")] * between
                result.append(replace(scatter, phase="backward"))
            else:
                result += [gather] * (micro_batches + 1 if between else 1)
                result.append(scatter)
    return result


def _units(config: Config, stage: Stage) -> Iterator[tuple[int | None, int, int, str]]:
    """(block or None for the ends, gathered elements with padding, processes, axis) of what is gathered together."""
    parallel = config.parallel
    shared = [t for t in stored_tensors(config.model, parallel, stage) if t.sharers(parallel) > 1]
    for unit in (*stage.numbers, None):
        for over_replicas in (False, True):
            tensors = [t for t in shared if t.unit == unit and t.over_replicas(parallel) == over_replicas]
            if tensors:
                processes = tensors[0].sharers(parallel)
                axis = "replicas" if over_replicas else "dp"
                yield unit, processes * sum(t.shard(parallel) for t in tensors), processes, axis
