"""Measures the memory of a training step at the dispatcher by tracking every storage from allocation to release.

Works on real and on fake tensors. Allocator rounding and cuBLAS workspaces are not included.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from boost.plan.categories import category_of


class MemoryTracker(TorchDispatchMode):
    """Counts live and peak bytes, by category, for every tensor allocated while it is active.

    The category follows from the operation's inputs (`boost.plan.categories.category_of`). Set `scope` to assign all tensors to
    one category instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scope = ""
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """Bytes by category at the peak."""
        self._known: dict[int, _LiveStorage] = {}
        self._total = self._largest = 0
        self._lock = threading.RLock()  # gloo threads may release a collective's tensors

    def watch(self, tensor: Tensor, category: str, role: str = "") -> None:
        """Counts a tensor, existing or new, in a category."""
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            return args[0]  # real tensors wait in place, but torch's fake rule returns another tensor
        result = func(*args, **(kwargs or {}))
        made = [x for x in _pytree.tree_leaves(result) if isinstance(x, Tensor)]
        name = func._schema.name.partition("::")[2]
        if isinstance(out := (kwargs or {}).get("out"), Tensor):
            self._write(out, *self._origin(name, args))
        new = [x for x in made if x.untyped_storage()._cdata not in self._known and x.untyped_storage().nbytes()]
        if new:
            inputs = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            category, role = self._origin(name, inputs)
            for tensor in new:
                self.watch(tensor, category, role)
        return result

    def _write(self, out: Tensor, category: str, role: str) -> None:
        """Handles a write into `out`: uninitialized memory takes the category of the written data."""
        with self._lock:
            storage = self._known.get(out.untyped_storage()._cdata)
            if storage is not None:
                self.live[storage.category] -= storage.size
                storage.category, storage.role = category, role
                self.live[category] += storage.size

    def _origin(self, operation: str, inputs: Iterable[object]) -> tuple[str, str]:
        """(category, role) of an operation's output. Only tensors computed from weights alone have a role."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        known = [self._known[key] for x in tensors if (key := x.untyped_storage()._cdata) in self._known]
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
    finalizer: weakref.finalize
