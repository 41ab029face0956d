"""Memory of a training step on one process, computed: what is there all the time, and what each block keeps for its backward
pass under each recomputation policy. A test holds it to what is seen to be alive.

Legend: T tokens of one micro-batch, p TP processes, w parts of heads and channels (p, or 1 where all compute all); a
"column" is one element for each of some rows (tokens).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from boost.config.architecture import Group, Slot, groups
from boost.config.cuts import TOKEN_SHARDED, cut_of, local_shape, wide_parts
from boost.config.schema import Config, RecomputeName
from boost.config.traffic import ITEMSIZE, statistic_columns, statistic_dtype
from boost.plan.replicas import stored_tensors

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
RESIDUAL = "residual stream"
LATENTS = "latents"
WIDE = "wide activations"
COPIES = "weight copies"
LOGITS = "logits and loss"
WORK = "at work"

STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)
"""There from step to step."""
KEPT = (RESIDUAL, LATENTS, WIDE, COPIES, LOGITS)
"""Kept from the forward pass of a micro-batch for its backward pass."""
CATEGORIES = {
    WEIGHTS: "as the optimizer changes them",
    GRADIENTS: "of one optimizer step",
    OPTIMIZER: "two moments a weight",
    RESIDUAL: "what enters attention and MLP",
    LATENTS: "width r, with online RMSNorm's statistic",
    WIDE: "normed inputs, q, k, v, gate, up, products",
    COPIES: "cast or scaled for a GEMM",
    LOGITS: "gradients of the head and its input",
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


def memory(config: Config) -> Memory:
    """Bytes on one process of a TP group: the training state, and what one micro-batch keeps. Raises nothing."""
    train = config.train
    stored = list(stored_tensors(config.model, config.parallel))
    weights = sum(tensor.elements for tensor in stored) * ITEMSIZE[train.param_dtype]
    states = {WEIGHTS: weights, GRADIENTS: weights, OPTIMIZER: 2 * weights + len(stored) * ITEMSIZE["float32"]}
    block = _Block(config)
    kept = [
        Kept(item.category, item.what, item.rows, item.columns, item.dtype, item.place, layer)
        for layer, policy in enumerate(train.recompute_by_layer(config.model.layers))
        for item in block.kept(policy, layer)
    ]
    return Memory(states, (*kept, *block.loss()))


class _Block:
    """What one block keeps. Eager autograd keeps what each operation's derivative asks for; this says what that is."""

    def __init__(self, config: Config) -> None:
        self.model, self.parallel, train = config.model, config.parallel, config.train
        p = self.parallel.tp
        self.layout = self.parallel.layout if p > 1 else "single"
        self.processes, self.wide = p, wide_parts(self.parallel)
        self.tokens = train.micro_batch * train.seq_len
        self.own_tokens = self.tokens // p if self.layout in TOKEN_SHARDED else self.tokens
        self.dtype, self.statistic = train.compute_dtype, statistic_dtype(train.compute_dtype)
        self.casts = train.compute_dtype != train.param_dtype
        self.acts = self.model.latent_act != "none"

    def kept(self, policy: RecomputeName, layer: int) -> Items:
        width = self.model.dim // self.processes if self.layout == "btp" else self.model.dim
        if policy == "full-block":
            yield self._residual(width, "attention")
            return
        qkv, o, gate_up, down = groups(self.model, layer)
        for place, enter, leave in (("attention", qkv, o), ("mlp", gate_up, down)):
            yield self._residual(width, place)
            if policy == "none":
                items = (*self._entered(enter), *self._between(enter), *self._left(leave), *self._copies(enter, leave))
            else:
                items = (*self._segments(enter, policy), *self._output(enter, policy), *self._behind(leave))
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
                yield self._latents("scaled latents", self.tokens, ranks)
            else:
                yield self._wide("normed residual", self.tokens, self.model.dim // self.processes)
                yield self._latents("latents", self.tokens, ranks)
            # The inverse RMS counts to what it is made of.
            kind = LATENTS if norm == "online" else WIDE
            yield Kept(kind, "inverse RMS", self.tokens, 1, self.statistic)
            yield self._latents("latents behind act", self.tokens, ranks * self.acts)
            return
        yield Kept(WIDE, "inverse RMS", self.own_tokens, 1, self.statistic)
        if not self.model.low_rank:
            copies = len(group.slots) if self.layout == "megatron-sp" and not self.parallel.grouping else 1
            yield self._wide("normed residual", self.tokens, self.model.dim * copies)
            return
        yield self._wide("normed residual", self.own_tokens, self.model.dim)
        if self.layout == "btp-sp":
            yield self._latents("own tokens' latents", self.own_tokens, ranks * self.acts)
            yield self._latents("gathered latents", self.tokens, ranks)
        else:
            held = ranks // self.processes  # cut along the rank under vanilla
            yield self._latents("latents", self.tokens, held)
            yield self._latents("latents behind act", self.tokens, held * self.acts)

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
            yield from self._left_latents(slot)
            rows = self.own_tokens if self.layout == "btp-sp" else self.tokens
            yield self._latents("latents behind act", rows, self._held(slot) * self.acts)

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

    def _copied(self, group: Group, factor: str, merged: bool) -> Items:
        for parameter, slot in zip(group.parameters("", factor), group.slots, strict=True):
            rows, columns = local_shape(parameter, cut_of(parameter.role, self.model, self.parallel), self.processes)
            if merged:  # of key/value heads held whole, only the own one's rows
                rows = min(rows, self._here(slot))
            yield Kept(COPIES, f"{slot.name}.{factor}", rows, columns, self.dtype)

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
            yield self._latents("own tokens' latents", self.own_tokens, ranks * (self.acts or sharded))
            yield self._latents("gathered latents", self.tokens, ranks * (not sharded))
        else:
            yield self._latents("latents", self.tokens, ranks // self.processes)
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
        yield from self._left_latents(slot)

    # Both.

    def _left_latents(self, slot: Slot) -> Items:
        yield self._latents("latents", self.own_tokens, self._held(slot))

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

    def _held(self, slot: Slot) -> int:
        """Width of the latents of a leaving slot on one process."""
        assert slot.rank is not None
        return slot.rank // self.processes if self.layout == "vanilla" else slot.rank

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
