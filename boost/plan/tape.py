"""Tensors and operations of a forward and a backward pass, in sizes alone: what eager autograd would hold and when, what it does.

An `Array` is a tensor of which only the size is known. It lives as a tensor lives, as long as something refers to it: Python
frames, what a node of the graph saved, gradients on their way. So a function written on arrays, the way it is written on
tensors, holds what that one holds. `Tape.live` counts bytes, `Tape.peak` the most that there were. Where arrays are made it is said
how: `Tape.work` counts operations, by the phase in which they are done. Those on one number a token are left out.

Like torch: the node made last runs first; what it saved goes when it has run; gradients that meet are added into a new tensor;
what a checkpointed function would save is made again when the first of it is asked for, up to the last of it.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from boost.config.traffic import ITEMSIZE
from boost.plan.work import STREAM, Counted, Work

Gradients = Sequence["Array | None"]
Backward = Callable[["Tape", list[Any], Sequence[Any]], Gradients]
"""(tape, gradients of the results, what was saved) -> gradients of the inputs."""


class _Storage:
    """Bytes, from birth to death."""

    __slots__ = ("bytes", "tape")

    def __init__(self, tape: "Tape", size: int) -> None:
        self.tape, self.bytes = tape, size
        tape.live += size
        tape.peak = max(tape.peak, tape.live)

    def __del__(self) -> None:
        self.tape.live -= self.bytes


class Array:
    """A tensor that has a size."""

    __slots__ = ("dtype", "elements", "node", "place", "storage")

    def __init__(self, storage: Any, elements: int, dtype: str, node: "_Node | None" = None, place: int = 0) -> None:
        self.storage, self.elements, self.dtype = storage, elements, dtype
        self.node, self.place = node, place

    def part(self, elements: int) -> "Array":
        """A view of some of it, of which nobody asks a gradient."""
        return Array(self.storage, elements, self.dtype)

    def bare(self) -> "Array":
        """Its place in the graph, without holding its bytes: of what someone else has."""
        return Array(None, self.elements, self.dtype, self.node, self.place)


class _Node:
    __slots__ = ("backward", "edges", "frame", "number", "results", "saved", "work_place")

    def __init__(
        self, number: float, inputs: Sequence[Array], results: int, backward: Backward | None, work_place: str
    ) -> None:
        self.number, self.results, self.backward, self.work_place = number, results, backward, work_place
        self.edges = [(x.node, x.place) for x in inputs]
        self.saved: Any = ()
        self.frame: _Frame | None = None


class _Frame:
    """One call of a checkpointed function."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], work_place: str) -> None:
        self.function, self.arguments, self.work_place = function, arguments, work_place
        self.count = 0
        self.found: dict[int, Array] | None = None
        self.outputs: list[Any] = []
        """Of operations whose results are kept all the same."""
        self.replayed = 0


class _Enough(Exception):
    """All that a checkpointed function would have saved is there again."""


class Tape:
    """What is alive, and what is done. Weights and their gradients that are there already are not counted."""

    def __init__(self, accumulates: bool, records: bool = False) -> None:
        """`accumulates`: gradients of weights are added to those of an earlier micro-batch, and do not stay themselves (adding
        them up is work of the step, not of a pass). `records`: operations are counted."""
        self.live = self.peak = 0
        self.place = ""
        """What operations from here on belong to, as `Work.place`; their gradients too."""
        self._records, self._phase = records, "forward"
        self._done: Counter[tuple[Any, ...]] = Counter()
        self.accumulates = accumulates
        self.gradients: list[Array] = []
        """Of what a backward pass began with, and new ones of weights."""
        self.put_off: list[Array] = []
        """Gradients from which those of weights are still to be made."""
        self._number = itertools.count()
        self._frame: _Frame | None = None
        self._again = False

    @property
    def work(self) -> Counted:
        """What was done."""
        return Counter({Work.of(*done): times for done, times in self._done.items()})

    def does(self, kernel: str, shape: tuple[int, ...], dtype: str, moves: float = 0.0, calls: int = 1) -> None:
        """An operation, as `Work.of` takes it."""
        if self._records:
            self._done[kernel, shape, dtype, moves, self.place, self._phase] += calls

    def new(self, elements: int, dtype: str, moves: float = 0.0, kernel: str = STREAM) -> Array:
        """A tensor without history. `moves`: numbers read and written to make it, for each of its own; 0: none by this process,
        or so few that they do not count."""
        if moves and self._records:
            self.does(kernel, (elements,), dtype, moves)
        return Array(_Storage(self, elements * ITEMSIZE[dtype]), elements, dtype)

    def leaf(self, elements: int, dtype: str) -> Array:
        """A weight."""
        return Array(None, elements, dtype, _Node(float("inf"), (), 1, None, self.place))

    def entered(self, x: Array) -> Array:
        """The same tensor as what a pass over some blocks begins with, whose gradient is asked for."""
        node = _Node(-1, (), 1, None, self.place)
        node.edges = []
        return Array(x.storage, x.elements, x.dtype, node)

    def apply(
        self,
        inputs: Sequence[Array],
        results: Sequence[tuple[int, str]],
        backward: Backward,
        saved: Sequence[Array] = (),
        keeps: bool = False,
        custom: bool = False,
        work: Sequence[tuple[int, str]] = (),
        view: bool = False,
        selected: bool = False,
        moves: float = 0.0,
        kernel: str = STREAM,
        shape: tuple[int, ...] = (),
    ) -> list[Array]:
        """Results of an operation. `keeps`: it saves them too. `custom`: a Python function, which saves when it is through;
        torch's own save their inputs first. `work`: what it makes beside its results. `view`: results are views of the
        first input. `selected`: results are kept even where the function is computed again. `moves` and `kernel` of the first
        result as of `new`, or `kernel` and `shape` as of `does`."""
        node = _Node(next(self._number), inputs, len(results), backward, self.place)
        if not custom:
            self._save(node, saved)
        working = [self.new(*size) for size in work]
        made = self._replay(selected)
        if made is None:
            if self._records and (moves or shape):
                self.does(kernel, shape or results[0][:1], results[0][1], moves)
            made = [inputs[0].storage for _ in results] if view else [self.new(*s).storage for s in results]
            if selected and self._frame is not None:
                self._frame.outputs.append(made)
        arrays = [Array(s, n, dtype, node, i) for i, (s, (n, dtype)) in enumerate(zip(made, results, strict=True))]
        del working
        if custom or keeps:
            bare = [Array(x.storage, x.elements, x.dtype) for x in arrays] if keeps else []
            self._save(node, [*(saved if custom else ()), *bare])
        return arrays

    def checkpoint(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function whose graph keeps its arguments only."""
        assert self._frame is None, "one checkpointed function in another"
        self._frame = _Frame(function, arguments, self.place)
        try:
            return function(*arguments)
        finally:
            self._frame = None

    def backward(self, roots: list[Array], gradients: list[Any], inputs_only: bool = False) -> None:
        """Runs the graph behind `roots`, and empties both lists.

        `inputs_only`: gradients of weights are put off, as zero bubble does: what was saved stays, and so does every gradient
        from which one of a weight is to be made.
        """
        self._phase = "backward"
        waiting, useful = _edges(roots, inputs_only)
        arrived: dict[_Node, list[Any]] = {}
        ready: list[tuple[float, int, _Node]] = []
        order = itertools.count()

        def arrives(node: _Node, place: int, gradient: Any) -> None:
            slots = arrived.setdefault(node, [None] * node.results)
            if gradient is not None and slots[place] is not None:
                self.place = node.work_place or self.place
                gradient = self.new(gradient.elements, gradient.dtype, 3)
            slots[place] = gradient or slots[place]
            if not waiting[node]:
                heapq.heappush(ready, (-node.number, next(order), node))

        for x, gradient in zip(roots, gradients, strict=True):
            if x.node is not None:
                waiting[x.node] -= 1
                arrives(x.node, x.place, gradient)
        roots.clear()
        gradients.clear()
        x = gradient = None  # type: ignore[assignment]
        while ready:
            node = heapq.heappop(ready)[2]
            results = self._run(node, arrived.pop(node), inputs_only, useful)
            for i, (target, place) in enumerate(node.edges if results else ()):
                if target is not None and target in useful:
                    waiting[target] -= 1
                    arrives(target, place, results[i])
                results[i] = None
        self._phase = "forward"

    def _run(self, node: _Node, gradients: list[Any], inputs_only: bool, useful: "set[_Node]") -> list[Any]:
        if node.backward is None:
            if node.number < 0 or not self.accumulates:
                self.gradients += [g for g in gradients if g is not None]
            return []
        if inputs_only and any(target is not None and target not in useful for target, _ in node.edges):
            self.put_off += [g for g in gradients if g is not None]
        saved = self._saved(node)
        self.place = node.work_place
        results = node.backward(self, gradients, saved)
        del saved
        if not inputs_only:
            node.saved, node.frame = (), None
        return list(results)

    def _save(self, node: _Node, saved: Sequence[Array]) -> None:
        bare = [Array(x.storage, x.elements, x.dtype) for x in saved]
        frame = self._frame
        if frame is None:
            node.saved = (*node.saved, *bare)
            return
        if self._again:
            assert frame.found is not None
            for x in bare:
                frame.found[frame.replayed] = x
                frame.replayed += 1
            if frame.replayed == frame.count and bare:
                raise _Enough
            return
        node.frame = frame
        node.saved = (*node.saved, *range(frame.count, frame.count + len(bare)))
        frame.count += len(bare)

    def _saved(self, node: _Node) -> Sequence[Array]:
        frame = node.frame
        if frame is None:
            result: Sequence[Array] = node.saved
            return result
        if frame.found is None:
            self._recompute(frame)
        assert frame.found is not None
        return [frame.found.pop(number) for number in node.saved]

    def _recompute(self, frame: _Frame) -> None:
        frame.found = {}
        self._frame, self._again = frame, True
        self._phase, self.place = "recompute", frame.work_place
        try:
            frame.function(*frame.arguments)
        except _Enough as enough:
            enough.__traceback__ = None  # it holds the frames, and they hold arrays
        finally:
            self._frame, self._again, self._phase = None, False, "backward"

    def _replay(self, selected: bool) -> list[Any] | None:
        if not (selected and self._again and self._frame is not None):
            return None
        found: list[Any] = self._frame.outputs.pop(0)
        return found


def _edges(roots: Sequence[Array], inputs_only: bool) -> tuple[dict[_Node, int], set[_Node]]:
    """(number of gradients that each node waits for, the nodes to run) of a backward pass."""
    first = [x.node for x in roots if x.node is not None]
    order: list[_Node] = []
    reached, seen = list(first), set(first)
    while reached:
        node = reached.pop()
        order.append(node)
        for target, _ in node.edges:
            if target is not None and target not in seen:
                seen.add(target)
                reached.append(target)
    useful = seen
    if inputs_only:
        useful = set()
        for node in sorted(
            order, key=lambda node: node.number if node.backward else -1
        ):  # inputs of a node come before it
            begins = node.backward is None and node.number < 0
            if begins or any(target in useful for target, _ in node.edges):
                useful.add(node)
    waiting = dict.fromkeys(useful, 0)
    for node in order:
        for target, _ in node.edges if node in useful else ():
            if target is not None and target in useful:
                waiting[target] += 1
    for node in first:
        waiting[node] += 1
    return waiting, useful
