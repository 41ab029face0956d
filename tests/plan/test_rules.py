"""Rules that a family's mathematics needs: each keeps the memory that torch keeps, in both passes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import boost
from boost.elementwise import ELEMENTWISE
from boost.measure.memory import MemoryTracker
from boost.plan import work
from boost.plan.shape_tensor import NoRuleError, ShapeTensor, contiguous, make
from boost.plan.tape import GraphNode, Tape
from boost.plan.tracer import _Rules

SHAPE, CPU = (6, 8), torch.device("cpu")
INDEX = torch.tensor([1, 4, 5])
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    """Element-wise functions that a test declares are forgotten after it."""
    usual = dict(ELEMENTWISE)
    yield
    ELEMENTWISE.clear()
    ELEMENTWISE.update(usual)


def size_only(tape: Tape, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ShapeTensor:
    return make(ShapeTensor(tape, None, shape, contiguous(shape), dtype, CPU), shape, "")


def of_the_tape(function: Function) -> tuple[int, int, tuple[int, ...]]:
    """(bytes alive after the forward pass; at the peak of both passes; shape of the gradient), without z and dy."""
    tape = Tape(1, 1)
    z, index = size_only(tape, SHAPE), size_only(tape, tuple(INDEX.shape), INDEX.dtype)
    z.node = GraphNode(-1, (), 1, None, "")
    before = tape.live
    with _Rules(tape, CPU):
        y = function(z, index)
        held, forward = tape.live - before, tape.peak - before
        dy = size_only(tape, y.shape)
        backward, *_ = tape.backward([y.without_storage()], [dy])
    return held, max(forward, held + backward), tape.input_gradients[0].shape


def of_torch(function: Function) -> tuple[int, int, tuple[int, ...]]:
    z = torch.randn(SHAPE, requires_grad=True)
    dy = torch.ones_like(function(z, INDEX))
    tracker = MemoryTracker()
    for x in (z, dy):
        tracker.watch(x, "")
    before = tracker.live.total()
    with tracker:
        y = function(z, INDEX)
        held = tracker.live.total() - before
        (dz,) = torch.autograd.grad(y, z, dy)
    return held, tracker.peak.total() - before, tuple(dz.shape)


ACTIVATIONS: dict[str, tuple[Function, bool]] = {
    "gelu": (F.gelu, False),
    "softplus": (F.softplus, False),
    "relu": (F.relu, True),
    "sigmoid": (torch.sigmoid, True),
    "tanh": (torch.tanh, True),
}
FAMILIES: dict[str, Function] = {
    "gated": lambda z, _: F.silu(z.chunk(2, dim=-1)[0]) * z.chunk(2, dim=-1)[1],
    "gated, with functions": lambda z, _: F.silu(torch.chunk(z, 2, -1)[0]) * torch.narrow(z, 1, 4, 4),
    "parts": lambda z, _: torch.cat((F.silu(z[:, :5]), z[:, 5:] * 0.5), dim=-1),
    "one part": lambda z, _: z[:, 2:5] * 2.0,
    "one column": lambda z, _: z[:, 2] * 2.0,
    "a new dimension": lambda z, _: z[None, 1:3] * 2.0,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_families_compute_keeps_torchs_memory(name: str) -> None:
    assert of_the_tape(FAMILIES[name]) == of_torch(FAMILIES[name])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_declared_activation_keeps_torchs_memory(name: str) -> None:
    function, saves_result = ACTIVATIONS[name]
    boost.elementwise_rule(function, saves_result=saves_result)
    expressions: list[Function] = [lambda z, _: function(z), lambda z, _: function(z * 2.0) * 3.0]
    if hasattr(torch.Tensor, name):
        expressions.append(lambda z, _: getattr(z, name)())  # a method is the same function
    for expression in expressions:
        assert of_the_tape(expression) == of_torch(expression)


def test_a_declared_activation_is_as_fast_as_silu() -> None:
    boost.elementwise_rule(F.gelu, backward=torch.ops.aten.gelu_backward)
    logs = []
    for function, backward in ((F.gelu, torch.ops.aten.gelu_backward), (F.silu, torch.ops.aten.silu_backward)):
        tape = Tape(1, 1)
        z, dy = size_only(tape, SHAPE), size_only(tape, SHAPE)
        with _Rules(tape, CPU):
            function(z), backward(dy, z)  # as in a hand-written node
            z.node = GraphNode(-1, (), 1, None, "")
            y: Any = function(z)
            tape.backward([y.without_storage()], [dy])
        logs.append(tape.log)
    assert logs[0] == logs[1]
    assert [operation.kernel for operation in logs[0]] == 2 * [work.SILU, work.SILU_BACKWARD]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda z: F.gelu(z), "gelu"),
        (lambda z: z.erf(), "erf"),
        (lambda z: 1.0 - z, "rsub"),
        (lambda z: z - 1.0, "sub"),
    ],
    ids=["function", "method", "operator", "operator under autograd"],
)
def test_the_error_names_the_operation_and_the_fix(function: Function, name: str) -> None:
    tape = Tape(1, 1)
    z = size_only(tape, SHAPE)
    z.node = GraphNode(-1, (), 1, None, "")
    with pytest.raises(NoRuleError, match=rf"no rule for '{name}'.*; boost.elementwise_rule adds one") as error:
        function(z)
    assert isinstance(error.value, boost.BoostError), "so commands print one line"
    boost.elementwise_rule(getattr(torch, name, F.gelu))
    assert function(z).shape == SHAPE


@pytest.mark.parametrize("key", [slice(None, None, 2), [0, 2]], ids=str)
def test_other_indexing_is_refused(key: Any) -> None:
    with pytest.raises(NoRuleError, match="no rule for"):
        size_only(Tape(1, 1), SHAPE)[key]
