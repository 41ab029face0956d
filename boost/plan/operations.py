"""The operations of a decoder in sizes: what each makes, saves, works with and moves, forward and backward, as the dispatcher
shows.

Each function stands for the torch function or the `autograd.Function` of its name in `boost.models` and `boost.parallel`.
Legend: T tokens, p TP processes; n elements. A number that follows a size: reads and writes for each element (`Tape.new`).
"""

from collections.abc import Sequence
from typing import Any

from boost.config.traffic import ITEMSIZE, statistic_dtype
from boost.plan.tape import Array, Gradients, Tape
from boost.plan.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GEMM,
    REDUCE,
    REORDER,
    REORDER_FINELY,
    SHORT_RUN,
    SILU,
    SILU_BACKWARD,
    STREAM,
)


class Operations:
    """On one tape, in one dtype of activations, over TP processes."""

    def __init__(self, tape: Tape, dtype: str, processes: int, fused_norm: bool, run: int) -> None:
        """`fused_norm`: RMSNorm of whole rows is one kernel (GPUs), not a few operations (CPUs); memory is that of the latter.
        `run`: elements of a row that one process has, which copies to and from other processes move at a time."""
        self.reorder = REORDER if run >= SHORT_RUN else REORDER_FINELY
        self.tape, self.dtype, self.processes, self.fused_norm = tape, dtype, processes, fused_norm
        self.statistic = statistic_dtype(dtype)
        self.narrow_share = ITEMSIZE[dtype] / ITEMSIZE[self.statistic]
        """Bytes of an activation for one of a statistic."""

    def weight(self, elements: int, dtype: str) -> Array:
        """A stored tensor."""
        return self.tape.leaf(elements, dtype)

    # Element by element.

    def cast(self, x: Array, dtype: str) -> Array:
        """x.to(dtype)."""
        if x.dtype == dtype:
            return x
        old, ratio = x.dtype, ITEMSIZE[x.dtype] / ITEMSIZE[dtype]
        return self.tape.apply(
            [x], [(x.elements, dtype)], lambda t, g, s: [t.new(g[0].elements, old, 1 + 1 / ratio)], moves=1 + ratio
        )[0]

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        return self.tape.apply([x, y], [(x.elements, x.dtype)], lambda t, g, s: [g[0], g[0]], moves=3)[0]

    def multiply(self, x: Array, y: Array) -> Array:
        """x * y of one shape."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply(
            [x, y], [(n, dtype)], lambda t, g, s: [t.new(n, dtype, 3), t.new(n, dtype, 3)], [x, y], moves=3
        )[0]

    def silu(self, x: Array) -> Array:
        """silu(x)."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply(
            [x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype, 3, SILU_BACKWARD)], [x], moves=2, kernel=SILU
        )[0]

    def scale(self, x: Array, c: Array) -> Array:
        """(x * c).to(x.dtype) for c, one number a token."""
        n, dtype, wide, tokens, share = x.elements, x.dtype, c.dtype, c.elements, self.narrow_share

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            dx = t.new(n, wide, 2)
            dc = t.new(n, wide, 2 + share)
            t.does(REDUCE, (n,), wide, 1)
            dc = t.new(tokens, wide)
            if wide != dtype:
                dx = t.new(n, dtype, 1 + 1 / share)
            return [dx, dc]

        return self.cast(self.tape.apply([x, c], [(n, wide)], backward, [x, c], moves=1 + share)[0], dtype)

    def rows(self, weights: Array, elements: Sequence[int]) -> list[Array]:
        """weights.split(...): views; their gradients are put together."""

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            return [t.new(sum(elements), weights_dtype, 2)]

        weights_dtype = weights.dtype
        if len(elements) == 1:
            return [weights]
        return self.tape.apply([weights], [(n, weights_dtype) for n in elements], backward, view=True)

    def narrow(self, weight: Array, elements: int) -> Array:
        """A view of some rows; its gradient is that of all rows, zero elsewhere."""
        n, dtype = weight.elements, weight.dtype
        if elements == n:
            return weight

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            t.does(STREAM, (elements,), dtype, 2)
            return [t.new(n, dtype, 1)]

        return self.tape.apply([weight], [(elements, dtype)], backward, view=True)[0]

    def cat(self, parts: Sequence[Array], kernel: str = STREAM) -> Array:
        """torch.cat; gradients are views. `kernel`: `reorder` where the parts are views in another order."""
        sizes = [x.elements for x in parts]
        total = sum(sizes), parts[0].dtype
        return self.tape.apply(parts, [total], lambda t, g, s: [g[0].part(n) for n in sizes], moves=2, kernel=kernel)[0]

    def copied(self, x: Array, backward: bool = True) -> Array:
        """A contiguous copy of a view; `backward`: so is its gradient."""
        n, dtype, reorder = x.elements, x.dtype, self.reorder
        return self.tape.apply(
            [x],
            [(n, dtype)],
            lambda t, g, s: [t.new(n, dtype, 2, reorder) if backward else g[0]],
            moves=2,
            kernel=reorder,
        )[0]

    # GEMMs.

    def linear(self, x: Array, weight: Array, columns: int, rows: int, bias: Array | None = None) -> Array:
        """[rows, I] x [I, columns]."""
        inputs, dtype, size, width = x.elements, x.dtype, weight.elements, x.elements // rows
        biased = bias is not None  # the closure holds no array

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            t.does(GEMM, (1, rows, width, columns), dtype)
            t.does(GEMM, (1, columns, width, rows), dtype)
            dw = t.new(size, dtype)
            dx = t.new(inputs, dtype)
            if not biased:
                return [dx, dw]
            t.does(REDUCE, (rows * columns,), dtype, 1)
            return [dx, dw, t.new(columns, dtype)]

        product = (1, rows, columns, width)
        return self.tape.apply(
            [x, weight, *([] if bias is None else [bias])],
            [(rows * columns, dtype)],
            backward,
            [x, weight],
            kernel=GEMM,
            shape=product,
        )[0]

    # Norms.

    def rms_norm(self, x: Array, gamma: Array, tokens: int) -> Array:
        """parallel.norms._RMSNorm."""
        n, dtype, wide, width, kept = x.elements, x.dtype, self.statistic, gamma.elements, gamma.dtype
        share, fused, place = self.narrow_share, self.fused_norm, self.tape.place

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            if fused:
                return [t.new(n, dtype, 5), t.new(width, kept)]
            dy = t.new(n, wide, 1 + share) if dtype != wide else g[0]
            normed = t.new(n, wide, 1 + share)
            product = t.new(n, wide, 3)
            t.does(REDUCE, (n,), wide, 1, calls=2)
            dgamma = t.new(width, wide)
            del product
            inner = t.new(n, wide, 2)
            product = t.new(n, wide, 3)
            del product
            t.does(STREAM, (n,), wide, 3)  # in place: less what lies along the row
            t.does(STREAM, (n,), wide, 2)
            dx = t.new(n, dtype, 1 + 1 / share) if dtype != wide else inner
            del dy, normed
            return [dx, t.new(width, kept) if kept != wide else dgamma]

        self.tape.place = "norm"
        c = self.tape.new(tokens, wide)
        work = [(n, wide)] if dtype != wide else []
        if not fused:
            self.tape.does(REDUCE, (n,), dtype, 1)
            self.tape.does(STREAM, (n,), wide, 1 + share)
            self.tape.does(STREAM, (n,), wide, 2)
        # The last operation rounds, where there is something to round.
        rounds = 2.0 if fused else 1 + 1 / share if dtype != wide else 0.0
        y = self.tape.apply([x, gamma], [(n, dtype)], backward, [x, gamma, c], custom=True, work=work, moves=rounds)[0]
        self.tape.place = place
        return y

    def sum_of_squares(self, x: Array, tokens: int) -> Array:
        """parallel.norms._SumOfSquares."""
        n, dtype = x.elements, x.dtype
        self.tape.does(REDUCE, (n,), dtype, 1)
        return self.tape.apply(
            [x], [(tokens, self.statistic)], lambda t, g, s: [t.new(n, dtype, 2)], [x], custom=True
        )[0]  # fmt: skip

    def inverse_rms(self, s: Array) -> Array:
        """1 / sqrt(s / d + eps)."""
        n, dtype = s.elements, s.dtype
        work = [(n, dtype)]
        return self.tape.apply([s], [(n, dtype)], lambda t, g, _: [t.new(n, dtype)], keeps=True, work=work)[0]

    def scaled_weight(self, weight: Array, gamma: Array) -> Array:
        """(A * gamma).to(dtype)."""
        n, stored, width = weight.elements, weight.dtype, gamma.elements

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            da, product = t.new(n, stored, 2), t.new(n, stored, 3)
            t.does(REDUCE, (n,), stored, 1)
            del product
            return [da, t.new(width, stored)]

        scaled = self.tape.apply([weight, gamma], [(n, stored)], backward, [weight, gamma], moves=2)[0]
        return self.cast(scaled, self.dtype)

    def project(self, x: Array, weight: Array, gamma: Array, columns: int, tokens: int, measures: bool) -> list[Array]:
        """parallel.norms._ProjectAndMeasure."""
        inputs, dtype, size, stored, width = x.elements, x.dtype, weight.elements, weight.dtype, gamma.elements
        casts, ratio = stored != dtype, ITEMSIZE[stored] / ITEMSIZE[dtype]

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            scaled = t.new(size, stored, 2)
            if casts:
                scaled = t.new(size, dtype, 1 + ratio)
            t.does(GEMM, (1, tokens, width, columns), dtype)
            dx = t.new(inputs, dtype, 3 * measures)
            del scaled
            t.does(GEMM, (1, columns, width, tokens), dtype)
            d = t.new(size, dtype)
            if casts:
                d = t.new(size, stored, 1 + 1 / ratio)
            da, product = t.new(size, stored, 2), t.new(size, stored, 3)
            t.does(REDUCE, (size,), stored, 1)
            del product, d
            return [dx, da, t.new(width, stored)]

        working = self.tape.new(size, stored, 2)
        if casts:
            working = self.tape.new(size, dtype, 1 + ratio)
        if measures:
            self.tape.does(REDUCE, (inputs,), dtype, 1)
        results = [(tokens * columns, dtype)] + [(tokens, self.statistic)] * measures
        shape = (1, tokens, columns, width)
        found = self.tape.apply(
            [x, weight, gamma], results, backward, [x, weight, gamma], custom=True, kernel=GEMM, shape=shape
        )
        del working
        return found

    def sum_with_statistic(self, u: Array, s: Array, payload: int) -> list[Array]:
        """parallel.norms._SumWithStatistic; the results are views of what was sent, but for an fp32 statistic of bf16."""
        flat = self.tape.new(payload, self.dtype, 2)
        summed = self.tape.new(payload, self.dtype)
        del flat
        separate = self.dtype != self.statistic
        s_storage = self.tape.new(s.elements, s.dtype).storage if separate else summed.storage
        both = self.tape.apply([u, s], [(0, u.dtype), (0, s.dtype)], lambda t, g, _: list(g), custom=True)
        for found, like, storage in zip(both, (u, s), (summed.storage, s_storage), strict=True):
            found.storage, found.elements = storage, like.elements
        return both

    # Latents that cross.

    def layer_norm(self, x: Array, rows: int) -> Array:
        """torch's, without weight and bias; a mean and a deviation a row stay."""
        n, dtype = x.elements, x.dtype
        statistics = self.tape.new(2 * rows, dtype)
        results = [(n, dtype), (0, dtype)]
        return self.tape.apply([x], results, lambda t, g, s: [t.new(n, dtype, 3)], [x, statistics], moves=2)[0]

    def addcmul(self, bias: Array, x: Array, weight: Array) -> Array:
        """bias + x * weight for vectors of a row's width."""
        n, dtype, few = x.elements, x.dtype, weight.elements

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            dx, product = t.new(n, dtype, 2), t.new(n, dtype, 3)
            t.does(STREAM, (n,), dtype, 2)  # x times one
            t.does(REDUCE, (n,), dtype, 1, calls=2)
            del product
            return [t.new(few, dtype), dx, t.new(few, dtype)]

        return self.tape.apply([bias, x, weight], [(n, dtype)], backward, [x, weight], moves=2)[0]

    def moments(self, x: Array, sums: int) -> Array:
        """models.crossing._Moments."""
        n, dtype, wide, share = x.elements, x.dtype, self.statistic, self.narrow_share

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            work = [] if dtype == wide else [t.new(n, wide, 1 + share)]
            work += [t.new(n, wide, 2) for _ in range(3)]  # 2 x, times ds_2, and ds_1
            t.does(STREAM, (n,), wide, 2)  # side by side
            dx = t.new(n, dtype, 0 if dtype == wide else 1 + 1 / share)
            del work
            return [dx]

        if dtype != wide:
            self.tape.does(STREAM, (n,), wide, 1 + share)
        self.tape.does(STREAM, (n,), wide, 2)  # squares
        self.tape.does(REDUCE, (n,), wide, 1, calls=2)
        return self.tape.apply([x], [(sums, wide)], backward, [x], custom=True, work=[(n, wide)] * 2)[0]

    def settle(self, x: Array, moments: Array, weight: Array, bias: Array) -> Array:
        """models.crossing._Settle."""
        n, dtype, wide, share = x.elements, x.dtype, self.statistic, self.narrow_share
        size, few, stored = moments.elements, weight.elements, weight.dtype

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            work = [] if dtype == wide else [t.new(n, wide, 1 + share) for _ in range(2)]
            # w dy, v - m, the latter times w dy, parts of dv and of (v - m) c, and one of both side by side.
            work += [t.new(n, wide, 3 if i == 2 else 2) for i in range(6)]
            t.does(STREAM, (n,), wide, 2)  # the other
            t.does(STREAM, (n,), wide, 3)  # times dy, for dw
            t.does(REDUCE, (n,), wide, 1, calls=4)
            del work[-1]
            dx = t.new(n, dtype, 0 if dtype == wide else 1 + 1 / share)
            del work
            return [dx, t.new(size, wide), t.new(few, stored), t.new(few, stored)]

        if dtype != wide:
            self.tape.does(STREAM, (n,), wide, 1 + share)
            self.tape.does(STREAM, (n,), dtype, 1 + 1 / share)
        self.tape.does(STREAM, (n,), wide, 2, calls=4)  # v - m, times c, side by side, times w plus b
        inputs, work = [x, moments, weight, bias], [(n, wide)] * (3 if dtype == wide else 4)
        return self.tape.apply(inputs, [(n, dtype)], backward, inputs[:3], custom=True, work=work)[0]

    # Attention.

    def rotate(self, x: Array) -> Array:
        """models.attention.rotate."""
        n, dtype = x.elements, x.dtype

        def halves(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            return [t.new(n, dtype, 2)]

        first, second = self.tape.apply([x], [(n // 2, dtype)] * 2, halves, view=True)
        straight = self.times(x)
        negative = self.tape.apply([second], [(n // 2, dtype)], lambda t, g, s: [t.new(n // 2, dtype, 2)], moves=2)[0]
        turned = self.cat((negative, first))
        del negative
        turned = self.times(turned)
        return self.add(straight, turned)

    def times(self, x: Array) -> Array:
        """x times something small that has no gradient and is there anyway."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply(
            [x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype, 2)], [Array(None, n, dtype)], moves=2
        )[0]  # fmt: skip

    def attention(self, q: Array, k: Array, v: Array, shape: tuple[int, ...], selected: bool) -> Array:
        """The fused kernel, which saves the logsumexp of rows of scores. `shape` as of `Work`, `selected` as of `Tape.apply`."""
        sizes, dtype, n, wide = [x.elements for x in (q, k, v)], q.dtype, q.elements, self.statistic

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            t.does(ATTENTION_BACKWARD, shape, dtype)
            return [t.new(size, dtype) for size in sizes]

        results = [(n, dtype), (n // shape[-1], wide)]
        return self.tape.apply(
            [q, k, v], results, backward, [q, k, v], keeps=True, selected=selected, kernel=ATTENTION, shape=shape
        )[0]  # fmt: skip

    # Collectives.

    def sum_forward(self, x: Array) -> Array:
        """All-reduce forward, nothing backward."""
        return self.tape.apply([x], [(x.elements, x.dtype)], lambda t, g, s: [g[0]])[0]

    def sum_backward(self, x: Array) -> Array:
        """Nothing forward, all-reduce backward."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype)], view=True)[0]

    def sum_both(self, x: Array) -> Array:
        """All-reduce in both."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype)])[0]

    def gather(self, x: Array) -> Array:
        """All-gather forward, reduce-scatter backward."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n * self.processes, dtype)], lambda t, g, s: [t.new(n, dtype)])[0]

    def scatter_sum(self, x: Array) -> Array:
        """Reduce-scatter forward, all-gather backward."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n // self.processes, dtype)], lambda t, g, s: [t.new(n, dtype)])[0]

    def rows_to_features(self, x: Array) -> Array:
        """Shards from one below the other to side by side: a copy; its gradient is copied before it is sent."""
        return self.copied(x)
