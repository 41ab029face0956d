"""A block of one process in sizes: the functions of `boost.models` and `boost.parallel.layouts`, on `Array`s.

What they hold and when follows from how they are written, so they are written like those. Legend: T tokens of one micro-batch,
p TP processes, w parts of heads and channels; `Latents` as in `boost.models.interface`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from boost.config.architecture import Group, Slot, crossed, crossing_parameters, groups, tensor_shape
from boost.config.cuts import TOKEN_SHARDED, cut_of, local_shape, wide_parts
from boost.config.schema import Config, RecomputeName
from boost.config.traffic import statistic_columns
from boost.plan.operations import Operations
from boost.plan.tape import Array, Tape

Latents = tuple[Array, ...]


class Passes:
    """Forward passes on one tape, of which it can run the backward pass."""

    def __init__(self, config: Config, tape: Tape, fused_norm: bool = False) -> None:
        """`fused_norm`: as of `Operations`."""
        self.model, self.parallel, train = config.model, config.parallel, config.train
        p = self.parallel.tp
        self.p, self.wide = p, wide_parts(self.parallel) if p > 1 else 1
        self.layout = self.parallel.layout if p > 1 else "single"
        self.sequences, self.length = train.micro_batch, train.seq_len
        self.tokens = self.sequences * self.length
        self.own_tokens = self.tokens // p if self.layout in TOKEN_SHARDED else self.tokens
        self.width = self.model.dim // p if self.layout == "btp" else self.model.dim
        self.stored, self.dtype = train.param_dtype, train.compute_dtype
        self.gathered = self.parallel.sharded
        self.tape, self.do = tape, Operations(tape, self.dtype, p, fused_norm, self.model.dim // p)

    @property
    def residual(self) -> int:
        """Elements of the residual stream on this process."""
        return self.own_tokens * self.width

    def _weight(self, parameters: Sequence[Any]) -> Array:
        cut = cut_of(parameters[0].role, self.model, self.parallel)
        n = sum(math.prod(local_shape(parameter, cut, self.p)) for parameter in parameters)
        return self.do.weight(n, self.dtype if self.gathered else self.stored)


class BlockPasses(Passes):
    """One block."""

    def __init__(self, config: Config, layer: int, policy: RecomputeName, tape: Tape, fused_norm: bool = False) -> None:
        super().__init__(config, tape, fused_norm)
        self.groups = groups(self.model, layer)
        self.crossed, self.carries = crossed(self.model, layer), self.model.crosses and layer + 1 < self.model.layers
        self.policy = policy
        self.sharded_latents = policy == "low-rank-sharded" and self.layout == "btp-sp"
        self.gammas = [self.do.weight(self.width, self.stored) for _ in range(2)]
        self.A = {g.name: self._weight(g.parameters("", "A")) for g in self.groups if self.model.low_rank}
        factor = "B" if self.model.low_rank else "W"
        self.outer = {g.name: self._outer(g, factor) for g in self.groups}
        self.crossing = {
            g.name: {name: self._weight(of) for name, of in crossing_parameters(self.model, g, "").items()}
            for g in self.groups
            if self.crossed
        }

    def _outer(self, group: Group, factor: str) -> list[tuple[Array, list[int]]]:
        """(stored tensor, elements of each slot in it)."""
        parameters = group.parameters("", factor)
        runs: list[list[Any]] = []
        for parameter in parameters:
            cut = cut_of(parameter.role, self.model, self.parallel)
            if factor == "W" and runs and cut == cut_of(runs[-1][0].role, self.model, self.parallel):
                runs[-1].append(parameter)
            else:
                runs.append([parameter])
        return [
            (
                self._weight(run),
                [
                    math.prod(local_shape(each, cut_of(each.role, self.model, self.parallel), self.p))
                    for each in run
                ],
            )
            for run in runs
        ]  # fmt: skip

    def arriving(self) -> tuple[Array, Latents]:
        """What the block before hands on."""
        self.tape.place = "residual"
        x = self.tape.entered(self.tape.new(self.residual, self.dtype))
        carried = []
        for group in self.groups if self.crossed else ():
            for rank in self._tensors(group):
                carried.append(self.tape.entered(self.tape.new(self._latent_rows() * rank, self.dtype)))
        return x, tuple(carried)

    def forward(self, x: Array, carried: Latents) -> tuple[Array, Latents]:
        """models.decoder.Block."""
        if self.policy == "full-block":
            result: tuple[Array, Latents] = self.tape.checkpoint(self._run, x, carried)
            return result
        return self._run(x, carried)

    def _local(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.policy.startswith("low-rank"):
            return self.tape.checkpoint(function, *arguments)
        return function(*arguments)

    def _run(self, x: Array, carried: Latents) -> tuple[Array, Latents]:
        qkv, o, gate_up, down = self.groups
        for gamma, enter, between, leave in (
            (self.gammas[0], qkv, self._attention, o),
            (self.gammas[1], gate_up, self._product, down),
        ):
            self.tape.place = enter.name
            kept, carried = self._enter(x, gamma, enter, carried)
            closed, carried = self._local(between, carried, *kept)
            self.tape.place = leave.name
            update, carried = self._leave(closed, leave, carried)
            self.tape.place = "residual"
            x = self.do.add(x, update)
        return x, carried

    def _attention(self, carried: Latents, *kept: Array) -> tuple[Array, Latents]:
        (q, k, v), carried = self._open(kept, self.groups[0], carried)
        self.tape.place = "attention"
        q, k = self.do.rotate(q), self.do.rotate(k)
        width = self.model.head_dim
        heads, kv = (x.elements // (self.tokens * width) for x in (q, k))
        shape = self.sequences, heads, kv, self.length, width
        a = self.do.attention(q, k, v, shape, self.policy == "low-rank+attention-output")
        return self._close(a, self.groups[1]), carried

    def _product(self, carried: Latents, *kept: Array) -> tuple[Array, Latents]:
        (gate, up), carried = self._open(kept, self.groups[2], carried)
        self.tape.place = "product"
        a = self.do.multiply(self.do.silu(gate) if self.model.mlp_silu else gate, up)
        return self._close(a, self.groups[3]), carried

    # The four functions of a layout.

    def _enter(self, x: Array, gamma: Array, group: Group, carried: Latents) -> tuple[Sequence[Array], Latents]:
        do, layout = self.do, self.layout
        if layout == "btp":
            return (
                self._online(x, gamma, group) if self.parallel.norm == "online" else self._sync(x, gamma, group)
            ), carried
        if not self.model.low_rank:
            normed = do.rms_norm(x, gamma, self.own_tokens)
            if layout == "single":
                return [normed], carried
            meet = do.gather if layout == "megatron-sp" else do.sum_backward
            return [meet(normed) for _ in group.slots[: 1 if self.parallel.grouping else None]], carried
        if layout == "vanilla":
            return self._enter_vanilla(x, gamma, group, carried)
        latents = self._local(lambda x: self._down(do.rms_norm(x, gamma, self.own_tokens), group), x)
        if layout == "single" or self.sharded_latents:
            return latents, carried
        if self.crossed:
            bent, carried = self._local(lambda waiting, *u: self._bend(u, waiting, group), carried, *latents)
        else:
            bent, carried = self._bend(latents, carried, group)
        return [do.gather(h) for h in bent], carried

    def _open(self, kept: Sequence[Array], group: Group, carried: Latents) -> tuple[Sequence[Array], Latents]:
        do = self.do
        if self.layout == "vanilla":
            return kept, carried
        if not self.model.low_rank:
            return self._dense(kept, group), carried
        if self.layout == "btp-sp":
            if not self.sharded_latents:
                return self._up(kept, group), carried
            bent, carried = self._bend(kept, carried, group)
            return self._up([do.gather(h) for h in bent], group), carried
        if self.layout == "btp" and self.parallel.norm == "online":
            *latents, s = kept
            c = do.inverse_rms(s)
            kept = [do.scale(u, c) for u in latents]
        return self._bend_up(kept, carried, group)

    def _close(self, a: Array, group: Group) -> Array:
        self.tape.place = group.name
        if self.layout == "vanilla" and self.wide > 1:
            return a
        if self.layout == "vanilla":
            a = self.do.sum_backward(a)
        if not self.model.low_rank:
            ((weight, _),) = self.outer[group.name]
            return self.do.linear(a, self.do.cast(weight, self.dtype), group.slots[0].d_out, self.tokens)
        return self._down(a, group)[0]

    def _leave(self, closed: Array, group: Group, carried: Latents) -> tuple[Array, Latents]:
        do, layout = self.do, self.layout
        if not self.model.low_rank:
            if layout == "single":
                return closed, carried
            return (do.sum_forward if layout == "megatron" else do.scatter_sum)(closed), carried
        if layout == "vanilla":
            if self.wide > 1:
                whole = do.rows_to_features(do.gather(closed))
                closed = self._local(lambda whole: self._down(whole, group)[0], whole)
            (update,), carried = self._bend_up_vanilla([closed], group, carried)
            return do.sum_forward(update), carried
        u = closed if layout == "single" else (do.sum_forward if layout == "btp" else do.scatter_sum)(closed)
        (update,), carried = self._local(lambda u, *waiting: self._bend_up([u], waiting, group), u, *carried)
        return update, carried

    # Their parts.

    def _tensors(self, group: Group) -> list[int]:
        """Widths of the tensors that hold the latents of a group on this process."""
        ranks = [rank // (self.p if self.layout == "vanilla" else 1) for rank in group.ranks]
        return [sum(ranks)] if self.parallel.grouping else ranks

    def _latent_rows(self) -> int:
        return self.own_tokens

    def _down_weights(self, weight: Array, group: Group) -> list[Array]:
        widths = self._tensors(group)
        return self.do.rows(weight, [weight.elements * width // sum(widths) for width in widths])

    def _down(self, x: Array, group: Group) -> list[Array]:
        weights = self._down_weights(self.do.cast(self.A[group.name], x.dtype), group)
        rows = self.tokens if group.side == "leave" or self.layout not in TOKEN_SHARDED else self.own_tokens
        return [self.do.linear(x, a, width, rows) for a, width in zip(weights, self._tensors(group), strict=True)]

    def _online(self, x: Array, gamma: Array, group: Group) -> list[Array]:
        do, widths = self.do, self._tensors(group)
        weights = self._down_weights(self.A[group.name], group)
        u, s = do.project(x, weights[0], gamma, widths[0], self.tokens, True)
        payload = self.tokens * (widths[0] + statistic_columns(self.dtype, self.p))
        u, s = do.sum_with_statistic(u, s, payload)
        others = [
            do.sum_forward(do.project(x, a, gamma, width, self.tokens, False)[0])
            for a, width in zip(weights[1:], widths[1:], strict=True)
        ]
        return [u, *others, s]

    def _sync(self, x: Array, gamma: Array, group: Group) -> list[Array]:
        do = self.do
        s = do.sum_both(do.sum_of_squares(x, self.tokens))

        def down(x: Array, s: Array) -> list[Array]:
            normed = do.scale(x, do.inverse_rms(s))
            weights = self._down_weights(do.scaled_weight(self.A[group.name], gamma), group)
            return [
                do.linear(normed, a, width, self.tokens) for a, width in zip(weights, self._tensors(group), strict=True)
            ]

        return [do.sum_forward(u) for u in self._local(down, x, s)]

    def _bend_up(self, latents: Sequence[Array], carried: Latents, group: Group) -> tuple[list[Array], Latents]:
        bent, carried = self._bend(latents, carried, group)
        if self.layout == "btp":
            bent = [self.do.sum_backward(h) for h in bent]
        return self._up(bent, group), carried

    def _bend(self, latents: Sequence[Array], carried: Latents, group: Group) -> tuple[list[Array], Latents]:
        if self.crossed:
            arrived, carried = carried[: len(latents)], carried[len(latents) :]
            latents = self._cross(latents, arrived, group)
        bent = self._act(latents)
        return bent, (*carried, *bent) if self.carries else carried

    def _act(self, latents: Sequence[Array]) -> list[Array]:
        return [self.do.silu(u) for u in latents] if self.model.latent_act == "silu" else list(latents)

    def _up(self, latents: Sequence[Array], group: Group) -> list[Array]:
        slots = group.slots
        if len(latents) == 1 and len(slots) > 1:
            (h,) = latents
            latents = self.do.rows(h, [h.elements * slot_rank // sum(group.ranks) for slot_rank in group.ranks])
        weights = self._outer_weights(group)
        rows = self.own_tokens if group.side == "leave" else self.tokens
        return [
            self.do.linear(h, b, self._columns(slot, group), rows)
            for h, b, slot in zip(latents, weights, slots, strict=True)
        ]

    def _outer_weights(self, group: Group) -> list[Array]:
        """models.group.Group.outer_weights."""
        whole = []
        for weight, sizes in self.outer[group.name]:
            for size in sizes:
                whole.append(self.do.cast(self.do.narrow(weight, size), self.dtype))
        if group.name != "qkv" or self.layout == "vanilla":
            return whole
        return [
            self.do.narrow(w, min(w.elements, w.elements * self._here(slot) // self._held_rows(slot)))
            for w, slot in zip(whole, group.slots, strict=True)
        ]

    def _held_rows(self, slot: Slot) -> int:
        """Rows of an outer weight that this process holds: of few key/value heads all."""
        return slot.d_out if slot.kv and self.model.kv_heads < self.p else slot.d_out // self.p

    def _here(self, slot: Slot) -> int:
        return max(slot.d_out // self.wide, self.model.head_dim if slot.kv else 0)

    def _columns(self, slot: Slot, group: Group) -> int:
        if self.layout == "vanilla":
            return slot.d_out
        return self._here(slot) if group.side == "enter" else self.width

    def _dense(self, kept: Sequence[Array], group: Group) -> list[Array]:
        do = self.do
        widths = [self._here(slot) for slot in group.slots]
        if self.parallel.grouping:
            shared = group.name == "qkv" and self.model.kv_heads < self.wide
            if len(self.outer[group.name]) == 1 and not shared:
                weight = do.cast(self.outer[group.name][0][0], self.dtype)
            else:
                weight = do.cat(self._outer_weights(group))
            y = do.linear(kept[0], weight, sum(widths), self.tokens)
            return do.rows(y, [self.tokens * width for width in widths])
        weights = self._outer_weights(group)
        kept = kept if len(kept) > 1 else [kept[0]] * len(weights)
        return [do.linear(x, w, width, self.tokens) for x, w, width in zip(kept, weights, widths, strict=True)]

    # vanilla.

    def _enter_vanilla(self, x: Array, gamma: Array, group: Group, carried: Latents) -> tuple[Sequence[Array], Latents]:
        do = self.do

        def down(x: Array) -> list[Array]:
            normed = do.rms_norm(x, gamma, self.tokens)
            weights = self._down_weights(do.cast(self.A[group.name], x.dtype), group)
            return [
                do.linear(do.sum_backward(normed), a, width, self.tokens)
                for a, width in zip(weights, self._tensors(group), strict=True)
            ]

        outputs, carried = self._bend_up_vanilla(self._local(down, x), group, carried)
        if self.wide == 1:
            return [do.sum_forward(y) for y in outputs], carried
        shares = [self._by_process(y, slot) for y, slot in zip(outputs, group.slots, strict=True)]
        if not self.parallel.grouping:
            return [do.scatter_sum(do.copied(share, backward=False)) for share in shares], carried
        merged = do.scatter_sum(do.cat(shares, do.reorder))
        return do.rows(merged, [share.elements // self.p for share in shares]), carried

    def _by_process(self, y: Array, slot: Slot) -> Array:
        """[T, O] -> [p, T, O/p], a view, or a copy where key/value heads are sent to several processes."""
        n, dtype = y.elements, y.dtype
        heads = self.model.kv_heads if slot.kv else self.p
        if heads < self.p:
            times = self.p // heads
            return self.tape.apply(
                [y], [(n * times, dtype)], lambda t, g, s: [t.new(n, dtype, 1 + times)], moves=2
            )[0]  # fmt: skip
        return self.tape.apply([y], [(n, dtype)], lambda t, g, s: [t.new(n, dtype, 2)], view=True)[0]

    def _bend_up_vanilla(self, latents: Sequence[Array], group: Group, carried: Latents) -> tuple[list[Array], Latents]:
        do = self.do
        if not self.crossed:
            result: tuple[list[Array], Latents] = self._local(
                lambda waiting, *latents: self._bend_up(latents, waiting, group), carried, *latents
            )
            return result
        arrived, carried = carried[: len(latents)], carried[len(latents) :]
        if self.model.mixes:
            arrived = tuple(do.gather(h) for h in arrived)
        slots = [len(group.slots)] if len(latents) == 1 else [1] * len(latents)

        def mix(arrived: Latents, *latents: Array) -> list[Array]:
            mixed = self._mix(latents, arrived, group)
            return [
                *mixed,
                *(self.do.moments(v, 2 * count * self.tokens) for v, count in zip(mixed, slots, strict=True)),
            ]

        def settle(carried: Latents, *found: Array) -> tuple[list[Array], Latents]:
            pairs = zip(found[: len(slots)], found[len(slots) :], strict=True)
            bent = self._act([self._settle(v, moments, group) for v, moments in pairs])
            return self._up(bent, group), (*carried, *bent) if self.carries else carried

        found = self._local(mix, arrived, *latents)
        sums = [do.sum_both(moments) for moments in found[len(slots) :]]
        done: tuple[list[Array], Latents] = self._local(settle, carried, *found[: len(slots)], *sums)
        return done

    # Latent crossing.

    def _cross(self, latents: Sequence[Array], arrived: Latents, group: Group) -> list[Array]:
        mixed = self._mix(latents, arrived, group)
        return [self._layer_norm(v, group) for v in mixed]

    def _mix(self, latents: Sequence[Array], arrived: Latents, group: Group) -> list[Array]:
        do, ranks = self.do, group.ranks
        parts: list[Array] = []
        for h in arrived:
            widths = list(ranks) if len(arrived) == 1 else [1]
            parts += do.rows(h, [h.elements * width // sum(widths) for width in widths])
        if self.layout == "vanilla" and self.model.mixes:
            parts = [do.rows_to_features(part) for part in parts]
        gated = [self._gated(h, slot, group, len(arrived) == 1) for slot, h in enumerate(parts)]
        if len(latents) == 1:
            return [do.add(latents[0], gated[0] if len(gated) == 1 else do.cat(gated))]
        return [do.add(u, g) for u, g in zip(latents, gated, strict=True)]

    def _gated(self, h: Array, slot: int, group: Group, together: bool) -> Array:
        do, weights, rank = self.do, self.crossing[group.name], group.ranks[slot]
        name = group.slots[slot].name.partition(".")[2]
        rows = h.elements // rank
        if self.model.gate == "dense":
            weight = do.cast(weights[f"gate_weight_{name}"], self.dtype)
            bias = do.narrow(weights["gate_bias"], weights["gate_bias"].elements // len(group.ranks))
            return do.linear(h, weight, weight.elements // rank, rows, do.cast(bias, self.dtype))
        if self.model.gate == "tensor":
            a_whole, b = tensor_shape(rank)
            matrices = [do.cast(weights[f"{part}_{name}"], self.dtype) for part in ("gate_rows", "gate_columns")]
            a = matrices[0].elements // a_whole
            if a < a_whole:
                turned = do.copied(h)
                y = do.copied(do.linear(turned, matrices[0], a, rows * b))
                return do.linear(y, matrices[1], b, rows * a)
            if together and len(group.slots) > 1 and self.layout in ("single", "btp"):
                h = do.copied(h, backward=False)
            y = do.copied(do.linear(h, matrices[1], b, rows * a))
            return do.copied(do.linear(y, matrices[0], a, rows * b), backward=False)
        return h

    def _layer_norm(self, mixed: Array, group: Group) -> Array:
        n, whole, do = mixed.elements, self._latent_rows() * sum(group.ranks), self.do
        slots = max(len(group.slots) * n // whole, 1)
        normed = do.layer_norm(mixed, self._latent_rows() * slots)
        weights = self.crossing[group.name]
        bias, weight = (
            do.cast(do.narrow(weights[name], max(weights[name].elements * n // whole, 1)), mixed.dtype)
            for name in ("norm_bias", "norm_weight")
        )
        return do.addcmul(bias, normed, weight)

    def _settle(self, mixed: Array, moments: Array, group: Group) -> Array:
        weights, share = self.crossing[group.name], mixed.elements // self.tokens
        weight, bias = (self.do.narrow(weights[name], share) for name in ("norm_weight", "norm_bias"))
        return self.do.settle(mixed, moments, weight, bias)
