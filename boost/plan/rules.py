"""Shape-tensor rules for torch functions: the output, saved tensors and bytes moved, in the forward and the backward pass.

A rule allocates its output with `make` and adds it to the graph with `record`; its backward function calls rules too. `moves`
counts elements read and written per output element, excluding broadcast operands.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import boost.parallel.collectives  # noqa: F401  defines torch.ops.boost
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.elementwise import ELEMENTWISE, elementwise_rule
from boost.plan import work
from boost.plan.shape_tensor import RULES, NoRuleError, Shape, ShapeTensor, contiguous, make, origin, record, rule
from boost.plan.tape import Gradients, Operand, Tape, Tensors

# Element-wise operations.


# The first call of torch.broadcast_shapes imports symbolic shapes, which takes half a second.
_broadcast_shapes = functools.lru_cache(maxsize=8192)(np.broadcast_shapes)


def _promoted(operands: Sequence[ShapeTensor]) -> torch.dtype:
    dtype = operands[0].dtype
    for x in operands[1:]:
        if x.dtype != dtype and x.shape:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


@functools.lru_cache(maxsize=8192)
def _dense(shape: Shape, strides: Shape) -> Shape:
    """Dense strides in the same dimension order."""
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    dense = contiguous(tuple(shape[dim] for dim in order))
    return tuple(dense[order.index(dim)] for dim in range(len(shape)))


def _moved(operands: Sequence[ShapeTensor], numel: int, dtype: torch.dtype) -> float:
    return 1 + sum(x.dtype.itemsize for x in operands if x.numel_ == numel) / dtype.itemsize


def _made(operation: str, operands: Sequence[ShapeTensor], kernel: str = work.STREAM) -> ShapeTensor:
    shape, dtype = _broadcast_shapes(*(x.shape for x in operands)), _promoted(operands)
    moves = _moved(operands, math.prod(shape), dtype)
    # The first operand that has this shape determines the dimension order of the result.
    like = next((x for x in operands if x.shape == shape), None)
    strides = contiguous(shape) if like is None or like.is_contiguous() else _dense(shape, like.strides)
    return make(operands[0], shape, operation, moves, dtype=dtype, inputs=operands, kernel=kernel, strides=strides)


@rule("elementwise")
def elementwise(operation: str, *operands: Operand, **_: object) -> ShapeTensor:
    """Element-wise operation on one or more tensors. Under autograd, only on one tensor, and only if it is in ELEMENTWISE."""
    tensors = [x for x in operands if isinstance(x, ShapeTensor)]
    if operation not in ELEMENTWISE or len(tensors) > 1:
        _require_no_graph(operation, tensors)
        return _made(operation, tensors, work.SILU_BACKWARD if operation in ELEMENTWISE else work.STREAM)
    return record(
        lambda: _made(operation, tensors, work.SILU),
        tensors,
        lambda g, s: [_made(f"{operation}_backward", [g[0], s[0]], work.SILU_BACKWARD)],
        [] if ELEMENTWISE[operation] else tensors,
        saves_result=lambda made: [made] if ELEMENTWISE[operation] else [],
    )


def _require_no_graph(operation: str, operands: Sequence[object]) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, ShapeTensor) and x.node is not None for x in operands):
        raise NoRuleError(f"'{operation}' under autograd")


for _method in ("square", "clamp", "clamp_min", "sub", "pow"):
    RULES[_method] = functools.partial(elementwise, _method)
elementwise_rule(F.silu, backward=torch.ops.aten.silu_backward)


@rule("compare")
def compare(x: ShapeTensor, *_: object) -> ShapeTensor:
    """Comparison; returns a bool mask."""
    return make(x, x.shape, "compare", dtype=torch.bool)


@rule("in_place", "add_", "sub_", "mul_", "div_", "square_", "addcmul_")
def in_place(x: ShapeTensor, *operands: Operand, value: float = 1) -> ShapeTensor:
    """In-place update of x."""
    _require_no_graph("in-place operation", (x, *operands))
    if not x.is_small:
        read = [x, *(y for y in operands if isinstance(y, ShapeTensor))]
        x.tape.record_op(work.STREAM, (x.numel_,), x.dtype, _moved(read, x.numel_, x.dtype))
    return x


@rule("exp_")
def exp_(x: ShapeTensor) -> ShapeTensor:
    """In-place exp, timed like a softmax."""
    x.tape.record_op(work.LOSS, (x.numel_,), x.dtype, 2)
    return x


def _summed_to(gradient: ShapeTensor, like: ShapeTensor) -> ShapeTensor:
    """Sums a gradient over the broadcast dimensions of an operand."""
    if gradient.shape == like.shape:
        return gradient
    if not gradient.is_small:
        gradient.tape.record_op(work.REDUCE, (gradient.numel_,), gradient.dtype, 1)
    return make(gradient, like.shape, "sum")


@rule("add", torch.add, torch.Tensor.add)
def add(x: ShapeTensor, y: Operand) -> ShapeTensor:
    if not isinstance(y, ShapeTensor):
        return record(lambda: _made("add", [x]), [x], lambda g, s: [g[0]])
    a, b = x.without_storage(), y.without_storage()
    return record(
        lambda: _made("add", [x, y]),
        [x, y],
        lambda g, s: [_summed_to(g[0], a).to(a.dtype), _summed_to(g[0], b).to(b.dtype)],
    )


@rule("mul", torch.mul)
def mul(x: ShapeTensor, y: Operand, out: ShapeTensor | None = None) -> ShapeTensor:
    """x * y; saves each operand that the other operand's gradient needs."""
    if out is not None:
        _require_no_graph("mul", (x, y))
        read = [z for z in (x, y) if isinstance(z, ShapeTensor)]
        out.tape.record_op(work.STREAM, (out.numel_,), out.dtype, _moved(read, out.numel_, out.dtype))
        return out
    if not isinstance(y, ShapeTensor):
        return record(lambda: _made("mul", [x]), [x], lambda g, s: [_made("mul", [g[0]])])
    for_x, for_y = x.node is not None, y.node is not None
    a, b = x.without_storage(), y.without_storage()

    def backward(g: Tensors, saved: Tensors) -> Gradients:
        rest = list(saved)
        first = rest.pop(0) if for_y else None
        second = rest.pop(0) if for_x else None
        dx = _summed_to(mul(g[0], second), a).to(a.dtype) if second is not None else None
        dy = _summed_to(mul(g[0], first), b).to(b.dtype) if first is not None else None
        return [dx, dy]

    return record(lambda: _made("mul", [x, y]), [x, y], backward, [*([x] if for_y else []), *([y] if for_x else [])])


@rule("masked_fill")
def masked_fill(x: ShapeTensor, mask: ShapeTensor, value: float) -> ShapeTensor:
    """x with a number where the mask is true; saves the mask."""
    return record(lambda: _made("masked_fill", [x]), [x], lambda g, s: [_made("masked_fill", [g[0]])], [mask])


@rule("div")
def div(x: ShapeTensor, y: Operand) -> ShapeTensor:
    """x / y. Under autograd y must be a number."""
    if isinstance(y, ShapeTensor):
        return elementwise("div", x, y)
    return record(lambda: _made("div", [x]), [x], lambda g, s: [_made("div", [g[0]])])


@rule("neg", torch.neg)
def neg(x: ShapeTensor) -> ShapeTensor:
    return record(lambda: _made("neg", [x]), [x], lambda g, s: [_made("neg", [g[0]])])


@rule(torch.rsqrt)
def rsqrt(x: ShapeTensor) -> ShapeTensor:
    """x^(-1/2); saves its result."""
    return record(
        lambda: _made("rsqrt", [x]), [x], lambda g, s: [_made("mul", [g[0], s[0]])], saves_result=lambda made: [made]
    )


@rule(torch.addcmul)
def addcmul(bias: ShapeTensor, x: ShapeTensor, weight: ShapeTensor) -> ShapeTensor:
    """bias + x * weight, with one bias and weight per column."""
    few, like = bias.without_storage(), weight.without_storage()

    def backward(g: Tensors, s: Tensors) -> Gradients:
        dbias = _summed_to(g[0], few)
        dx = mul(g[0], s[1])
        ones = _made("mul", [g[0]])  # multiplied by value = 1
        dweight = _summed_to(mul(ones, s[0]), like)
        return [dbias, dx, dweight]

    return record(lambda: _made("addcmul", [bias, x, weight]), [bias, x, weight], backward, [x, weight])


# Sums.


@rule("sum")
def reduce(
    x: ShapeTensor, dim: int | Sequence[int] | None = None, kernel: str = work.REDUCE, dtype: torch.dtype | None = None
) -> ShapeTensor:
    """Sum over one or several dimensions, or over all."""
    _require_no_graph("sum", (x,))
    if not x.is_small:
        x.tape.record_op(kernel, (x.numel_,), x.dtype, 1)
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    shape = tuple(size for n, size in enumerate(x.shape) if n not in [d % x.ndim for d in dims])
    return make(x, shape, "sum", dtype=dtype)


@rule("logsumexp")
def logsumexp(x: ShapeTensor, dim: int) -> ShapeTensor:
    """logsumexp over one dimension, timed like a softmax."""
    return reduce(x, dim, work.LOSS)


@rule(torch.linalg.vector_norm)
def vector_norm(x: ShapeTensor, *, dim: int, dtype: torch.dtype, keepdim: bool = False) -> ShapeTensor:
    """Norm over one dimension."""
    norm = reduce(x, dim, dtype=dtype)
    return norm.unsqueeze(dim) if keepdim else norm


@rule(torch.linalg.vecdot)
def vecdot(x: ShapeTensor, y: ShapeTensor) -> ShapeTensor:
    """Row-wise dot product: multiply, then sum."""
    return reduce(mul(x, y), -1)


# Concatenation.


@rule(torch.cat)
def cat(parts: Sequence[ShapeTensor], dim: int = 0) -> ShapeTensor:
    """Concatenation; gradients are views."""
    dim %= parts[0].ndim
    sizes = [x.shape[dim] for x in parts]
    shape = (*parts[0].shape[:dim], sum(sizes), *parts[0].shape[dim + 1 :])
    kinds = {(x.shape, x.strides): x for x in parts}.values()
    run = min(x.run for x in kinds)
    turned = any(list(x.strides) != sorted(x.strides, reverse=True) for x in kinds)
    kernel = (work.REORDER if run >= work.SHORT_RUN else work.REORDER_FINELY) if turned else work.STREAM

    def made() -> ShapeTensor:
        return make(parts[0], shape, "cat", 2.0, inputs=parts, kernel=kernel, dtype=_promoted(parts))

    def backward(g: Tensors, _: Tensors) -> Gradients:
        return g[0].split(sizes, dim)

    return record(made, list(parts), backward)


@rule(F.pad)
def pad(x: ShapeTensor, sizes: Sequence[int], mode: str = "constant", value: float | None = None) -> ShapeTensor:
    """Pads x; the gradient is a copy of the unpadded part."""
    shape = list(x.shape)
    for dim, added in enumerate(zip(sizes[::2], sizes[1::2], strict=True), start=1):  # last dimension first
        shape[-dim] += sum(added)
    like = x.without_storage()
    return record(lambda: make(x, tuple(shape), "pad", 2.0), [x], lambda g, s: [make(like, like.shape, "pad", 2.0)])


@rule(torch.stack)
def stack(parts: Sequence[ShapeTensor], dim: int = 0) -> ShapeTensor:
    """Stacks tensors. Works only outside autograd."""
    _require_no_graph("stack", parts)
    dim %= parts[0].ndim + 1
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])
    return make(parts[0], shape, "cat", 2.0 * (not parts[0].is_small), inputs=parts)


@rule("repeat_interleave")
def repeat_interleave(x: ShapeTensor, times: int, dim: int) -> ShapeTensor:
    """Repeats each slice; the gradient sums over the repeats."""
    shape = (*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :])
    like = x.without_storage()
    return record(
        lambda: make(x, shape, "repeat_interleave", 2.0), [x], lambda g, s: [make(like, like.shape, "sum", 1.0 + times)]
    )


@rule(torch.empty_like)
def empty_like(x: ShapeTensor, **_: object) -> ShapeTensor:
    """Allocates memory without writing to it."""
    return make(x, x.shape, "empty")


@rule(torch.zeros_like)
def zeros_like(x: ShapeTensor, dtype: torch.dtype | None = None) -> ShapeTensor:
    """Allocates memory, and writes each element once."""
    return make(x, x.shape, "zeros", 1.0, dtype=dtype)


# GEMMs.


def _product(
    a: ShapeTensor, b: ShapeTensor, shape: Shape, operation: str, inputs: Sequence[ShapeTensor]
) -> ShapeTensor:
    """[m, k] x [k, n], with leading dimensions folded."""
    m, k, n = math.prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
    a.tape.record_op(work.GEMM, (1, m, n, k), a.dtype)
    return make(a, shape, operation, inputs=inputs)


@rule(F.linear)
def linear(x: ShapeTensor, weight: ShapeTensor, bias: ShapeTensor | None = None) -> ShapeTensor:
    """x W^T (+ b); saves x and W. Folds leading dimensions first, with a copy if x is not contiguous."""
    if x.ndim > 2:
        folded = x.reshape(-1, x.shape[-1])
        return linear(folded, weight, bias).view(*x.shape[:-1], weight.shape[0])

    def made() -> ShapeTensor:
        return _product(x, weight.without_graph().t(), (*x.shape[:-1], weight.shape[0]), "linear", [x, weight])

    few = None if bias is None else bias.without_storage()
    for_x = x.node is not None

    def backward(g: Tensors, s: Tensors) -> Gradients:
        dw = _product(g[0].t(), s[0], s[1].shape, "mm", [g[0], s[0]])
        dx = _product(g[0], s[1], s[0].shape, "mm", [g[0], s[1]]) if for_x else None
        return [dx, dw] if few is None else [dx, dw, _summed_to(g[0], few)]

    return record(made, [x, weight, *([] if bias is None else [bias])], backward, [x, weight])


@rule("mm", torch.mm)
def mm(a: ShapeTensor, b: ShapeTensor, out: ShapeTensor | None = None) -> ShapeTensor:
    """[m, k] x [k, n]."""
    if out is not None:
        _require_no_graph("mm", (a, b))
        a.tape.record_op(work.GEMM, (1, a.shape[0], b.shape[1], a.shape[1]), a.dtype)
        if out.storage is not None and out.storage.category:
            # `out` may be uninitialized memory, so it takes the category of the result.
            out.storage.category, out.storage.role = origin(out.tape, "mm", [a, b])
            out.tape.alive[id(out.storage)] = out.storage.category, out.storage.bytes
        return out

    def made() -> ShapeTensor:
        return _product(a, b, (a.shape[0], b.shape[1]), "mm", [a, b])

    def backward(g: Tensors, s: Tensors) -> Gradients:
        db = mm(s[0].t(), g[0])
        return [mm(g[0], s[1].t()), db]

    return record(made, [a, b], backward, [a, b])


@rule("addmm_")
def addmm_(x: ShapeTensor, a: ShapeTensor, b: ShapeTensor) -> ShapeTensor:
    """x + a b, in place."""

    def made() -> ShapeTensor:
        a.tape.record_op(work.GEMM, (1, a.shape[0], b.shape[1], a.shape[1]), a.dtype)
        return x.without_graph()

    return record(made, [x, a, b], lambda g, s: [g[0], mm(g[0], s[1].t()), mm(s[0].t(), g[0])], [a, b])


@rule("matmul", torch.matmul)
def matmul(a: ShapeTensor, b: ShapeTensor) -> ShapeTensor:
    """[m, k] x [k, n], or [m, k] x [b, k, n], which torch folds into one GEMM on the transposed batch."""
    if a.ndim == b.ndim == 2:
        return mm(a, b)
    if not (a.ndim == 2 and b.ndim == 3):
        raise NoRuleError(f"matmul of a {a.ndim}-D and a {b.ndim}-D tensor", "use F.linear")
    turned = b.transpose(1, 2)
    folded = turned.reshape(-1, turned.shape[-1])
    return mm(folded, a.t()).view(*turned.shape[:-1], a.shape[0]).transpose(1, 2).contiguous()


# Norms, attention, embedding.


@rule(F.layer_norm)
def layer_norm(x: ShapeTensor, shape: Shape, weight: None = None, bias: None = None, eps: float = 0.0) -> ShapeTensor:
    """LayerNorm without a weight or a bias; saves x, and the mean and rstd of each row."""
    assert weight is None and bias is None
    return record(
        lambda: make(x, x.shape, "layer_norm", 2.0),
        [x],
        lambda g, s: [make(g[0], g[0].shape, "layer_norm_backward", 3.0)],
        [x],
        saves_result=lambda made: [make(x, x.shape[:-1], "statistics") for _ in range(2)],
    )


@rule(F.scaled_dot_product_attention)
def attention(
    q: ShapeTensor,
    k: ShapeTensor,
    v: ShapeTensor,
    attn_mask: object = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> ShapeTensor:
    """Fused attention; saves the logsumexp of each row of scores. Its output is token-major, not head-major."""
    batch, heads, length, width = q.shape
    shape: tuple[int, ...] = batch, heads, k.shape[1], length, width
    if k.shape[2] != length:
        assert attn_mask is not None, "a mask is required if there are fewer queries than keys"
        shape = *shape, k.shape[2]
    tape, acc_dtype = q.tape, torch.promote_types(q.dtype, torch.float32)

    def kernel() -> tuple[ShapeTensor, ShapeTensor]:
        tape.record_op(work.ATTENTION, shape, q.dtype)
        made = make(q, q.shape, "attention", inputs=[q, k, v], strides=_by_tokens(q.shape))
        return made, make(q, (batch, heads, length), "attention", dtype=acc_dtype)

    both: list[ShapeTensor] = []

    def made() -> ShapeTensor:
        both[:] = (x.without_graph() for x in tape.selected(kernel))
        return both[0]

    def backward(g: Tensors, s: Tensors) -> Gradients:
        tape.record_op(work.ATTENTION_BACKWARD, shape, g[0].dtype)
        return [make(x, x.shape, "attention_backward", strides=_by_tokens(x.shape)) for x in s[:3]]

    kept = [q, k, v, *([attn_mask] if isinstance(attn_mask, ShapeTensor) else [])]
    return record(made, [q, k, v], backward, kept, saves_result=lambda _: both)


def _by_tokens(shape: Shape) -> Shape:
    _, heads, length, width = shape
    return heads * length * width, width, heads * width, 1


@rule("index_select")
def index_select(x: ShapeTensor, dim: int, index: ShapeTensor) -> ShapeTensor:
    """Some slices of x; saves their index. The gradient is zero elsewhere."""
    dim %= x.ndim
    like, shape = x.without_storage(), (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    return record(
        lambda: make(x, shape, "index_select", 2.0, inputs=[x, index]),
        [x],
        lambda g, s: [index_add_(make(like, like.shape, "zeros", 1.0), dim, s[0], g[0])],
        [index],
    )


@rule("index_add_")
def index_add_(x: ShapeTensor, dim: int, index: ShapeTensor, added: ShapeTensor) -> ShapeTensor:
    """Adds to some slices of x, in place."""
    _require_no_graph("index_add_", (x, added))
    if not added.is_small:
        added.tape.record_op(work.STREAM, (added.numel_,), added.dtype, 3)
    return x


@rule(F.embedding)
def embedding(tokens: ShapeTensor, table: ShapeTensor, *_: object, **__: object) -> ShapeTensor:
    rows, shape = table.shape[0], (*tokens.shape, table.shape[1])
    return record(
        lambda: make(table, shape, "embedding", 2.0, kernel=work.LOOKUP, inputs=[table]),
        [None, table],
        lambda g, s: [None, embedding_backward(g[0], tokens, rows, -1, False)],
    )


@rule(torch.ops.aten.embedding_dense_backward)
def embedding_backward(dy: ShapeTensor, tokens: object, rows: int, padding: int, scaled: bool) -> ShapeTensor:
    """Zeroes the gradient of the table, then accumulates into it."""
    table = make(dy, (rows, dy.shape[1]), "embedding_backward", 1.0)
    dy.tape.record_op(work.LOOKUP, (dy.numel_,), dy.dtype, 3)
    return table


def zeros(
    tape_device: tuple[Tape, torch.device], *shape: Any, dtype: torch.dtype | None = None, **_: object
) -> ShapeTensor:
    """torch.zeros, recorded on the tape."""
    tape, device = tape_device
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    like = ShapeTensor(tape, None, shape, contiguous(shape), dtype or torch.get_default_dtype(), device)
    return make(like, shape, "zeros", 1.0)


# The collectives in boost.parallel.collectives, and their variants for CPU processes.


_ops = torch.ops._c10d_functional


def _collective(kind: str, x: ShapeTensor, *others: object) -> ShapeTensor:
    """[...] -> [...]; all-gather: [n, ...] -> [p n, ...]; reduce-scatter: [p n, ...] -> [n, ...]. The group is last."""
    axis, _, processes = str(others[-1]).partition(" ")
    made, operation = x.shape, "all_reduce"
    if kind == ALL_GATHER:
        made, operation = (x.shape[0] * int(processes), *x.shape[1:]), "all_gather_into_tensor"
    elif kind == REDUCE_SCATTER:
        made, operation = (x.shape[0] // int(processes), *x.shape[1:]), "reduce_scatter"
    result = make(x, made, operation)
    x.tape.record_collective(kind, made if kind == ALL_GATHER else x.shape, int(processes), axis, result)
    return result


_boost = torch.ops.boost
for _kind, _functions in {
    ALL_REDUCE: (_ops.all_reduce, _boost.all_reduce),
    ALL_GATHER: (_ops.all_gather_into_tensor, _boost.all_gather),
    REDUCE_SCATTER: (_ops.reduce_scatter_tensor, _boost.reduce_scatter),
    ALL_TO_ALL: (_ops.all_to_all_single, _boost.all_to_all),
}.items():
    RULES.update(dict.fromkeys(_functions, functools.partial(_collective, _kind)))


@rule(_ops.wait_tensor)
def wait_tensor(x: ShapeTensor) -> ShapeTensor:
    """Returns its input, which is then no longer in flight."""
    x.tape.wait(x)
    return x
