from __future__ import annotations

import numpy as np
import pytest

from fedapps.tasks.splits import Purpose, hold_out, stream

LABELS = np.repeat([0, 1, 2], [100, 30, 7])


def cut(targets, fraction, seed=0):
    return hold_out(targets, fraction, stream(Purpose.SERVER_VALIDATION, seed))


def test_each_class_gives_its_share():
    kept, held = cut(LABELS, 0.1)
    assert np.bincount(LABELS[held]).tolist() == [10, 3, 1]
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(137))


@pytest.mark.parametrize(
    ("targets", "fraction", "num_held"),
    [
        pytest.param(np.zeros(0), 0.5, 0, id="no-examples"),
        pytest.param(np.zeros(1), 0.9, 0, id="one-example-is-kept"),
        pytest.param(np.array([0, 1]), 0.9, 1, id="two-classes-of-one-example"),
        pytest.param(LABELS, 0.0, 0, id="nothing-to-hold-out"),
        pytest.param(np.linspace(0, 1, 50), 0.2, 10, id="real-targets"),
        pytest.param(np.zeros((50, 3)), 0.2, 10, id="targets-with-more-dimensions"),
        pytest.param(np.array([0, 0, 1, 1]), 0.9, 2, id="each-class-keeps-one"),
        pytest.param(np.repeat([0, 1], [50, 1]), 0.5, 25, id="a-class-of-one-example-is-kept"),
    ],
)
def test_sizes(targets, fraction, num_held):
    kept, held = cut(targets, fraction)
    assert len(held) == num_held
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(targets)))


def test_a_class_of_one_example_stays():
    """At half of 51 examples the single one of class 1 has the larger remainder, and is kept nevertheless."""
    kept, held = cut(np.repeat([0, 1], [50, 1]), 0.5)
    assert 50 in kept
    assert 50 not in held


def test_the_draw_is_random_but_seeded():
    assert np.array_equal(cut(LABELS, 0.3)[1], cut(LABELS, 0.3)[1])
    assert not np.array_equal(cut(LABELS, 0.3)[1], cut(LABELS, 0.3, seed=1)[1])


def test_streams_differ_by_purpose_seed_and_identity():
    draws = {
        stream(*args).integers(2**62)
        for args in [
            (Purpose.PARTITION, 0),
            (Purpose.SERVER_VALIDATION, 0),
            (Purpose.PARTITION, 2**63 - 1),
            (Purpose.CLIENT_HOLD_OUT, 0, 10, 1),
            (Purpose.CLIENT_HOLD_OUT, 0, 10, 2),
        ]
    }
    assert len(draws) == 5
