"""Tests of ``fedapps/zeroth_order/wire.py``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.scheme import Record
from fedapps.zeroth_order.wire import pack_scalars, pack_slice, unpack_scalars, unpack_slice


def record(server_round: int, tau: int = 2, probes: int = 3, **other: object) -> Record:
    values = np.random.default_rng(server_round).normal(size=(tau, probes)).astype(np.float32)
    scalars = tuple(tuple(float(v) for v in row) for row in values)
    made = Record(server_round, 10 * (server_round % 100), 0.1, 1e-3, 0.1, 1e-6, scalars, 4)
    return replace(made, **other)  # type: ignore[arg-type]


SLICES = {
    "no record": Slice(3, 5, ()),
    "one record": Slice(0, 1, (record(1),)),
    "all alike": Slice(1, 6, tuple(record(r) for r in (2, 3, 5))),
    "settings that change": Slice(0, 4, (record(1), record(2, lr=0.05, mu=2e-3), record(4, nu=0.2, eps=1e-8))),
    "shapes that change": Slice(0, 3, (record(1), record(2, 1, 5), record(3, 4, 1))),
    "fingerprints": Slice(0, 3, (record(1), record(2, fingerprint="ab" * 32), record(3, fingerprint="0c" * 32))),
    "momentum": Slice(0, 2, (record(1, momentum=0.9), record(2, momentum=0.8))),
    "late steps": Slice(0, 2**40, (record(2**40, first_step=2**32 - 2, participants=10**6),)),
}


@pytest.mark.parametrize("part", SLICES.values(), ids=SLICES.keys())
def test_a_slice_comes_back_as_it_was(part: Slice) -> None:
    assert unpack_slice(pack_slice(part), "server") == part


def test_a_scalar_costs_four_bytes_and_settings_that_stay_are_sent_once() -> None:
    short, long = (pack_slice(Slice(0, 50, tuple(record(r, tau, 8) for r in range(1, 51)))) for tau in (1, 11))
    assert len(long["scalars"]) - len(short["scalars"]) == 4 * 50 * 80  # type: ignore[arg-type]
    assert {key: value for key, value in long.items() if key not in ("scalars", "shape")} == {
        key: value for key, value in short.items() if key not in ("scalars", "shape")
    }
    assert long["lr"] == [0.1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"after": None}, "TypeError"),
        ({"through": 0}, "rounds in order"),
        ({"scalars": b"\0" * 47}, "no whole rows"),
        ({"scalars": b"\0" * 96}, "do not fit the records"),
        ({"first-steps": [1]}, "ValueError"),
        ({"lr": 0.1}, "TypeError"),
        ({"mu": [float("nan")] * 2}, "finite"),
        ({"shape": [2]}, "ValueError"),
        ({"marked": [7], "fingerprints": b"\1" * 32}, "IndexError"),
        ({"rounds": [2, 10**400]}, "Error"),
        ({"scalars": np.full(12, np.nan, "<f4").tobytes()}, "finite scalars"),
    ],
)
def test_a_malformed_slice_is_named(change: dict[str, object], match: str) -> None:
    columns = {**pack_slice(Slice(1, 3, (record(2), record(3)))), **change}
    with pytest.raises(JournalError, match=rf"(?s)server, journal slice: .*{match}"):
        unpack_slice(columns, "server")


def test_a_missing_column_is_named() -> None:
    columns = pack_slice(Slice(1, 3, (record(2), record(3))))
    del columns["eps"]
    with pytest.raises(JournalError, match="KeyError: 'eps'"):
        unpack_slice(columns, "server")


def test_scalars_are_little_endian_float32_row_after_row() -> None:
    assert pack_scalars([1.0, -2.0]) == bytes.fromhex("0000803f000000c0")
    assert unpack_scalars(pack_scalars([1, 2, 3, 4, 5, 6]), 2) == ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0))
    with pytest.raises(ValueError, match="no whole rows of 2"):
        unpack_scalars(b"\0" * 12, 2)
