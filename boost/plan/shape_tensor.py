"""Tensors with shape, strides and dtype but no data. The decoder runs on them unchanged.

`ShapeTensor` implements the methods of torch.Tensor that the model uses, and handles torch functions through `__torch_function__`.
Rules in `boost.plan.rules` define each function's output, saved tensors and bytes moved. A function without a rule, of its own or
of the method with its name, raises NoRuleError.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from boost.elementwise import ELEMENTWISE
from boost.errors import BoostError
from boost.plan.categories import COPIES, category_of
from boost.plan.tape import LEAF, Backward, Gradients, GraphNode, ShapeStorage, Tape, Tensors
from boost.plan.work import REORDER, REORDER_FINELY, SHORT_RUN, STREAM

Shape = tuple[int, ...]
_Rule = TypeVar("_Rule", bound=Callable[..., "ShapeTensor"])


class NoRuleError(BoostError):
    """The model uses an operation that has no rule."""

    def __init__(
        self, operation: str, fix: str = "boost.elementwise_rule adds one for a function of each element"
    ) -> None:
        super().__init__(f"the planner has no rule for {operation}; {fix}")


def _by_rule(name: str) -> "Callable[..., ShapeTensor]":
    """A method that applies the rule with this name."""

    def method(self: "ShapeTensor", *operands: object) -> "ShapeTensor":
        return _rule_of(name)(self, *operands)

    return method


class ShapeTensor:
    """A tensor without data."""

    __slots__ = ("device", "dtype", "index", "node", "numel_", "shape", "storage", "strides", "tape")

    def __init__(
        self,
        tape: Tape,
        storage: ShapeStorage | None,
        shape: Shape,
        strides: Shape,
        dtype: torch.dtype,
        device: torch.device,
        node: GraphNode | None = None,
        index: int = 0,
    ) -> None:
        """If `storage` is None, the memory is owned elsewhere."""
        self.tape, self.storage, self.shape, self.strides = tape, storage, shape, strides
        self.dtype, self.device, self.node, self.index = dtype, device, node, index
        self.numel_ = math.prod(shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = RULES.get(function)
        if answer is None:
            name = getattr(function, "__name__", str(function))
            answer = vars(cls).get(name) or _rule_of(name)
        return answer(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Looks up a missing method in RULES by name."""
        return functools.partial(_rule_of(name), self)

    # Properties.

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
        """Whether it is too small to count as work: at most one element per token, or per column."""
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
        """Whether its elements fill their memory without gaps, in any order."""
        order = sorted(range(self.ndim), key=lambda dim: -self.strides[dim])
        dense = contiguous(tuple(self.shape[dim] for dim in order))
        return all(self.shape[d] == 1 or self.strides[d] == n for d, n in zip(order, dense, strict=True))

    @property
    def run(self) -> int:
        """Length of the contiguous runs that a copy reads, in elements."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size != 1 and stride != expected:
                return expected
            expected *= size
        return expected

    # Autograd graph.

    def without_graph(self) -> "ShapeTensor":
        """Returns a tensor with the same memory but no graph node, so that it can be saved."""
        return ShapeTensor(self.tape, self.storage, self.shape, self.strides, self.dtype, self.device)

    def without_storage(self) -> "ShapeTensor":
        """Returns the same graph node without memory, which is owned elsewhere."""
        return ShapeTensor(self.tape, None, self.shape, self.strides, self.dtype, self.device, self.node, self.index)

    detach = without_graph

    def as_view(self, shape: Shape, strides: Shape, node: GraphNode | None = None, index: int = 0) -> "ShapeTensor":
        return ShapeTensor(self.tape, self.storage, shape, strides, self.dtype, self.device, node, index)

    # Views.

    def view(self, *shape: Any) -> "ShapeTensor":
        new = _resolved(self, shape)
        strides = view_strides(self.shape, self.strides, new)
        assert strides is not None, f"{self.shape} with strides {self.strides} cannot be viewed as {new}"
        return _viewed(self, new, strides, _reshaped(self.shape))

    def view_as(self, other: "ShapeTensor") -> "ShapeTensor":
        return self.view(*other.shape)

    def reshape(self, *shape: Any) -> "ShapeTensor":
        new = _resolved(self, shape)
        if view_strides(self.shape, self.strides, new) is None:
            return self.contiguous().view(*new)
        return self.view(*new)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "ShapeTensor":
        start, end = start_dim % self.ndim, end_dim % self.ndim
        return self.reshape(*self.shape[:start], math.prod(self.shape[start : end + 1]), *self.shape[end + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> "ShapeTensor":
        dim %= self.ndim
        return self.view(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def transpose(self, first: int, second: int) -> "ShapeTensor":
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        shape, strides = tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order)
        return _viewed(self, shape, strides, lambda g, s: [g[0].transpose(first, second)])

    def t(self) -> "ShapeTensor":
        return self.transpose(0, 1)

    def unsqueeze(self, dim: int) -> "ShapeTensor":
        dim %= self.ndim + 1
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        strides = (*self.strides[:dim], 1, *self.strides[dim:])
        return _viewed(self, shape, strides, _reshaped(self.shape))

    def squeeze(self, dim: int) -> "ShapeTensor":
        dim %= self.ndim
        assert self.shape[dim] == 1
        shape, strides = (x[:dim] + x[dim + 1 :] for x in (self.shape, self.strides))
        return _viewed(self, shape, strides, _reshaped(self.shape))

    def narrow(self, dim: int, start: int, length: int) -> "ShapeTensor":
        dim %= self.ndim
        if length == self.shape[dim]:
            return self
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        if not records(self):
            return self.as_view(shape, self.strides)
        whole = self.without_storage()

        def backward(gradients: Tensors, _: Tensors) -> Gradients:
            full = make(whole, whole.shape, "zeros", 1.0)  # zero outside the slice
            whole.tape.record_op(STREAM, (gradients[0].numel_,), whole.dtype, 2)
            return [full]

        return _viewed(self, shape, self.strides, backward)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> "list[ShapeTensor]":
        dim %= self.ndim
        if isinstance(sizes, int):
            count, rest = divmod(self.shape[dim], sizes)
            sizes = [sizes] * count + [rest] * bool(rest)
        shapes = [(*self.shape[:dim], size, *self.shape[dim + 1 :]) for size in sizes]
        if not records(self):
            views = {shape: self.as_view(shape, self.strides) for shape in dict.fromkeys(shapes)}
            return [views[shape] for shape in shapes]

        whole = self.without_storage()

        def backward(gradients: Tensors, _: Tensors) -> Gradients:
            return [make(whole, whole.shape, "cat", 2.0)]

        node = self.tape.node([self], len(shapes), backward)
        return [self.as_view(shape, self.strides, node, i) for i, shape in enumerate(shapes)]

    def chunk(self, count: int, dim: int = 0) -> "list[ShapeTensor]":
        return self.split(-(-self.shape[dim] // count), dim)

    def __getitem__(self, key: Any) -> "ShapeTensor":
        x, dim = self, 0
        for index in key if isinstance(key, tuple) else (key,):
            if isinstance(index, int):
                x = x.narrow(dim, index, 1).squeeze(dim)
                continue
            if index is None:
                x = x.unsqueeze(dim)
            elif isinstance(index, slice) and index.step is None:
                start, stop, _ = index.indices(x.shape[dim])
                x = x.narrow(dim, start, max(stop - start, 0))
            else:
                raise NoRuleError(f"indexing with {index!r}", "use narrow or reshape")
            dim += 1
        return x

    def __setitem__(self, key: object, value: "ShapeTensor") -> None:
        if not value.is_small:
            self.tape.record_op(STREAM, (value.numel_,), self.dtype, 2)

    # Copies.

    def new_empty(self, *shape: int) -> "ShapeTensor":
        return make(self, shape, "empty")

    def contiguous(self) -> "ShapeTensor":
        if self.is_contiguous():
            return self
        kernel = REORDER if self.run >= SHORT_RUN else REORDER_FINELY
        return record(lambda: make(self, self.shape, "contiguous", 2.0, kernel=kernel), [self], lambda g, s: [g[0]])

    def clone(self) -> "ShapeTensor":
        return record(lambda: make(self, self.shape, "clone", 2.0), [self], lambda g, s: [g[0]])

    def to(self, dtype: torch.dtype) -> "ShapeTensor":
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

    # Arithmetic, with rules in boost.plan.rules.

    __mul__ = __rmul__ = _by_rule("mul")
    __add__ = __radd__ = _by_rule("add")
    __iadd__ = _by_rule("in_place")
    __sub__, __rsub__, __truediv__, __neg__ = _by_rule("sub"), _by_rule("rsub"), _by_rule("div"), _by_rule("neg")
    __pow__, __matmul__ = _by_rule("pow"), _by_rule("matmul")
    __lt__ = __gt__ = __le__ = __ge__ = __and__ = __or__ = _by_rule("compare")

    def __eq__(self, other: object) -> Any:
        return RULES["compare"](self, other)

    __ne__ = __eq__
    __hash__ = object.__hash__

    def copy_(self, other: "ShapeTensor") -> "ShapeTensor":
        self[...] = other
        return self

    def masked_fill_(self, mask: "ShapeTensor", value: float) -> "ShapeTensor":
        return RULES["in_place"](self)

    def gather(self, dim: int, index: "ShapeTensor") -> "ShapeTensor":
        return RULES["elementwise"]("gather", index)

    def scatter_add_(self, dim: int, index: "ShapeTensor", values: "ShapeTensor") -> "ShapeTensor":
        return self


RULES: dict[object, Callable[..., ShapeTensor]] = {}
"""Rules by torch function, or by name for methods and operators. Filled by `boost.plan.rules`."""


def _rule_of(name: str) -> Callable[..., ShapeTensor]:
    """The rule for a method, or for an element-wise function by its name."""
    if name in RULES:
        return RULES[name]
    if name not in ELEMENTWISE:
        raise NoRuleError(f"'{name}'")
    return functools.partial(RULES["elementwise"], name)


def rule(*functions: object) -> Callable[[_Rule], _Rule]:
    """Decorator that registers the rule for these functions."""

    def register(answer: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(functions, answer))
        return answer

    return register


def records(*inputs: object) -> bool:
    """Whether autograd would record an operation on these inputs."""
    if torch.is_grad_enabled():
        for x in inputs:  # a loop, because a generator takes twice as long
            if isinstance(x, ShapeTensor) and x.node is not None:
                return True
    return False


def make(
    like: ShapeTensor,
    shape: Shape,
    operation: str,
    moves: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
    inputs: Sequence[ShapeTensor] = (),
    kernel: str = STREAM,
    strides: Shape | None = None,
) -> ShapeTensor:
    """Allocates the output of an operation on `inputs` (default: `like`), without a graph node.

    `moves`: elements read and written per output element; 0: not counted as work. Small tensors are never counted.
    """
    tape, dtype = like.tape, dtype or like.dtype
    numel = math.prod(shape)
    if tape.phase == "forward":
        category, role = origin(tape, operation, inputs or (like,))
        storage = ShapeStorage(tape, numel * dtype.itemsize, category, role)
        tape.alive[id(storage)] = category, storage.bytes
    else:
        storage = ShapeStorage(tape, numel * dtype.itemsize, "", "")
    made = ShapeTensor(tape, storage, shape, strides or contiguous(shape), dtype, like.device)
    if moves and not made.is_small:
        tape.record_op(kernel, (numel,), dtype, moves)
    return made


def origin(tape: Tape, operation: str, inputs: Sequence[ShapeTensor]) -> tuple[str, str]:
    """(category, role) of an operation's output."""
    if tape.scope:
        return tape.scope, ""
    held = [x.storage for x in inputs if x.storage is not None]
    roles = [storage.role for storage in held if storage.role]
    return category_of(operation, roles, [storage.category for storage in held if not storage.role])


def record(
    make_it: Callable[[], ShapeTensor],
    inputs: Sequence[object],
    backward: Backward,
    saved: Tensors = (),
    saves_result: Callable[[ShapeTensor], Tensors] | None = None,
) -> ShapeTensor:
    """Returns the output of `make_it`, and records it if autograd is on.

    As in torch, inputs (`saved`) are saved before `make_it` runs, so that recomputation can stop early; outputs (`saves_result`)
    are saved afterwards.
    """
    if not records(*inputs):
        return make_it()
    tape = next(x.tape for x in inputs if isinstance(x, ShapeTensor))
    node = tape.node([x if isinstance(x, ShapeTensor) else None for x in inputs], 1, backward)
    tape.save(node, saved)
    made = make_it()
    made.node = node
    if saves_result is not None:
        tape.save(node, saves_result(made))
    return made


def _viewed(x: ShapeTensor, shape: Shape, strides: Shape, backward: Backward) -> ShapeTensor:
    if not records(x):
        return x.as_view(shape, strides)
    return x.as_view(shape, strides, x.tape.node([x], 1, backward))


def _reshaped(shape: Shape) -> Backward:
    """Backward function for a view."""
    return lambda gradients, _: [gradients[0].reshape(*shape)]


def _resolved(x: ShapeTensor, shape: Any) -> Shape:
    """Resolves -1 in a requested shape."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    if -1 not in shape:
        return tuple(shape)
    known = -math.prod(shape)
    return tuple(x.numel_ // known if n == -1 else n for n in shape)


@functools.lru_cache(maxsize=8192)
def contiguous(shape: Shape) -> Shape:
    """Row-major strides."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=8192)
def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of the same memory viewed with another shape; None if a copy is needed.

    Contiguous runs of dimensions can be regrouped; dimensions with a gap between them cannot be merged.
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


def leaf(
    tape: Tape, shape: Shape, dtype: torch.dtype, device: torch.device, role: str, grad_dtype: torch.dtype | None = None
) -> ShapeTensor:
    """Returns a weight with a role: a leaf of the graph, not counted in live bytes. `grad_dtype`: dtype in which its gradients are
    accumulated, if it differs from the weight's."""
    storage = ShapeStorage(_WEIGHTS_TAPE, 0, COPIES, role)  # counted as training state
    node = GraphNode(LEAF, (), 1, None, tape.place)
    node.widening = grad_dtype.itemsize // dtype.itemsize if grad_dtype else 1
    return ShapeTensor(tape, storage, shape, contiguous(shape), dtype, device, node)


_WEIGHTS_TAPE = Tape(0, 0)
"""A separate tape for weights, so that they are not counted."""
