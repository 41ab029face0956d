"""Inspects how a configuration shards every weight and the residual stream, and lists every collective in an optimizer step.

Legend: T tokens per micro-batch in a TP group, p TP processes; d hidden size, f MLP width.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from boost.config import architecture
from boost.config.layouts import LayoutSpec, Placement, local_shape, num_shards, placement_of, spec_of
from boost.config.optimizers import LOROConfig
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.stages import Stage, stages_of
from boost.config.traffic import Collective
from boost.plan.collectives import step_collectives
from boost.plan.optimizer import optimizer_collectives
from boost.plan.structure import held_tensors


@dataclass(frozen=True)
class Weight:
    """One parameter and how it is sharded."""

    name: str
    """Parameter name; `layers.N.` stands for every block."""
    shape: tuple[int, ...]
    local: tuple[int, ...]
    placement: Placement
    where: str
    """The placement in words."""


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives in a step that differ only in block and micro-batch."""

    collective: Collective
    """One of these collectives, without its block."""
    count: int

    @property
    def total_bytes(self) -> int:
        """Total bytes sent by one process."""
        return self.count * self.collective.sent_bytes


@dataclass(frozen=True)
class Inspection:
    """What one process in a TP group stores and sends. Shapes are (rows, columns); byte counts are bytes sent."""

    config: Config
    pp_rank: int
    """This process's pipeline rank."""
    stages: tuple[Stage, ...]
    """Pipeline stages on this process."""
    weights: tuple[Weight, ...]
    """Parameters outside blocks and those in one block, in model order."""
    parameters: int
    """Number of parameters in the whole model."""
    parameters_per_process: int
    """Number of parameters stored on this process, after sharding over TP, PP and replicas."""
    tokens: int
    """T, tokens per micro-batch."""
    micro_batches: int
    """Micro-batches per optimizer step on one process."""
    of_micro_batch: tuple[Collective, ...]
    """Collectives for one micro-batch, in order of issue; they are the same for all micro-batches."""
    of_step: tuple[Collective, ...]
    """Collectives issued once per optimizer step, in order of issue."""
    exact: tuple[Collective, ...]
    """Additional collectives in LORO's exact step (every optim.exact_every steps). Empty for other optimizers."""

    @property
    def spec(self) -> LayoutSpec:
        """Spec of the layout in effect; with one TP process, every layout is `single`."""
        return spec_of(self.config.parallel)

    @property
    def layout(self) -> str:
        """Name of the layout in effect."""
        return self.spec.name

    @property
    def residual(self) -> tuple[int, int]:
        """Local shape of the residual stream for one micro-batch."""
        return self.spec.residual_shape(self.config.model, self.config.parallel, self.tokens)

    @property
    def heads(self) -> tuple[int, int]:
        """Local shape of the queries and of the attention output."""
        return self.tokens, self.config.model.heads_dim // num_shards(self.config.parallel)

    @property
    def channels(self) -> tuple[int, int]:
        """Local shape of gate, up and their product."""
        return self.spec.channels_shape(self.config.model, self.config.parallel, self.tokens)

    @cached_property
    def rows(self) -> tuple[CollectiveRow, ...]:
        """Collectives in a step, aggregated over blocks and micro-batches, in order of first use."""
        return (*_aggregated(self.of_micro_batch, self.micro_batches), *_aggregated(self.of_step))

    @cached_property
    def exact_rows(self) -> tuple[CollectiveRow, ...]:
        """Additional collectives in an exact step, aggregated."""
        return tuple(_aggregated(self.exact))

    @cached_property
    def bytes_per_step(self) -> int:
        """Bytes sent by one process per optimizer step."""
        return self.micro_batches * self.bytes_per_micro_batch + sum(c.sent_bytes for c in self.of_step)

    @cached_property
    def bytes_of_exact_step(self) -> int:
        """Additional bytes sent by one process in an exact step."""
        return sum(c.sent_bytes for c in self.exact)

    @cached_property
    def bytes_per_micro_batch(self) -> int:
        """Bytes sent by one process per micro-batch, forward and backward."""
        return sum(c.sent_bytes for c in self.of_micro_batch)

    @property
    def layer(self) -> int:
        """Index of the block that represents all others: the last one in this process's first stage. (If
        latents pass between blocks, the first block in the model differs from the others.)"""
        return self.stages[0].numbers[-1]

    @property
    def takes_latents(self) -> bool:
        """Whether block `layer` combines its latents with those from the previous block."""
        return any(group.kind.carries == "latents" for group in architecture.taken(self.config.model, self.layer))

    @property
    def bytes_per_token(self) -> float:
        """Bytes sent by one process per token, forward and backward."""
        return self.bytes_per_micro_batch / self.tokens


def inspect(config: Config, pp_rank: int = 0) -> Inspection:
    """Inspects one process of the first replica at pipeline rank `pp_rank`."""
    model, parallel, train = config.model, config.parallel, config.train
    micro_batches = train.global_batch // (parallel.dp * train.micro_batch)
    held = stages_of(config, pp_rank)
    parameters = [*architecture.block_parameters(model, held[0].numbers[-1])]
    if held[0].has_embedding:
        parameters.insert(0, architecture.embedding(model))
    if held[-1].has_head:
        parameters.append(architecture.final_norm(model))
        if not (model.tied and held[0].has_embedding):
            parameters.append(architecture.head(model))
    collectives = step_collectives(config, pp_rank)
    of_all, stored = [c for c in collectives if c.phase != "step"], held_tensors(config, held)
    return Inspection(
        config=config,
        pp_rank=pp_rank,
        stages=held,
        weights=tuple(_weight(parameter, model, parallel) for parameter in parameters),
        parameters=architecture.parameter_count(model),
        parameters_per_process=stored.indices + sum(tensor.shard(parallel) for tensor in stored.tensors),
        tokens=train.micro_batch * train.seq_len // parallel.cp,
        micro_batches=micro_batches,
        of_micro_batch=tuple(of_all[: len(of_all) // micro_batches]),
        of_step=tuple(c for c in collectives if c.phase == "step"),
        exact=tuple(optimizer_collectives(config, pp_rank)) if isinstance(config.optim, LOROConfig) else (),
    )


def _aggregated(collectives: Sequence[Collective], times: int = 1) -> list[CollectiveRow]:
    """Aggregates collectives that differ only in their block; each counts `times` times."""
    counts = Counter(collective._replace(layer=None) for collective in collectives)
    return [CollectiveRow(collective, count * times) for collective, count in counts.items()]


def _weight(parameter: architecture.Parameter, model: ModelConfig, parallel: ParallelConfig) -> Weight:
    placement = placement_of(parameter.role, model, parallel)
    name = re.sub(r"^layers\.\d+\.", "layers.N.", parameter.name)
    words = "replicated, gradient summed once per step" if placement.partial else "replicated"
    if placement.dim is not None:
        words = f"dim {placement.dim} over {parallel.tp}"
    if parallel.sharded and len(parameter.shape) > 1:
        outer = parallel.shard_outer and placement.partial
        words = words.partition(",")[0] if outer else words
        words += f"; rows sharded over {parallel.dp_cp * (parallel.tp if outer else 1)}"
    return Weight(name, parameter.shape, local_shape(parameter, placement, parallel.tp), placement, words)
