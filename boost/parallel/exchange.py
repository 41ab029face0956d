"""CPU collectives built from point-to-point messages that post every receive before the sends.

gloo puts a pair's payloads and "ready to receive" notices on one first-in-first-out connection. Its own all-gather,
reduce-scatter and all-to-all post the send first, so the notice queues behind the payload and the two directions of the wire
take turns. Posting receives first lets both directions overlap. See docs/wire.md.

Each collective is one op of `torch.ops.boost`, so collective counters and torch.compile see a single op. It returns while
messages are in flight; `wait_tensor` completes it, as for torch's functional collectives. Legend: p processes, n rows of each.
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
    """The latest exchange of a group. c10d's flight recorder does not see gloo's point-to-point messages."""

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
"""Latest exchange by group name."""


def _profiler_range(what: str, latest: LastExchange) -> contextlib.AbstractContextManager[object]:
    """A profiler range that says which message this is, active only while a profiler records (train.profile)."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(
        f"{what} {latest.operation} #{latest.sequence} of {latest.group}, {latest.bytes} bytes"
    )


class _Exchange(Work):
    """Messages in flight and the local work that turns them into the result. Keeps their tensors alive."""

    def __init__(
        self, messages: list[Work], finish: Callable[[], object], timeout: timedelta, latest: LastExchange
    ) -> None:
        super().__init__()
        self._messages, self._finish, self._timeout, self._latest = messages, finish, timeout, latest

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the result. Raises RuntimeError if a message fails or exceeds the group's timeout."""
        messages, self._messages = self._messages, []
        with _profiler_range("wait for", self._latest):
            for message in messages:
                message.wait(self._timeout)
        finish, self._finish = self._finish, lambda: None
        finish()
        return True


class Peers:
    """The other processes of a group, as peers of one `operation` on `x`."""

    def __init__(self, name: str, operation: str, x: Tensor) -> None:
        group = dist.distributed_c10d._resolve_process_group(cast(Any, name))
        sequence = last_exchanges[name].sequence + 1 if name in last_exchanges else 1
        self._latest = LastExchange(operation, sequence, group.group_desc, x.nbytes, time.time_ns())
        last_exchanges[name] = self._latest
        self._backend: Any = group._get_backend(torch.device("cpu"))
        self.rank, self.size = group.rank(), group.size()
        self.others = [other for other in range(self.size) if other != self.rank]

    def exchange(
        self, received: Callable[[int], Tensor], sent: Callable[[int], Tensor], finish: Callable[[], object]
    ) -> _Exchange:
        """Posts a receive for every other process, then a send. `received` and `sent` map a rank to a contiguous tensor."""
        with _profiler_range("start", self._latest):
            messages = [self._backend.recv([received(other)], other, 0) for other in self.others]
            messages += [self._backend.send([sent(other)], other, 0) for other in self.others]
        return _Exchange(messages, finish, self._backend.options._timeout, self._latest)


def _complete(result: Tensor, exchange: _Exchange, blocking: bool) -> Tensor:
    if blocking:
        exchange.wait()
    else:
        _register_work(result, exchange)
    return result


@torch.library.custom_op("boost::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, blocking: bool, group: str) -> Tensor:
    """Sum over two processes. Both add the same two terms, so the results are bitwise equal."""
    peers = Peers(group, "all_reduce", x)
    theirs, result = torch.empty_like(x), torch.empty_like(x)
    # `.data` bypasses autograd's version counter: a node may already have saved the result, which is filled in later.
    exchange = peers.exchange(lambda _: theirs, lambda _: x, lambda: torch.add(x, theirs, out=result.data))
    return _complete(result, exchange, blocking)


@torch.library.custom_op("boost::all_gather", mutates_args=())
def _all_gather(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """[n, ...] of every process -> [p n, ...]."""
    peers = Peers(group, "all_gather", x)
    result = x.new_empty(processes * x.shape[0], *x.shape[1:])
    parts = result.view(processes, *x.shape)
    exchange = peers.exchange(parts.__getitem__, lambda _: x, lambda: None)
    parts[peers.rank].copy_(x)
    return _complete(result, exchange, blocking)


@torch.library.custom_op("boost::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """[p n, ...] -> [n, ...], this process's rows of the sum. Rows go directly to the process that sums them, so a bf16 sum is
    rounded once."""
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

    return _complete(result, peers.exchange(received.__getitem__, mine.__getitem__, add), blocking)


@torch.library.custom_op("boost::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    """[p n, ...], the j-th n rows for process j -> [p n, ...], the j-th n rows from process j."""
    peers = Peers(group, "all_to_all", x)
    shape = (processes, x.shape[0] // processes, *x.shape[1:])
    result = torch.empty_like(x)
    sent, received = x.view(shape), result.view(shape)
    exchange = peers.exchange(received.__getitem__, sent.__getitem__, lambda: None)
    received[peers.rank].copy_(sent[peers.rank])
    return _complete(result, exchange, blocking)


@_all_reduce.register_fake
def _(x: Tensor, blocking: bool, group: str) -> Tensor:
    return torch.empty_like(x)


@_all_gather.register_fake
def _(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    return x.new_empty(processes * x.shape[0], *x.shape[1:])


@_reduce_scatter.register_fake
def _(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // processes, *x.shape[1:])


@_all_to_all.register_fake
def _(x: Tensor, processes: int, blocking: bool, group: str) -> Tensor:
    return torch.empty_like(x)
