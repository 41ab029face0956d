"""`single`: no tensor parallelism. With tp = 1, every layout becomes `single`."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from boost.config.schema import ModelConfig, ParallelConfig
from boost.layouts.spec import WHOLE, GroupContext, LayoutSpec, Placement, PlannedComm


class SingleConfig(ParallelConfig):
    """No tensor parallelism; in effect for any layout with tp = 1."""

    layout: Literal["single"] = "single"


class SingleSpec(LayoutSpec):
    """No collectives and no sharding."""

    config = SingleConfig
    runtime = "boost.layouts.single.runtime:Single"
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
