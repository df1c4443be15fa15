from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order.directions import Distribution, direction
from fedapps.zeroth_order.errors import DirectionError

BOTH = pytest.mark.parametrize("distribution", list(Distribution))


def test_known_directions(known: dict[str, Any]) -> None:
    for case in known["directions"]:
        distribution = Distribution(case["distribution"])
        u = direction(int(case["seed"]), case["step"], case["probe"], 0, case["elements"], distribution)
        assert u.dtype == np.float32
        assert hashlib.sha256(u.astype("<f4").tobytes()).hexdigest() == case["sha256_le_f32"]
        assert u[:8].tolist() == case["first"]


def test_known_windows(known: dict[str, Any]) -> None:
    for case in known["windows"]:
        stop = case["start"] + len(case["values"])
        distribution = Distribution(case["distribution"])
        u = direction(int(case["seed"]), case["step"], case["probe"], case["start"], stop, distribution)
        assert u.tolist() == case["values"]


@BOTH
@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
@pytest.mark.parametrize("origin", [0, 2**32 * 8 - 700, 2**40 + 3], ids=["start", "over 2^32 blocks", "far"])
def test_any_window_is_that_part_of_the_whole(distribution: Distribution, seed: int, origin: int) -> None:
    whole = direction(seed, 4, 1, origin, origin + 1500, distribution)
    for start, stop in ((0, 0), (0, 1), (7, 9), (8, 16), (127, 129), (300, 1500), (1499, 1500)):
        window = direction(seed, 4, 1, origin + start, origin + stop, distribution)
        np.testing.assert_array_equal(window, whole[start:stop])


@pytest.mark.slow
@BOTH
def test_moments(distribution: Distribution) -> None:
    """Mean 0, variance 1, and the fourth moment of the distribution, each within 5 standard errors of 400000 draws."""
    u = direction(11, 0, 0, 0, 400_000, distribution).astype(np.float64)
    fourth = 3.0 if distribution is Distribution.GAUSSIAN else 1.0
    tolerance = 5 / np.sqrt(u.size)
    assert abs(u.mean()) < tolerance
    assert abs((u**2).mean() - 1) < tolerance * np.sqrt(2)
    assert abs((u**3).mean()) < tolerance * np.sqrt(15)
    assert abs((u**4).mean() - fourth) < tolerance * np.sqrt(96) + 0.001  # the table ends at 4.3


@BOTH
def test_steps_probes_seeds_and_neighbours_are_independent(distribution: Distribution) -> None:
    n = 200_000
    base = direction(3, 5, 0, 0, n + 1, distribution).astype(np.float64)
    others = {
        "next step": direction(3, 6, 0, 0, n, distribution),
        "next probe": direction(3, 5, 1, 0, n, distribution),
        "next seed": direction(4, 5, 0, 0, n, distribution),
        "high word of the seed": direction(3 + 2**32, 5, 0, 0, n, distribution),
        "another tensor": direction(3, 5, 0, n, 2 * n, distribution),
        "next element": base[1:],
    }
    for name, other in others.items():
        assert abs(np.mean(base[:n] * other)) < 5 / np.sqrt(n), name
        assert abs(np.mean((base[:n] ** 2 - 1) * (other.astype(np.float64) ** 2 - 1))) < 10 / np.sqrt(n), name


@BOTH
def test_global_generators_have_no_part_in_it(distribution: Distribution) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 (the global state is the subject)
    before = (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    first = direction(5, 0, 0, 3, 50, distribution)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    random.seed(2)
    np.testing.assert_array_equal(direction(5, 0, 0, 3, 50, distribution), first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2**64, 0, 0, 0, 1), r"seed: expected an integer from 0 to 2\^64 - 1"),
        ((-1, 0, 0, 0, 1), "seed: expected an integer"),
        ((True, 0, 0, 0, 1), "seed: expected an integer"),
        ((0, 2**32, 0, 0, 1), r"step: expected an integer from 0 to 2\^32 - 1, got 4294967296; start a new run"),
        ((0, 0, 2**32, 0, 1), "probe: expected an integer"),
        ((0, 0, 0, -1, 1), "elements: expected 0 <= start <= stop"),
        ((0, 0, 0, 2, 1), "elements: expected 0 <= start <= stop"),
    ],
    ids=["seed too large", "seed negative", "seed a boolean", "step too large", "probe too large", "start", "stop"],
)
def test_what_lies_outside_the_definition_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DirectionError, match=message):
        direction(*arguments)
