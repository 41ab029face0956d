"""The data that flows through the blocks, and a layout's operations on it, which `boost.models.block` and the decoder call.
`boost.layouts` implements them, with one file per layout.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from boost.config.layouts import LayoutSpec
from boost.models.attention import Context, SequenceShare
from boost.models.fused import Sharding
from boost.models.group import Latents, LinearGroup, Outputs

Arrived = tuple[Any, ...]
"""Results of the last collective and what else a layout's next operation needs."""


class Stream(NamedTuple):
    """The data that one block passes to the next. It is a tuple so that torch finds its tensors."""

    x: Tensor
    """The residual stream, in the layout's shape."""
    latents: Latents = ()
    """What the block's groups carry, latents or outputs, in forward order."""


class Flow:
    """One part of a micro-batch as it passes through the blocks: the residual stream, and the results of the last collective."""

    def __init__(self, x: Tensor, prev_latents: Latents = (), first_half: "Flow | None" = None) -> None:
        """`first_half`: for a sequence's second half, the flow of its first half, whose keys it attends to."""
        self.x = x
        """The residual stream; before the blocks, the tokens."""
        self.prev_latents = prev_latents
        """Queue from which each group in turn takes what the same group in the previous block carries."""
        self.latents: Latents = ()
        """What this block's groups so far carry to the next block."""
        self.arrived: Arrived = ()
        """The inputs of `Layout.up`, or of attention."""
        self.first_half = first_half
        self.keys_values: list[tuple[Tensor, Tensor]] = []
        """Rotated keys and values [B, K, S, E] of a first half, one entry per block, which the second half takes."""

    def take(self) -> Tensor:
        """Takes the next tensor from the queue of the previous block's latents."""
        taken, *rest = self.prev_latents
        self.prev_latents = tuple(rest)
        return taken

    def take_outputs(self, group: LinearGroup) -> Latents:
        """Takes the previous block's outputs for a group from the queue."""
        taken, self.prev_latents = self.prev_latents[: group.takes_outputs], self.prev_latents[group.takes_outputs :]
        return taken

    def add(self, update: Tensor, group: LinearGroup) -> None:
        """Adds the output of a group to the residual stream."""
        if group.finishes:
            (update,), kept = group.finish((update,), (), self.take_outputs(group))
            self.latents += kept
        self.x = self.x + update


class Teaching(NamedTuple):
    """A teacher's outputs for the same tokens, from which a model learns (`boost.parallel.loss`)."""

    hidden_TE: Tensor
    """The input of the teacher's head, [T, E], replicated; no gradient."""
    head_VE: Tensor
    """This process's rows of the teacher's head: the same vocabulary rows as in the model's head."""
    weight: float
    """w in (1 - w) cross-entropy + w K^2 KL(teacher || model)."""
    temperature: float
    """K in the formula for `weight`."""
    hidden_weight: float = 0.0
    """Weight of the mean squared difference between the two models' inputs to the head."""
    cross_entropy: Tensor | None = None
    """Accumulates only the cross-entropy, summed over targets (nats, fp64 scalar): the loss may consist mostly of other terms."""

    def split(self, sizes: Sequence[int]) -> "list[Teaching]":
        """Splits the tokens into consecutive parts of these sizes."""
        return [self._replace(hidden_TE=part) for part in self.hidden_TE.split(list(sizes))]


NOTHING_IN_FLIGHT: tuple[None, ...] = ()
"""Returned by layout operations that do not communicate and have nothing to wait for."""


class Layout(Sharding, Protocol):
    """One way to shard the decoder over TP ranks: `spec` describes placement and communication; this class implements both.

    Operations that communicate return an iterable (usually a generator) that pauses while a collective is in flight. They
    store their results in the flow. In the forward pass, `up` and `down` do not communicate, except that
    `up` gathers latents that were saved sharded.

    T is the number of tokens in the micro-batch. `up` returns all T tokens and 1/num_shards of the heads or channels (or,
    for an MLP that stays token-sharded, T/p tokens and all channels). With a context axis, T is the number of local tokens, and
    attention has its own collectives.
    """

    spec: LayoutSpec
    halves: bool
    """Whether a micro-batch runs as two halves, so that one computes while the other's collectives are in flight."""
    lag: int
    """Steps (`block.interleave`) by which the second half trails the first."""
    inference: "Layout"
    """A layout with the same function and weights that accepts any number of tokens and computes no gradients."""

    def sequence_share(self) -> SequenceShare | None:
        """This process's share of each sequence; None: the whole sequence."""

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> Iterable[None]:
        """Turns x from tokens (int64, [T]) into their embedding in `dtype`, the activations' dtype, so nothing wider is sent."""

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterable[None]:
        """norm(x), then the first part of a group, up to its last collective. Sets `arrived`."""

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """The rest of the group: one [T, d_out / num_shards] per slot, and the latents for the next block if they are
        computed here."""

    def enter_attention(self, flow: Flow, qkv: Sequence[Tensor], context: Context) -> Iterable[None]:
        """Redistributes q, k (both rotated) and v of the local tokens for attention: all tokens of some heads, or the same
        queries with all keys and values. `arrived` holds them in this order."""

    def leave_attention(self, flow: Flow, attended: Tensor, context: Context) -> Iterable[None]:
        """Redistributes attention's output: `arrived` holds all heads of this TP rank for the local tokens."""

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """Heads or channels [T, d_in / num_shards] through the first part of a group, up to its first collective."""

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterable[None]:
        """The rest of the group, and its update of x."""

    def head_input(self, flow: Flow, gamma: Tensor) -> Iterable[None]:
        """Turns x into the final norm's output for all T tokens, [T, d], replicated on every process. Each process then uses its
        rows of the head, so gradients of the result are partial, and the backward pass sums them."""

    def loss(self, normed_TD: Tensor, head: Tensor, targets_T: Tensor, teaching: Teaching | None = None) -> Tensor:
        """Sum of the cross-entropy or, with a teacher, of the distillation loss over targets that are not -100, given
        the head's input; a scalar in nats, fp32 or wider. Equal on every process."""

    def all_logits(self, normed_TD: Tensor, head: Tensor) -> Tensor:
        """Differentiable logits [T, V] for all tokens, given the head's input, replicated on every process (`loss`
        never materializes them)."""

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        """Logits [N, V] for the tokens at indices `tokens_N`, replicated on every process, for generation."""
