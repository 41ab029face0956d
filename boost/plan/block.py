"""The operations of one block, in forward and backward pass, under every layout and recomputation policy. Arithmetic only.

Legend: p TP processes, w parts of heads and channels; "own" tokens are T/p where the residual stream is cut along tokens,
else T. A test holds all of it to what the runtime dispatches.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from boost.config.architecture import Group, Slot, crossed, groups, tensor_shape
from boost.config.cuts import TOKEN_SHARDED, cut_of, local_shape, wide_parts
from boost.config.schema import Config, RecomputeName
from boost.config.traffic import ITEMSIZE, statistic_dtype
from boost.plan.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GEMM,
    REDUCE,
    SILU,
    SILU_BACKWARD,
    STREAM,
    Work,
    Works,
    gemm,
    gradients,
    moved,
    norm,
    norm_backward,
)


class BlockWork:
    """The operations of one block under a configuration, in forward order.

    A block is four groups and what stands between them; the same names as in `boost.models.interface.Layout`: `enter` up to
    the last collective of an entering group, `open` behind it, `close` before the collective of a leaving one, `leave`.
    """

    def __init__(self, config: Config, layer: int, fused_norm: bool) -> None:
        """`fused_norm`: whether RMSNorm of whole rows is one kernel (GPUs) or a few operations (CPUs)."""
        self.model, self.parallel, train = config.model, config.parallel, config.train
        p = self.parallel.tp
        self.layer, self.fused_norm = layer, fused_norm
        self.layout = self.parallel.layout if p > 1 else "single"
        self.p, self.w = p, wide_parts(self.parallel)
        self.sequences, self.length = train.micro_batch, train.seq_len
        self.tokens = self.sequences * self.length
        self.own = self.tokens // p if self.layout in TOKEN_SHARDED else self.tokens
        self.width = self.model.dim // p if self.layout == "btp" else self.model.dim
        self.dtype, self.stored = train.compute_dtype, train.param_dtype
        self.casts = self.dtype != self.stored
        self.acts = self.model.latent_act != "none"
        self.crossed = crossed(self.model, layer)
        self.qkv, self.o, self.gate_up, self.down = groups(self.model, layer)

    def forward(self) -> Works:
        """The forward pass."""
        for enter, between, leave in self._halves():
            yield from self._placed(enter, self.enter(enter))
            yield from self._placed(enter, self.open(enter))
            yield from between
            yield from self._placed(leave, self.close(leave))
            yield from self._placed(leave, self.leave(leave))
            yield self._at("residual", self._stream(self.own * self.width, 3))

    def recomputed(self, policy: RecomputeName) -> Works:
        """What the backward pass computes again. A segment stops before the last GEMM whose result nobody needs."""
        if policy == "none":
            return
        if policy == "full-block":
            yield from self._without_last_gemm(self.forward())
            return
        for enter, between, leave in self._halves():
            yield from self._placed(enter, self._entered_again(enter))
            kept = (ATTENTION,) if policy == "low-rank+attention-output" else ()
            again = self._bend(enter, self.own) if policy == "low-rank-sharded" else ()
            inner = [*self._placed(enter, again), *self._placed(enter, self.open(enter))]
            inner += [work for work in between if work.kernel not in kept]
            closing = list(self._placed(leave, self.close(leave)))
            if self.layout == "vanilla" and self.w > 1:
                yield from inner  # the gathering stands between, and ends the segment
                yield from self._placed(leave, self._left_again(leave))
                continue
            yield from self._without_last_gemm([*inner, *closing])
            yield from self._placed(leave, self._left_again(leave))

    def backward(self) -> Works:
        """The backward pass, recomputation not included."""
        for enter, between, leave in self._halves():
            yield self._at("residual", self._stream(self.own * self.width, 3))
            yield from self._placed(leave, self._leave_backward(leave))
            yield from self._between_backward(between)
            yield from self._placed(enter, self._enter_backward(enter))

    # Forward.

    def enter(self, group: Group) -> Works:
        """From the residual stream to the latents (dense: to what W takes)."""
        if self.layout == "btp":
            yield from self._scaled_weight(group)
            yield self._reduce(self.own * self.width)
            if self.parallel.norm == "sync":
                yield self._scale(self.own * self.width)
            yield from self._down_gemms(group)
            if self.parallel.norm == "online":
                yield self._stream(self.tokens * self._first_latents(group), 2)
            return
        yield from norm(self.own * self.model.dim, self.dtype, self.fused_norm)
        if not self.model.low_rank:
            return
        yield from self._cast(group, "A")
        yield from self._down_gemms(group)
        if self.layout == "btp-sp":
            yield from self._bend(group, self.own)
        elif self.layout == "vanilla":
            yield from self._bend(group, self.tokens)
            yield from self._ups(group)
            if self.w > 1:
                yield self._stream(self.tokens * self._sent(group), 2)

    def open(self, group: Group) -> Works:
        """To heads or channels."""
        if not self.model.low_rank:
            yield from self._cast(group, "W")
            yield from self._merged_weights(group)
            yield from self._dense_gemms(group)
        elif self.layout == "btp-sp":
            yield from self._ups(group)
        elif self.layout != "vanilla":
            if self.layout == "btp" and self.parallel.norm == "online":
                yield self._scale(self.tokens * sum(group.ranks))
            yield from self._bend(group, self.tokens)
            yield from self._ups(group)

    def attention(self) -> Works:
        """Rotary embedding and attention over the heads held here."""
        q, k = (self._here(slot) for slot in self.qkv.slots[:2])
        for width in (q, k):
            yield from self._rotary(width)
        yield self._attention(ATTENTION)

    def product(self) -> Works:
        """The gated product."""
        elements = self.tokens * self._here(self.gate_up.slots[0])
        if self.model.mlp_silu:
            yield moved(SILU, elements, 2, self.dtype)
        yield self._stream(elements, 3)

    def close(self, group: Group) -> Works:
        """Heads or channels down to latents (dense: through W)."""
        (slot,) = group.slots
        if not self.model.low_rank:
            yield from self._cast(group, "W")
            yield gemm(self.tokens, self.model.dim, slot.d_in // self.w, self.dtype)
            return
        if self.layout == "vanilla" and self.w > 1:
            yield self._stream(self.tokens * slot.d_in, 2)
        yield from self._cast(group, "A")
        yield gemm(self.tokens, self._held(group), self._taken(slot), self.dtype)

    def leave(self, group: Group) -> Works:
        """Back to the residual stream."""
        yield from (*self._bend(group, self.own), *self._ups(group)) if self.model.low_rank else ()

    # Backward.

    def _leave_backward(self, group: Group) -> Works:
        (slot,) = group.slots
        if not self.model.low_rank:
            yield from gradients(gemm(self.tokens, self.model.dim, slot.d_in // self.w, self.dtype))
            yield from self._cast(group, "W")
            return
        for product in self._up_gemms(group):
            yield from gradients(product)
        yield from self._bend_backward(group, self.own)
        yield from gradients(gemm(self.tokens, self._held(group), self._taken(slot), self.dtype))
        yield from self._cast(group, "A")
        yield from self._cast(group, "B")
        if self.layout == "vanilla" and self.w > 1:
            yield self._stream(self.tokens * slot.d_in, 2)

    def _between_backward(self, between: Sequence[Work]) -> Works:
        for work in between:
            if work.kernel == ATTENTION:
                yield replace(self._attention(ATTENTION_BACKWARD), place=work.place)
            elif work.kernel == SILU:
                yield replace(work, kernel=SILU_BACKWARD, bytes=work.bytes * 3 // 2)
            elif work.place == "product":
                yield replace(work, calls=2)  # of both factors
            else:
                yield work

    def _enter_backward(self, group: Group) -> Works:
        grouped = self.parallel.grouping
        if not self.model.low_rank:
            if grouped:
                yield self._stream(self.tokens * sum(self._here(slot) for slot in group.slots), 2)
            else:
                yield from self._put_together(group)
            for product in self._dense_gemms(group):
                yield from gradients(product)
            yield from self._cast(group, "W")
            yield from self._sums_of_inputs(group)
            yield from norm_backward(self.own * self.model.dim, self.dtype, self.fused_norm)
            return
        if self.layout == "vanilla" and self.w > 1:
            yield from self._unscattered(group)
        for product in self._up_gemms(group):
            yield from gradients(product)
        if grouped:
            yield self._stream(self.tokens * self._held(group), 2)
        elif len(group.slots) > 1:
            yield moved(STREAM, self._held(group) * self.width, 2, self.stored)
        yield from self._cast(group, "B")
        yield from self._bend_backward(group, self.own)
        if self.layout == "btp":
            yield from self._entered_btp_backward(group)
            return
        for product in self._down_gemms(group):
            yield from gradients(product)
        yield from self._cast(group, "A")
        yield from self._sums_of_inputs(group)
        yield from norm_backward(self.own * self.model.dim, self.dtype, self.fused_norm)

    def _entered_btp_backward(self, group: Group) -> Works:
        weight = self._held(group) * self.width
        if self.parallel.norm == "online":
            latents, wide = self.tokens * sum(group.ranks), statistic_dtype(self.dtype)
            yield self._scale(latents)
            yield moved(STREAM, latents, 2 if self.dtype == wide else 2.5, wide)
            yield moved(STREAM, latents, 1 if self.dtype == wide else 2, wide)
            yield moved(REDUCE, latents, 1, wide)
        for product in self._down_gemms(group):
            yield from gradients(product)
        yield from self._scaled_weight(group)
        if self.parallel.norm == "sync":
            yield self._scale(self.own * self.width)
            yield self._stream(self.own * self.width, 3)
            yield self._reduce(self.own * self.width)
            yield self._stream(self.own * self.width, 3)  # of the statistic
        yield self._stream(self.own * self.width, 3)
        yield from self._sums_of_inputs(group)
        yield from self._cast(group, "A")
        yield moved(STREAM, weight, 2, self.stored)
        yield moved(STREAM, weight, 3, self.stored)
        yield moved(REDUCE, weight, 1, self.stored)

    # Recomputation.

    def _entered_again(self, group: Group) -> Works:
        """Local parts before the last collective of an entering group."""
        if self.layout == "btp":
            if self.parallel.norm == "sync":
                yield self._scale(self.own * self.width)
                yield from self._scaled_weight(group)
                yield from self._down_gemms(group)[:-1]
            return
        yield from norm(self.own * self.model.dim, self.dtype, self.fused_norm)
        yield from self._cast(group, "A")
        yield from self._down_gemms(group)[:-1]
        if self.layout == "vanilla":
            yield from self._bend(group, self.tokens)
            yield from self._cast(group, "B")
            yield from self._up_gemms(group)[:-1]
        elif self.crossed and self.layout == "btp-sp":
            yield from (work for work in self._bend(group, self.own) if work.kernel != SILU)

    def _left_again(self, group: Group) -> Works:
        if self.layout == "vanilla" and self.w > 1:
            yield from self._cast(group, "A")
        yield from self._bend(group, self.own)
        yield from self._cast(group, "B")

    @staticmethod
    def _without_last_gemm(works: Iterable[Work]) -> Works:
        """Up to the last GEMM: its inputs are needed, what it makes is not."""
        listed = list(works)
        last = max((i for i, work in enumerate(listed) if work.kernel == GEMM), default=len(listed))
        yield from listed[:last]

    # Pieces.

    def _halves(self) -> tuple[tuple[Group, list[Work], Group], ...]:
        attention = [self._at("attention", work) for work in self.attention()]
        product = [self._at("product", work) for work in self.product()]
        return (self.qkv, attention, self.o), (self.gate_up, product, self.down)

    def _scaled_weight(self, group: Group) -> Works:
        """gamma times the columns of A."""
        yield moved(STREAM, self._held(group) * self.width, 2, self.stored)
        yield from self._cast(group, "A")

    def _scale(self, elements: int) -> Work:
        """x times the inverse RMS of its row, which is fp32 or wider; rounded to x's dtype."""
        wide = ITEMSIZE[statistic_dtype(self.dtype)] / ITEMSIZE[self.dtype]
        return self._stream(elements, 2 if wide == 1 else 2 + 2 * wide)

    def _rotary(self, width: int) -> Works:
        elements = self.tokens * width
        yield self._stream(elements, 2, calls=2)
        yield self._stream(elements // 2, 2)
        yield self._stream(elements, 2)
        yield self._stream(elements, 3)

    def _attention(self, kernel: str) -> Work:
        """Causal: half of the scores. Forward two products of them, backward five (it makes the scores again)."""
        heads, kv = (self._here(slot) // self.model.head_dim for slot in self.qkv.slots[:2])
        products = 2 if kernel == ATTENTION else 5
        flops = products * self.tokens * self.length * heads * self.model.head_dim
        tensors = (2, 2) if kernel == ATTENTION else (4, 4)
        elements = self.tokens * self.model.head_dim * (tensors[0] * heads + tensors[1] * kv)
        shape = (self.sequences, heads, kv, self.length, self.model.head_dim)
        return Work(kernel, self.dtype, shape, flops, elements * ITEMSIZE[self.dtype], place="attention")

    def _bend(self, group: Group, rows: int) -> Works:
        """What acts on latents: gate and LayerNorm where they cross, then the activation."""
        elements = rows * self._held(group)
        if self.crossed:
            yield from self._gates(group, rows)
            if len(group.slots) > 1 and self.parallel.grouping:
                yield self._stream(elements, 2)
            yield self._stream(elements, 3)
            yield from self._layer_norm(elements)
        if self.acts:
            yield moved(SILU, elements, 2, self.dtype)

    def _bend_backward(self, group: Group, rows: int) -> Works:
        elements = rows * self._held(group)
        if self.acts:
            yield moved(SILU_BACKWARD, elements, 3, self.dtype)
        if self.crossed:
            yield from self._layer_norm_backward(elements)
            yield self._stream(elements, 3)  # the gradients of both uses of carried latents meet
            for work in self._gates(group, rows):
                yield from gradients(work) if work.kernel == GEMM else (work,)
            if self.model.gate == "dense":
                yield self._reduce(elements)

    def _layer_norm(self, elements: int) -> Works:
        """Of latents; where they are cut along the rank, in steps between which sums travel."""
        wide = statistic_dtype(self.dtype)
        if self.layout == "vanilla":
            yield moved(STREAM, elements, 2, wide)
            yield moved(REDUCE, elements, 1, wide, calls=2)
            yield moved(STREAM, elements, 2, wide, calls=3)
        else:
            yield self._stream(elements, 2)
        yield self._stream(elements, 3)

    def _layer_norm_backward(self, elements: int) -> Works:
        wide = statistic_dtype(self.dtype)
        if self.layout != "vanilla":
            yield self._stream(elements, 3, calls=3)
            yield self._stream(elements, 4)
            yield self._reduce(elements)
            yield self._reduce(elements)
            return
        yield moved(STREAM, elements, 2, wide, calls=9)
        yield moved(STREAM, elements, 3, wide, calls=4)
        yield moved(REDUCE, elements, 1, wide, calls=4)

    def _gates(self, group: Group, rows: int) -> Works:
        if self.model.mixes and self.layout == "vanilla":
            yield self._stream(rows * sum(group.ranks), 2)
        for slot in group.slots:
            rank = slot.rank or 0
            held = rank // self.p if self.layout == "vanilla" else rank
            if self.model.gate == "dense":
                yield gemm(rows, held, rank, self.dtype)
            elif self.model.gate == "tensor":
                a, b = tensor_shape(rank)
                here = a // self.p if self.layout == "vanilla" else a
                yield self._stream(rows * rank, 2, calls=2)  # turned over for each product
                yield gemm(rows * b, here, a, self.dtype)
                yield gemm(rows * here, b, b, self.dtype)

    def _down_gemms(self, group: Group) -> list[Work]:
        """A of an entering group."""
        held = [rank // self.p if self.layout == "vanilla" else rank for rank in group.ranks]
        return [gemm(self.own, n, self.width, self.dtype) for n in ([sum(held)] if self.parallel.grouping else held)]

    def _ups(self, group: Group) -> Works:
        yield from self._cast(group, "B")
        yield from self._up_gemms(group)

    def _up_gemms(self, group: Group) -> list[Work]:
        """B of either side, one a slot."""
        rows = self.own if group.side == "leave" else self.tokens
        result = []
        for slot in group.slots:
            rank = slot.rank or 0
            held = rank // self.p if self.layout == "vanilla" else rank
            out = self.width if group.side == "leave" else self._made(slot)
            result.append(gemm(rows, out, held, self.dtype))
        return result

    def _dense_gemms(self, group: Group) -> list[Work]:
        """W of an entering group."""
        widths = [self._here(slot) for slot in group.slots]
        merged = [sum(widths)] if self.parallel.grouping else widths
        return [gemm(self.tokens, n, self.model.dim, self.dtype) for n in merged]

    def _merged_weights(self, group: Group) -> Works:
        """Dense weights that are stored apart, put together for one GEMM."""
        if group.name == "qkv" and self.parallel.grouping and self.model.kv_heads < self.w:
            yield self._stream(sum(self._here(slot) for slot in group.slots) * self.model.dim, 2)

    def _cast(self, group: Group, factor: str) -> Works:
        """Weights in the dtype of activations; in the backward pass their gradients in that of weights. (Adding those up over
        micro-batches is counted with the step.)"""
        if self.casts:
            ratio = ITEMSIZE[self.stored] / ITEMSIZE[self.dtype]
            for size in self._weights(group, factor):
                yield self._stream(size, 1 + ratio)

    def _weights(self, group: Group, factor: str) -> list[int]:
        sizes = []
        for parameter in group.parameters("", factor):
            shape = local_shape(parameter, cut_of(parameter.role, self.model, self.parallel), self.p)
            sizes.append(math.prod(shape))
        return [sum(sizes)] if factor == "A" else sizes

    def _sums_of_inputs(self, group: Group) -> Works:
        """Gradients of one input that several products took by themselves."""
        if not self.parallel.grouping and len(group.slots) > 1:
            yield self._stream(self.own * self.width, 3, calls=len(group.slots) - 1)

    def _put_together(self, group: Group) -> Works:
        """Gradients of weights that are stored as one tensor and used one by one: each spread out in zeros, and added."""
        for _, alike in itertools.groupby(group.slots, lambda slot: slot.kv and self.model.kv_heads < self.w):
            parts = [self._here(slot) * self.model.dim for slot in alike]
            if len(parts) > 1:
                yield moved(STREAM, sum(parts), 1, self.stored, calls=len(parts))
                yield from (moved(STREAM, part, 2, self.stored) for part in parts)
                yield moved(STREAM, sum(parts), 3, self.stored, calls=len(parts) - 1)

    def _unscattered(self, group: Group) -> Works:
        """Gathered gradients of heads or channels, back to the order of B's outputs."""
        elements = self.tokens * self._sent(group)
        if self.parallel.grouping:
            yield self._stream(elements // self.p, 2)
        yield self._stream(elements, 2)

    def _sent(self, group: Group) -> int:
        """Width that vanilla sums over processes: of key/value heads at least one for each."""
        return sum(max(slot.d_out, self.p * self.model.head_dim if slot.kv else 0) for slot in group.slots)

    def _first_latents(self, group: Group) -> int:
        return sum(group.ranks) if self.parallel.grouping else group.ranks[0]

    def _here(self, slot: Slot) -> int:
        """Output width of an entering slot on one process: of key/value heads at least one."""
        return max(slot.d_out // self.w, self.model.head_dim if slot.kv else 0)

    def _made(self, slot: Slot) -> int:
        """What B makes of an entering slot: under vanilla a term of all of it."""
        return slot.d_out if self.layout == "vanilla" else self._here(slot)

    def _taken(self, slot: Slot) -> int:
        """What A of a leaving slot takes."""
        return slot.d_in if self.layout == "vanilla" else slot.d_in // self.p

    def _held(self, group: Group) -> int:
        """Width of the latents of a group on one process."""
        return sum(group.ranks) // self.p if self.layout == "vanilla" else sum(group.ranks)

    def _stream(self, elements: int, times: float, calls: int = 1) -> Work:
        return moved(STREAM, elements, times, self.dtype, calls)

    def _reduce(self, elements: int) -> Work:
        return moved(REDUCE, elements, 1, self.dtype)

    @staticmethod
    def _at(place: str, work: Work) -> Work:
        return replace(work, place=place)

    @staticmethod
    def _placed(group: Group, works: Iterable[Work]) -> Works:
        for work in works:
            yield work if work.place else replace(work, place=group.name)
