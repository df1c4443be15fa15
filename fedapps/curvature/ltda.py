r"""LTDA's diagonal: an estimate of the Hessian's from its first row, in NumPy or torch.

.. math:: d_j = \frac{h_{1j}^2}{h_{11}}, \qquad
          \theta_j \leftarrow \theta_j - \eta\, \frac{g_j}{\max(|d_j|, \text{damping})}

Sen, Mohan & Qin, PReMI 2023. It is the diagonal of :math:`h_1 h_1' / h_{11}`, the matrix of rank one with the Hessian's first
row, hence exact where the Hessian has rank one. Of a positive semidefinite Hessian :math:`d_j \le H_{jj}` (Cauchy-Schwarz), so
that steps of full length would diverge: the damping alone bounds them, and ``eta <= 2 damping / L`` is stable.

========== ============ =====================================================================
symbol     identifier   meaning
========== ============ =====================================================================
h_1        ``row``      first row of the Hessian, by name in the order of the parameters
d          ``d``        the diagonal, by name
g          ``gradient`` gradient, by name
eta        ``lr``       step size
========== ============ =====================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tensors = Mapping[str, Any]
"""Name -> NumPy array or torch tensor."""


def diagonal(row: Tensors, eps: float) -> Tensors | None:
    """Estimate the diagonal of a Hessian from its first row.

    Args:
        row: ``h_1``.
        eps: Below it ``|h_11|`` counts as zero, and the row says nothing.

    Returns:
        ``d``; None where it says nothing.

    Example:
        >>> import numpy as np
        >>> diagonal({"w": np.array([4.0, -2.0])}, 1e-8)  # that of [[4, -2], [-2, 1]]
        {'w': array([4., 1.])}
    """
    h_11 = next(iter(row.values())).reshape(-1)[0]
    if not abs(h_11) >= eps:
        return None
    return {name: h**2 / h_11 for name, h in row.items()}


def step(theta: Tensors, gradient: Tensors, d: Tensors | None, *, lr: float, damping: float) -> dict[str, Any]:
    """Take the step; a plain one without a diagonal.

    Args:
        theta: The model; left as it is.
        gradient: ``g``.
        d: What `diagonal` gave.
        lr: ``eta``.
        damping: Least absolute value that is divided by, > 0.

    Returns:
        The new model.
    """
    if d is None:
        return {name: value - lr * gradient[name] for name, value in theta.items()}
    return {name: value - lr * gradient[name] / abs(d[name]).clip(damping) for name, value in theta.items()}
