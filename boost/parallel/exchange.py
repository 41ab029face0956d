"""Collectives for CPUs, built from point-to-point messages, with every receive posted before the sends.

gloo sends two processes' payloads and "ready to receive" notices over one first-in-first-out connection. Its all-gather,
reduce-scatter and all-to-all post the send first, so the notice waits behind the payload and the two directions take turns. Posting
receives first lets the directions overlap (docs/design.md). Each collective is one op in `torch.ops.boost`, which counters and
torch.compile can see. It returns while messages are in flight; `wait_tensor` completes it, as for torch's ops.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_work

from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER


class LastExchange(NamedTuple):
    """The latest exchange in a group. c10d's flight recorder does not see gloo's point-to-point messages."""

    operation: str
    sequence: int
    """Sequence number within the group, the same on all its processes."""
    group: str
    """Description of the group."""
    bytes: int
    """Size of this process's input tensor."""
    time_ns: int
    """Start time, nanoseconds since the epoch."""


last_exchanges: dict[str, LastExchange] = {}
"""Latest exchange by group name; under "graph", the latest replay of a CUDA graph."""

_NOT_RECORDED = contextlib.nullcontext()


class _Exchange(Work):
    """Messages to and from every other process in a group, in flight. Keeps their tensors alive."""

    def __init__(
        self,
        operation: str,
        x: Tensor,
        name: str,
        received: Sequence[Tensor] | Tensor,
        sent: Sequence[Tensor] | Tensor,
        finish: Callable[[], object],
    ) -> None:
        """Posts a receive from every other process, then a send to each. `received` and `sent` hold contiguous tensors by rank.
        `finish` turns received messages into the result."""
        super().__init__()
        group = dist.distributed_c10d._resolve_process_group(cast(Any, name))
        sequence = last_exchanges[name].sequence + 1 if name in last_exchanges else 1
        self._latest = LastExchange(operation, sequence, group.group_desc, x.nbytes, time.time_ns())
        last_exchanges[name] = self._latest
        backend: Any = group._get_backend(torch.device("cpu"))
        self._limit, self.rank, self._finish = backend.options._timeout, group.rank(), finish
        others = [other for other in range(group.size()) if other != self.rank]
        with _recorded("start", self._latest) if torch.autograd.profiler._is_profiler_enabled else _NOT_RECORDED:
            self._messages = [backend.recv([received[other]], other, 0) for other in others]
            self._messages += [backend.send([sent[other]], other, 0) for other in others]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the result. Raises RuntimeError if a message fails or exceeds the group's timeout."""
        messages, self._messages = self._messages, []
        with _recorded("wait for", self._latest) if torch.autograd.profiler._is_profiler_enabled else _NOT_RECORDED:
            for message in messages:
                message.wait(self._limit)
        finish, self._finish = self._finish, _nothing
        finish()
        return True


def _recorded(what: str, latest: LastExchange) -> contextlib.AbstractContextManager[object]:
    """A profiler range (train.profile) that identifies the exchange."""
    return torch.profiler.record_function(
        f"{what} {latest.operation} #{latest.sequence} of {latest.group}, {latest.bytes} bytes"
    )


def _nothing() -> None:
    """Finishes an exchange whose messages are already in place."""


_library = torch.library.Library("boost", "DEF")


def _op(shape: Callable[[torch.Size, int], Sequence[int]] = lambda shape, _: shape) -> Callable[..., object]:
    """Defines an op for CPUs. `shape`: of the result, given the input's shape and the number of processes.
    `torch.library.custom_op` would add a dozen Python calls to each of its calls."""

    def define(function: Callable[..., Tensor]) -> None:
        name = function.__name__.removeprefix("_")
        schema = torch.library.infer_schema(function, mutates_args=(), op_name=name)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, function, "CPU")

        @torch.library.register_fake(f"boost::{name}", lib=_library)
        def _(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
            return x.new_empty(shape(x.shape, processes))

    return define


@_op()
def _all_reduce(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """Sums over two processes. Both add the same two terms, so the results are bitwise equal."""
    theirs, result = torch.empty_like(x), torch.empty_like(x)
    # `.data` bypasses autograd's version counter: a node may already have saved the result, although it is filled in later.
    add = functools.partial(torch.add, x, theirs, out=result.data)
    exchange = _Exchange("all_reduce", x, group, [theirs] * 2, [x] * 2, add)
    exchange.wait() if blocking else _register_work(result, exchange)
    return result


@_op(lambda shape, processes: (processes * shape[0], *shape[1:]))
def _all_gather(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """[n, ...] from every process -> [p n, ...]."""
    result = x.new_empty(processes * x.shape[0], *x.shape[1:])
    parts = result.view(processes, *x.shape)
    exchange = _Exchange("all_gather", x, group, parts, [x] * processes, _nothing)
    parts[exchange.rank].copy_(x)
    exchange.wait() if blocking else _register_work(result, exchange)
    return result


@_op(lambda shape, processes: (shape[0] // processes, *shape[1:]))
def _reduce_scatter(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """[p n, ...] -> [n, ...], this process's rows of the sum. Rows go directly to the process that sums them, so a bf16 sum is
    rounded only once."""
    mine = x.view(processes, x.shape[0] // processes, *x.shape[1:])
    received, result = torch.empty_like(mine), torch.empty_like(mine[0])

    def add() -> None:
        own = mine[exchange.rank]
        if processes == 2:
            torch.add(own, received[1 - exchange.rank], out=result.data)
        else:
            received[exchange.rank].copy_(own)
            torch.sum(received, 0, out=result.data)

    exchange = _Exchange("reduce_scatter", x, group, received, mine, add)
    exchange.wait() if blocking else _register_work(result, exchange)
    return result


@_op()
def _all_to_all(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """[p n, ...], the j-th block of n rows for process j -> [p n, ...], the j-th block from process j."""
    shape = (processes, x.shape[0] // processes, *x.shape[1:])
    result = torch.empty_like(x)
    sent, received = x.view(shape), result.view(shape)
    exchange = _Exchange("all_to_all", x, group, received, sent, _nothing)
    received[exchange.rank].copy_(sent[exchange.rank])
    exchange.wait() if blocking else _register_work(result, exchange)
    return result


OPS: dict[str, Callable[..., Tensor]] = {
    ALL_REDUCE: torch.ops.boost.all_reduce,
    ALL_GATHER: torch.ops.boost.all_gather,
    REDUCE_SCATTER: torch.ops.boost.reduce_scatter,
    ALL_TO_ALL: torch.ops.boost.all_to_all,
}
"""Ops by kind of collective: (x, processes, blocking, group name) -> result."""
