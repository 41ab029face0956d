"""Emulates eager autograd without data: the operations and allocations in a forward and a backward pass.

A `ShapeTensor` (`boost.plan.shape_tensor`) has a shape and a dtype but no data. Like a real tensor, it lives as long as something
references it: Python frames, saved tensors, gradients in flight. The real decoder runs on such tensors, so the memory estimate
comes from the real code. `Tape.live` counts live bytes and `Tape.peak` is their maximum in a pass; `Tape.log` lists operations, and
`Tape.collectives` lists collectives with their phases.

As in torch, the backward pass runs the latest node first, frees its saved tensors afterwards, and accumulates gradients out of
place. It recomputes a checkpointed function when its first saved tensor is needed, and stops at the last saved tensor. (Torch's own
autograd on meta tensors takes several times as long, and a search traces hundreds of blocks. A test holds the tape to it.)
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from boost.config.traffic import STATISTIC_TERMS, Collective
from boost.plan.work import Counted, Work

ShapeTensor = Any
"""A `boost.plan.shape_tensor.ShapeTensor`, whose module imports this one."""

_T = TypeVar("_T")

Operand: TypeAlias = ShapeTensor | float
Tensors = Sequence[ShapeTensor]
Gradients = Sequence[ShapeTensor | None]
"""None: no gradient."""
Backward = Callable[[Tensors, Tensors], Gradients]
"""(gradients of the outputs, saved tensors) -> gradients of the inputs. A node with one output has its gradient."""

LEAF = float("inf")
"""`GraphNode.number` of a weight: its node runs as soon as its gradient is available."""


class Operation(NamedTuple):
    """One entry in the log: the arguments of `Work.of`, and how often the operation runs."""

    shape: tuple[int, ...]
    kernel: str
    dtype: torch.dtype
    moves: float
    place: str
    phase: str
    times: int


class Flight(NamedTuple):
    """The start of a collective, or the wait for it."""

    before: int
    """Number of operations in the log before it."""
    number: int
    """Index of the collective, or of its first run if it runs several times."""
    times: int
    waited: bool


def work_of(log: Iterable[Operation]) -> Counted:
    """Counts how often each operation in a log runs."""
    counts: dict[Operation, int] = {}
    for operation in log:
        counts[operation] = counts.get(operation, 0) + operation.times
    work: Counted = Counter()
    for (shape, kernel, dtype, moves, place, phase, _), times in counts.items():
        work[Work.of(kernel, shape, name_of(dtype), moves, place, phase)] += times
    return work


class ShapeStorage:
    """The memory of a tensor, which counts as live until it is garbage-collected."""

    __slots__ = ("__weakref__", "bytes", "category", "role", "tape")

    def __init__(self, tape: "Tape", size: int, category: str, role: str) -> None:
        self.tape, self.bytes, self.category, self.role = tape, size, category, role
        live = tape.live = tape.live + size
        tape.peak = max(tape.peak, live)
        tape.first_peak = max(tape.first_peak, live + tape.new_gradients)

    def __del__(self) -> None:
        self.tape.live -= self.bytes
        if self.category:
            self.tape.alive.pop(id(self), None)


class GraphNode:
    """A node in the autograd graph. `number` orders the backward pass; inputs have -1 and weights have LEAF."""

    __slots__ = ("backward", "edges", "frame", "number", "numbers", "place", "results", "saved", "widening")

    def __init__(self, number: float, inputs: Gradients, results: int, backward: Backward | None, place: str) -> None:
        self.number, self.results, self.backward, self.place = number, results, backward, place
        self.edges = [(x.node, x.index) if x is not None else (None, 0) for x in inputs]
        self.saved: Tensors = ()
        self.frame: CheckpointFrame | None = None
        self.numbers: tuple[int, ...] = ()
        """Numbers of the saved tensors in `frame`."""
        self.widening = 1
        """For a working copy: size of the stored gradient relative to the incoming one, which is released after the cast."""


class CheckpointFrame:
    """One call to a checkpointed function."""

    def __init__(
        self,
        function: Callable[..., object],
        arguments: Sequence[object],
        selective: bool,
        to_the_end: bool,
        place: str,
    ) -> None:
        self.function, self.arguments, self.place = function, arguments, place
        self.selective = selective
        """Whether attention outputs are saved instead of recomputed."""
        self.to_the_end = to_the_end
        """Whether it is recomputed to the end, instead of up to the last saved tensor."""
        self.count = 0
        self.recomputed: dict[int, ShapeTensor] | None = None
        self.outputs: list[Tensors] = []
        """Saved outputs of operations that are not recomputed."""
        self.replayed = 0


class _StopRecompute(Exception):
    """All saved tensors of a checkpointed function have been recomputed."""


class Tape:
    """Records live memory, operations and collectives.

    Live bytes exclude weights, and weight gradients that are accumulated into existing ones.
    """

    def __init__(self, tokens: int, largest: int, processes: int = 1) -> None:
        """`tokens`: tokens per micro-batch. `largest`: width of the longest vector.

        Tensors up to either size are too small to count as work, as is the norm statistic that `processes` processes exchange.
        """
        self.live = 0
        self.peak = 0
        """Largest number of live bytes in the pass."""
        self.new_gradients = 0
        """Bytes of weight gradients so far, for a first micro-batch, whose gradients stay allocated."""
        self.first_peak = 0
        """`peak` for a first micro-batch, whose weight gradients stay allocated."""
        self.alive: dict[int, tuple[str, int]] = {}
        """(category, bytes) of each live storage in a forward pass, by the id of the storage."""
        self.place = ""
        """`Work.place` of the operations that follow, and of their gradients."""
        self.scope = ""
        """If not empty: the category of all new tensors."""
        self.phase = "forward"
        self.times = 1
        """How often the operations that follow run."""
        self.collectives: list[Collective] = []
        self.small = max(tokens, largest)
        self.tokens, self.statistic = tokens, STATISTIC_TERMS * processes * tokens
        self.input_gradients: list[ShapeTensor] = []
        """Gradients for the pass's inputs."""
        self.log: list[Operation] = []
        """All operations, in order."""
        self.flights: list[Flight] = []
        """Starts of collectives and waits for them, in order."""
        self._in_flight: dict[int, int] = {}
        """Indices of collectives, by the ids of their results' storages."""
        self._number = itertools.count()
        self._frame: CheckpointFrame | None = None
        self._recomputing = False

    def begin_pass(self) -> None:
        """Starts tracking the peak of a pass."""
        self.peak = self.first_peak = self.live
        self.new_gradients = 0

    def record_op(self, kernel: str, shape: tuple[int, ...], dtype: torch.dtype, moves: float = 0.0) -> None:
        """Records an operation. Arguments are those of `Work.of`."""
        self.log.append(Operation(shape, kernel, dtype, moves, self.place, self.phase, self.times))

    @contextmanager
    def unrecorded(self) -> Iterator[list[Operation]]:
        """Context manager: records operations only in the list it yields. Memory allocated inside must be freed inside."""
        before, done = len(self.log), list[Operation]()
        peaks, live = (self.peak, self.first_peak), self.live
        try:
            yield done
        finally:
            done += self.log[before:]
            del self.log[before:]
            self.peak, self.first_peak = peaks
            assert self.live == live, "memory was not freed"

    def record_collective(
        self, kind: str, shape: tuple[int, ...], processes: int, axis: str, result: ShapeTensor
    ) -> None:
        """Records the start of a collective, which is in flight until `wait`."""
        self._in_flight[id(result.storage)] = len(self.collectives)
        self.flights.append(Flight(len(self.log), len(self.collectives), self.times, waited=False))
        sent = Collective(self.phase, kind, shape, name_of(result.dtype), processes, self.place, axis=axis)
        self.collectives += [sent] * self.times

    def record(self) -> tuple[tuple[Operation, ...], tuple[Collective, ...], tuple[Flight, ...]]:
        """Returns all operations and collectives so far, and when each collective was in flight."""
        return tuple(self.log), tuple(self.collectives), tuple(self.flights)

    def wait(self, result: ShapeTensor) -> None:
        """Records the wait for the collective with this result."""
        number = self._in_flight.pop(id(result.storage))
        self.flights.append(Flight(len(self.log), number, self.times, waited=True))

    def node(self, inputs: Gradients, results: int, backward: Backward | None) -> GraphNode:
        return GraphNode(next(self._number), inputs, results, backward, self.place)

    # Activation checkpointing.

    def checkpoint(
        self, function: Callable[..., _T], /, *arguments: object, selective: bool = False, to_the_end: bool = False
    ) -> _T:
        """Calls a function, and saves only its arguments and, if `selective`, attention outputs. `to_the_end`: recomputation
        runs to the end, even if nothing needs the last results."""
        assert self._frame is None, "nested checkpointed functions"
        self._frame = CheckpointFrame(function, arguments, selective, to_the_end, self.place)
        try:
            return function(*arguments)
        finally:
            self._frame = None

    def selected(self, make: Callable[[], Tensors]) -> Tensors:
        """Returns the result of `make`, or its saved result during a selective recomputation."""
        frame = self._frame
        if frame is None or not frame.selective:
            return make()
        if self._recomputing:
            return frame.outputs.pop(0)
        made = make()
        frame.outputs.append(made)
        return made

    def save(self, node: GraphNode, saved: Tensors) -> None:
        """Saves tensors for the backward pass of a node."""
        if not saved:
            return
        bare = [x.without_graph() for x in saved]
        frame = self._frame
        if frame is None:
            node.saved = (*node.saved, *bare)
            return
        if self._recomputing:
            assert frame.recomputed is not None
            for x in bare:
                frame.recomputed[frame.replayed] = x
                frame.replayed += 1
            if frame.replayed == frame.count and not frame.to_the_end:
                raise _StopRecompute
            return
        node.frame = frame
        node.numbers = (*node.numbers, *range(frame.count, frame.count + len(bare)))
        frame.count += len(bare)

    def _saved(self, node: GraphNode) -> Tensors:
        frame = node.frame
        if frame is None:
            return node.saved
        if frame.recomputed is None:
            frame.recomputed = {}
            self._frame, self._recomputing = frame, True
            self.phase, self.place = "recompute", frame.place
            try:
                with torch.enable_grad():
                    frame.function(*frame.arguments)
            except _StopRecompute as enough:
                enough.__traceback__ = None  # its frames would keep tensors alive
            finally:
                self._frame, self._recomputing, self.phase = None, False, "backward"
        return [frame.recomputed.pop(number) for number in node.numbers]

    # The backward pass.

    def backward(self, roots: list[ShapeTensor], gradients: list[ShapeTensor]) -> tuple[int, int, int]:
        """Runs the backward pass from `roots`, and empties both lists. Returns its peaks in bytes above what is live at its start,
        for a later micro-batch and for the first one, and the bytes of weight gradients."""
        held = self.live
        self.begin_pass()
        self.phase = "backward"
        with torch.no_grad():
            self._backward(roots, gradients)
        self.phase = "forward"
        return self.peak - held, self.first_peak - held, self.new_gradients

    def _backward(self, roots: list[ShapeTensor], gradients: list[ShapeTensor]) -> None:
        waiting = _pending(roots)
        incoming: dict[GraphNode, list[ShapeTensor | None]] = {}
        ready: list[tuple[float, int, GraphNode]] = []
        order = itertools.count()

        def add_gradient(node: GraphNode, index: int, gradient: ShapeTensor | None) -> None:
            slots = incoming.setdefault(node, [None] * node.results)
            former = slots[index]
            if gradient is not None and former is not None:
                self.place = node.place or self.place
                gradient = former + gradient
            slots[index] = gradient if gradient is not None else former
            if not waiting[node]:
                heapq.heappush(ready, (-node.number, next(order), node))

        for x, gradient in zip(roots, gradients, strict=True):
            if x.node is not None:
                waiting[x.node] -= 1
                add_gradient(x.node, x.index, gradient)
        roots.clear()
        gradients.clear()
        del x, gradient  # their memory is freed as the pass goes on
        while ready:
            node = heapq.heappop(ready)[2]
            results = self._run(node, incoming.pop(node))
            for i, (target, index) in enumerate(node.edges if results else ()):
                if target is not None:
                    waiting[target] -= 1
                    add_gradient(target, index, results[i])
                results[i] = None

    def _run(self, node: GraphNode, gradients: list[ShapeTensor | None]) -> list[ShapeTensor | None]:
        if node.backward is None:
            if node.number < 0:
                self.input_gradients += [g for g in gradients if g is not None]
            else:
                new_bytes = node.widening * sum(
                    g.storage.bytes for g in gradients if g is not None and g.storage is not None
                )
                if node.widening > 1:
                    self.first_peak = max(self.first_peak, self.live + self.new_gradients + new_bytes)
                gradients.clear()
                self.new_gradients += new_bytes
            return []
        saved = self._saved(node)
        self.place = node.place
        results = node.backward(gradients, saved)
        del saved
        node.saved, node.frame = (), None
        return list(results)


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype, such as 'bfloat16'."""
    return str(dtype)[6:]


def _pending(roots: Tensors) -> dict[GraphNode, int]:
    """Number of pending gradients for each node that a backward pass runs."""
    first = [x.node for x in roots if x.node is not None]
    reached, waiting = list(first), dict.fromkeys(first, 0)
    while reached:
        for target, _ in reached.pop().edges:
            if target is not None:
                if target not in waiting:
                    waiting[target] = 0
                    reached.append(target)
                waiting[target] += 1
    for node in first:
        waiting[node] += 1
    return waiting
