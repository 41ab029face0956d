"""Loss and embedding of one process in sizes: `boost.parallel.loss`, `boost.parallel.lookup` and their layouts, on `Array`s."""

from collections.abc import Sequence
from typing import Any

from boost.config.cuts import TOKEN_SHARDED
from boost.config.traffic import chunk_tokens
from boost.plan.passes import Passes
from boost.plan.tape import Array, Tape


class EndPasses(Passes):
    """Loss and embedding."""

    def loss(self, x: Array) -> Array:
        """layout.loss."""
        do, model = self.do, self.model
        head = do.weight(model.vocab_size // self.p * model.dim, self.dtype if self.gathered else self.stored)
        gamma = do.weight(model.dim, self.stored)
        if self.layout == "btp":
            x = do.rows_to_features(do.gather(x))
            normed = do.rms_norm(x, gamma, self.tokens)
        else:
            normed = do.rms_norm(x, gamma, self.own_tokens)
            if self.layout in TOKEN_SHARDED:
                normed = do.gather(normed)
            elif self.layout != "single":
                normed = do.sum_backward(normed)
        return self._cross_entropy(normed, do.cast(head, self.dtype))

    def _cross_entropy(self, x: Array, weight: Array) -> Array:
        t, dtype, wide = self.tape, self.dtype, self.do.statistic
        n, size, rows = x.elements, weight.elements, self.model.vocab_size // self.p
        dx, dw = t.new(n, dtype), t.new(size, wide)
        chunk = min(chunk_tokens(rows), self.tokens)
        logits = t.new(chunk * rows, dtype)
        small = [t.new(chunk, "float64"), t.new(chunk, wide), t.new(chunk, wide)]
        if dtype != wide:
            logits = t.new(chunk * rows, wide)
            d = t.new(chunk * rows, dtype)
            addend = t.new(size, dtype)
            del addend, d
        del small, logits
        final = t.new(size, dtype) if dtype != wide else dw
        del dw

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Any:
            return [t.new(n, dtype), t.new(size, dtype)]

        return t.apply([x, weight], [(1, wide)], backward, [dx, final], custom=True)[0]

    def embed(self) -> Array:
        """layout.embed."""
        do, model, t = self.do, self.model, self.tape
        stored = self.dtype if self.gathered else self.stored
        n, size = self.tokens * model.dim // self.p, model.vocab_size * model.dim // self.p
        table = do.weight(size, stored)
        narrow = stored != self.do.statistic and stored == "bfloat16"

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Any:
            if not narrow:
                return [t.new(size, stored)]
            working = [t.new(n, "float32"), t.new(size, "float32")]
            table_gradient = t.new(size, stored)
            del working
            return [table_gradient]

        rows = do.cast(t.apply([table], [(n, stored)], backward)[0], self.dtype)
        if self.layout in ("single", "btp"):
            return rows
        dtype, sharded = self.dtype, self.layout in TOKEN_SHARDED
        if sharded:
            moved = t.apply([rows], [(n, dtype)], lambda t, g, s: [t.new(n, dtype)])[0]
        else:
            moved = t.apply([rows], [(n * self.p, dtype)], lambda t, g, s: [g[0].part(n)])[0]
        return do.rows_to_features(moved)
