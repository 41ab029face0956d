"""Checks every collective, forward and backward, against plain arithmetic.

Payloads are small integers, whose sums are exact in every dtype, so that results are compared bit for bit. Each process generates
the payloads of all processes and computes the expected results locally.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from boost.config.layouts import spec
from boost.config.layouts.spec import Comm
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.measure.verify.report import Found, Verifier
from boost.parallel import collectives
from boost.parallel.mesh import Axis

COMMS: dict[str, Comm] = {name: value for name, value in vars(spec).items() if isinstance(value, Comm)}
"""Differentiable collectives by name."""

PLAIN: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    ALL_REDUCE: collectives.all_reduce,
    ALL_GATHER: collectives.all_gather,
    REDUCE_SCATTER: collectives.reduce_scatter,
    ALL_TO_ALL: collectives.all_to_all,
}
"""Collectives without a gradient, by kind."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 3, 4096)
"""Payload rows per process: one, an odd number, and more than gloo's buffers and NCCL's low-latency protocols hold."""

WIDTH = 5


def expected(kind: str | None, payloads: list[Tensor], rank: int) -> Tensor:
    """Computes the expected result on process `rank` from the payloads of all processes."""
    rows = payloads[0].shape[0] // len(payloads)
    if kind is None:
        return payloads[rank]
    if kind == ALL_GATHER:
        return torch.cat(payloads)
    if kind == ALL_TO_ALL:
        return torch.cat([payload.narrow(0, rank * rows, rows) for payload in payloads])
    total = torch.stack(payloads).double().sum(0).to(payloads[0].dtype)
    return total if kind == ALL_REDUCE else total.narrow(0, rank * rows, rows)


def wrong_functions(axis: Axis, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of the functions whose results differ from plain arithmetic."""
    wrong = []
    for size in SIZES:
        payloads = _payloads(axis, size, dtype, device)
        own = payloads[axis.rank]
        for kind, function in PLAIN.items():
            if not torch.equal(function(own, axis), expected(kind, payloads, axis.rank)):
                wrong.append(kind)
        x = own.clone()
        collectives.start_all_reduce(x, axis)
        collectives.finish_all_reduce(x)
        if not torch.equal(x, expected(ALL_REDUCE, payloads, axis.rank)):
            wrong.append("all-reduce in place")
        for name, comm in COMMS.items():
            for way, begin in (("", collectives.run), (", started", collectives.start)):
                if not _differentiable(comm, begin, axis, payloads):
                    wrong.append(f"{name}{way}")
    return wrong


def _payloads(axis: Axis, rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Payloads of all processes, [p rows, WIDTH] each, of integers so small that sums are exact in bfloat16."""
    largest = max(1, min(8, 128 // axis.size))
    made = []
    for rank in range(axis.size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        numbers = torch.randint(-largest, largest + 1, (axis.size * rows, WIDTH), generator=generator)
        made.append(numbers.to(device, dtype))
    return made


def _differentiable(
    comm: Comm, begin: Callable[[Comm, Tensor, Axis], collectives.InFlight], axis: Axis, payloads: list[Tensor]
) -> bool:
    x = payloads[axis.rank].clone().requires_grad_()
    y = begin(comm, x, axis).wait()
    whole = expected(comm.forward, payloads, axis.rank)
    if not torch.equal(y, whole):
        return False
    gradients = [gradient[: y.shape[0]] for gradient in _payloads(axis, y.shape[0], y.dtype, y.device, seed=1)]
    y.backward(gradients[axis.rank])
    if comm.backward is None and comm.forward == ALL_GATHER:
        # The gradient is complete and identical everywhere: each process takes its own rows.
        n = x.shape[0]
        due = gradients[axis.rank].narrow(0, axis.rank * n, n)
    else:
        due = expected(comm.backward, gradients, axis.rank)
    return x.grad is not None and torch.equal(x.grad, due)


def verify(verifier: Verifier, axes: dict[str, Axis], device: torch.device) -> None:
    """Runs one check per axis and dtype."""
    verifier.section("Collectives, forward and backward, against plain arithmetic")
    count = len(PLAIN) + 1 + 2 * len(COMMS)

    def judge(wrong_by_rank: list[list[str]]) -> Found:
        wrong = sorted({name for names in wrong_by_rank for name in names})
        if wrong:
            return Found("failed", f"wrong results from {', '.join(wrong)}", numbers={"wrong": wrong})
        return Found("ok", f"{count} functions, payloads of {', '.join(map(str, SIZES))} rows: bitwise equal")

    for name, axis in axes.items():
        for dtype in DTYPES:
            words = str(dtype).removeprefix("torch.")
            verifier.check(
                f"{name} ({axis.size} processes), {words}",
                partial(wrong_functions, axis, dtype, device),
                judge,
                "do not train on these machines: check drivers, NCCL and the network of the failing ranks",
            )
