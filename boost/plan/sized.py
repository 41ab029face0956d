"""Tensors of which only shape, strides and dtype are known, on which the decoder runs as it is.

`Sized` has the methods of torch.Tensor that the model uses, and answers torch's functions by `__torch_function__`; rules of what
each makes, saves and moves are in `boost.plan.rules`. A method or function without a rule raises NoRuleError.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from boost.plan.categories import COPIES, category_of
from boost.plan.tape import LEAF, Backward, GraphNode, Held, SizedStorage, Tape, name_of
from boost.plan.work import REORDER, REORDER_FINELY, SHORT_RUN, STREAM

Shape = tuple[int, ...]


class NoRuleError(NotImplementedError):
    """The model uses an operation of which it is not known what it makes, saves and moves."""


class Sized:
    """A tensor that has a shape."""

    __slots__ = ("device", "dtype", "index", "node", "numel_", "shape", "storage", "strides", "tape")

    def __init__(
        self,
        tape: Tape,
        storage: SizedStorage | None,
        shape: Shape,
        strides: Shape,
        dtype: torch.dtype,
        device: torch.device,
        node: GraphNode | None = None,
        index: int = 0,
    ) -> None:
        """`storage` None: of someone else, who holds it."""
        self.tape, self.storage, self.shape, self.strides = tape, storage, shape, strides
        self.dtype, self.device, self.node, self.index = dtype, device, node, index
        self.numel_ = math.prod(shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = RULES.get(function)
        if answer is None:
            name = getattr(function, "__name__", str(function))
            raise NoRuleError(f"no rule of what '{name}' makes, saves and moves; add one to boost.plan.rules")
        return answer(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise NoRuleError(
            f"no rule of what the tensor method '{name}' makes, saves and moves; add one to boost.plan.sized"
        )

    # Facts.

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        return self.node is not None

    @property
    def nbytes(self) -> int:
        return self.numel_ * self.dtype.itemsize

    def numel(self) -> int:
        return self.numel_

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether it has one number a token (or one for each of a row's width) at most."""
        tape, shape = self.tape, self.shape
        if len(shape) > 1 and shape[-1] == tape.tokens:
            return self.numel_ <= tape.statistic
        return self.numel_ <= tape.small and (len(shape) < 2 or self.numel_ == max(shape))

    def is_contiguous(self) -> bool:
        usual = contiguous(self.shape)
        return self.strides == usual or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(self.shape, self.strides, usual, strict=True)
        )

    def is_dense(self) -> bool:
        """Whether its elements fill their memory without gaps, in whatever order."""
        order = sorted(range(self.ndim), key=lambda dim: -self.strides[dim])
        dense = contiguous(tuple(self.shape[dim] for dim in order))
        return all(self.shape[d] == 1 or self.strides[d] == n for d, n in zip(order, dense, strict=True))

    @property
    def run(self) -> int:
        """Elements that lie side by side: what a copy moves at a time."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != expected:
                return expected
            expected *= size
        return expected

    # Places in the graph.

    def bare(self) -> "Sized":
        """Its memory without its place in the graph: what a node saves."""
        return Sized(self.tape, self.storage, self.shape, self.strides, self.dtype, self.device)

    def elsewhere(self) -> "Sized":
        """Its place in the graph without its memory: of what someone else holds."""
        return Sized(self.tape, None, self.shape, self.strides, self.dtype, self.device, self.node, self.index)

    def detach(self) -> "Sized":
        return self.bare()

    def at(self, shape: Shape, strides: Shape, node: GraphNode | None = None, index: int = 0) -> "Sized":
        """A view."""
        return Sized(self.tape, self.storage, shape, strides, self.dtype, self.device, node, index)

    # Views.

    def view(self, *shape: Any) -> "Sized":
        new = _resolved(self, shape)
        strides = view_strides(self.shape, self.strides, new)
        assert strides is not None, f"{self.shape} with strides {self.strides} cannot be viewed as {new}"
        return _viewed(self, new, strides, _reshaped(self.shape))

    def view_as(self, other: "Sized") -> "Sized":
        return self.view(*other.shape)

    def reshape(self, *shape: Any) -> "Sized":
        new = _resolved(self, shape)
        if view_strides(self.shape, self.strides, new) is None:
            return self.contiguous().view(*new)
        return self.view(*new)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Sized":
        start, end = start_dim % self.ndim, end_dim % self.ndim
        return self.reshape(*self.shape[:start], math.prod(self.shape[start : end + 1]), *self.shape[end + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> "Sized":
        dim %= self.ndim
        return self.view(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def transpose(self, first: int, second: int) -> "Sized":
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        shape, strides = tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order)
        return _viewed(self, shape, strides, lambda g, s: [g[0].transpose(first, second)])

    def t(self) -> "Sized":
        return self.transpose(0, 1)

    def unsqueeze(self, dim: int) -> "Sized":
        dim %= self.ndim + 1
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        strides = (*self.strides[:dim], 1, *self.strides[dim:])
        return _viewed(self, shape, strides, _reshaped(self.shape))

    def squeeze(self, dim: int) -> "Sized":
        dim %= self.ndim
        assert self.shape[dim] == 1
        shape, strides = (x[:dim] + x[dim + 1 :] for x in (self.shape, self.strides))
        return _viewed(self, shape, strides, _reshaped(self.shape))

    def narrow(self, dim: int, start: int, length: int) -> "Sized":
        dim %= self.ndim
        if length == self.shape[dim]:
            return self
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])

        whole = self.elsewhere()

        def backward(gradients: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            full = make(whole, whole.shape, "zeros", 1.0)  # zero elsewhere
            whole.tape.does(STREAM, (gradients[0].numel_,), whole.dtype, 2)
            return [full]

        return _viewed(self, shape, self.strides, backward)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> "list[Sized]":
        dim %= self.ndim
        if isinstance(sizes, int):
            count, rest = divmod(self.shape[dim], sizes)
            sizes = [sizes] * count + [rest] * bool(rest)
        shapes = [(*self.shape[:dim], size, *self.shape[dim + 1 :]) for size in sizes]
        if not records(self):
            return [self.at(shape, self.strides) for shape in shapes]

        whole = self.elsewhere()

        def backward(gradients: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
            return [make(whole, whole.shape, "cat", 2.0)]

        node = self.tape.node([self], len(shapes), backward)
        return [self.at(shape, self.strides, node, i) for i, shape in enumerate(shapes)]

    def chunk(self, count: int, dim: int = 0) -> "list[Sized]":
        return self.split(-(-self.shape[dim] // count), dim)

    def __getitem__(self, key: Any) -> "Sized":
        assert self.node is None or not torch.is_grad_enabled(), "an index in the graph has no rule"
        shape, strides, dim = [], [], 0
        for each in key if isinstance(key, tuple) else (key,):
            if each is None:
                shape.append(1)
                strides.append(1)
                continue
            if isinstance(each, slice):
                length = len(range(*each.indices(self.shape[dim])))
                shape.append(length)
                strides.append(self.strides[dim] * (each.step or 1))
            dim += 1
        return self.at((*shape, *self.shape[dim:]), (*strides, *self.strides[dim:]))

    def __setitem__(self, key: Any, value: "Sized") -> None:
        if not value.is_small:
            self.tape.does(STREAM, (value.numel_,), self.dtype, 2)

    # Copies.

    def contiguous(self) -> "Sized":
        if self.is_contiguous():
            return self
        kernel = REORDER if self.run >= SHORT_RUN else REORDER_FINELY
        return record(lambda: make(self, self.shape, "contiguous", 2.0, kernel=kernel), [self], lambda g, s: [g[0]])

    def clone(self) -> "Sized":
        return record(lambda: make(self, self.shape, "clone", 2.0), [self], lambda g, s: [g[0]])

    def to(self, dtype: torch.dtype) -> "Sized":
        if dtype == self.dtype:
            return self
        old = self.dtype
        moves = 1 + old.itemsize / dtype.itemsize
        strides = self.strides if not self.is_contiguous() and self.is_dense() else None
        return record(
            lambda: make(self, self.shape, "to", moves, dtype=dtype, strides=strides),
            [self],
            lambda g, s: [g[0].to(old)],
        )

    # Arithmetic: the rules are functions of their own.

    def __mul__(self, other: Any) -> "Sized":
        return RULES["mul"](self, other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> "Sized":
        return RULES["add"](self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Sized":
        return RULES["elementwise"]("sub", self, other)

    def __truediv__(self, other: Any) -> "Sized":
        return RULES["div"](self, other)

    def __neg__(self) -> "Sized":
        return RULES["neg"](self)

    def __matmul__(self, other: "Sized") -> "Sized":
        return RULES["matmul"](self, other)

    def __pow__(self, exponent: Any) -> "Sized":
        return RULES["elementwise"]("pow", self)

    def __ge__(self, other: Any) -> "Sized":
        return RULES["compare"](self)

    __lt__ = __gt__ = __le__ = __ge__

    def __eq__(self, other: object) -> Any:
        return RULES["compare"](self)

    __ne__ = __eq__
    __hash__ = object.__hash__

    def __and__(self, other: Any) -> "Sized":
        return RULES["compare"](self)

    def __iadd__(self, other: Any) -> "Sized":
        return RULES["in_place"](self, other)

    def mul_(self, other: Any) -> "Sized":
        return RULES["in_place"](self, other)

    def sub_(self, other: Any) -> "Sized":
        return RULES["in_place"](self, other)

    def square_(self) -> "Sized":
        return RULES["in_place"](self)

    def exp_(self) -> "Sized":
        return RULES["exp_"](self)

    def clamp(self, *_: Any) -> "Sized":
        return RULES["elementwise"]("clamp", self)

    def clamp_min(self, _: Any) -> "Sized":
        return RULES["elementwise"]("clamp", self)

    def square(self) -> "Sized":
        return RULES["elementwise"]("square", self)

    def addcmul_(self, first: "Sized", second: "Sized", value: float = 1) -> "Sized":
        return RULES["in_place"](self, first, second)

    def addmm_(self, a: "Sized", b: "Sized") -> "Sized":
        return RULES["addmm_"](self, a, b)

    def sum(self, dim: int | None = None) -> "Sized":
        return RULES["reduce"](self, dim)

    def logsumexp(self, dim: int) -> "Sized":
        return RULES["logsumexp"](self, dim)

    def gather(self, dim: int, index: "Sized") -> "Sized":
        return RULES["elementwise"]("gather", index)

    def scatter_add_(self, dim: int, index: "Sized", values: "Sized") -> "Sized":
        return self

    def repeat_interleave(self, times: int, dim: int) -> "Sized":
        return RULES["repeat_interleave"](self, times, dim)


RULES: dict[Any, Any] = {}
"""By torch function, and by name for what methods and operators share; filled by `boost.plan.rules`."""


def rule(*functions: Any) -> Any:
    """Registers what answers these functions."""

    def register(answer: Any) -> Any:
        RULES.update(dict.fromkeys(functions, answer))
        return answer

    return register


def records(*inputs: Any) -> bool:
    """Whether autograd would make a node of an operation on these."""
    if not torch.is_grad_enabled():
        return False
    return any(x.node is not None for x in inputs if isinstance(x, Sized))


def make(
    like: Sized,
    shape: Shape,
    operation: str,
    moves: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
    inputs: Sequence[Sized] = (),
    kernel: str = STREAM,
    strides: Shape | None = None,
) -> Sized:
    """A new tensor without history, made by an operation of `inputs` (`like` alone unless said).

    `moves`: numbers read and written for each of its own; 0: nothing counts. What is small is not counted.
    """
    tape, dtype = like.tape, dtype or like.dtype
    numel = math.prod(shape)
    if tape.phase == "forward":
        category, role = origin(tape, operation, inputs or (like,))
        storage = SizedStorage(tape, numel * dtype.itemsize, category, role)
        tape.alive[id(storage)] = Held(storage.bytes, category, operation, shape, name_of(dtype), tape.place)
    else:
        storage = SizedStorage(tape, numel * dtype.itemsize, "", "")
    made = Sized(tape, storage, shape, strides or contiguous(shape), dtype, like.device)
    if moves and not made.is_small:
        tape.does(kernel, (numel,), dtype, moves)
    return made


def origin(tape: Tape, operation: str, inputs: Sequence[Sized]) -> tuple[str, str]:
    """(category, role) of what an operation makes."""
    if tape.scope:
        return tape.scope, ""
    held = [x.storage for x in inputs if x.storage is not None]
    roles = [each.role for each in held if each.role]
    return category_of(operation, roles, [each.category for each in held if not each.role])


def record(
    make_it: Callable[[], Sized],
    inputs: Sequence[Any],
    backward: Backward,
    saved: Sequence[Sized] = (),
    keeps: Callable[[Sized], Sequence[Sized]] | None = None,
) -> Sized:
    """What `make_it` makes, in the graph if there is one. `saved` of the inputs is saved before it is made, as torch does it (so
    that a recomputation that needs no more ends before), what `keeps` of the result after."""
    if not records(*inputs):
        return make_it()
    tape = next(x.tape for x in inputs if isinstance(x, Sized))
    node = tape.node([x if isinstance(x, Sized) else None for x in inputs], 1, backward)
    tape.save(node, saved)
    made = make_it()
    made.node = node
    if keeps is not None:
        tape.save(node, keeps(made))
    return made


def _viewed(x: Sized, shape: Shape, strides: Shape, backward: Backward) -> Sized:
    if not records(x):
        return x.at(shape, strides)
    return x.at(shape, strides, x.tape.node([x], 1, backward))


def _reshaped(shape: Shape) -> Backward:
    """The backward pass of a view."""
    return lambda gradients, _: [gradients[0].reshape(*shape)]


def _resolved(x: Sized, shape: Any) -> Shape:
    """The shape that `view` was asked for, with -1 filled in."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    if -1 not in shape:
        return tuple(shape)
    known = -math.prod(shape)
    return tuple(x.numel_ // known if n == -1 else n for n in shape)


@functools.lru_cache(maxsize=8192)
def contiguous(shape: Shape) -> Shape:
    """Strides of rows one after the other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=8192)
def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of the same memory under another shape; None where it has to be copied.

    Runs of dimensions that lie without a gap can be divided otherwise; what has a gap in between cannot be joined.
    """
    if not shape:
        return contiguous(new)
    result, place = [0] * len(new), len(new) - 1
    base, inside, taken = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        inside *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == inside * base):
            continue
        while place >= 0 and (taken < inside or new[place] == 1):
            result[place] = taken * base
            taken *= new[place]
            place -= 1
        if taken != inside:
            return None
        if dim:
            base, inside, taken = strides[dim - 1], 1, 1
    return tuple(result) if place == -1 else None


def leaf(tape: Tape, shape: Shape, dtype: torch.dtype, device: torch.device, role: str) -> Sized:
    """A weight of a role: not counted among the living, and where the backward pass ends."""
    storage = SizedStorage(_Nowhere, 0, COPIES, role)  # memory that is there anyway
    return Sized(tape, storage, shape, contiguous(shape), dtype, device, GraphNode(LEAF, (), 1, None, tape.place))


_Nowhere = Tape(0, 0)
"""Where weights are held."""
