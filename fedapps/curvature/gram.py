r"""Uncentred covariances of input rows, kept as rows or as matrix, and dividing by ``P = A + damping I``.

Tensors have a leading dimension for the groups of a layer: rows ``(groups, k, width)``, matrices ``(groups, width, width)``,
gradients ``(groups, out / groups, width)``.

With fewer rows than its width, ``A = R'R`` has rank ``k``, and dividing through the rows is cheaper. With ``R' = Q S`` (``Q``
``(width, k)`` orthonormal, ``S`` ``(k, k)`` triangular), ``A = Q S S' Q'`` and

.. math:: G P^{-1} = (G Q)\,(S S' + \text{damping} \cdot I)^{-1} Q' + (G - G Q Q') / \text{damping}

For the layer's own gradient, ``G = E'R``, the second term is zero and the first is ``E'(R R' + damping I)^{-1} R``; nothing is
divided by the damping, so no digit is lost however small it is. The second term is what a gradient has outside the rows' span:
weight decay, a proximal term, other examples. It is left out where it is no more than rounding (`OUTSIDE_MARGIN`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch

from fedapps.curvature.solve import PIVOT_MARGIN, damping_ladder, not_definite, not_finite
from fedapps.errors import CurvatureError

OUTSIDE_MARGIN = 30.0
"""A part outside the rows' span below this many epsilons of the gradient's norm is the rounding of the projection."""

QR_COST = 3.0
"""How much slower an operation of a QR factorisation is than one of a matrix product."""


def covariance(rows: torch.Tensor) -> torch.Tensor:
    r"""Compute the uncentred covariance of rows ``([groups,] R, width)``, :math:`A = \frac1R \sum_r a_r a_r'`.

    It is symmetric, ``([groups,] width, width)``, in float32 or better.
    """
    rows = widened(rows)
    return rows.mT @ rows / rows.shape[-2]


def widened(x: torch.Tensor) -> torch.Tensor:
    """Convert a floating tensor to float32 if that has more digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Gram:
    """A sum of outer products ``sum a a'``, as its rows or as matrix; exactly one of the two is set."""

    rows: torch.Tensor | None  # ``(groups, k, width)``, or None
    matrix: torch.Tensor | None  # ``(groups, width, width)``, or None

    @classmethod
    def of_rows(cls, rows: torch.Tensor) -> Self:
        """Keep rows, ``(groups, k, width)``, as they are."""
        return cls(rows, None)

    @classmethod
    def of_matrix(cls, matrix: torch.Tensor) -> Self:
        """Take a matrix, ``(groups, width, width)``."""
        return cls(None, matrix)

    def plus(self, other: Gram) -> Gram:
        """Add: rows are joined if both have them, else matrices are added."""
        if self.rows is not None and other.rows is not None:
            return Gram.of_rows(torch.cat([self.rows, other.rows], dim=1))
        return Gram.of_matrix(self.dense() + other.dense())

    def times(self, factor: float) -> Gram:
        """Multiply by a number >= 0."""
        if self.rows is not None:
            return Gram.of_rows(self.rows * factor**0.5)
        return Gram.of_matrix(self.dense() * factor)

    def dense(self) -> torch.Tensor:
        """Give the matrix, ``(groups, width, width)``."""
        if self.matrix is not None:
            return self.matrix
        if self.rows is None:
            raise RuntimeError("a Gram without rows and matrix")
        return self.rows.mT @ self.rows

    @property
    def num_rows(self) -> int | None:
        """Number of rows, or None if only the matrix is kept."""
        return None if self.rows is None else self.rows.shape[1]


def cheaper_through_rows(num_rows: int, width: int, out: int, solves: int) -> bool:
    """Say whether dividing so many gradients through the ``k`` rows takes fewer operations than through the matrix.

    QR ``4 w k^2`` and ``6 out w k`` a gradient, against building ``2 k w^2``, Cholesky ``w^3 / 3`` and ``2 out w^2`` a
    gradient.
    """
    if num_rows >= width:
        return False
    through_rows = QR_COST * 4 * width * num_rows**2 + solves * 6 * out * width * num_rows
    through_matrix = 2 * num_rows * width**2 + width**3 / 3 + solves * 2 * out * width**2
    return through_rows < through_matrix


class Divisor(Protocol):
    """A factorised ``P``, which gradients are divided by."""

    @property
    def added_damping(self) -> float:
        """The largest damping that a group needed beyond the one asked for."""

    def divide(self, G: torch.Tensor) -> torch.Tensor:
        """Compute ``G P^-1``, ``(groups, out / groups, width)``."""

    def matrix(self) -> torch.Tensor:
        """Give ``P``, ``(groups, width, width)``."""


@dataclass(frozen=True, eq=False)
class DenseDivisor:
    """``P`` by its Cholesky factor."""

    P: torch.Tensor  # ``(groups, width, width)``
    factor: torch.Tensor  # lower factors, ``(groups, width, width)``
    added_damping: float  # the largest damping that a group needed beyond the one asked for

    def divide(self, G: torch.Tensor) -> torch.Tensor:
        """Compute ``G P^-1``, ``(groups, out / groups, width)``."""
        return torch.cholesky_solve(G.mT, self.factor).mT

    def matrix(self) -> torch.Tensor:
        """Give ``P``, ``(groups, width, width)``."""
        return self.P


@dataclass(frozen=True, eq=False)
class RowDivisor:
    """``P = R'R + damping I`` through its rows."""

    rows: torch.Tensor  # ``R``, ``(groups, k, width)``
    basis: torch.Tensor  # ``Q``, ``(groups, width, k)``
    inside_and_span: torch.Tensor  # ``(S S' + damping I)^-1 Q'`` and, beside it, ``Q'``, ``(groups, k, 2 width)``
    damping: float  # the damping, > 0
    added_damping: float = 0.0  # 0: a block that needs more is factorised as matrix

    def divide(self, G: torch.Tensor) -> torch.Tensor:
        """Compute ``G P^-1``, ``(groups, out / groups, width)``, by the formula of the module."""
        coordinates = G @ self.basis  # (groups, out / groups, k)
        update, projected = (coordinates @ self.inside_and_span).chunk(2, dim=2)
        outside = G - projected
        rounding = OUTSIDE_MARGIN * torch.finfo(G.dtype).eps * torch.linalg.norm(G)
        if torch.linalg.norm(outside) > rounding:
            update = update + outside / self.damping
        return update

    def matrix(self) -> torch.Tensor:
        """Give ``P``, ``(groups, width, width)``."""
        return add_to_diagonal(self.rows.mT @ self.rows, self.damping)


def factorise(A: Gram, damping: float, *, through_rows: bool, where: str) -> Divisor:
    """Factorise ``P = A + damping I``, with more damping if that cannot be.

    Args:
        A: The estimate.
        damping: >= 0.
        through_rows: Use the rows if ``A`` has them; without damping, or with one that rounding swallows, the matrix is used.
        where: Layer and client, for messages.

    Raises:
        CurvatureError: ``A`` is not finite, or ``P`` is not positive definite even with the last damping of `damping_ladder`.
    """
    if through_rows and A.rows is not None and damping > 0:
        if not torch.isfinite(A.rows).all():
            raise not_finite(where)
        basis, S = torch.linalg.qr(A.rows.mT)
        small = add_to_diagonal(S @ S.mT, damping)
        factor, definite = _cholesky(small)
        if definite.all():
            inside = torch.cholesky_solve(basis.mT, factor)
            return RowDivisor(A.rows, basis, torch.cat([inside, basis.mT], dim=2), damping)
    return factorise_matrix(add_to_diagonal(A.dense(), damping), where=where)


def factorise_matrix(P: torch.Tensor, *, where: str) -> DenseDivisor:
    """Factorise ``P + d I`` with the smallest ``d`` of `damping_ladder` that makes it positive definite, group by group.

    ``P``, ``(groups, width, width)``, is symmetrised before use; not finite, or not positive definite with the last damping
    of the ladder, it is a CurvatureError.
    """
    if not torch.isfinite(P).all():
        raise not_finite(where)
    P = (P + P.mT) / 2
    factor, definite = _cholesky(P)
    added = 0.0
    for group in torch.nonzero(~definite).flatten().tolist():
        P[group], factor[group], more = _damp(P[group], where)
        added = max(added, more)
    return DenseDivisor(P, factor, added)


class _Damped(NamedTuple):
    P: torch.Tensor
    factor: torch.Tensor
    added: float


def _damp(P: torch.Tensor, where: str) -> _Damped:
    """Climb the ladder with one matrix ``(width, width)``."""
    mean_diagonal = float(P.diagonal().mean())
    for damping in damping_ladder(mean_diagonal, torch.finfo(P.dtype).eps):
        damped = add_to_diagonal(P, damping)
        factor, definite = _cholesky(damped[None])
        if definite.all():
            return _Damped(damped, factor[0], damping)
    raise not_definite(where, mean_diagonal, is_zero=not bool(P.any()))


def _cholesky(P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give lower factors, and for each group whether it is not singular, as in `fedapps.curvature.solve`."""
    factor, failed = torch.linalg.cholesky_ex(P)
    scale = P.diagonal(dim1=-2, dim2=-1).rsqrt()
    correlation = scale[..., :, None] * P * scale[..., None, :]
    rounding = PIVOT_MARGIN * torch.finfo(P.dtype).eps * torch.linalg.norm(correlation, dim=(-2, -1))
    pivots = (factor.diagonal(dim1=-2, dim2=-1) * scale).amin(-1).square()
    return factor, (failed == 0) & (pivots > rounding)


class Preconditioned(NamedTuple):
    """What `precondition` gives."""

    update: torch.Tensor  # ``G (P + d I)^-1``, ``(out, width)``
    P: torch.Tensor  # ``P + d I``, ``(width, width)``
    added_damping: float  # ``d``; 0 almost always


def precondition(G: torch.Tensor, P: torch.Tensor, *, where: str = "") -> Preconditioned:
    """Divide a gradient by a block: ``G (P + d I)^-1`` with the smallest ``d`` of `damping_ladder` that can be factorised.

    Args:
        G: ``(out, width)``.
        P: ``(width, width)``, damping included; symmetrised before use.
        where: Layer and client, for messages; may be empty.

    Returns:
        The update, and the matrix that it was divided by, in float32 or better.

    Raises:
        CurvatureError: The shapes do not fit, an input is not finite, or ``P`` is not positive definite even with the last
            damping of the ladder.
    """
    if P.dim() != 2 or G.dim() != 2 or P.shape != 2 * G.shape[1:]:
        raise CurvatureError(
            where,
            expected="a gradient of shape (out, width) and P of shape (width, width)",
            got=f"{tuple(G.shape)} and {tuple(P.shape)}",
            do="fold the bias as last column into the gradient and as a trailing 1 into the rows, or into neither",
        )
    divisor = factorise_matrix(widened(P)[None], where=where)
    update = divide(divisor, widened(G).to(divisor.P.dtype)[None], where=where)
    return Preconditioned(update[0], divisor.P[0], divisor.added_damping)


def divide(divisor: Divisor, G: torch.Tensor, *, where: str) -> torch.Tensor:
    """Divide a gradient, ``(groups, out / groups, width)``, by a factorised block, and check that all is finite.

    Raises:
        CurvatureError: The gradient or the result is not finite.
    """
    update = divisor.divide(G)
    # A gradient that is not finite gives an update that is not.
    if not torch.isfinite(update).all():
        raise not_finite(where)
    return update


def add_to_diagonal(P: torch.Tensor, damping: float) -> torch.Tensor:
    """Compute ``P + damping I`` for ``P`` ``(..., width, width)``, which is left unchanged."""
    damped = P.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    return damped
