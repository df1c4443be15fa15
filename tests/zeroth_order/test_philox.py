from __future__ import annotations

from typing import Any

import numpy as np

from fedapps.zeroth_order.philox import MULTIPLIERS, WEYL, philox4x32, round_keys, split_word


def slow_philox(counter: list[int], seed: int) -> list[int]:
    """One block in Python's unbounded integers, from the paper's definition of the S-P network."""
    (k0, k1), (c0, c1, c2, c3) = split_word(seed), counter
    for _ in range(10):
        hi0, lo0 = divmod(MULTIPLIERS[0] * c0, 2**32)
        hi1, lo1 = divmod(MULTIPLIERS[1] * c2, 2**32)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) % 2**32, (k1 + WEYL[1]) % 2**32
    return [c0, c1, c2, c3]


def test_known_answers(known: dict[str, Any]) -> None:
    for case in known["philox4x32_10"]:
        seed = case["key"][0] | case["key"][1] << 32
        assert [int(word) for word in philox4x32(tuple(case["counter"]), seed)] == case["words"]


def test_blocks_equal_those_drawn_one_by_one() -> None:
    random = np.random.default_rng(0)
    counters = random.integers(0, 2**32, (4, 50), dtype=np.uint64)
    for seed in (0, 2**63, 2**64 - 1, 987654321987654321):
        words = np.stack(philox4x32(tuple(counters), seed))
        expected = [slow_philox([int(c) for c in counter], seed) for counter in counters.T]
        np.testing.assert_array_equal(words.T, expected)
        assert words.dtype == np.uint32


def test_scalars_are_broadcast_against_arrays() -> None:
    words = philox4x32((np.arange(3), 0, 7, 9), 5)
    assert [int(word[2]) for word in words] == slow_philox([2, 0, 7, 9], 5)


def test_keys_start_with_the_low_word() -> None:
    assert round_keys(2**32 * 3 + 4)[0].tolist() == [4, 3]
    assert round_keys(2**64 - 1).max() < 2**32
