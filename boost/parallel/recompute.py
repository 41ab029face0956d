"""Activation checkpointing: what a block saves in its forward pass, and what it recomputes in its backward pass.

A block is a chain of local parts between collectives. Under the low-rank policies each part is a segment of its own: what
goes into it, the latents after a collective or the residual stream, is saved; what it makes on the way is not. No segment
holds a collective, so recomputation issues none, and it ends before the last GEMM of a segment, whose result is not needed.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from boost.config.schema import RecomputeName
from boost.models.interface import NO_RECOMPUTE, Layout, RecomputePolicy, SegmentRunner

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}
"""Fused kernels: softmax(q k^T) v and, for the backward pass, the logsumexp of each row."""


def recompute(function: Callable[..., Any], /, *arguments: Any) -> Any:
    """The arguments; everything inside is recomputed when the backward pass first needs it."""
    return _checkpoint(function, *arguments)


def recompute_but_attention(function: Callable[..., Any], /, *arguments: Any) -> Any:
    """The arguments, and what the attention kernel returned."""
    return _checkpoint(
        function, *arguments, context_fn=functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    )


def recompute_block(function: Callable[..., Any], /, layout: Layout, *arguments: Any) -> Any:
    """As `recompute`, of a function that communicates: of two halves to its end, so that no collective is left in flight."""
    return _checkpoint(function, layout, *arguments, early_stop=not layout.halves)


def policies(
    all_of_it: SegmentRunner, all_but_attention: SegmentRunner, whole_block: SegmentRunner
) -> dict[RecomputeName, RecomputePolicy]:
    """What each policy recomputes, by what recomputes a segment or a whole block."""
    return {
        "none": NO_RECOMPUTE,
        "low-rank": RecomputePolicy(local=all_of_it, attention=all_of_it),
        "low-rank+attention-output": RecomputePolicy(local=all_of_it, attention=all_but_attention),
        "low-rank-sharded": RecomputePolicy(local=all_of_it, attention=all_of_it, sharded_latents=True),
        "full-block": RecomputePolicy(block=whole_block),
    }


POLICIES = policies(recompute, recompute_but_attention, recompute_block)


def _keep_attention(_context: Any, operator: Any, *_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    # Nothing here draws random numbers, and shapes follow from shapes: the checks of both would only cost time.
    return checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **keywords
    )
