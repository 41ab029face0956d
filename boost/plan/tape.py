"""A forward and a backward pass in sizes: what eager autograd holds and when, and what it does.

A `Sized` (`boost.plan.sized`) is a tensor of which only shape and dtype are known. It lives as a tensor lives, as long as something
refers to it: Python frames, what a node of the graph saved, gradients on their way. The decoder itself runs on such tensors, so
what it holds here is what it holds. `Tape.live` counts bytes, `Tape.peak` the most that there were, `Tape.work` operations and
`Tape.collectives` what is sent, by the phase in which they are done.

Like torch: the node made last runs first; what it saved goes when it has run; gradients that meet are added into a new tensor;
what a checkpointed function would save is made again when the first of it is asked for, up to the last of it.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from boost.config.traffic import STATISTIC_TERMS, Collective
from boost.plan.work import Counted, Work

if TYPE_CHECKING:
    from boost.plan.sized import Sized

Backward = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
"""(gradients of the results, what was saved) -> gradients of the inputs."""

LEAF = float("inf")
"""Number of a weight's node: it comes last in nobody's order, since it runs as soon as its gradient is there."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor's memory that is alive."""

    bytes: int
    category: str
    """Of `boost.plan.categories`."""
    made_by: str
    """The operation."""
    shape: tuple[int, ...]
    dtype: str
    place: str


class SizedStorage:
    """Bytes, from birth to death."""

    __slots__ = ("__weakref__", "bytes", "category", "role", "tape")

    def __init__(self, tape: "Tape", size: int, category: str, role: str) -> None:
        self.tape, self.bytes, self.category, self.role = tape, size, category, role
        live = tape.live = tape.live + size
        if live > tape.peak:
            tape.peak = live
        if live + tape.born > tape.first_peak:
            tape.first_peak = live + tape.born

    def __del__(self) -> None:
        self.tape.live -= self.bytes
        if self.category:
            self.tape.alive.pop(id(self), None)


class GraphNode:
    """A node of the graph. `number` orders the backward pass; -1 and LEAF are where it ends."""

    __slots__ = ("backward", "edges", "frame", "number", "place", "results", "saved")

    def __init__(
        self, number: float, inputs: Sequence[Any], results: int, backward: Backward | None, place: str
    ) -> None:
        self.number, self.results, self.backward, self.place = number, results, backward, place
        self.edges = [(x.node, x.index) if x is not None else (None, 0) for x in inputs]
        self.saved: Any = ()
        self.frame: Frame | None = None


class Frame:
    """One call of a checkpointed function."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], selective: bool, place: str) -> None:
        self.function, self.arguments, self.place = function, arguments, place
        self.selective = selective
        """Whether results of attention are saved all the same."""
        self.count = 0
        self.found: dict[int, Any] | None = None
        self.outputs: list[Any] = []
        """Of operations whose results are saved all the same."""
        self.replayed = 0


class _Enough(Exception):
    """All that a checkpointed function would have saved is there again."""


class Tape:
    """What is alive, what is done and what is sent. Weights, and gradients of weights that were added to those of an earlier
    micro-batch, are not counted among the living."""

    def __init__(self, tokens: int, largest: int, processes: int = 1) -> None:
        """`tokens` of the micro-batch, and the `largest` width of a vector: what has one number for each is too little to count
        as work, and so is the statistic that `processes` exchange."""
        self.live = self.peak = 0
        self.born = 0
        """Gradients of weights so far, where they are the first of a step and stay."""
        self.first_peak = 0
        """The peak where they stay."""
        self.alive: dict[int, Held] = {}
        self.place = ""
        """What operations from here on belong to, as `Work.place`; their gradients too."""
        self.scope = ""
        """If not empty: the category of everything that is made."""
        self.phase = "forward"
        self.times = 1
        """How often what is done from here on is done."""
        self.collectives: list[Collective] = []
        self.small = max(tokens, largest)
        self.tokens, self.statistic = tokens, STATISTIC_TERMS * processes * tokens
        self.put_off: list[Any] = []
        """Gradients from which those of weights are still to be made (zero bubble)."""
        self.entering: list[Any] = []
        """Gradients of what a backward pass began with."""
        self._done: Counter[tuple[Any, ...]] = Counter()
        self._number = itertools.count()
        self._frame: Frame | None = None
        self._again = False

    @property
    def work(self) -> Counted:
        """What was done."""
        return Counter(
            {
                Work.of(kernel, shape, name_of(dtype), moves, place, phase): times
                for (kernel, shape, dtype, moves, place, phase), times in self._done.items()
            }
        )

    def does(self, kernel: str, shape: tuple[int, ...], dtype: torch.dtype, moves: float = 0.0) -> None:
        """An operation, as `Work.of` takes it."""
        self._done[kernel, shape, dtype, moves, self.place, self.phase] += self.times

    def sends(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, processes: int) -> None:
        """A collective."""
        self.collectives += [Collective(self.phase, kind, shape, name_of(dtype), processes, self.place)] * self.times

    def node(self, inputs: Sequence[Any], results: int, backward: Backward | None) -> GraphNode:
        """A node behind all others."""
        return GraphNode(next(self._number), inputs, results, backward, self.place)

    # Checkpoints.

    def checkpoint(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Calls a function whose graph saves its arguments only."""
        return self._checkpoint(function, arguments, selective=False)

    def checkpoint_but_attention(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """The same, with what the attention kernel returned."""
        return self._checkpoint(function, arguments, selective=True)

    def _checkpoint(self, function: Callable[..., Any], arguments: Sequence[Any], selective: bool) -> Any:
        assert self._frame is None, "one checkpointed function in another"
        self._frame = Frame(function, arguments, selective, self.place)
        try:
            return function(*arguments)
        finally:
            self._frame = None

    def selected(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, or returned in the forward pass where a selective checkpoint saved it."""
        frame = self._frame
        if frame is None or not frame.selective:
            return make()
        if self._again:
            return frame.outputs.pop(0)
        made = make()
        frame.outputs.append(made)
        return made

    def save(self, node: GraphNode, saved: Sequence["Sized"]) -> None:
        """What a node asks for in its backward pass, in the order in which it is asked for here."""
        if not saved:
            return
        bare = [x.bare() for x in saved]
        frame = self._frame
        if frame is None:
            node.saved = (*node.saved, *bare)
            return
        if self._again:
            assert frame.found is not None
            for x in bare:
                frame.found[frame.replayed] = x
                frame.replayed += 1
            if frame.replayed == frame.count:
                raise _Enough
            return
        node.frame = frame
        node.saved = (*node.saved, *range(frame.count, frame.count + len(bare)))
        frame.count += len(bare)

    def _saved(self, node: GraphNode) -> Sequence["Sized"]:
        frame = node.frame
        if frame is None:
            result: Sequence[Sized] = node.saved
            return result
        if frame.found is None:
            self._recompute(frame)
        assert frame.found is not None
        return [frame.found.pop(number) for number in node.saved]

    def _recompute(self, frame: Frame) -> None:
        frame.found = {}
        self._frame, self._again = frame, True
        self.phase, self.place = "recompute", frame.place
        try:
            with torch.enable_grad():
                frame.function(*frame.arguments)
        except _Enough as enough:
            enough.__traceback__ = None  # it holds the frames, and they hold tensors
        finally:
            self._frame, self._again, self.phase = None, False, "backward"

    # The backward pass.

    def backward(self, roots: list[Any], gradients: list[Any], inputs_only: bool = False) -> None:
        """Runs the graph behind `roots`, and empties both lists.

        `inputs_only`: gradients of weights are put off, as zero bubble does: what was saved stays, and so does every gradient
        from which one of a weight is to be made.
        """
        self.phase = "backward"
        with torch.no_grad():
            self._backward(roots, gradients, inputs_only)
        self.phase = "forward"

    def _backward(self, roots: list[Any], gradients: list[Any], inputs_only: bool) -> None:
        waiting, useful = _edges(roots, inputs_only)
        arrived: dict[GraphNode, list[Any]] = {}
        ready: list[tuple[float, int, GraphNode]] = []
        order = itertools.count()

        def arrives(node: GraphNode, index: int, gradient: Any) -> None:
            slots = arrived.setdefault(node, [None] * node.results)
            if gradient is not None and slots[index] is not None:
                self.place = node.place or self.place
                gradient = slots[index] + gradient
            slots[index] = gradient if gradient is not None else slots[index]
            if not waiting[node]:
                heapq.heappush(ready, (-node.number, next(order), node))

        for x, gradient in zip(roots, gradients, strict=True):
            if x.node is not None:
                waiting[x.node] -= 1
                arrives(x.node, x.index, gradient)
        roots.clear()
        gradients.clear()
        x = gradient = None
        while ready:
            node = heapq.heappop(ready)[2]
            results = self._run(node, arrived.pop(node), inputs_only, useful)
            for i, (target, index) in enumerate(node.edges if results else ()):
                if target is not None and target in useful:
                    waiting[target] -= 1
                    arrives(target, index, results[i])
                results[i] = None

    def _run(self, node: GraphNode, gradients: list[Any], inputs_only: bool, useful: "set[GraphNode]") -> list[Any]:
        if node.backward is None:
            if node.number < 0:
                self.entering += [g for g in gradients if g is not None]
            else:
                born = sum(g.storage.bytes for g in gradients if g is not None)
                gradients.clear()
                self.born += born
            return []
        if inputs_only and any(target is not None and target not in useful for target, _ in node.edges):
            self.put_off += [g for g in gradients if g is not None]
        saved = self._saved(node)
        self.place = node.place
        results = node.backward(gradients, saved)
        del saved
        if not inputs_only:
            node.saved, node.frame = (), None
        return list(results)


def name_of(dtype: torch.dtype) -> str:
    """'bfloat16'."""
    return str(dtype)[6:]


def _edges(roots: Sequence[Any], inputs_only: bool) -> tuple[dict[GraphNode, int], set[GraphNode]]:
    """(number of gradients that each node waits for, the nodes to run) of a backward pass."""
    first = [x.node for x in roots if x.node is not None]
    order: list[GraphNode] = []
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
        for node in sorted(order, key=lambda node: node.number if node.backward else -1):  # inputs come before
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
