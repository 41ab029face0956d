"""Operations of published code compute what our kernels compute."""

import pytest
import torch

from benchmarks.experiments.separate import separate_operations
from boost.models.kernels import BACKENDS, KERNELS, using
from tests.models.kernel_arguments import arguments


@pytest.mark.parametrize(
    "name", ["activated", "gated", "rotated", "rotated_backward", "scaled_backward", "row_product"]
)
def test_each_is_the_same_function(name: str) -> None:
    given = arguments(torch.float64)[name]
    expected = KERNELS[name](*given)
    with separate_operations(), using(BACKENDS["eager"]):
        torch.testing.assert_close(KERNELS[name](*given), expected, rtol=1e-12, atol=1e-12)
