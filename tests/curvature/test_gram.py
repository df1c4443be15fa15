"""Covariances as rows or matrix, and dividing by them: every way against a dense solve in float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedapps.curvature.gram import (
    DenseDivisor,
    Gram,
    RowDivisor,
    cheaper_through_rows,
    covariance,
    divide,
    factorise,
    factorise_matrix,
    precondition,
)
from fedapps.errors import CurvatureError


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(G: torch.Tensor, R: torch.Tensor, damping: float) -> torch.Tensor:
    """``G (R'R + damping I)^-1`` in float64."""
    R, G = R.double(), G.double()
    return torch.linalg.solve(R.mT @ R + damping * torch.eye(R.shape[-1], dtype=torch.float64), G.mT).mT


# Through the rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1.0, 1e-3, 1e-8])
@pytest.mark.parametrize(
    "inside", [True, False], ids=["the layer's own gradient", "with a part outside the rows' span"]
)
def test_dividing_through_rows_equals_the_dense_solve(inside: bool, damping: float) -> None:
    """Two groups, 3 rows of width 7; in float64 the dense solve has digits to spare at these dampings."""
    R, E = draw(2, 3, 7), draw(2, 3, 4, seed=1)
    G = E.mT @ R if inside else E.mT @ R + 0.1 * draw(2, 4, 7, seed=2)
    divisor = factorise(Gram.of_rows(R), damping, through_rows=True, where="test")
    assert isinstance(divisor, RowDivisor)
    expected = reference(G, R, damping)
    torch.testing.assert_close(divisor.divide(G), expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))
    torch.testing.assert_close(divisor.matrix(), R.mT @ R + damping * torch.eye(7, dtype=torch.float64))


def test_no_digit_is_lost_in_single_precision_at_a_damping_below_rounding() -> None:
    """``E'(R R' + damping I)^-1 R`` in float32 at 1e-7: the form with ``1 / damping`` would be off by more than the result."""
    R, E = draw(1, 5, 60, dtype=torch.float32), draw(1, 5, 8, seed=1, dtype=torch.float32)
    G = E.mT @ R
    divisor = factorise(Gram.of_rows(R), 1e-7, through_rows=True, where="test")
    small = R[0].double() @ R[0].double().T + 1e-7 * torch.eye(5, dtype=torch.float64)
    expected = E[0].double().T @ torch.linalg.solve(small, R[0].double())
    torch.testing.assert_close(divisor.divide(G)[0].double(), expected, rtol=1e-4, atol=1e-5)
    woodbury = (G - G @ R.mT @ torch.linalg.solve(R @ R.mT + 1e-7 * torch.eye(5), R)) / 1e-7
    assert (woodbury[0].double() - expected).abs().max() > expected.abs().max()


def test_repeated_and_dead_rows_are_no_obstacle() -> None:
    R = draw(1, 2, 6).repeat(1, 2, 1)
    R[:, 3] = 0
    G = draw(1, 4, 3, seed=1).mT @ R
    divisor = factorise(Gram.of_rows(R), 1e-2, through_rows=True, where="test")
    torch.testing.assert_close(divisor.divide(G), reference(G, R, 1e-2), rtol=1e-8, atol=1e-10)


def test_without_damping_the_matrix_is_used() -> None:
    """With fewer rows than the width ``R'R`` is singular: the ladder adds a damping."""
    divisor = factorise(Gram.of_rows(draw(1, 3, 7)), 0.0, through_rows=True, where="test")
    assert isinstance(divisor, DenseDivisor)
    assert divisor.added_damping > 0


@pytest.mark.parametrize("through_rows", [True, False])
def test_rows_that_are_not_finite_are_named(through_rows: bool) -> None:
    R = draw(1, 3, 7)
    R[0, 1, 2] = torch.inf
    with pytest.raises(CurvatureError, match="layer 'fc1': expected finite"):
        factorise(Gram.of_rows(R), 0.1, through_rows=through_rows, where="layer 'fc1'")


def test_gradient_that_is_not_finite_is_named() -> None:
    G = draw(1, 4, 7, seed=1)
    G[0, 0, 0] = torch.nan
    for through_rows in (True, False):
        divisor = factorise(Gram.of_rows(draw(1, 3, 7)), 0.1, through_rows=through_rows, where="test")
        with pytest.raises(CurvatureError, match="layer 'fc1': expected finite"):
            divide(divisor, G, where="layer 'fc1'")


def test_few_rows_of_a_wide_layer_are_cheaper_and_many_are_not() -> None:
    assert cheaper_through_rows(32, 1024, 128, solves=10)
    assert not cheaper_through_rows(900, 1024, 128, solves=10)
    assert not cheaper_through_rows(1024, 1024, 128, solves=10)


# Sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [(), (0,), (0, 1)], ids=["rows and rows", "matrix and rows", "matrices"])
def test_sums_and_multiples_are_those_of_the_matrices(dense: tuple[int, ...]) -> None:
    parts = [draw(2, 3, 5), draw(2, 4, 5, seed=1)]
    grams = [Gram.of_matrix(R.mT @ R) if i in dense else Gram.of_rows(R) for i, R in enumerate(parts)]
    mixed = grams[0].times(0.9).plus(grams[1].times(0.1))
    torch.testing.assert_close(mixed.dense(), 0.9 * parts[0].mT @ parts[0] + 0.1 * parts[1].mT @ parts[1])
    assert mixed.num_rows == (None if dense else 7)


# Matrices -------------------------------------------------------------------------------------


def test_only_the_group_that_needs_it_gets_more_damping() -> None:
    R = draw(3, 9, 4)
    R[1, 1:] = 0  # rank one
    divisor = factorise_matrix(R.mT @ R, where="test")
    assert divisor.added_damping > 0
    torch.testing.assert_close(divisor.P[[0, 2]], (R.mT @ R)[[0, 2]])
    extra = divisor.P[1] - (R.mT @ R)[1]
    torch.testing.assert_close(extra, divisor.added_damping * torch.eye(4, dtype=torch.float64), rtol=1e-6, atol=1e-15)
    torch.testing.assert_close(divisor.divide(draw(3, 2, 4)) @ divisor.P, draw(3, 2, 4), rtol=1e-5, atol=1e-5)


def test_block_that_is_not_definite_is_named() -> None:
    with pytest.raises(CurvatureError, match=r"layer 'fc1': .*positive definite"):
        precondition(torch.ones(2, 2), torch.diag(torch.tensor([1.0, -5.0])), where="layer 'fc1'")


def test_without_a_place_the_message_starts_with_what_was_expected() -> None:
    with pytest.raises(CurvatureError, match=r"^expected .*positive definite"):
        precondition(torch.ones(2, 2), torch.diag(torch.tensor([1.0, -5.0])))


@pytest.mark.parametrize("shape", [(2, 2), (3,), (2, 2, 3)], ids=["bias in P only", "vector", "groups"])
def test_a_gradient_that_does_not_fit_its_block_is_named_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(CurvatureError, match=rf"layer 'fc1': expected .*, got {re.escape(str(shape))} and \(3, 3\)"):
        precondition(torch.ones(shape), torch.eye(3), where="layer 'fc1'")


@pytest.mark.parametrize(
    ("dtype", "solved"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    ids=["bfloat16", "float32", "float64"],
)
def test_functional_form_works_in_single_precision_or_better(dtype: torch.dtype, solved: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, G = torch.randn(50, 4).to(dtype), torch.randn(3, 4).to(dtype)
    P = covariance(rows) + 0.1 * torch.eye(4)
    update, used, added = precondition(G, P, where="test")
    assert update.dtype == used.dtype == solved
    assert added == 0
    R = rows.double().numpy()
    expected = G.double().numpy() @ np.linalg.inv(R.T @ R / 50 + 0.1 * np.eye(4))
    np.testing.assert_allclose(update.numpy(), expected, atol=1e-5)


def test_block_is_symmetrised_before_use() -> None:
    P = torch.tensor([[2.0, 1.1], [0.9, 3.0]], dtype=torch.float64)
    update, used, _ = precondition(torch.ones(1, 2, dtype=torch.float64), P, where="test")
    torch.testing.assert_close(used, torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64))
    torch.testing.assert_close(update @ used, torch.ones(1, 2, dtype=torch.float64))


def test_singular_block_is_not_solved_as_noise() -> None:
    """The same blocks of rank one as in the test of ``solve_spd``; here by torch's factorisation."""
    for n in (3, 30, 200):
        a = torch.randn(1, n, generator=torch.Generator().manual_seed(n))
        update, P, added = precondition(a, a.T @ a, where="test")
        assert added > 0
        torch.testing.assert_close(P, a.T @ a + added * torch.eye(n))
        assert torch.linalg.norm(update - a / a.square().sum()) < 0.1 * torch.linalg.norm(a / a.square().sum())
