"""Tests of ``fedapps/strategies/kept_journal.py``: a server that holds scalars, and its model on demand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedapps.messages import Arrays
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.zeroth_order.errors import AstrayError, DirectionError
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.replica import Replica
from fedapps.zeroth_order.scheme import Record, Scheme

SCHEME = Scheme(5, "hiso")
FIRST = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(3), "b": np.ones(2, np.float32)}


def record(server_round: int) -> Record:
    return Record(server_round, server_round - 1, 0.1, 1e-3, 0.1, 1e-6, ((0.5 * server_round,),), 2)


def fingerprint_after(last: int) -> str:
    replica = Replica(SCHEME, {name: FIRST[name].copy() for name in ("w", "b")})
    replica.advance(Slice(0, last, tuple(record(r) for r in range(1, last + 1))))
    return replica.fingerprint()


class Loader:
    """Counts how often the first model is loaded."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Arrays:
        self.calls += 1
        return {name: value.copy() for name, value in FIRST.items()}


@pytest.fixture
def load() -> Loader:
    return Loader()


@pytest.fixture
def kept(load: Loader) -> KeptJournal:
    return KeptJournal(SCHEME, load(), ["w", "b"], load=load)


def test_no_model_is_held_before_somebody_asks_for_it(kept: KeptJournal, load: Loader) -> None:
    for r in (1, 2, 3):
        kept.append(record(r))
        assert kept.fingerprint_after(record(r + 1)) is None
    assert kept.replica is None
    assert load.calls == 1
    model = kept.model()
    assert load.calls == 2
    assert list(model) == list(FIRST)
    assert model["count"] == 3
    assert kept.replica is not None
    assert kept.replica.fingerprint() == fingerprint_after(3)
    assert kept.fingerprint_after(record(4)) == fingerprint_after(4)
    kept.append(record(4))
    kept.model()
    assert kept.replica.fingerprint() == fingerprint_after(4)
    assert load.calls == 2


def test_the_model_is_read_only_and_the_first_one_stays(load: Loader) -> None:
    first = load()
    kept = KeptJournal(SCHEME, first, ["w", "b"])
    kept.append(record(1))
    model = kept.model()
    assert first["w"].tobytes() == FIRST["w"].tobytes() != model["w"].tobytes()
    with pytest.raises(ValueError, match="read-only"):
        model["w"][0] = 0


def test_a_round_that_could_not_be_written_is_not_in_the_model(kept: KeptJournal, load: Loader) -> None:
    kept.append(record(1))
    kept.model()
    kept.fingerprint_after(record(2))  # The disk is full, and the round never reaches the journal.
    kept.model()
    assert kept.replica is not None
    assert kept.replica.fingerprint() == fingerprint_after(1)
    assert load.calls == 3


def test_a_model_that_differs_from_the_journals_fingerprint_is_not_handed_out(kept: KeptJournal) -> None:
    kept.append(replace(record(1), fingerprint="0" * 64))
    with pytest.raises(AstrayError, match="replica at round 1: expected fingerprint 0000"):
        kept.model()


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(DirectionError, match="model: expected a trainable parameter, got none"):
        KeptJournal(SCHEME, FIRST, [])
