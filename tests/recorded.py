"""CUDA graphs in software: records the operations and collectives of a pass on a CPU, and runs them again on the same memory.

As on a GPU, nothing runs during a capture: results are NaN until the first replay, and reading one on the host is an error. A
replay fails if it uses memory that was allocated before the capture and freed since. Unlike in a GPU's pool, no memory is reused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from boost.train import graphs

WAIT = torch.ops._c10d_functional.wait_tensor.default


class Place(NamedTuple):
    """A tensor's memory, which it does not keep alive."""

    storage: StorageWeakRef
    dtype: torch.dtype
    view: tuple[int, torch.Size, tuple[int, ...]]
    """Offset, shape and strides."""

    @classmethod
    def of(cls, x: Tensor) -> "Place":
        return cls(StorageWeakRef(x.untyped_storage()), x.dtype, (x.storage_offset(), x.shape, x.stride()))

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        if storage is None:
            raise RuntimeError("a replay uses memory that was freed after the capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)  # type: ignore[call-overload]


class RecordedGraph(TorchDispatchMode):
    """A `boost.train.graphs.CudaGraph` on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any], Any, list[Any]]] = []
        """Operation, flat arguments and their structure, results; tensors as places."""
        self.replays = 0
        self._pool: list[torch.UntypedStorage] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        with self:
            yield

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for op, flat, structure, results in self.calls:
                here = [x.tensor() if isinstance(x, Place) else x for x in flat]
                args, kwargs = tree_unflatten(here, structure)
                made = tree_leaves(op(*args, **kwargs))
                for x, place in zip(made, results, strict=bool(results)):
                    place.tensor().copy_(WAIT(x))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: the host reads a number")
        aliases = [info for argument in op._schema.arguments if (info := argument.alias_info)]
        if aliases and not any(info.is_write for info in aliases):
            return op(*args, **kwargs)  # a view
        flat, structure = tree_flatten((args, kwargs))
        placed = [Place.of(x) if isinstance(x, Tensor) else x for x in flat]
        if op is WAIT:
            self.calls.append((op, placed, structure, []))
            return args[0]
        if aliases:
            self.calls.append((op, placed, structure, []))
            names = {a.name: a for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
            given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
            changed = [given[name] for name in names]
            return None if not op._schema.returns else changed[0] if len(changed) == 1 else tuple(changed)
        meta = [x.to("meta") if isinstance(x, Tensor) else x for x in flat]
        args, kwargs = tree_unflatten(meta, structure)
        result = tree_map(self._allocate, op(*args, **kwargs | ({"device": "meta"} if "device" in kwargs else {})))
        if not op.__name__.startswith(("empty", "new_empty")):
            self.calls.append((op, placed, structure, [Place.of(x) for x in tree_leaves(result)]))
        return result

    def _allocate(self, like: Any) -> Any:
        if not isinstance(like, Tensor):
            return like
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        made.fill_(float("nan") if made.is_floating_point() else 1)
        self._pool.append(made.untyped_storage())
        return made


@contextmanager
def recorded_graphs(warm_up: int = graphs.WARM_UP) -> Iterator[list[RecordedGraph]]:
    """CPUs can capture passes, after so many steps. Yields the list of graphs, which grows."""
    made: list[RecordedGraph] = []

    def make() -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(graphs.GRAPHS, "cpu", make)
        patch.setattr(graphs, "WARM_UP", warm_up)
        yield made
