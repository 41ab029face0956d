"""What a training step really holds in memory, seen at the dispatcher: every storage from its birth to its death.

It works on real tensors and on fake ones, which have shapes and no memory: so the share of one process of a 7B model is
measured in seconds on a laptop, with the code that would run. The allocator's rounding and cuBLAS's workspaces come on top.
"""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config import Config
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.parallel.mesh import Axis, Mesh
from boost.plan.categories import GRADIENTS, KEPT, LOGITS, OPTIMIZER, WEIGHTS, WORK, category_of, short_role
from boost.train.model import build_decoder


class MemoryTracker(TorchDispatchMode):
    """Bytes of every tensor made while it is active, alive and at their peak, by category.

    The category follows from what a tensor is made of (`boost.plan.categories.category_of`). Set `scope` to put everything
    under one category instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scope = ""
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """The categories at the moment of the largest sum."""
        self._known: dict[int, _LiveStorage] = {}
        self._total = self._largest = 0
        self._lock = threading.RLock()  # what a collective held may die in a thread of gloo's

    def watch(self, tensor: Tensor, category: str, role: str = "") -> None:
        """Counts a tensor, already there or new, under a category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._known:
                self._forget(key)
            self._known[key] = _LiveStorage(
                category, role, storage.nbytes(), weakref.finalize(storage, self._forget, key)
            )
            self._known[key].finalizer.atexit = False
            self.live[category] += storage.nbytes()
            self._total += storage.nbytes()
            if self._total > self._largest:
                self._largest, self.peak = self._total, +self.live

    def settle(self) -> None:
        """Waits until nothing dies any more: gloo's threads let go of what they sent a moment after it has arrived."""
        before = -1
        while before != self._total:
            before = self._total
            time.sleep(0.1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            return args[0]  # a real one is waited for in place; torch's rule for fake ones makes another
        result = func(*args, **(kwargs or {}))
        made = [x for x in _pytree.tree_leaves(result) if isinstance(x, Tensor)]
        new = [x for x in made if x.untyped_storage()._cdata not in self._known and x.untyped_storage().nbytes()]
        if new:
            inputs = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            category, role = self._origin(func._schema.name.partition("::")[2], inputs)
            for tensor in new:
                self.watch(tensor, category, role)
        return result

    def _origin(self, operation: str, inputs: Iterable[Tensor]) -> tuple[str, str]:
        """(category, role) of what an operation makes of these inputs. Only what is made of weights alone has a role."""
        known = [self._known[key] for x in inputs if (key := x.untyped_storage()._cdata) in self._known]
        roles = [storage.role for storage in known if storage.role]
        if self.scope:
            return self.scope, ""
        return category_of(operation, roles, [storage.category for storage in known if not storage.role])

    def _forget(self, key: int) -> None:
        with self._lock:
            storage = self._known.pop(key, None)
            if storage is not None:
                storage.finalizer.detach()
                self.live[storage.category] -= storage.size
                self._total -= storage.size


@dataclass
class _LiveStorage:
    category: str
    role: str
    size: int
    finalizer: Any


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes alive on one process."""

    kept: dict[str, int]
    """By category, between the forward and the backward pass of a micro-batch; gradients behind the latter."""
    peak: dict[str, int]
    """By category, at the worst moment of the step."""

    @property
    def activations(self) -> dict[str, int]:
        """Of `kept`, what the forward pass leaves for the backward pass."""
        return {category: size for category, size in self.kept.items() if category in KEPT}


@dataclass(frozen=True)
class _FakeGroup:
    """A process group of which torch asks the name only: fake tensors are sent to nobody."""

    group_name: str = "nobody"


def fake_mesh(tp: int) -> Mesh:
    """The first of `tp` processes of which the others are not there: for fake tensors."""
    axis = Axis(0, tp, _FakeGroup() if tp > 1 else None)  # type: ignore[arg-type]
    return Mesh(torch.device("cpu"), {"tp": axis})


def measure(config: Config) -> MeasuredMemory:
    """One process's share of a training step, run on fake tensors: any model, without its memory and without processes.

    Takes one micro-batch, the last one: if the step has several, the gradients of the others are there already. The buckets
    in which gradients are summed over processes are not among it: they replace the gradients.
    """
    train = config.train
    accumulated = train.global_batch // (config.parallel.dp * train.micro_batch)
    with FakeTensorMode():
        mesh = fake_mesh(config.parallel.tp)
        decoder = build_decoder(config, mesh)
        for parameter in decoder.parameters() if accumulated > 1 else ():
            parameter.grad = torch.zeros_like(parameter)
        tokens_BS = torch.zeros(train.micro_batch, train.seq_len, dtype=torch.long)
        return measure_step(decoder, config, (tokens_BS, tokens_BS), mesh)


def measure_step(decoder: Decoder, config: Config, batch: tuple[Tensor, Tensor], mesh: Mesh) -> MeasuredMemory:
    """The same of a decoder that is there, on any tensors: a micro-batch, which adds to its gradients, and an update."""
    params = list(fused_params(decoder))
    optimizer = build_optimizer(params, config, mesh)
    tracker = MemoryTracker()
    for storage in params:
        tracker.watch(storage.tensor, WEIGHTS, short_role(storage.slices[0].parameter.role))
        if storage.tensor.grad is not None:
            tracker.watch(storage.tensor.grad, GRADIENTS)
    for value in optimizer.state_tensors():
        tracker.watch(value, OPTIMIZER)
    hooks = [s.tensor.register_post_accumulate_grad_hook(lambda p: tracker.watch(p.grad, GRADIENTS)) for s in params]
    usual = decoder.layout.loss

    def loss(*arguments: Any) -> Tensor:
        tracker.scope = LOGITS
        return usual(*arguments)

    decoder.layout.loss = loss  # type: ignore[method-assign, assignment]
    try:
        with tracker:
            total = decoder(*batch)
            if not isinstance(total, FakeTensor):
                tracker.settle()
            kept = dict(+tracker.live)
            tracker.scope = WORK
            total.backward()
            kept[GRADIENTS] = tracker.live[GRADIENTS]
            optimizer.step(0, config.optim.lr)
    finally:
        decoder.layout.loss = usual  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return MeasuredMemory(kept, dict(tracker.peak))
