r"""FedCLUP: global and personal models with a dial ``lambda`` between them.

Yu, He, Sun, Xue & Li, ICML 2025, arXiv 2410.08934. The objective is

.. math:: \min_{w, \{w_i\}} \sum_i p_i \big( L_i(w_i) + \tfrac{\lambda}{2} |w - w_i|^2 \big),

solved as a bilevel problem: every client minimises over its own ``w_i`` by ``K`` warm-started steps
(`fedapps.personalization.proximal`), and the server descends on what is left, a sum of Moreau envelopes,

.. math:: w \leftarrow w - \gamma \lambda \sum_i p_i (w - w_i).

=============== ==================== =========== =========================================================
symbol          identifier           shape       meaning
=============== ==================== =========== =========================================================
w               ``model``            named       the global model
w_i             ``personal``         named       client i's model; never leaves the client
d_i = w - w_i   ``difference``       named       to the model ``w`` that the client received
p_i             ``weight``                       weight of a client, over *all* N clients
sum p_i d_i     ``total``            named       the one running sum, float64
lambda          ``lam``                          pull; in units of curvature
gamma           ``gamma``                        server step; in units of inverse curvature
=============== ==================== =========== =========================================================

A client that is not sampled still counts: `Stale` says how. With ``reuse`` and ``reuse-models`` the server's sum mirrors
what clients know of themselves. It changes by ``p_i (new - old)``, only for folded replies; a client sends new minus old,
where old is what its last *folded* reply left (`Sent.known`, kept in its store). So the server keeps no client's model,
and lost replies leave both ends in agreement.

Departures: partial participation (the paper has every client in every round). `Sent.known` is float64 and counts what
was sent *after* rounding to the model's dtype, so that rounding does not pile up in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import MessageError, SettingsError
from fedapps.personalization.proximal import check_lambda

Arrays = Mapping[str, NDArray[Any]]
"""Name -> array."""

_SLACK = 1 + 1e-9
"""A bound that is met exactly is not passed because of rounding."""


class Stale(StrEnum):
    """What the server's sum holds for the clients that did not reply in a round."""

    REUSE = "reuse"
    """The last known difference ``d_i``: the fixed point is exact. 0 before a client's first reply, when ``w_i = w``."""
    REUSE_MODELS = "reuse-models"
    """The last known model ``w_i``: exact too, but stable only up to ``gamma = 1/lambda``, and slower."""
    REPLIES = "replies"
    """Nothing: the round's replies alone, their weights scaled to 1. Hovers around the solution under partial participation."""


@dataclass(frozen=True)
class FedClupConfig:
    """The server's numbers, which may change from round to round.

    Raises:
        SettingsError: A number is out of range, or ``reuse-models`` has ``gamma > 1/lambda``.
    """

    lam: float  # ``lambda > 0``
    gamma: float  # server step, above 0: `default_gamma`, or ``1/lambda`` for plain averaging
    stale: Stale = Stale.REUSE  # what stands for clients that did not reply

    def __post_init__(self) -> None:
        check_lambda(self.lam, positive=True)
        if not np.isfinite(self.gamma) or self.gamma <= 0:
            raise SettingsError(
                "gamma", expected="a finite number above 0", got=f"{self.gamma:g}", do="leave it at its default"
            )
        if self.stale is Stale.REUSE_MODELS and self.gamma * self.lam > _SLACK:
            raise SettingsError(
                "gamma with stale = reuse-models",
                expected=f"at most 1/lambda = {1 / self.lam:g}, beyond which old models make the step diverge",
                got=f"{self.gamma:g}",
                do="take gamma = 1/lambda, or stale = reuse",
            )


@dataclass(frozen=True)
class ServerState:
    """What the server keeps.

    Attributes:
        model: ``w``, the personal tensors of the global model.
        total: ``sum p_i d_i`` (``reuse-models``: ``sum p_i w_i``) over the clients heard of, float64.
        heard: ``sum p_i`` over the clients heard of (``replies``: of this round).
        generation: Counts `restart`; what a client knows of an older generation is void.
    """

    model: dict[str, NDArray[Any]]
    total: dict[str, NDArray[np.float64]]
    heard: float = 0.0
    generation: int = 0


@dataclass(frozen=True)
class Sent:
    """What a client sends, and what it must keep if the server folds it."""

    message: dict[str, NDArray[Any]]  # new minus last folded value, in the model's dtype
    known: dict[str, NDArray[np.float64]]  # what the server's sum then holds of this client, float64


def default_gamma(lam: float, L: float, num_sampled: int, num_clients: int) -> float:
    r"""Give the server step, :math:`\gamma = \frac{|S|}{N} \big(\frac{1}{\lambda} + \frac{1}{L}\big)`.

    ``1/lambda + 1/L`` is one over the smoothness of a Moreau envelope. The share of sampled clients keeps the sum of old
    differences from overshooting.

    Args:
        lam: ``lambda``.
        L: Greatest curvature over the clients, above 0.
        num_sampled: ``|S|``, clients in a round.
        num_clients: ``N``.

    References:
        arXiv 2410.08934 for full participation; the share ``|S|/N`` is this project's.
    """
    return num_sampled / num_clients * (1 / lam + 1 / L)


def initial_state(model: Arrays) -> ServerState:
    """Start a run from (the personal tensors of) the initial model: every ``w_i`` starts at ``w``, so every difference is 0."""
    return restart(ServerState(model={name: np.array(w) for name, w in model.items()}, total={}, generation=-1))


def restart(state: ServerState) -> ServerState:
    """Void the running sum, for when a client has lost its store and can no longer take back what it once added.

    The global model stays. Every client's next reply counts as its first, whatever it knew.
    """
    zeros = {name: np.zeros(w.shape) for name, w in state.model.items()}
    return replace(state, total=zeros, heard=0.0, generation=state.generation + 1)


def value_to_send(received: Arrays, personal: Arrays, stale: Stale) -> dict[str, NDArray[np.float64]]:
    """Compute what the server's sum is to hold of a client, float64: ``d_i = w - w_i``, or ``w_i`` for ``reuse-models``."""
    if stale is Stale.REUSE_MODELS:
        return {name: _wide(w_i) for name, w_i in personal.items()}
    return {name: _wide(received[name]) - _wide(w_i) for name, w_i in personal.items()}


def send(received: Arrays, personal: Arrays, known: Arrays | None, stale: Stale) -> Sent:
    """Compute a client's reply: its new value minus what the server already holds of it.

    Args:
        received: ``w`` as the client received it.
        personal: ``w_i`` after the client's ``K`` steps.
        known: `Sent.known` of the client's last folded reply in the server's present generation; None if there is none,
            and always None for ``replies``, whose sum is of one round.
        stale: The server's rule.

    Raises:
        MessageError: The personal model, or ``known``, has other tensors than the received one.
    """
    _check_like(personal, received, "personal model in the client's store")
    if known is not None:
        _check_like(known, received, "last folded reply in the client's store")
    message: dict[str, NDArray[Any]] = {}
    now_known: dict[str, NDArray[np.float64]] = {}
    for name, value in value_to_send(received, personal, stale).items():
        old = np.zeros_like(value) if known is None else _wide(known[name])
        message[name] = (value - old).astype(received[name].dtype)
        now_known[name] = old + _wide(message[name])
    return Sent(message, now_known)


def fold(state: ServerState, message: Arrays, weight: float, *, first: bool) -> ServerState:
    """Add ``p_i (new - old)`` of one reply, `Sent.message`, to the running sum; ``state`` is not modified.

    ``p_i`` are weights that sum to 1 over all ``N`` clients; ``first`` says whether this is the client's first folded reply of
    this generation (``replies``: always).

    Raises:
        MessageError: The reply has other tensors than the model.
        SettingsError: The weights of the clients heard of pass 1.
    """
    _check_like(message, state.model, "reply")
    heard = state.heard + weight if first else state.heard
    if weight <= 0 or heard > _SLACK:
        raise SettingsError(
            "client weights p_i",
            expected="positive weights that sum to 1 over all N clients",
            got=f"p_i = {weight:g}, a sum of {heard:g} over the clients heard of so far",
            do="divide by the sum over all clients, not over those of a round",
        )
    total = {name: held + weight * _wide(message[name]) for name, held in state.total.items()}
    return replace(state, total=total, heard=heard)


def server_step(state: ServerState, config: FedClupConfig) -> ServerState:
    r"""Move the global model, :math:`w \leftarrow w - \gamma\lambda \sum_i p_i (w - w_i)`, after the round's last fold.

    Under ``replies`` the sum of the new state is empty again. arXiv 2410.08934, outer update.
    """
    scale = config.gamma * config.lam
    model = {
        name: (_wide(w) - scale * _mean_difference(state, name, config.stale)).astype(w.dtype)
        for name, w in state.model.items()
    }
    if config.stale is Stale.REPLIES:
        zeros = {name: np.zeros_like(held) for name, held in state.total.items()}
        return replace(state, model=model, total=zeros, heard=0.0)
    return replace(state, model=model)


def gamma_warnings(config: FedClupConfig, L: float, num_sampled: int, num_clients: int) -> list[str]:
    """Say what is wrong with a server step, with the bound that is passed; nothing if the step is known to be stable.

    ``L`` is the greatest curvature over the clients, known or estimated.
    """
    numbers = f"with lambda = {config.lam:g}, L = {L:g}, {num_sampled} of {num_clients} clients a round"
    full = default_gamma(config.lam, L, num_clients, num_clients)
    stable = default_gamma(config.lam, L, num_sampled, num_clients)
    warnings = []
    if config.gamma >= 2 * full * _SLACK:
        warnings.append(
            f"gamma = {config.gamma:g} is unstable even with every client in every round: the theory's step is"
            f" 1/lambda + 1/L = {full:g}, and twice that, {2 * full:g}, is its limit; {numbers}"
        )
    elif config.stale is Stale.REUSE and config.gamma > stable * _SLACK:
        warnings.append(
            f"gamma = {config.gamma:g} with stale = reuse is larger than (|S|/N)(1/lambda + 1/L) = {stable:g}; it can diverge"
            f" for rarely sampled or heavily weighted clients; {numbers}"
        )
    elif config.gamma > full * _SLACK:
        warnings.append(
            f"gamma = {config.gamma:g} is larger than the theory's step 1/lambda + 1/L = {full:g}; {numbers}"
        )
    return warnings


def _mean_difference(state: ServerState, name: str, stale: Stale) -> NDArray[np.float64]:
    if stale is Stale.REUSE_MODELS:
        return state.heard * _wide(state.model[name]) - state.total[name]
    if stale is Stale.REPLIES:
        return state.total[name] / state.heard if state.heard else state.total[name]
    return state.total[name]


def _wide(array: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(array, dtype=np.float64)


def _check_like(arrays: Arrays, model: Arrays, what: str) -> None:
    got, expected = _shapes(arrays), _shapes(model)
    if got != expected:
        differing = [name for name in {**expected, **got} if got.get(name) != expected.get(name)]
        raise MessageError(
            f"{what}, tensors {_listed(differing)}",
            expected=f"shapes {_listed(expected.get(name, 'none') for name in differing)} as in the global model",
            got=f"{_listed(got.get(name, 'none') for name in differing)}",
            do="it belongs to another architecture or other personal parts; start a new experiment",
        )


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def personal_names(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Pick the personal tensors of a model, in the order of ``names``.

    A pattern is a name, a module (``head`` stands for ``head.weight`` and ``head.bias``) or a shell pattern
    (``layers.*.bias``), and must name a tensor; no pattern makes every tensor personal.
    """
    for pattern in patterns:
        if not any(_names(pattern, name) for name in names):
            raise SettingsError(
                f"personal parts, '{pattern}'",
                expected="the name of a tensor or module of the model",
                got="one that names nothing; the tensors are " + ", ".join(names),
                do="correct it, or leave personal parts empty to personalise everything",
            )
    if not patterns:
        return tuple(names)
    return tuple(name for name in names if any(_names(pattern, name) for pattern in patterns))


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
