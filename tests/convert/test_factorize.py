"""Truncated SVD in the norm of second moments."""

import torch
from torch import Tensor

from boost.convert.spectrum import balanced, factorize_weighted, moment_root, solve_right, weighted_values
from boost.models.init import factorize

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double, generator=GENERATOR)


def weighted_error(lost: Tensor, g: Tensor, c: Tensor) -> float:
    return float((g @ lost @ c @ lost.T).trace())


def test_no_factors_of_this_rank_lose_less() -> None:
    w, x, y = drawn(7, 10), drawn(40, 10) @ torch.diag(torch.arange(1.0, 11).double()), drawn(40, 7)
    c, g = x.T @ x / 40, y.T @ y / 40
    inputs, outputs = moment_root(c), moment_root(g)
    found = factorize_weighted(w, 3, outputs, inputs)
    error = weighted_error(w - found.b_OR @ found.a_RI, g, c)
    torch.testing.assert_close(error, float(found.values[3:].square().sum()), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.values, weighted_values(w, outputs, inputs))
    plain = factorize(w, 3)
    assert error < weighted_error(w - plain.b_OR @ plain.a_RI, g, c)
    for _ in range(50):  # a local minimum, at least
        a, b = found.a_RI + 1e-3 * drawn(3, 10), found.b_OR + 1e-3 * drawn(7, 3)
        assert weighted_error(w - b @ a, g, c) >= error * (1 - 1e-5)


def test_balanced_factors_have_equal_gram_matrices() -> None:
    a, b = drawn(3, 10), 100 * drawn(7, 3)
    even_a, even_b = balanced(a, b)
    torch.testing.assert_close(even_b @ even_a, b @ a)
    torch.testing.assert_close(even_a @ even_a.T, even_b.T @ even_b)


def test_directions_without_data_have_an_inverse() -> None:
    x = drawn(3, 8)  # three of eight directions
    root = moment_root(x.T @ x / 3)
    torch.testing.assert_close(root.root @ root.inverse, torch.eye(8).double(), rtol=0, atol=1e-6)
    assert moment_root(torch.zeros(4, 4)).root.isfinite().all()
    y = drawn(3, 5)
    solved = solve_right(y.T @ x, x.T @ x)
    torch.testing.assert_close(x @ solved.T, y, rtol=0, atol=1e-3)
