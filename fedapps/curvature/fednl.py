r"""FedNL: Newton's method with Hessians that are learned from compressed differences.

Safaryan, Islamov, Qian & Richtarik, ICML 2022, arXiv 2106.02969. Client ``i`` keeps an estimate :math:`H_i` of its Hessian and
learns what its compressor ``C`` lets through (Algorithm 1, line 6):

.. math:: S_i = C(\nabla^2 f_i(\theta) - H_i), \qquad H_i \leftarrow H_i + \alpha S_i

The server keeps :math:`H = \sum p_i H_i` from the :math:`S_i`, and takes the step of option 1, in which eigenvalues below
:math:`\mu` are raised to it, or that of option 2, with :math:`l = \sum p_i |H_i - \nabla^2 f_i(\theta)|_F` (line 11):

.. math:: \theta' = \theta - [H]_\mu^{-1} g \qquad\text{or}\qquad \theta' = \theta - [H + l I]^{-1} g

Under partial participation (Algorithm 2) clients send :math:`q_i = (H_i + l_i I)\theta - g_i` in place of :math:`g_i`, and
sums run over the last known :math:`q_i, l_i, H_i` of all clients. In delta form, which single precision bears better:

.. math:: \theta' = [H + l I]^{-1} q = \theta + [H + l I]^{-1} (q - (H + l I)\,\theta)

All sums are in float64, matrices are packed upper triangles (`fedapps.curvature.packing`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.compressors import Compressor, Triangle
from fedapps.curvature.newton import Vector
from fedapps.curvature.packing import diagonal_places, triangle_size, triangle_width, unpack_upper
from fedapps.errors import CurvatureError


class Learned(NamedTuple):
    """What `learn` gives."""

    H: Triangle  # ``H_i + alpha S_i``
    message: dict[str, NDArray[Any]]  # ``S_i`` as it travels


def learn(H: Triangle, hessian: Triangle, compressor: Compressor, alpha: float) -> Learned:
    r"""Learn from one Hessian, :math:`H_i \leftarrow H_i + \alpha\, C(\nabla^2 f_i(\theta) - H_i)`."""
    message = compressor.compress(hessian - H)
    return Learned(H + alpha * compressor.decompress(message, triangle_width(len(H)), "client"), message)


def norm(M: Triangle) -> float:
    """Compute the Frobenius norm of a symmetric matrix from its upper triangle."""
    diagonal = M[diagonal_places(triangle_width(len(M)))]
    return float(np.sqrt(2 * (M @ M) - diagonal @ diagonal))


def product(H: Triangle, shift: float, theta: Vector) -> Vector:
    r"""Compute :math:`(H + \text{shift} \cdot I)\,\theta`, ``(d,)``."""
    return np.asarray(unpack_upper(H) @ theta + shift * theta)


@dataclass(frozen=True)
class ServerState:
    """What the server keeps over rounds: sums over the clients heard of, weighted over all ``N``.

    Attributes:
        H: ``sum p_i H_i``.
        q: ``sum p_i q_i``, ``(d,)``; stays zero under full participation.
        weight: ``sum p_i``.
    """

    H: Triangle
    q: Vector
    weight: float = 0.0


@dataclass
class RoundSums:
    """What the replies of a round add to a `ServerState`.

    Attributes:
        initial: ``sum p_i H_i^0`` of clients that are heard of for the first time.
        learned: ``sum p_i S_i``.
        q: Sum of the ``p_i`` times changes of ``q_i``.
        weight: ``sum p_i`` of clients that are heard of for the first time.
        errors: Client -> ``l_i``.
    """

    initial: Triangle
    learned: Triangle
    q: Vector
    weight: float = 0.0
    errors: dict[int, float] = field(default_factory=dict)


def empty_state(d: int) -> ServerState:
    """Give the state without any client."""
    return ServerState(np.zeros(triangle_size(d)), np.zeros(d))


def start_round(d: int) -> RoundSums:
    """Give the sums of a round without any reply."""
    return RoundSums(np.zeros(triangle_size(d)), np.zeros(triangle_size(d)), np.zeros(d))


class States(NamedTuple):
    """What `end_round` gives."""

    before: ServerState  # with the initial estimates of new clients, but without what was learned in this round
    after: ServerState  # with that: what the server keeps


def end_round(state: ServerState, sums: RoundSums, alpha: float) -> States:
    r"""Add a round, :math:`H \leftarrow H + \sum p_i H_i^0 + \alpha \sum p_i S_i`; nothing is modified."""
    before = ServerState(state.H + sums.initial, state.q + sums.q, state.weight + sums.weight)
    return States(before, ServerState(before.H + alpha * sums.learned, before.q, before.weight))


class Direction(NamedTuple):
    """What `cut_solve` gives."""

    x: Vector  # ``(d,)``
    num_cut: int  # eigenvalues that were below ``mu``


def cut_solve(H: Triangle, shift: float, rhs: Vector, mu: float, *, where: str) -> Direction:
    r"""Solve with eigenvalues cut from below, :math:`x = [H + \text{shift} \cdot I]_\mu^{-1} \text{rhs}`.

    Option 1 has no shift. In option 2 the shift alone makes :math:`H + l I \succeq \nabla^2 f \succeq \mu I` if the loss is
    ``mu``-strongly convex and every client replied, so that nothing is cut.

    Raises:
        CurvatureError: An eigenvalue is not above 0 after the cut, or there is none.
    """
    try:
        eigenvalues, Q = np.linalg.eigh(unpack_upper(H))
    except np.linalg.LinAlgError as error:
        raise CurvatureError(
            where, expected="a finite Hessian", got=str(error), do="lower fednl.alpha, or check the clients' data"
        ) from error
    eigenvalues = eigenvalues + shift
    cut = np.maximum(eigenvalues, mu)
    if not cut[0] > 0:
        raise CurvatureError(
            where,
            expected="eigenvalues above 0",
            got=f"{cut[0]:.1e} as the least",
            do="set fednl.mu, the bound from below, above 0",
        )
    # To rounding, which is no cut that anyone wants to hear of.
    num_cut = int(np.sum(eigenvalues < mu - 1e-10 * np.abs(eigenvalues).max()))
    return Direction(np.asarray(Q @ ((Q.T @ rhs) / cut)), num_cut)
