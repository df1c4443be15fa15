"""Absurd but finite replies, and defences: no round of any method takes them over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean

from fedapps import defences
from fedapps.errors import SettingsError
from fedapps.messages.schema import Reply, pack_arrays, unpack_arrays
from fedapps.settings import RoundSettings
from fedapps.strategies.fedavgm import FedAvgM
from fedapps.strategies.fedopt import FedAdagrad, FedAdam, FedYogi
from fedapps.strategies.fedpm import FedPM
from fedapps.strategies.rounds import REFERENCE_ROUNDS
from fedapps.zeroth_order.wire import pack_scalars, unpack_scalars

from ..methods.rows import ROWS
from ..simulation.runs import short_run

pytestmark = pytest.mark.usefixtures("own_module")

MODEL = {"x": np.zeros(3, np.float32)}


def absurd(reply: Message) -> Message:
    """1e30 in every number of what a client trained."""
    for record in ("arrays", "products"):
        if record in reply.content:
            arrays = unpack_arrays(reply.content, record, "")
            reply.content[record] = pack_arrays({n: np.full_like(v, 1e30) for n, v in arrays.items()})
    scalars = reply.content.get("scalars")
    if isinstance(scalars, ConfigRecord) and "values" in scalars:
        values = [1e30] * sum(len(row) for row in unpack_scalars(scalars["values"], 1))
        scalars["values"] = pack_scalars([float(np.float32(value)) for value in values])
    return reply


# LocalTrain's clients send no number.
@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in ROWS if name != "localtrain"])
def test_1e30_in_one_reply_is_refused_by_name_and_every_honest_round_goes_on(tmp_path: Path, method: str) -> None:
    config = {"method": method, "num-server-rounds": 4}
    left = short_run(tmp_path / "run", config, faults={(1, 1): absurd, (3, 1): absurd})
    rows = left.rows("train")
    for row in (rows[0], rows[2]):
        assert list(row["refused"]) == ["1"]
        assert "max-update-ratio" in row["refused"]["1"]
    assert [row["accepted"] for row in rows[1:]] == [True, True, True]
    assert all(np.abs(value).max() < 1e3 for value in left.model.values())


@pytest.mark.parametrize("cls", [FedAdam, FedYogi, FedAdagrad, FedAvgM])
def test_a_round_that_is_not_finite_leaves_model_and_state_as_they_were(cls: type[FedAdam]) -> None:
    strategy = cls(RoundSettings(max_update_ratio=0), **({"server_momentum": 0.9} if cls is FedAvgM else {}))
    outcomes = []
    for number, value in enumerate([1.0, 3e38, 1.0], 1):
        strategy.rounds.begin(number, MODEL, [0])
        before = strategy.state_arrays()
        sign = -1 if number == 3 else 1
        strategy.rounds.receive(0, Reply(0, 1, {}, {"x": np.full(3, sign * value, np.float32)}))
        outcomes.append(strategy.rounds.end() is not None)
        if not outcomes[-1]:
            assert all(np.array_equal(value, before[name]) for name, value in strategy.state_arrays().items())
    assert outcomes[0]
    assert outcomes[2]
    assert all(np.isfinite(value).all() for value in strategy.state_arrays().values())


def replies(n: int = 9) -> list[dict[str, dict[str, np.ndarray]]]:
    random = np.random.default_rng(0)
    return [{"update": {"w": random.normal(size=(4, 3)), "count": np.array(i)}} for i in range(n)]


def test_median_and_trimmed_mean_are_flowers() -> None:
    stacked = np.stack([reply["update"]["w"] for reply in replies()])
    np.testing.assert_allclose(defences.coordinatewise(replies(), None)["update"]["w"], np.median(stacked, axis=0))
    np.testing.assert_allclose(defences.coordinatewise(replies(), 2)["update"]["w"], trim_mean(stacked, 2.25 / 9))
    assert "count" not in defences.coordinatewise(replies(), None)["update"]


def test_multi_krum_leaves_out_those_far_from_the_others() -> None:
    lied = replies()
    for place in (2, 5):
        lied[place]["update"]["w"] = lied[place]["update"]["w"] - 50.0
    assert defences.multi_krum(lied, 2) == [0, 1, 3, 4, 6, 7, 8]


def test_clipping_shortens_an_update_to_its_bound_and_leaves_others_alone() -> None:
    origin = {"w": np.ones((4, 3))}
    reply = replies(1)[0]
    norm = defences.update_norm(reply["update"], {**origin})
    clipped = defences.clip(reply, origin, {"update": norm / 4})["update"]
    np.testing.assert_allclose(clipped["w"] - 1, (reply["update"]["w"] - 1) / 4)
    assert defences.clip(reply, origin, {"update": norm * 2})["update"]["w"] is reply["update"]["w"]


def test_half_of_the_clients_cannot_be_assumed_to_lie() -> None:
    assert [defences.num_liars(0.2, n) for n in (1, 2, 3, 5, 10, 11)] == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("defence", ["clip", "multi-krum", "median", "trimmed-mean"])
@pytest.mark.parametrize("buffer_mb", [0.0, 100.0], ids=["on disk", "in memory"])
def test_a_defended_run_ends(tmp_path: Path, defence: str, buffer_mb: float) -> None:
    left = short_run(tmp_path / "run", {"method": "fedavg", "defence": defence, "fold-buffer-mb": buffer_mb})
    assert [row["accepted"] for row in left.rows("train")] == [True, True]


def test_fedpm_refuses_a_median_of_curvature() -> None:
    with pytest.raises(SettingsError, match=r"'defence' of method 'fedpm'.*clip or multi-krum.*median"):
        FedPM(RoundSettings(defence="median"))


@pytest.mark.parametrize(("quiet", "accepted"), [(REFERENCE_ROUNDS - 1, True), (REFERENCE_ROUNDS, False)])
def test_rounds_of_clients_that_have_nothing_left_to_learn_do_not_bound_the_others(quiet: int, accepted: bool) -> None:
    strategy = FedAvgM(RoundSettings(max_update_ratio=100))
    for number, norm in enumerate([1.0] + quiet * [1e-3] + [1.0], 1):
        strategy.rounds.begin(number, MODEL, [0])
        strategy.rounds.receive(0, Reply(0, 1, {}, {"x": np.array([norm, 0, 0], np.float32)}))
        strategy.rounds.end()
    assert strategy.rounds.report.accepted is accepted
