r"""Sophia's step with clipped, diagonally preconditioned momentum, in NumPy or torch.

.. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, g\\
    v &\leftarrow \beta_2 v + (1 - \beta_2)\, B\, \hat g \odot \hat g \qquad \text{(every } \tau \text{ steps)}\\
    \theta &\leftarrow \theta - \eta w \theta - \eta\, \mathrm{clip}\big(m / \max(v, \epsilon),\, \rho\big)

:math:`\hat g` is the gradient of a batch of ``B`` examples at labels drawn from the model: the Gauss-Newton-Bartlett estimate.
Its square has the expectation :math:`\frac1B \mathrm{diag}` of the Gauss-Newton matrix, since the gradients of the examples are
independent and have mean zero at such labels. Liu et al., ICLR 2024, arXiv 2305.14342, Algorithms 2 and 3; as local steps:
Elbakary et al. 2024, arXiv 2406.06655. ``m = v = 0`` at the start, without a correction of the bias.

========== ================ =====================================================
symbol     identifier       meaning
========== ================ =====================================================
m, v       ``m``, ``v``     averages of gradients and of curvature, by name
eta        ``lr``           step size
w          ``weight_decay`` decoupled weight decay
rho        ``rho``          largest step of a coordinate, in units of ``lr``
eps        ``eps``          least curvature that is divided by
========== ================ =====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tensors = Mapping[str, Any]
"""Name -> NumPy array or torch tensor."""


def average(held: Tensors, new: Tensors, beta: float) -> dict[str, Any]:
    """Give ``beta held + (1 - beta) new``, tensor by tensor."""
    return {name: beta * value + (1 - beta) * new[name] for name, value in held.items()}


def bartlett(sampled_gradient: Tensors, num_examples: int) -> dict[str, Any]:
    r"""Estimate the diagonal of the Gauss-Newton matrix, :math:`B\, \hat g \odot \hat g`.

    Args:
        sampled_gradient: The mean gradient of the batch at labels drawn from the model.
        num_examples: ``B``.

    Returns:
        The estimate, nowhere negative.
    """
    return {name: num_examples * g * g for name, g in sampled_gradient.items()}


def step(
    theta: Tensors, m: Tensors, v: Tensors, *, lr: float, weight_decay: float, rho: float, eps: float
) -> dict[str, Any]:
    """Take the step.

    Args:
        theta: The model; left as it is.
        m: Average of the gradients.
        v: Average of the curvature.
        lr: ``eta``.
        weight_decay: ``w``.
        rho: Bound of the quotient, > 0.
        eps: Least value that is divided by, > 0.

    Returns:
        The new model.

    Example:
        >>> import numpy as np
        >>> m, v = {"w": np.array([3.0, -0.5])}, {"w": np.array([1.0, 2.0])}
        >>> step({"w": np.zeros(2)}, m, v, lr=0.5, weight_decay=0.0, rho=1.0, eps=1e-12)
        {'w': array([-0.5  ,  0.125])}
    """
    return {
        name: (1 - lr * weight_decay) * value - lr * (m[name] / v[name].clip(eps)).clip(-rho, rho)
        for name, value in theta.items()
    }
