"""Collectives of CPUs, made of messages that are received before they are sent.

gloo puts payloads and "ready to receive" notices of a pair of processes on one connection, first in, first out. Its all-gather,
reduce-scatter and all-to-all post the send first, so that the notice queues behind the payload and the two directions of the wire
take turns. Posting every receive first lets them overlap. More in docs/wire.md.

Each is one operation of `torch.ops.boost`, so that whoever counts collectives sees one, and torch.compile traces one. It returns
while messages are in flight; `wait_tensor` ends it, as for torch's functional collectives. Legend: p processes, n rows of each.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_work


@dataclass(frozen=True)
class LastExchange:
    """The latest exchange of a group: c10d's flight recorder does not see messages of gloo."""

    operation: str
    sequence: int
    """Number within the group, the same on all its processes."""
    group: str
    """Its description."""
    bytes: int
    """Of the tensor that this process passed in."""
    time_ns: int
    """When it began, since the epoch."""


last_exchanges: dict[str, LastExchange] = {}
"""By name of the group."""


def _noted(what: str, of: LastExchange) -> contextlib.AbstractContextManager[object]:
    """While a profiler records (train.profile), a range that `boost.measure.timeline` finds again."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"{what} {of.operation} #{of.sequence} of {of.group}, {of.bytes} bytes")


class _Exchange(Work):
    """Messages in flight, and the local work that makes the result of them. Holds what they read and write."""

    def __init__(
        self, messages: list[Work], finish: Callable[[], object], timeout: timedelta, of: LastExchange
    ) -> None:
        super().__init__()
        self._messages, self._finish, self._timeout, self._of = messages, finish, timeout, of

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the result is there. Raises RuntimeError if a message fails or takes longer than the group's timeout."""
        messages, self._messages = self._messages, []
        with _noted("wait for", self._of):
            for message in messages:
                message.wait(self._timeout)
        finish, self._finish = self._finish, lambda: None
        finish()
        return True


class Peers:
    """The other processes of a group, as senders and receivers, for one `operation` on `x`."""

    def __init__(self, name: str, operation: str, x: Tensor) -> None:
        group = dist.distributed_c10d._resolve_process_group(cast(Any, name))
        sequence = last_exchanges[name].sequence + 1 if name in last_exchanges else 1
        self._of = LastExchange(operation, sequence, group.group_desc, x.nbytes, time.time_ns())
        last_exchanges[name] = self._of
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self.rank, self.size = group.rank(), group.size()
        self.others = [other for other in range(self.size) if other != self.rank]

    def exchange(
        self, received: Callable[[int], Tensor], sent: Callable[[int], Tensor], finish: Callable[[], object]
    ) -> _Exchange:
        """Posts a receive for every other process, then a send: `received` and `sent` are contiguous tensors by rank."""
        with _noted("start", self._of):
            messages = [self._backend.recv([received(other)], other, 0) for other in self.others]
            messages += [self._backend.send([sent(other)], other, 0) for other in self.others]
        return _Exchange(messages, finish, self._backend.options._timeout, self._of)


def _end(result: Tensor, exchange: _Exchange, at_once: bool) -> Tensor:
    if at_once:
        exchange.wait()
    else:
        _register_work(result, exchange)
    return result


@torch.library.custom_op("boost::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, at_once: bool, group: str) -> Tensor:
    """Sum over two processes. Both add the same two terms: equal to the bit."""
    peers = Peers(group, "all_reduce", x)
    theirs, result = torch.empty_like(x), torch.empty_like(x)
    # `.data`: a node that has saved the result did so before it was there, and finds nothing changed in place.
    exchange = peers.exchange(lambda _: theirs, lambda _: x, lambda: torch.add(x, theirs, out=result.data))
    return _end(result, exchange, at_once)


@torch.library.custom_op("boost::all_gather", mutates_args=())
def _all_gather(x: Tensor, processes: int, at_once: bool, group: str) -> Tensor:
    """[n, ...] of every process -> [p n, ...]."""
    peers = Peers(group, "all_gather", x)
    result = x.new_empty(processes * x.shape[0], *x.shape[1:])
    parts = result.view(processes, *x.shape)
    exchange = peers.exchange(parts.__getitem__, lambda _: x, lambda: None)
    parts[peers.rank].copy_(x)
    return _end(result, exchange, at_once)


@torch.library.custom_op("boost::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, processes: int, at_once: bool, group: str) -> Tensor:
    """[p n, ...] -> [n, ...], this process's rows of the sum. They go straight to who sums them: a sum of bf16 is rounded once."""
    peers = Peers(group, "reduce_scatter", x)
    mine = x.view(processes, x.shape[0] // processes, *x.shape[1:])
    received = torch.empty_like(mine)
    result = torch.empty_like(mine[0])

    def add() -> None:
        if processes == 2:
            torch.add(mine[peers.rank], received[1 - peers.rank], out=result.data)
        else:
            received[peers.rank].copy_(mine[peers.rank])
            torch.sum(received, 0, out=result.data)

    return _end(result, peers.exchange(received.__getitem__, mine.__getitem__, add), at_once)


@torch.library.custom_op("boost::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, processes: int, at_once: bool, group: str) -> Tensor:
    """[p n, ...], the j-th n rows for process j -> [p n, ...], the j-th n rows from process j."""
    peers = Peers(group, "all_to_all", x)
    shape = (processes, x.shape[0] // processes, *x.shape[1:])
    result = torch.empty_like(x)
    sent, received = x.view(shape), result.view(shape)
    exchange = peers.exchange(received.__getitem__, sent.__getitem__, lambda: None)
    received[peers.rank].copy_(sent[peers.rank])
    return _end(result, exchange, at_once)


@_all_reduce.register_fake
def _(x: Tensor, at_once: bool, group: str) -> Tensor:
    return torch.empty_like(x)


@_all_gather.register_fake
def _(x: Tensor, processes: int, at_once: bool, group: str) -> Tensor:
    return x.new_empty(processes * x.shape[0], *x.shape[1:])


@_reduce_scatter.register_fake
def _(x: Tensor, processes: int, at_once: bool, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // processes, *x.shape[1:])


@_all_to_all.register_fake
def _(x: Tensor, processes: int, at_once: bool, group: str) -> Tensor:
    return torch.empty_like(x)
