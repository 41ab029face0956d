"""Memory of a training step on one process, computed: what is there all the time, and what each block keeps for its backward
pass under each recomputation policy. A test holds it to what is seen to be alive.

Legend: T tokens of one micro-batch, p TP processes, w parts of heads and channels (p, or 1 where all compute all); a
"column" is one element for each of some rows (tokens).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from boost.config.architecture import Group, Slot, crossed, crossing_parameters, groups
from boost.config.cuts import TOKEN_SHARDED, cut_of, local_shape, wide_parts
from boost.config.schema import Config, RecomputeName
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE, statistic_columns, statistic_dtype
from boost.plan.optimizer import state_bytes
from boost.plan.replicas import StoredTensor, stored_tensors

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
RESIDUAL = "residual stream"
LATENTS = "latents"
WIDE = "wide activations"
COPIES = "weight copies"
LOGITS = "logits and loss"
BUFFERS = "pipeline buffers"
GATHERED = "gathered weights"
WORK = "at work"

STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)
"""There from step to step."""
KEPT = (RESIDUAL, LATENTS, WIDE, COPIES, LOGITS)
"""Kept from the forward pass of a micro-batch for its backward pass."""
CATEGORIES = {
    WEIGHTS: "as the optimizer changes them",
    GRADIENTS: "of one optimizer step",
    OPTIMIZER: "moments: two a weight (Muon: one of a factor)",
    RESIDUAL: "what enters attention and MLP",
    LATENTS: "width r, with online RMSNorm's statistic",
    WIDE: "normed inputs, q, k, v, gate, up, products",
    COPIES: "cast or scaled for a GEMM",
    LOGITS: "gradients of the head and its input",
    BUFFERS: "received, to be sent, and their gradients",
    GATHERED: "of what replicas share, while it is used",
    WORK: "the worst moment, on top of what is kept",
}
"""Everything that a step holds, in words."""


@dataclass(frozen=True)
class Kept:
    """One tensor that lives from the forward to the backward pass of a micro-batch."""

    category: str
    what: str
    rows: int
    columns: int
    dtype: str
    place: str = ""
    """attention | mlp | loss"""
    layer: int | None = None

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.rows * self.columns * ITEMSIZE[self.dtype]


Items = Iterator[Kept]


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds, by category."""

    states: dict[str, int]
    """WEIGHTS, GRADIENTS, OPTIMIZER."""
    kept: tuple[Kept, ...]
    """Between the forward and the backward pass of a micro-batch."""

    @property
    def by_category(self) -> dict[str, int]:
        """STATES and KEPT."""
        sums = {**self.states, **dict.fromkeys(KEPT, 0)}
        for item in self.kept:
            sums[item.category] += item.bytes
        return sums

    @property
    def activations(self) -> int:
        """All that is kept for the backward pass."""
        return sum(item.bytes for item in self.kept)

    @property
    def total(self) -> int:
        """Between forward and backward pass, gradients of an earlier micro-batch included."""
        return self.activations + sum(self.states.values())


def memory(config: Config, pp_rank: int = 0) -> Memory:
    """Bytes on one process: the training state of its stages and shards, and what one micro-batch keeps in them."""
    stages = stages_of(config, pp_rank)
    kept = [
        Kept(item.category, item.what, item.rows, item.columns, item.dtype, item.place, layer)
        for stage in stages
        for layer in stage.numbers
        for item in block_keeps(config, layer)
    ]
    stored = [tensor for stage in stages for tensor in stored_tensors(config.model, config.parallel, stage)]
    behind = loss_keeps(config) if stages[-1].predicts else ()
    return Memory(states_of(config, stored, stages), (*kept, *behind))


def states_of(config: Config, stored: Sequence[StoredTensor], stages: Sequence[Stage]) -> dict[str, int]:
    """STATES of the stored tensors of some stages, in shards where replicas share them."""
    weights = sum(tensor.shard(config.parallel) for tensor in stored) * ITEMSIZE[config.train.param_dtype]
    return {WEIGHTS: weights, GRADIENTS: weights, OPTIMIZER: state_bytes(config, stored, stages)}


def block_keeps(config: Config, layer: int) -> Items:
    """What one block keeps."""
    policies = config.train.recompute_by_layer(config.model.layers)
    return _Block(config, layer).kept(policies[layer], policies[layer + 1 : layer + 2])


def loss_keeps(config: Config) -> Items:
    """What the loss keeps."""
    return _Block(config, 0).loss()


class _Block:
    """What one block keeps. Eager autograd keeps what each operation's derivative asks for; this says what that is."""

    def __init__(self, config: Config, layer: int) -> None:
        self.model, self.parallel, train = config.model, config.parallel, config.train
        p = self.parallel.tp
        self.layout = self.parallel.layout if p > 1 else "single"
        self.processes, self.wide = p, wide_parts(self.parallel)
        self.tokens = train.micro_batch * train.seq_len
        self.own_tokens = self.tokens // p if self.layout in TOKEN_SHARDED else self.tokens
        self.dtype, self.statistic = train.compute_dtype, statistic_dtype(train.compute_dtype)
        # Weights that are gathered are so in the dtype of activations.
        self.casts = train.compute_dtype != train.param_dtype and not self.parallel.sharded
        self.acts = self.model.latent_act != "none"
        self.groups = groups(self.model, layer)
        self.crossed = crossed(self.model, layer)
        self.mixes = self.model.mixes

    def kept(self, policy: RecomputeName, following: Sequence[RecomputeName]) -> Items:
        """Of a block under `policy`, before one under the policy `following` (none: it is the last)."""
        width = self.model.dim // self.processes if self.layout == "btp" else self.model.dim
        qkv, o, gate_up, down = self.groups
        for place, enter, leave in (("attention", qkv, o), ("mlp", gate_up, down)):
            items: Iterable[Kept] = ()
            if policy == "none":
                items = (*self._entered(enter), *self._between(enter), *self._left(leave), *self._copies(enter, leave))
            elif policy != "full-block":
                items = (*self._segments(enter, policy), *self._output(enter, policy), *self._behind(leave))
            if policy != "full-block" or place == "attention":
                yield self._residual(width, place)
            items = (*items, *self._carried((enter, leave), policy, following))
            yield from (Kept(i.category, i.what, i.rows, i.columns, i.dtype, place) for i in items if i.columns)

    def loss(self) -> Items:
        """Behind the last block."""
        model, rows = self.model, self.tokens
        yield Kept(LOGITS, "gradient of the normed residual", rows, model.dim, self.dtype, "loss")
        yield Kept(LOGITS, "gradient of the head", model.vocab_size // self.processes, model.dim, self.dtype, "loss")
        if self.layout == "btp":
            yield Kept(LOGITS, "gathered residual", rows, model.dim, self.dtype, "loss")
        else:
            yield Kept(RESIDUAL, "residual", self.own_tokens, model.dim, self.dtype, "loss")
        rows = self.tokens if self.layout == "btp" else self.own_tokens
        yield Kept(LOGITS, "inverse RMS", rows, 1, self.statistic, "loss")
        yield Kept(LOGITS, "loss", 1, 1, self.statistic, "loss")

    # Without recomputation.

    def _entered(self, group: Group) -> Items:
        """From the residual to the latents (or to W), without recomputation."""
        ranks, norm = sum(group.ranks), self.parallel.norm
        if self.layout == "btp":
            if norm == "online":
                yield self._payload(ranks)
                yield self._latents("scaled latents", self.tokens, ranks * (not self.crossed))
            else:
                yield self._wide("normed residual", self.tokens, self.model.dim // self.processes)
                yield self._latents("latents", self.tokens, ranks * (not self.crossed))
            # The inverse RMS counts to what it is made of.
            kind = LATENTS if norm == "online" else WIDE
            yield Kept(kind, "inverse RMS", self.tokens, 1, self.statistic)
            yield from self._bent(group, self.tokens)
            return
        yield Kept(WIDE, "inverse RMS", self.own_tokens, 1, self.statistic)
        if not self.model.low_rank:
            copies = len(group.slots) if self.layout == "megatron-sp" and not self.parallel.grouping else 1
            yield self._wide("normed residual", self.tokens, self.model.dim * copies)
            return
        yield self._wide("normed residual", self.own_tokens, self.model.dim)
        if self.layout == "btp-sp":
            if self.crossed:
                yield from self._bent(group, self.own_tokens)
            else:
                yield self._latents("own tokens' latents", self.own_tokens, ranks * self.acts)
            yield self._latents("gathered latents", self.tokens, ranks)
        else:
            yield self._latents("latents", self.tokens, self._held(group) * (not self.crossed))
            yield from self._bent(group, self.tokens)

    def _between(self, group: Group) -> Items:
        """The wide side: attention, or the gated product."""
        model, rows = self.model, self.tokens
        widths = [self._here(slot) for slot in group.slots]
        if group.name == "qkv":
            yield self._wide("rotated q and k", rows, widths[0] + widths[1])
            # v is a view of what one GEMM or one collective made of all three, and keeps all of it.
            yield self._wide(
                "q, k and v" if self._merges() else "v", rows, sum(widths) if self._merges() else widths[2]
            )
            yield from self._output(group, "low-rank+attention-output")
            return
        yield self._wide("gate and up", rows, sum(widths))
        yield self._wide("silu(gate)", rows, widths[0] * model.mlp_silu)
        if not self._gathers():
            yield self._wide("gate times up", rows, widths[0])

    def _left(self, group: Group) -> Items:
        """From the wide side back to the residual."""
        (slot,) = group.slots
        if self._gathers():
            yield self._wide("gathered heads or channels", self.tokens, slot.d_in)
        if self.model.low_rank:
            if not self.crossed:
                yield from self._left_latents(group)
            yield from self._bent(group, self.own_tokens)

    def _copies(self, *entering_and_leaving: Group) -> Items:
        """Weights that an operation takes in another form than that in which they are stored."""
        for group in entering_and_leaving:
            for factor in "AB" if self.model.low_rank else "W":
                scaled = factor == "A" and group.side == "enter" and self.layout == "btp"
                if scaled and self.parallel.norm == "online":
                    continue  # made anew in the backward pass
                merged = factor == "W" and self._concatenates(group)
                if scaled or merged or self.casts:
                    yield from self._copied(group, factor, merged)
            if self.crossed and self.casts:
                yield from self._copied_crossing(group)

    def _copied(self, group: Group, factor: str, merged: bool) -> Items:
        for parameter, slot in zip(group.parameters("", factor), group.slots, strict=True):
            rows, columns = local_shape(parameter, cut_of(parameter.role, self.model, self.parallel), self.processes)
            if merged:  # of key/value heads held whole, only the own one's rows
                rows = min(rows, self._here(slot))
            yield Kept(COPIES, f"{slot.name}.{factor}", rows, columns, self.dtype)

    def _copied_crossing(self, group: Group) -> Items:
        for name, parameters in crossing_parameters(self.model, group, "").items():
            used_as_stored = name.endswith("_bias") or (name == "norm_weight" and self.layout == "vanilla")
            for parameter in () if used_as_stored else parameters:
                shape = local_shape(parameter, cut_of(parameter.role, self.model, self.parallel), self.processes)
                yield Kept(COPIES, parameter.name, math.prod(shape), 1, self.dtype)

    # With it.

    def _segments(self, group: Group, policy: RecomputeName) -> Items:
        """What segments begin with, from the residual to the wide side."""
        ranks = sum(group.ranks)
        if self.layout == "btp":
            if self.parallel.norm == "online":
                yield self._payload(ranks)
                # In fp32 and fp64 the statistic is a view of the payload; in bf16 it is summed into a tensor of its own.
                apart = self.dtype != self.statistic
                yield Kept(LATENTS, "statistic", self.tokens, int(apart), self.statistic)
            else:
                yield Kept(WIDE, "statistic", self.tokens, 1, self.statistic)
                yield self._latents("latents", self.tokens, ranks)
        elif self.layout == "btp-sp":
            sharded = policy == "low-rank-sharded"
            yield self._latents("own tokens' latents", self.own_tokens, ranks * (self.acts or sharded or self.crossed))
            yield self._latents("gathered latents", self.tokens, ranks * (not sharded))
        else:
            yield self._latents("latents", self.tokens, ranks // self.processes)
            yield from self._met(group)
            if self.layout == "vanilla":
                yield self._wide("sums of full width", self.tokens, sum(self._here(slot) for slot in group.slots))

    def _output(self, group: Group, policy: RecomputeName) -> Items:
        if group.name == "qkv" and policy == "low-rank+attention-output":
            width = self._here(group.slots[0])
            yield self._wide("attention's output", self.tokens, width)
            yield Kept(WIDE, "logsumexp of scores", self.tokens, width // self.model.head_dim, self.statistic)

    def _behind(self, group: Group) -> Items:
        (slot,) = group.slots
        if self._gathers():
            yield self._wide("gathered heads or channels", self.tokens, slot.d_in)
        yield from self._left_latents(group)
        yield from self._met(group)

    # Both.

    def _left_latents(self, group: Group) -> Items:
        yield self._latents("latents", self.own_tokens, self._held(group))

    def _met(self, group: Group) -> Items:
        """Between the collectives of a crossing under vanilla, which cuts latents."""
        if self.layout == "vanilla" and self.crossed:
            yield self._latents("gathered latents", self.tokens, sum(group.ranks) * self.mixes)
            yield self._latents("mixed latents", self.tokens, self._held(group))
            yield Kept(LATENTS, "sums of LayerNorm", self.tokens, 2 * len(group.slots), self.statistic)

    def _bent(self, group: Group, rows: int) -> Items:
        """What acts on latents, without recomputation."""
        held = self._held(group)
        if self.crossed:
            yield from self._settled(group, rows)
            yield self._latents("crossed latents", rows, held * self.acts)
        behind = "latents behind act" if self.acts else "crossed latents"
        if not (self.layout == "btp-sp" and group.side == "enter"):  # there, what is gathered of them is kept
            yield self._latents(behind, rows, held * (self.acts or self.crossed))

    def _settled(self, group: Group, rows: int) -> Items:
        """Gate and LayerNorm."""
        held = self._held(group)
        if self.model.gate == "tensor":
            yield self._latents("latents in the gate", rows, held)
            side_by_side = self.parallel.grouping and len(group.slots) > 1  # copied apart for its products
            if side_by_side and self.layout in ("single", "btp"):
                yield self._latents("latents for the gate", rows, held)
        if self.mixes and self.layout == "vanilla":
            yield self._latents("gathered latents", rows, sum(group.ranks))
        yield self._latents("mixed latents", rows, held)
        if self.layout == "vanilla":
            yield Kept(LATENTS, "sums of LayerNorm", rows, 2 * len(group.slots), self.statistic)
            return
        yield self._latents("normed latents", rows, held)
        # In the dtype of latents on CPUs; in fp32 on GPUs, which is too little to tell apart.
        yield self._latents("means and deviations", rows, 2 * len(group.slots))

    def _carried(self, met: Sequence[Group], policy: RecomputeName, following: Sequence[RecomputeName]) -> Items:
        """Latents that the next block takes, where it keeps them and this one does not."""
        if not self.model.crosses or not following or (following[0] == "none" and not self.mixes):
            return
        for group in met:
            gathered = self.layout == "btp-sp" and group.side == "enter"
            if policy == "none":
                kept = not gathered
            else:  # latents that nothing acts on are those that are carried
                scaled = self.layout == "btp" and self.parallel.norm == "online" and group.side == "enter"
                untouched = not (self.acts or self.crossed or scaled or policy == "full-block")
                kept = untouched and (not gathered or policy == "low-rank-sharded")
            if not kept:
                yield self._latents("carried latents", self.own_tokens, self._held(group))

    def _payload(self, ranks: int) -> Kept:
        """What online RMSNorm's collective sent stays whole."""
        columns = ranks + statistic_columns(self.dtype, self.processes)
        return self._latents("latents and statistic", self.tokens, columns)

    def _residual(self, width: int, place: str) -> Kept:
        return Kept(RESIDUAL, "residual", self.own_tokens, width, self.dtype, place)

    def _latents(self, what: str, rows: int, columns: int) -> Kept:
        return Kept(LATENTS, what, rows, columns, self.dtype)

    def _wide(self, what: str, rows: int, columns: int) -> Kept:
        return Kept(WIDE, what, rows, columns, self.dtype)

    def _here(self, slot: Slot) -> int:
        """Output width of an entering slot on one process: of key/value heads at least one."""
        return max(slot.d_out // self.wide, self.model.head_dim if slot.kv else 0)

    def _held(self, group: Group) -> int:
        """Width of the latents of a group on one process."""
        return sum(group.ranks) // self.processes if self.layout == "vanilla" else sum(group.ranks)

    def _merges(self) -> bool:
        """Whether q, k and v are made as one tensor."""
        if not self.parallel.grouping:
            return False
        return not self.model.low_rank or (self.layout == "vanilla" and self.wide > 1)

    def _gathers(self) -> bool:
        """Whether heads and channels are gathered before a leaving group."""
        return self.layout == "vanilla" and self.wide > 1

    def _concatenates(self, group: Group) -> bool:
        """Whether dense weights that are stored apart are put together for one GEMM."""
        shared = self.model.kv_heads < self.wide
        return group.name == "qkv" and shared and self.parallel.grouping
