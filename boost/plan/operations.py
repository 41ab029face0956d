"""The operations of a decoder in sizes: what each makes, saves and works with, forward and backward, as the dispatcher shows.

Each function stands for the torch function or the `autograd.Function` of its name in `boost.models` and `boost.parallel`.
Legend: T tokens, p TP processes; n elements.
"""

from collections.abc import Sequence
from typing import Any

from boost.config.traffic import statistic_dtype
from boost.plan.tape import Array, Gradients, Tape


class Operations:
    """On one tape, in one dtype of activations, over TP processes."""

    def __init__(self, tape: Tape, dtype: str, processes: int) -> None:
        self.tape, self.dtype, self.processes = tape, dtype, processes
        self.statistic = statistic_dtype(dtype)

    def weight(self, elements: int, dtype: str) -> Array:
        """A stored tensor."""
        return self.tape.leaf(elements, dtype)

    # Element by element.

    def cast(self, x: Array, dtype: str) -> Array:
        """x.to(dtype)."""
        if x.dtype == dtype:
            return x
        old = x.dtype
        return self.tape.apply([x], [(x.elements, dtype)], lambda t, g, s: [t.new(g[0].elements, old)])[0]

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        return self.tape.apply([x, y], [(x.elements, x.dtype)], lambda t, g, s: [g[0], g[0]])[0]

    def multiply(self, x: Array, y: Array) -> Array:
        """x * y of one shape."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x, y], [(n, dtype)], lambda t, g, s: [t.new(n, dtype), t.new(n, dtype)], [x, y])[0]

    def silu(self, x: Array) -> Array:
        """silu(x)."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype)], [x])[0]

    def scale(self, x: Array, c: Array) -> Array:
        """(x * c).to(x.dtype) for c, one number a token."""
        n, dtype, wide, tokens = x.elements, x.dtype, c.dtype, c.elements

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            dx = t.new(n, wide)
            dc = t.new(n, wide)
            dc = t.new(tokens, wide)
            if wide != dtype:
                dx = t.new(n, dtype)
            return [dx, dc]

        return self.cast(self.tape.apply([x, c], [(n, wide)], backward, [x, c])[0], dtype)

    def rows(self, weights: Array, elements: Sequence[int]) -> list[Array]:
        """weights.split(...): views; their gradients are put together."""

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            return [t.new(sum(elements), weights_dtype)]

        weights_dtype = weights.dtype
        if len(elements) == 1:
            return [weights]
        return self.tape.apply([weights], [(n, weights_dtype) for n in elements], backward, view=True)

    def narrow(self, weight: Array, elements: int) -> Array:
        """A view of some rows; its gradient is that of all rows, zero elsewhere."""
        n, dtype = weight.elements, weight.dtype
        if elements == n:
            return weight
        return self.tape.apply([weight], [(elements, dtype)], lambda t, g, s: [t.new(n, dtype)], view=True)[0]

    def cat(self, parts: Sequence[Array]) -> Array:
        """torch.cat; gradients are views."""
        sizes = [x.elements for x in parts]
        total = sum(sizes), parts[0].dtype
        return self.tape.apply(parts, [total], lambda t, g, s: [g[0].part(n) for n in sizes])[0]

    def copied(self, x: Array, backward: bool = True) -> Array:
        """A contiguous copy of a view; `backward`: so is its gradient."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype) if backward else g[0]])[0]

    # GEMMs.

    def linear(self, x: Array, weight: Array, columns: int, rows: int) -> Array:
        """[rows, I] x [I, columns]."""
        inputs, dtype, size = x.elements, x.dtype, weight.elements

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            dw = t.new(size, dtype)
            return [t.new(inputs, dtype), dw]

        return self.tape.apply([x, weight], [(rows * columns, dtype)], backward, [x, weight])[0]

    # Norms.

    def rms_norm(self, x: Array, gamma: Array, tokens: int) -> Array:
        """parallel.norms._RMSNorm."""
        n, dtype, wide, width, kept = x.elements, x.dtype, self.statistic, gamma.elements, gamma.dtype

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            dy = t.new(n, wide) if dtype != wide else g[0]
            normed = t.new(n, wide)
            product = t.new(n, wide)
            dgamma = t.new(width, wide)
            del product
            inner = t.new(n, wide)
            product = t.new(n, wide)
            del product
            dx = t.new(n, dtype) if dtype != wide else inner
            del dy, normed
            return [dx, t.new(width, kept) if kept != wide else dgamma]

        c = self.tape.new(tokens, wide)
        work = [(n, wide)] if dtype != wide else []
        return self.tape.apply([x, gamma], [(n, dtype)], backward, [x, gamma, c], custom=True, work=work)[0]

    def sum_of_squares(self, x: Array, tokens: int) -> Array:
        """parallel.norms._SumOfSquares."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply(
            [x], [(tokens, self.statistic)], lambda t, g, s: [t.new(n, dtype)], [x], custom=True
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
            da, product = t.new(n, stored), t.new(n, stored)
            del product
            return [da, t.new(width, stored)]

        return self.cast(self.tape.apply([weight, gamma], [(n, stored)], backward, [weight, gamma])[0], self.dtype)

    def project(self, x: Array, weight: Array, gamma: Array, columns: int, tokens: int, measures: bool) -> list[Array]:
        """parallel.norms._ProjectAndMeasure."""
        inputs, dtype, size, stored, width = x.elements, x.dtype, weight.elements, weight.dtype, gamma.elements
        casts = stored != dtype

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            scaled = t.new(size, stored)
            if casts:
                scaled = t.new(size, dtype)
            dx = t.new(inputs, dtype)
            del scaled
            d = t.new(size, dtype)
            if casts:
                d = t.new(size, stored)
            da, product = t.new(size, stored), t.new(size, stored)
            del product, d
            return [dx, da, t.new(width, stored)]

        working = self.tape.new(size, stored)
        if casts:
            working = self.tape.new(size, dtype)
        results = [(tokens * columns, dtype)] + [(tokens, self.statistic)] * measures
        found = self.tape.apply([x, weight, gamma], results, backward, [x, weight, gamma], custom=True)
        del working
        return found

    def sum_with_statistic(self, u: Array, s: Array, payload: int) -> list[Array]:
        """parallel.norms._SumWithStatistic; the results are views of what was sent, but for an fp32 statistic of bf16."""
        flat = self.tape.new(payload, self.dtype)
        summed = self.tape.new(payload, self.dtype)
        del flat
        separate = self.dtype != self.statistic
        s_storage = self.tape.new(s.elements, s.dtype).storage if separate else summed.storage
        both = self.tape.apply([u, s], [(0, u.dtype), (0, s.dtype)], lambda t, g, _: list(g), custom=True)
        for found, like, storage in zip(both, (u, s), (summed.storage, s_storage), strict=True):
            found.storage, found.elements = storage, like.elements
        return both

    # Attention.

    def rotate(self, x: Array) -> Array:
        """models.attention.rotate."""
        n, dtype = x.elements, x.dtype

        def halves(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            return [t.new(n, dtype)]

        first, second = self.tape.apply([x], [(n // 2, dtype)] * 2, halves, view=True)
        straight = self.silu_like(x)
        negative = self.tape.apply([second], [(n // 2, dtype)], lambda t, g, s: [t.new(n // 2, dtype)])[0]
        turned = self.cat((negative, first))
        del negative
        turned = self.silu_like(turned)
        return self.add(straight, turned)

    def silu_like(self, x: Array) -> Array:
        """x times something that has no gradient and is there anyway."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n, dtype)], lambda t, g, s: [t.new(n, dtype)], [Array(None, n, dtype)])[0]

    def attention(self, q: Array, k: Array, v: Array, rows: int, selected: bool) -> Array:
        """The fused kernel; `rows`: rows of scores, of which it saves the logsumexp. `selected`: as of `Tape.apply`."""
        sizes, dtype, n, wide = [x.elements for x in (q, k, v)], q.dtype, q.elements, self.statistic

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Gradients:
            return [t.new(size, dtype) for size in sizes]

        results = [(n, dtype), (rows, wide)]
        return self.tape.apply([q, k, v], results, backward, [q, k, v], keeps=True, selected=selected)[0]

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

    def gather(self, x: Array, strided: bool = False) -> Array:
        """All-gather forward, reduce-scatter backward; `strided`: x is a view that must be copied to be sent."""
        n, dtype = x.elements, x.dtype
        work = [(n, dtype)] * strided
        return self.tape.apply([x], [(n * self.processes, dtype)], lambda t, g, s: [t.new(n, dtype)], work=work)[0]

    def scatter_sum(self, x: Array) -> Array:
        """Reduce-scatter forward, all-gather backward."""
        n, dtype = x.elements, x.dtype
        return self.tape.apply([x], [(n // self.processes, dtype)], lambda t, g, s: [t.new(n, dtype)])[0]

    def rows_to_features(self, x: Array) -> Array:
        """Shards from one below the other to side by side: a copy; its gradient is copied before it is sent."""
        return self.copied(x)
