"""What each operation of the model makes, saves and moves: torch's functions on `Sized` tensors, forward and backward.

A rule makes its results by `make` and puts them into the graph by `record`; its backward pass is written with the same
operations. `moves` are numbers read and written for each number made, operands that are broadcast left out.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from boost.plan.sized import NoRuleError, Shape, Sized, contiguous, make, record, rule
from boost.plan.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GEMM,
    LOOKUP,
    LOSS,
    REDUCE,
    REORDER,
    REORDER_FINELY,
    SHORT_RUN,
    SILU,
    SILU_BACKWARD,
    STREAM,
)

# Element by element.


def _broadcast(operands: Sequence[Sized]) -> Shape:
    if len(operands) == 1 or all(x.shape == operands[0].shape for x in operands):
        return operands[0].shape
    return _broadcast_shapes(*(x.shape for x in operands))


@functools.lru_cache(maxsize=8192)
def _broadcast_shapes(*shapes: Shape) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


def _promoted(operands: Sequence[Sized]) -> torch.dtype:
    dtype = operands[0].dtype
    for x in operands[1:]:
        if x.dtype != dtype and x.shape:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _strides(operands: Sequence[Sized], shape: Shape) -> Shape:
    """Those of the first operand of the result's shape, if it has no gaps."""
    for x in operands:
        if x.shape == shape:
            return contiguous(shape) if x.is_contiguous() else _dense(shape, x.strides)
    return contiguous(shape)


@functools.lru_cache(maxsize=8192)
def _dense(shape: Shape, strides: Shape) -> Shape:
    """Strides without gaps, in the order of these."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    dense = contiguous(tuple(shape[dim] for dim in order))
    return tuple(dense[order.index(dim)] for dim in range(len(shape)))


def _moved(operands: Sequence[Sized], numel: int, dtype: torch.dtype, written: int = 1) -> float:
    return written + sum(x.dtype.itemsize for x in operands if x.numel_ == numel) / dtype.itemsize


def _made(operation: str, operands: Sequence[Sized], kernel: str = STREAM) -> Sized:
    shape, dtype = _broadcast(operands), _promoted(operands)
    moves = _moved(operands, math.prod(shape), dtype)
    strides = _strides(operands, shape)
    return make(operands[0], shape, operation, moves, dtype=dtype, inputs=operands, kernel=kernel, strides=strides)


@rule("elementwise")
def elementwise(operation: str, *operands: Any) -> Sized:
    """Of one or more tensors, in hand-written passes only."""
    _require_no_graph(operation, operands)
    return _made(operation, [x for x in operands if isinstance(x, Sized)])


def _require_no_graph(operation: str, operands: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, Sized) and x.node is not None for x in operands):
        raise NoRuleError(f"no rule of what '{operation}' saves for its backward pass; add one to boost.plan.rules")


@rule("compare")
def compare(x: Sized) -> Sized:
    """A mask."""
    return make(x, x.shape, "compare", dtype=torch.bool)


@rule("in_place")
def in_place(x: Sized, *operands: Any) -> Sized:
    """x changed."""
    _require_no_graph("in-place operation", (x, *operands))
    if not x.is_small:
        read = [x, *(each for each in operands if isinstance(each, Sized))]
        x.tape.does(STREAM, (x.numel_,), x.dtype, _moved(read, x.numel_, x.dtype))
    return x


@rule("exp_")
def exp_(x: Sized) -> Sized:
    """x changed, at the speed of a softmax."""
    x.tape.does(LOSS, (x.numel_,), x.dtype, 2)
    return x


def _summed_to(gradient: Sized, like: Sized) -> Sized:
    """The gradient of an operand that was broadcast."""
    if gradient.shape == like.shape:
        return gradient
    if not gradient.is_small:
        gradient.tape.does(REDUCE, (gradient.numel_,), gradient.dtype, 1)
    return make(gradient, like.shape, "sum")


@rule("add", torch.add, torch.Tensor.add)
def add(x: Sized, y: Any) -> Sized:
    """x + y."""
    if not isinstance(y, Sized):
        return record(lambda: _made("add", [x]), [x], lambda g, s: [g[0]])
    a, b = x.elsewhere(), y.elsewhere()
    return record(
        lambda: _made("add", [x, y]),
        [x, y],
        lambda g, s: [_summed_to(g[0], a).to(a.dtype), _summed_to(g[0], b).to(b.dtype)],
    )


@rule("mul", torch.mul)
def mul(x: Sized, y: Any) -> Sized:
    """x * y, which saves each operand that the other's gradient asks for."""
    if not isinstance(y, Sized):
        return record(lambda: _made("mul", [x]), [x], lambda g, s: [_made("mul", [g[0]])])
    for_x, for_y = x.node is not None, y.node is not None
    a, b = x.elsewhere(), y.elsewhere()

    def backward(g: Sequence[Any], saved: Sequence[Sized]) -> Sequence[Any]:
        rest = list(saved)
        first = rest.pop(0) if for_y else None
        second = rest.pop(0) if for_x else None
        dx = _summed_to(mul(g[0], second), a).to(a.dtype) if second is not None else None
        dy = _summed_to(mul(g[0], first), b).to(b.dtype) if first is not None else None
        return [dx, dy]

    return record(lambda: _made("mul", [x, y]), [x, y], backward, [*([x] if for_y else []), *([y] if for_x else [])])


@rule("div")
def div(x: Sized, y: Any) -> Sized:
    """x / y; in the graph by a number only."""
    if isinstance(y, Sized):
        return elementwise("div", x, y)
    return record(lambda: _made("div", [x]), [x], lambda g, s: [_made("div", [g[0]])])


@rule("neg", torch.neg)
def neg(x: Sized) -> Sized:
    """-x."""
    return record(lambda: _made("neg", [x]), [x], lambda g, s: [_made("neg", [g[0]])])


@rule(torch.rsqrt)
def rsqrt(x: Sized) -> Sized:
    """x^(-1/2), which saves its result."""
    return record(
        lambda: _made("rsqrt", [x]), [x], lambda g, s: [_made("mul", [g[0], s[0]])], keeps=lambda made: [made]
    )


@rule(F.silu)
def silu(x: Sized, inplace: bool = False) -> Sized:
    """x sigmoid(x), which saves x."""
    return record(
        lambda: _made("silu", [x], SILU), [x], lambda g, s: [_made("silu_backward", [g[0], s[0]], SILU_BACKWARD)], [x]
    )


@rule(torch.addcmul)
def addcmul(bias: Sized, x: Sized, weight: Sized) -> Sized:
    """bias + x * weight, the bias and the weight one a column."""
    few, like = bias.elsewhere(), weight.elsewhere()

    def backward(g: Sequence[Any], s: Sequence[Sized]) -> Sequence[Any]:
        dbias = _summed_to(g[0], few)
        dx = mul(g[0], s[1])
        ones = _made("mul", [g[0]])  # times the value, which is one
        dweight = _summed_to(mul(ones, s[0]), like)
        return [dbias, dx, dweight]

    return record(lambda: _made("addcmul", [bias, x, weight]), [bias, x, weight], backward, [x, weight])


# Sums.


@rule("reduce")
def reduce(x: Sized, dim: int | None = None, kernel: str = REDUCE, dtype: torch.dtype | None = None) -> Sized:
    """A sum over one dimension, or over all."""
    _require_no_graph("sum", (x,))
    if not x.is_small:
        x.tape.does(kernel, (x.numel_,), x.dtype, 1)
    shape = () if dim is None else (*x.shape[: dim % x.ndim], *x.shape[dim % x.ndim + 1 :])
    return make(x, shape, "sum", dtype=dtype)


@rule("logsumexp")
def logsumexp(x: Sized, dim: int) -> Sized:
    """Over one dimension, at the speed of a softmax."""
    return reduce(x, dim, LOSS)


@rule(torch.linalg.vector_norm)
def vector_norm(x: Sized, *, dim: int, dtype: torch.dtype) -> Sized:
    """Over one dimension."""
    return reduce(x, dim, dtype=dtype)


@rule(torch.linalg.vecdot)
def vecdot(x: Sized, y: Sized) -> Sized:
    """Row by row: a product and its sum."""
    return reduce(mul(x, y), -1)


# Parts put together.


@rule(torch.cat)
def cat(parts: Sequence[Sized], dim: int = 0) -> Sized:
    """Gradients are views."""
    dim %= parts[0].ndim
    sizes = [x.shape[dim] for x in parts]
    shape = (*parts[0].shape[:dim], sum(sizes), *parts[0].shape[dim + 1 :])
    run = min(x.run for x in parts)
    turned = any(list(x.strides) != sorted(x.strides, reverse=True) for x in parts)
    kernel = (REORDER if run >= SHORT_RUN else REORDER_FINELY) if turned else STREAM

    def made() -> Sized:
        return make(parts[0], shape, "cat", 2.0, inputs=parts, kernel=kernel, dtype=_promoted(parts))

    def backward(g: Sequence[Any], _: Sequence[Sized]) -> Sequence[Any]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [g[0].narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]

    return record(made, list(parts), backward)


@rule(torch.stack)
def stack(parts: Sequence[Sized], dim: int = 0) -> Sized:
    """In hand-written passes only."""
    _require_no_graph("stack", parts)
    dim %= parts[0].ndim + 1
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])
    return make(parts[0], shape, "cat", 2.0 * (not parts[0].is_small), inputs=parts)


@rule("repeat_interleave")
def repeat_interleave(x: Sized, times: int, dim: int) -> Sized:
    """Each slice several times; their gradients are summed."""
    shape = (*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :])
    like = x.elsewhere()
    return record(
        lambda: make(x, shape, "repeat_interleave", 2.0), [x], lambda g, s: [make(like, like.shape, "sum", 1.0 + times)]
    )


@rule(torch.empty_like)
def empty_like(x: Sized, **_: Any) -> Sized:
    """Nothing is moved."""
    return make(x, x.shape, "empty")


@rule(torch.zeros_like)
def zeros_like(x: Sized, dtype: torch.dtype | None = None) -> Sized:
    """Written once."""
    return make(x, x.shape, "zeros", 1.0, dtype=dtype)


# GEMMs.


def _product(a: Sized, b: Sized, shape: Shape, operation: str, inputs: Sequence[Sized]) -> Sized:
    """[m, k] x [k, n], folded."""
    m, k, n = math.prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
    a.tape.does(GEMM, (1, m, n, k), a.dtype)
    return make(a, shape, operation, inputs=inputs)


@rule(F.linear)
def linear(x: Sized, weight: Sized, bias: Sized | None = None) -> Sized:
    """x W^T (+ b), which saves x and W; more than two dimensions are folded first, by a copy where they lie apart."""
    if x.ndim > 2:
        folded = x.reshape(-1, x.shape[-1])
        return linear(folded, weight, bias).view(*x.shape[:-1], weight.shape[0])

    def made() -> Sized:
        return _product(x, weight.bare().t(), (*x.shape[:-1], weight.shape[0]), "linear", [x, weight])

    few = None if bias is None else bias.elsewhere()
    for_x = x.node is not None

    def backward(g: Sequence[Any], s: Sequence[Sized]) -> Sequence[Any]:
        dw = _product(g[0].t(), s[0], s[1].shape, "mm", [g[0], s[0]])
        dx = _product(g[0], s[1], s[0].shape, "mm", [g[0], s[1]]) if for_x else None
        return [dx, dw] if few is None else [dx, dw, _summed_to(g[0], few)]

    return record(made, [x, weight, *([] if bias is None else [bias])], backward, [x, weight])


@rule("mm", torch.mm)
def mm(a: Sized, b: Sized, out: Sized | None = None) -> Sized:
    """[m, k] x [k, n]."""
    if out is not None:
        _require_no_graph("mm", (a, b))
        a.tape.does(GEMM, (1, a.shape[0], b.shape[1], a.shape[1]), a.dtype)
        return out

    def made() -> Sized:
        return _product(a, b, (a.shape[0], b.shape[1]), "mm", [a, b])

    def backward(g: Sequence[Any], s: Sequence[Sized]) -> Sequence[Any]:
        db = mm(s[0].t(), g[0])
        return [mm(g[0], s[1].t()), db]

    return record(made, [a, b], backward, [a, b])


@rule("addmm_")
def addmm_(x: Sized, a: Sized, b: Sized) -> Sized:
    """x + a b, in place."""
    a.tape.does(GEMM, (1, a.shape[0], b.shape[1], a.shape[1]), a.dtype)
    return x


@rule("matmul", torch.matmul)
def matmul(a: Sized, b: Sized) -> Sized:
    """Of matrices, or of a matrix and a stack of them, which torch folds into one product of the transposed stack."""
    if a.ndim == b.ndim == 2:
        return mm(a, b)
    if not (a.ndim == 2 and b.ndim == 3):
        raise NoRuleError(f"no rule of a product of {a.ndim} and {b.ndim} dimensions; add one to boost.plan.rules")
    turned = b.transpose(1, 2)
    folded = turned.reshape(-1, turned.shape[-1])
    return mm(folded, a.t()).view(*turned.shape[:-1], a.shape[0]).transpose(1, 2).contiguous()


# Norms, attention, embedding.


@rule(F.layer_norm)
def layer_norm(x: Sized, shape: Any, weight: Any = None, bias: Any = None, eps: float = 0.0) -> Sized:
    """Without weight and bias; saves x, and a mean and a deviation a row."""
    assert weight is None and bias is None
    return record(
        lambda: make(x, x.shape, "layer_norm", 2.0),
        [x],
        lambda g, s: [make(g[0], g[0].shape, "layer_norm_backward", 3.0)],
        [x],
        keeps=lambda made: [make(x, x.shape[:-1], "statistics") for _ in range(2)],
    )


@rule(F.rms_norm)
def rms_norm(x: Sized, shape: Any, weight: Sized, eps: float) -> Sized:
    """torch's fused kernel; saves x and an inverse deviation a row."""
    acc_dtype, few = torch.promote_types(x.dtype, torch.float32), weight.elsewhere()
    place, x.tape.place = x.tape.place, "norm"
    made = record(
        lambda: make(x, x.shape, "rms_norm", 2.0),
        [x, weight],
        lambda g, s: [make(g[0], g[0].shape, "rms_norm", 5.0), make(few, few.shape, "sum")],
        [x, weight],
        keeps=lambda made: [make(x, x.shape[:-1], "statistics", dtype=acc_dtype)],
    )
    x.tape.place = place
    return made


@rule(F.scaled_dot_product_attention)
def attention(
    q: Sized, k: Sized, v: Sized, attn_mask: Any = None, is_causal: bool = False, enable_gqa: bool = False
) -> Sized:
    """The fused kernel, which saves the logsumexp of rows of scores. Its results lie by tokens, not by heads."""
    batch, heads, length, width = q.shape
    shape = batch, heads, k.shape[1], length, width
    tape, acc_dtype = q.tape, torch.promote_types(q.dtype, torch.float32)

    def kernel() -> tuple[Any, Any]:
        tape.does(ATTENTION, shape, q.dtype)
        made = make(q, q.shape, "attention", inputs=[q, k, v], strides=_by_tokens(q.shape))
        return made, make(q, (batch, heads, length), "attention", dtype=acc_dtype)

    both: list[Sized] = []

    def made() -> Sized:
        both[:] = (x.bare() for x in tape.selected(kernel))
        return both[0]

    def backward(g: Sequence[Any], s: Sequence[Sized]) -> Sequence[Any]:
        tape.does(ATTENTION_BACKWARD, shape, g[0].dtype)
        return [make(each, each.shape, "attention_backward", strides=_by_tokens(each.shape)) for each in s[:3]]

    return record(made, [q, k, v], backward, [q, k, v], keeps=lambda _: both)


def _by_tokens(shape: Shape) -> Shape:
    _, heads, length, width = shape
    return heads * length * width, width, heads * width, 1


@rule(F.embedding)
def embedding(tokens: Any, table: Sized, *_: Any, **__: Any) -> Sized:
    """Rows of a table."""
    rows, shape = table.shape[0], (*tokens.shape, table.shape[1])
    return record(
        lambda: make(table, shape, "embedding", 2.0, kernel=LOOKUP, inputs=[table]),
        [None, table],
        lambda g, s: [None, embedding_backward(g[0], tokens, rows, -1, False)],
    )


@rule(torch.ops.aten.embedding_dense_backward)
def embedding_backward(dy: Sized, tokens: Any, rows: int, padding: int, scaled: bool) -> Sized:
    """Cleared, then added up."""
    table = make(dy, (rows, dy.shape[1]), "embedding_backward", 1.0)
    dy.tape.does(LOOKUP, (dy.numel_,), dy.dtype, 3)
    return table


def zeros(tape_device: tuple[Any, torch.device], *shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Sized:
    """torch.zeros, for a tape."""
    tape, device = tape_device
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    like = Sized(tape, None, shape, contiguous(shape), dtype or torch.get_default_dtype(), device)
    return make(like, shape, "zeros", 1.0)
