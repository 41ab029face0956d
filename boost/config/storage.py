"""How a process stores parameters: which share a tensor, over which axis replicas shard its rows, and over which axis its gradient
is summed. The runtime and the planner both read the axes; a test compares the tensors with the runtime's modules.
"""

import itertools
from collections.abc import Callable, Iterator

from boost.config.architecture import GroupSpec, Parameter, attention_parameters, groups
from boost.config.schema import ModelConfig, ParallelConfig


def fused_weights(
    model: ModelConfig, group: GroupSpec, prefix: str, placement: Callable[[str], object]
) -> Iterator[tuple[Parameter, ...]]:
    """A group's weights as they are stored, one tuple per tensor: the inner maps of all slots, the indices of all slots, then each
    outer map. Dense weights are one tensor, or two if key and value are placed differently from query. `placement`: of parameters
    with this role."""
    if model.low_rank:
        yield group.maps(prefix, "inner")
        if selects := group.maps(prefix, "select"):
            yield selects
        yield from ((outer,) for outer in group.maps(prefix, "outer"))
        return
    for _, alike in itertools.groupby(group.maps(prefix, "weight"), lambda weight: placement(weight.role)):
        yield tuple(alike)


def fused_block(model: ModelConfig, layer: int, placement: Callable[[str], object]) -> Iterator[tuple[Parameter, ...]]:
    """Every parameter of block `layer` as it is stored, one tuple per tensor, in forward order (`fused_weights`)."""
    prefix = f"layers.{layer}"
    for norm in ("attn_norm", "mlp_norm"):
        yield (Parameter(f"{prefix}.{norm}", (model.dim,), "norm"),)
    for group in groups(model, layer):
        yield from fused_weights(model, group, prefix, placement)
        yield from group.extras(prefix).values()
        yield from ((parameter,) for parameter in attention_parameters(model, group, prefix))


def shard_axis(partial: bool, is_vector: bool, parallel: ParallelConfig) -> str:
    """The axis over which replicas shard the rows of a parameter (parallel.shard): dp, or replicas (dp x tp) for factors that TP
    replicates (parallel.shard_outer). Empty: not sharded. `partial`: whether its local gradient is (`Placement.partial`)."""
    if is_vector or not parallel.sharded:
        return ""
    return "replicas" if partial and parallel.shard_outer and parallel.tp > 1 else "dp"


SUM_AXES = "replicas", "dp", "tp"
"""Axes over which gradients are summed in buckets, in the order in which their last buckets are launched."""


def sum_axis(partial: bool, sharded_over: str) -> str:
    """The axis over which a gradient is summed in buckets once per step: partial gradients over TP and DP, complete ones over DP,
    and partial ones of sharded weights over TP. Empty: the reduce-scatter to the shards is the whole sum."""
    if not sharded_over:
        return "replicas" if partial else "dp"
    return "tp" if partial and sharded_over == "dp" else ""
