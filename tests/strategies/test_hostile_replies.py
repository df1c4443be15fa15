"""A few generated lies to every method, through the whole server; ``make soak`` tells each of them two thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fedapps.errors import RosterError

from ..methods.rows import ROWS

LIES = 15


@pytest.mark.slow
@pytest.mark.usefixtures("own_module")
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("method", ROWS)
def test_no_lie_ends_a_round_or_hurts_another_client(tmp_path: Path, method: str) -> None:
    from fedapps_hostile import CLIENTS, UnderFire, config_of

    chance = random.Random(f"ci {method}")
    fire = UnderFire(config_of(method), CLIENTS, tmp_path)
    refused = 0
    for _ in range(LIES):
        try:
            left = fire.fire(chance)
        except RosterError as error:  # A lie before round 1: the start is refused, and names who is missing.
            if fire.tape.target[0] != "query" or f"missing partitions {fire.tape.liar}" not in str(error):
                raise
            continue
        assert fire.faults(left) == [], left["kind"]
        refused += str(left["liar"]) in left["row"]["refused"]
    assert refused >= 3
