"""Probes on the unit sphere: FedZO's estimate, worked out here in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedapps.zeroth_order.directions import Distribution, direction
from fedapps.zeroth_order.probing import Difference, Prober
from fedapps.zeroth_order.scheme import LocalStep, Scheme

MU, LR, P = 0.05, 0.02, 3
FIXED = {"weight": ((3, 6),)}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4)


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum(dim=1)


@pytest.mark.parametrize("distribution", list(Distribution))
@pytest.mark.parametrize("difference", list(Difference))
@pytest.mark.parametrize("fixed", [{}, FIXED], ids=["all move", "a row is fixed"])
def test_the_estimate_is_the_papers(
    distribution: Distribution, difference: Difference, fixed: dict[str, tuple[tuple[int, int], ...]]
) -> None:
    scheme = Scheme(7, "decomfl", distribution)
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    prober = Prober(model(), scheme, fixed=fixed)
    result = prober.probe(loss, batches, first_step=4, num_probes=P, mu=MU, lr=LR, difference=difference, sphere=True)
    steps = [LocalStep(4 + k, g, LR) for k, g in enumerate(result.scalars)]
    moved = {name: tensor.numpy() for name, tensor in prober.displaced(steps).items()}

    layer = model()
    x = np.concatenate([p.detach().double().numpy().ravel() for p in layer.parameters()])
    free = np.ones(16, bool)
    free[3:6] = not fixed

    def f(x: np.ndarray, batch: torch.Tensor) -> float:
        W, b = x[:12].reshape(4, 3), x[12:]
        return float(np.mean(np.sum((batch.double().numpy() @ W.T + b) ** 2, axis=1)))

    for k, batch in enumerate(batches):
        estimate = np.zeros(16)
        for p in range(P):
            v = direction(7, 4 + k, p, 0, 16, distribution).astype(np.float64) * free
            v /= np.linalg.norm(v)
            if difference is Difference.CENTRAL:
                slope = (f(x + MU * v, batch) - f(x - MU * v, batch)) / (2 * MU)
            else:
                slope = (f(x + MU * v, batch) - f(x, batch)) / MU
            estimate += free.sum() * slope * v / P
        x = x - LR * estimate
    found = np.concatenate([moved["weight"].ravel(), moved["bias"]])
    np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-6)


def test_the_length_of_a_direction_does_not_depend_on_how_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    prober = Prober(model(), Scheme(7, "decomfl"), fixed=FIXED)
    whole = prober._square(2, 1)
    u = direction(7, 2, 1, 0, 16).astype(np.float64)
    assert whole == pytest.approx(np.sum(u**2) - np.sum(u[3:6] ** 2), rel=1e-12)
    monkeypatch.setattr("fedapps.zeroth_order.probing._CHUNK", 5)
    assert prober._square(2, 1) == pytest.approx(whole, rel=1e-12)
