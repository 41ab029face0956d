"""Element-wise kernels: gradients match plain formulas; each compiles to one kernel and counts as one operation in predictions."""

import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experiments.computed import elementwise_bytes, seven
from boost.config.schema import Config
from boost.models import kernels
from boost.models.kernels import BACKENDS, KERNELS, Kernel, gated_product, rotary, using
from boost.plan.timing import block_work
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM
from tests.models.kernel_arguments import angles, arguments, numbers

EAGER, INDUCTOR = BACKENDS["eager"], BACKENDS["inductor"]


def rotated_by_hand(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x_1, x_2) as real and imaginary part of a complex number, times e^(i angle)."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos[..., :half], sin)
    return torch.cat((turned.real, turned.imag), -1)


FORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "swiglu": (lambda g, u: gated_product(g, u, True), lambda g, u: F.silu(g) * u, ((5, 6), (5, 6))),
    "gated": (lambda g, u: gated_product(g, u, False), lambda g, u: g * u, ((5, 6), (5, 6))),
    "rotary": (
        lambda q, k: torch.cat(rotary(q, k, *angles(3, 8, q.dtype)), 2),
        lambda q, k: torch.cat([rotated_by_hand(x, *angles(3, 8, q.dtype)) for x in (q, k)], 2),
        ((2, 3, 4, 8), (2, 3, 2, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_plain_function(form: str) -> None:
    ours, plain, shapes = FORMS[form]
    inputs = [numbers(*shape).requires_grad_() for shape in shapes]
    results = []
    for function in (ours, plain):
        with using(EAGER):
            y = function(*inputs)
            results.append([y, *torch.autograd.grad((y * numbers(*y.shape)).sum(), inputs)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_nothing_is_kept_but_the_inputs() -> None:
    kept: list[Tensor] = []
    gate, up, x = numbers(5, 6).requires_grad_(), numbers(5, 6).requires_grad_(), numbers(2, 3, 4, 8).requires_grad_()
    cos, sin = angles(3, 8, torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        gated_product(gate, up, True)
        rotary(x, x, cos, sin)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (gate, up, cos, sin)}


ROW_SUMS = ("normed", "normed_backward", "normed_heads", "token_logits")
"""A row sum and the operations that use it are one Triton kernel, but several C++ loops."""


def results(kernel: Kernel, *given: Any) -> list[Tensor]:
    made = kernel(*given)
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_each_is_one_kernel_where_it_is_compiled_and_the_same_function(dtype: torch.dtype) -> None:
    from torch._inductor import metrics

    assert arguments(dtype).keys() == KERNELS.keys()
    for name, given in arguments(dtype).items():
        metrics.reset()
        with using(INDUCTOR):
            compiled = results(KERNELS[name], *given)
        assert metrics.generated_kernel_count == 1 or name in ROW_SUMS, name
        for got, expected in zip(compiled, results(KERNELS[name], *given), strict=True):
            assert (got.dtype, got.stride()) == (expected.dtype, expected.stride()), name
            assert (got - expected).norm() <= (1e-12 if dtype == torch.float64 else 2**-7) * expected.norm(), name


def test_a_backend_of_ones_own_runs_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def own(kernel: Kernel, given: tuple[Any, ...]) -> Any:
        called.append(kernel.name)
        return EAGER(kernel, given)

    monkeypatch.setitem(BACKENDS, "own", own)
    with using(EAGER):
        kernels.use("own")
        gated_product(numbers(2, 2), numbers(2, 2), True)
    assert called == ["gated"]
    with pytest.raises(KeyError):
        kernels.use("liger")


@pytest.mark.parametrize("kind", ["Unsupported", "FailOnRecompileLimitHit"])
def test_a_failed_compilation_is_a_warning_unless_compilation_was_requested(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of recompilations is an exception of its own family."""
    error = getattr(torch._dynamo.exc, kind)

    def fail(*_: Any) -> None:
        raise error("no such device\nand a page of advice")

    monkeypatch.setattr(kernels, "_compiled", lambda kernel: fail)
    x, y = numbers(2, 2), numbers(2, 2)
    with using(EAGER):
        kernels.use("inductor")
        with pytest.raises(error):
            gated_product(x, y, True)
        kernels.use("inductor or eager")
        for _ in range(2):
            torch.testing.assert_close(gated_product(x, y, True), F.silu(x) * y)
    (said,) = caplog.messages
    assert said.startswith("kernel 'gated' cannot be compiled, ") and "eager mode: no such device" in said
    assert "advice" not in said


def planned(layout: str, compiled: str, norm: str | None = None) -> Config:
    """7B, TP 4, 4 x 4,096 tokens: the shape in the performance goals."""
    words = [f"--parallel.layout={layout}", f"--train.compile={compiled}"]
    return seven(*words, *([f"--parallel.norm={norm}"] if norm else []))


def in_a_step(config: Config, micro_batches: int, copies: bool) -> float:
    """GB of element-wise memory traffic per block and micro-batch, in a step of several micro-batches."""
    train = {"working_copies": copies, "global_batch": micro_batches * config.train.micro_batch}
    return elementwise_bytes(config.model_copy(update={"train": config.train.model_copy(update=train)})) / 1e9


@pytest.mark.parametrize(
    ("layout", "eager", "fused"),
    [("btp", (33, 66), (33, 42)), ("btp-sp", (33, 60), (33, 22)), ("btp-cp", (33, 61), (33, 22))],
)
def test_a_block_runs_as_many_kernels_as_it_has_to(layout: str, eager: tuple[int, int], fused: tuple[int, int]) -> None:
    """(GEMMs, element-wise kernels) of a GPU's forward and backward pass, which shows lost fusions. btp scales latents by
    statistics that arrive with them, in separate functions."""
    for compiled, expected in (("none", eager), ("kernels", fused)):
        calls = Counter[str]()
        for work, times in block_work(planned(layout, compiled), 0, "none", on_gpu=True).items():
            calls[work.kernel] += times
        assert calls[ATTENTION] == calls[ATTENTION_BACKWARD] == 1
        assert (calls[GEMM], calls.total() - calls[GEMM] - 2) == expected


@pytest.mark.parametrize(
    ("layout", "micro_batches", "cast", "copied"),
    [("btp", 1, 3.95, 3.89), ("btp", 4, 4.13, 3.91), ("btp-sp", 1, 2.78, 2.68), ("btp-sp", 4, 3.16, 2.61)],
)
def test_working_copies_save_casts_and_passes_over_gradients(
    layout: str, micro_batches: int, cast: float, copied: float
) -> None:
    config = planned(layout, "kernels")
    assert in_a_step(config, micro_batches, False) == pytest.approx(cast, abs=0.01)
    assert in_a_step(config, micro_batches, True) == pytest.approx(copied, abs=0.01)
