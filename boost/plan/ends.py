"""Loss and embedding of one process in sizes: `boost.parallel.loss`, `boost.parallel.lookup` and their layouts, on `Array`s.

A number that follows a size: as in `boost.plan.operations`.
"""

from collections.abc import Sequence
from typing import Any

from boost.config.cuts import TOKEN_SHARDED
from boost.config.traffic import chunk_tokens
from boost.plan.passes import Passes
from boost.plan.tape import Array, Tape
from boost.plan.work import GEMM, LOOKUP, LOSS, STREAM


class EndPasses(Passes):
    """Loss and embedding."""

    def arriving(self) -> Array:
        """What the last block hands on."""
        return self.tape.entered(self.tape.new(self.residual, self.dtype))

    def loss(self, x: Array) -> Array:
        """layout.loss."""
        self.tape.place = "loss"
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
        dx, dw = t.new(n, dtype), t.new(size, wide, 1)
        chunk = min(chunk_tokens(rows), self.tokens)
        logits = t.new(chunk * rows, dtype)
        small = [t.new(chunk, "float64"), t.new(chunk, wide), t.new(chunk, wide)]
        if dtype != wide:
            logits = t.new(chunk * rows, wide)
            d = t.new(chunk * rows, dtype)
            addend = t.new(size, dtype)
            del addend, d
        del small, logits
        self._chunks(size)
        final = t.new(size, dtype, 1 + 1 / self.do.narrow_share) if dtype != wide else dw
        del dw

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Any:
            return [t.new(n, dtype, 2), t.new(size, dtype, 2)]

        return t.apply([x, weight], [(1, wide)], backward, [dx, final], custom=True)[0]

    def _chunks(self, size: int) -> None:
        """What is done chunk by chunk, with a head of `size` elements."""
        does, dtype, wide, dim = self.tape.does, self.dtype, self.do.statistic, self.model.dim
        vocabulary, ratio = size // dim, 1 / self.do.narrow_share
        step = chunk_tokens(vocabulary)
        whole, rest = divmod(self.tokens, step)
        for rows, times in ((step, whole), (rest, 1)):
            if not (rows and times):
                continue
            logits = (rows * vocabulary,)
            for m, n, k in ((rows, vocabulary, dim), (rows, dim, vocabulary), (vocabulary, dim, rows)):
                does(GEMM, (1, m, n, k), dtype, calls=times)
            does(LOSS, logits, wide, 1, times)  # logsumexp
            does(LOSS, logits, wide, 2, times)  # exp
            does(STREAM, logits, wide, 2, 2 * times)  # less logsumexp; of targets that count
            if dtype != wide:
                does(STREAM, logits, dtype, 1 + ratio, 2 * times)
                does(STREAM, (size,), dtype, 1 + 2 * ratio, times)  # added up

    def embed(self) -> Array:
        """layout.embed."""
        self.tape.place = "embed"
        do, model, t = self.do, self.model, self.tape
        stored = self.dtype if self.gathered else self.stored
        n, size = self.tokens * model.dim // self.p, model.vocab_size * model.dim // self.p
        table = do.weight(size, stored)
        narrow = stored == "bfloat16"
        wide = "float32" if narrow else stored

        def backward(t: Tape, g: list[Any], _: Sequence[Any]) -> Any:
            dy = t.new(n, wide, 1.5) if narrow else g[0]
            summed = t.new(size, wide, 1)  # cleared
            t.does(LOOKUP, (n,), wide, 3)
            table_gradient = t.new(size, stored, 3) if narrow else summed
            del dy
            return [table_gradient]

        rows = do.cast(t.apply([table], [(n, stored)], backward, moves=2, kernel=LOOKUP)[0], self.dtype)
        if self.layout in ("single", "btp"):
            return rows
        dtype, sharded = self.dtype, self.layout in TOKEN_SHARDED
        if sharded:
            moved = t.apply([rows], [(n, dtype)], lambda t, g, s: [t.new(n, dtype)])[0]
        else:
            moved = t.apply([rows], [(n * self.p, dtype)], lambda t, g, s: [g[0].part(n)])[0]
        return do.rows_to_features(moved)
