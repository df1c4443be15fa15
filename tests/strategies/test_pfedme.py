"""pFedMe's server, LocalTrain's, and what FedCLUP's server tells clients."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedapps.errors import MessageError, RoundFailedError
from fedapps.messages import pack_arrays
from fedapps.messages.plans import AskedCurvature, RoundPlan
from fedapps.settings import RoundSettings
from fedapps.strategies import LocalNewton, LocalTrain, PFedMe

MODEL = {"w": np.array([1.0, -2.0], np.float32), "mean": np.array([5.0]), "counter": np.array(3)}


def reply_of(w: float, mean: float, counter: int, num_examples: int) -> RecordDict:
    return RecordDict(
        {
            "arrays": pack_arrays({"w": np.full(2, w, np.float32)}),
            "buffers": pack_arrays({"mean": np.array([mean]), "counter": np.array(counter)}),
            "metrics": MetricRecord({"num-examples": num_examples}),
        }
    )


def one_round(strategy: PFedMe | LocalNewton) -> dict[str, np.ndarray]:
    strategy.rounds.begin(1, MODEL, [0, 1])
    strategy.receive(0, reply_of(4.0, 1.0, 7, 10), MODEL)
    strategy.receive(1, reply_of(8.0, 3.0, 2, 30), MODEL)
    new = strategy.rounds.end()
    assert new is not None
    return new


def test_the_model_is_mixed_with_the_mean_and_buffers_are_averaged() -> None:
    """Mean 7: (1 - 0.4) (1, -2) + 0.4 * 7 = (3.4, 1.6); the buffer's mean 2.5 and the counter's maximum are taken whole."""
    new = one_round(PFedMe(beta=0.4))
    np.testing.assert_allclose(new["w"], [3.4, 1.6], rtol=1e-6)
    assert new["w"].dtype == np.float32
    assert new["mean"] == pytest.approx([2.5])
    assert int(new["counter"]) == 7


def test_beta_one_is_one_plain_average() -> None:
    """With ``beta = 1`` the server's step is one plain average."""
    mixed, plain = one_round(PFedMe(beta=1.0)), one_round(LocalNewton())
    for name, value in plain.items():
        assert mixed[name].tobytes() == value.tobytes()


def test_localtrain_sends_nothing_and_refuses_models() -> None:
    strategy = LocalTrain(RoundSettings(max_consecutive_failed_rounds=2))
    assert strategy.records_for(0, 0, MODEL) == {"arrays": {}}
    strategy.rounds.begin(1, MODEL, [0, 1])
    strategy.receive(0, RecordDict({"arrays": ArrayRecord({}), "metrics": MetricRecord({"num-examples": 3})}), MODEL)
    strategy.receive(1, reply_of(4.0, 1.0, 7, 10), MODEL)
    new = strategy.rounds.end()
    assert strategy.rounds.report.folded == [0]
    assert "expected metrics only, got 3 tensors" in strategy.rounds.report.refused[1]
    assert new is not None
    assert all(new[name] is value for name, value in MODEL.items())
    for number in (2, 3):
        strategy.rounds.begin(number, MODEL, [1])
        if number == 3:
            with pytest.raises(RoundFailedError, match="failure 2 in a row"):
                strategy.rounds.end()
        else:
            assert strategy.rounds.end() is None


def test_the_plan_of_a_round_survives_the_message() -> None:
    plan = RoundPlan(0.25, 3, fitting=True, curvature=AskedCurvature.FOR_GAMMA)
    assert RoundPlan.from_entries({**plan.to_entries(), "lr": 0.1}) == plan
    with pytest.raises(MessageError, match=r"record 'config': expected .*FedCLUP's strategy sends it, got .*'lambda'"):
        RoundPlan.from_entries({"lr": 0.1})
