"""Activation checkpointing: choosing which tensors a block saves in its forward pass and which it recomputes in its backward pass.

A block is a chain of local parts between collectives. Under the low-rank policies, each part is a segment: its inputs
(latents after a collective, or the residual stream) are saved, but its intermediates are not. No segment contains a collective, so
recomputation does not communicate. Recomputation stops before the last GEMM of a segment, whose result is not needed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from boost.config.schema import RecomputeName

Result = TypeVar("Result")


class SegmentRunner(Protocol):
    """Calls a function and decides which tensors are saved for the backward pass.

    The function may be called again later with the same arguments, so anything else that it reads must not change.
    """

    def __call__(self, function: Callable[..., Result], /, *arguments: object) -> Result: ...


def call(function: Callable[..., Result], /, *arguments: object) -> Result:
    """Calls the function directly; autograd decides which tensors are saved."""
    return function(*arguments)


@dataclass(frozen=True)
class RecomputePolicy:
    """Which tensors the blocks save in the forward pass and recompute in the backward pass."""

    block: SegmentRunner = call
    """Runs the whole block."""
    local: SegmentRunner = call
    """Runs each segment except attention's."""
    attention: SegmentRunner = call
    """Runs the segment from the latents of q, k, v to the output of attention."""
    sharded_latents: bool = False
    """Saves latents before they are all-gathered, which takes the least memory but repeats the all-gather."""


NO_RECOMPUTE = RecomputePolicy()

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}
"""Fused attention kernels. They return softmax(q k^T) v and, for the backward pass, the logsumexp of each row."""


def recompute(function: Callable[..., Result], /, *arguments: object) -> Result:
    """Saves the arguments. Everything else is recomputed when the backward pass first needs it."""
    return _checkpoint(function, *arguments)


def recompute_but_attention(function: Callable[..., Result], /, *arguments: object) -> Result:
    """Saves the arguments and the outputs of the attention kernel."""
    return _checkpoint(
        function, *arguments, context_fn=functools.partial(create_selective_checkpoint_contexts, _save_attention)
    )


def recompute_block(function: Callable[..., Result], /, *arguments: Any) -> Result:
    """Like `recompute`, but for a function that communicates. With two halves, it recomputes to the end, so that no collective is
    left in flight."""
    return _checkpoint(function, *arguments, early_stop=not arguments[0].halves)


def policies(
    all_of_it: SegmentRunner, all_but_attention: SegmentRunner, whole_block: SegmentRunner
) -> dict[RecomputeName, RecomputePolicy]:
    """Maps each policy name to its policy, built from functions that recompute a segment or a whole block."""
    return {
        "none": NO_RECOMPUTE,
        "low-rank": RecomputePolicy(local=all_of_it, attention=all_of_it),
        "low-rank+attention-output": RecomputePolicy(local=all_of_it, attention=all_but_attention),
        "low-rank-sharded": RecomputePolicy(local=all_of_it, attention=all_of_it, sharded_latents=True),
        "full-block": RecomputePolicy(block=whole_block),
    }


POLICIES = policies(recompute, recompute_but_attention, recompute_block)


def _save_attention(_context: Any, operator: Any, *_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint(function: Callable[..., Result], /, *arguments: object, **keywords: Any) -> Result:
    if not torch.is_grad_enabled():
        return function(*arguments)
    # No random numbers are drawn, and shapes do not depend on values, so saving RNG state or checking shapes would waste time.
    return checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=False, determinism_check="none", **keywords
    )
