"""`single`: no tensor parallelism. Every other layout becomes this one with tp = 1."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.layouts.spec import WHOLE, GroupContext, LayoutSpec, Placement, PlannedComm
from boost.config.schema import ModelConfig, ParallelConfig


class SingleConfig(ParallelConfig):
    """No tensor parallelism: every layout with tp = 1."""

    layout: Literal["single"] = "single"


class SingleSpec(LayoutSpec):
    """No collective, nothing sharded."""

    config = SingleConfig
    runtime = "boost.parallel.layouts.single:Single"
    low_rank = False
    residual = "replicated"
    placements: ClassVar[dict[str, Placement]] = {}
    single_process = True

    def placement(self, role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
        return WHOLE

    def num_shards(self, parallel: ParallelConfig) -> int:
        return 1

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        return iter(())

    shards_rank = communicates_at_bottleneck = ends_with_comm = False
