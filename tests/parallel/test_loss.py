"""The chunked cross-entropy against torch's own; no gradients are computed unless requested."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config import traffic
from boost.config.architecture import IGNORED
from boost.parallel.loss import cross_entropy
from boost.parallel.mesh import Axis


class Products(TorchDispatchMode):
    """Counts GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::mm", "aten::addmm_", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    monkeypatch.setattr(traffic, "CHUNK_ELEMENTS", 8 * 30)  # eight tokens per chunk
    monkeypatch.setattr(traffic, "CHUNK_TOKENS", 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, dtype=torch.double, generator=generator).requires_grad_()
    head = torch.randn(30, 8, dtype=torch.double, generator=generator).requires_grad_()
    targets = torch.randint(0, 30, (20,), generator=generator)
    targets[3] = IGNORED
    return x, head, targets


def test_chunks_are_the_whole(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    x, head, targets = inputs
    with Products() as products:
        ours = cross_entropy(x, head, targets, Axis())
    assert products.count == 3 * 3, "logits and two gradients of each of three chunks"
    theirs = torch.nn.functional.cross_entropy(x @ head.t(), targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    expected = torch.autograd.grad(theirs, (x, head), torch.tensor(0.5, dtype=torch.double))
    actual = torch.autograd.grad(ours, (x, head), torch.tensor(0.5, dtype=torch.double))
    torch.testing.assert_close(actual, expected)


def test_evaluation_forms_no_gradient(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    with Products() as products, torch.no_grad():
        cross_entropy(*inputs, Axis())
    assert products.count == 3, "the logits of three chunks"
