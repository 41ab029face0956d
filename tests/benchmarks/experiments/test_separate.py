"""Operations of published code compute what our kernels compute."""

from typing import Any

import pytest
import torch

from benchmarks.experiments.separate import separate_operations
from boost.models.kernels import BACKENDS, KERNELS, using
from tests.models.kernel_arguments import arguments

GIVEN = [
    *[(name, arguments(torch.float64)[name]) for name in ("activated", "gated", "scaled_backward", "row_product")],
    *[("rotated", (*arguments(torch.float64)["rotated"][:-1], direction)) for direction in (1, -1)],
]


@pytest.mark.parametrize(("name", "given"), GIVEN, ids=[name for name, _ in GIVEN])
def test_each_is_the_same_function(name: str, given: tuple[Any, ...]) -> None:
    expected = KERNELS[name](*given)
    with separate_operations(), using(BACKENDS["eager"]):
        torch.testing.assert_close(KERNELS[name](*given), expected, rtol=1e-12, atol=1e-12)
