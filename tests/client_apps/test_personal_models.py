"""What a client keeps of its personal model: round trip, loss, other architectures, export."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from fedapps.client_apps.personal_models import (
    PersonalModel,
    evaluate,
    export_personal,
    finish,
    load_personal,
    save_personal,
    stable_step,
)
from fedapps.client_apps.problem import Trained, local_problem
from fedapps.client_apps.work import ClientWork, Node
from fedapps.errors import MessageError, TaskError
from fedapps.methods import resolve_settings
from fedapps.results.storage import load_arrays
from fedapps.tasks import TaskConfig
from fedapps.tasks.base import ClientData, Data
from fedapps.tasks.convex_task import ConvexTask

DATA = Data(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, -1]))
RECEIVED = {"weights": np.array([1.0, 1.0])}


class Two(ConvexTask):
    """Two examples of two features."""

    def load(self) -> tuple[Data, Data]:
        return DATA, DATA


def work_of(tmp_path: Path, **changes: Any) -> ClientWork:
    settings = resolve_settings({"method": "fedclup", "fedclup.export": True, "num-server-rounds": 3}, "convex")
    work = ClientWork(
        settings=settings, task=Two(TaskConfig()), node=Node(4, 9, tmp_path), data=ClientData(DATA, DATA.take([]), DATA),
        arrays=RECEIVED, server_round=2, lr=0.1, last_folded=1, experiment="some experiment", run_dir="",
    )  # fmt: skip
    return replace(work, **changes)


def test_what_was_saved_is_loaded_once_its_reply_was_folded(tmp_path: Path) -> None:
    model = PersonalModel({"weights": np.array([3.0, 4.0])}, {"weights": np.array([-2.0, -3.0])}, generation=7)
    save_personal(work_of(tmp_path, server_round=1, last_folded=0), model)
    kept = load_personal(work_of(tmp_path))
    assert kept.model["weights"].tolist() == [3.0, 4.0]
    assert kept.known is not None
    assert kept.known["weights"].tolist() == [-2.0, -3.0]
    assert (kept.generation, kept.lost) == (7, False)


def test_before_the_first_folded_reply_the_personal_model_is_the_received_one(tmp_path: Path) -> None:
    kept = load_personal(work_of(tmp_path, last_folded=0))
    assert kept.model["weights"].tolist() == [1.0, 1.0]
    assert (kept.known, kept.lost) == (None, False)
    alone = load_personal(work_of(tmp_path, last_folded=0, arrays={}))  # LocalTrain receives nothing.
    assert alone.model["weights"].tolist() == [0.0, 0.0]


def test_a_lost_store_is_told_from_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        kept = load_personal(work_of(tmp_path))
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert kept.lost
    assert kept.model["weights"].tolist() == [1.0, 1.0]
    assert "the state of round 1 is lost" in caplog.text


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"weights": np.zeros(3)}, r"tensor 'weights': expected shape \(2,\) and dtype float64, got shape \(3,\)"),
        ({"weights": np.zeros(2, np.float32)}, r".*got shape \(2,\) and dtype float32"),
        ({"weights": np.zeros(2), "head": np.zeros(1)}, r"tensor 'head': expected none"),
    ],
    ids=["another shape", "another dtype", "another tensor"],
)
def test_a_stored_model_of_another_architecture_is_named(tmp_path: Path, tensors: Any, match: str) -> None:
    save_personal(work_of(tmp_path, server_round=1, last_folded=0), PersonalModel(tensors))
    with pytest.raises(MessageError, match=rf"client 4, stored personal model, {match}"):
        load_personal(work_of(tmp_path))


def test_both_models_are_measured_and_the_personal_one_exported_after_the_last_round(tmp_path: Path) -> None:
    """Weights (1, 1) get one of the two test examples right, (3, -4) both."""
    save_personal(work_of(tmp_path, server_round=1, last_folded=0), PersonalModel({"weights": np.array([3.0, -4.0])}))
    metrics = evaluate(work_of(tmp_path))
    assert (metrics["personal-test-accuracy"], metrics["global-test-accuracy"]) == (1.0, 0.5)
    assert not any("validation" in name for name in metrics)
    folder = tmp_path / "some-experiment" / "personal"
    assert not folder.exists()
    evaluate(work_of(tmp_path, server_round=3))
    assert load_arrays(folder / "4.safetensors")["weights"].tolist() == [3.0, -4.0]
    manifest = json.loads((folder / "4.json").read_text())
    expected = {"file": "4.safetensors", "partition": 4, "num-partitions": 9, "round": 3, "trained-in-round": 1,
                "method": "fedclup", "num-examples": 2, "experiment": "some experiment"}  # fmt: skip
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["metrics"]["personal-test-accuracy"] == 1.0
    export_personal(work_of(tmp_path), {"weights": np.zeros(2)}, {})  # Written anew, nothing left aside.
    assert sorted(path.name for path in folder.iterdir()) == ["4.json", "4.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        0o600
    }  # The server asked for it, not the client.
    assert folder.stat().st_mode & 0o777 == 0o700


def limit_of(work: ClientWork, lam: float) -> float:
    """2/(L + lambda), with the client's own estimate of L."""
    return 2 / (local_problem(work).rough_curvature(work.arrays, ("weights",)) + lam)


def test_a_step_beyond_the_limit_is_reported_once_and_named_if_training_diverges(tmp_path: Path) -> None:
    first = work_of(tmp_path, server_round=1, last_folded=0)
    problem, limit = local_problem(first), limit_of(first, 0.5)
    with stable_step(first, problem, 0.5, 0.99 * limit) as metrics:
        assert metrics == {}
    with stable_step(first, problem, 0.5, limit) as metrics:
        assert metrics == {"step-limit": limit}
    with pytest.raises(TaskError, match=r"got nan; wait; .*2/\(L \+ lambda\)"), stable_step(first, problem, 0.5, limit):
        raise TaskError("loss", expected="a number", got="nan", do="wait")
    with pytest.raises(TaskError, match=r"^it diverged$"), stable_step(first, problem, 0.5, 0.1 * limit):
        raise TaskError("it diverged")
    with stable_step(work_of(tmp_path, last_folded=1), problem, 0.5, 10 * limit) as metrics:
        assert metrics == {}


def test_finishing_keeps_the_personal_model_and_says_that_the_old_one_was_lost(tmp_path: Path) -> None:
    work = work_of(tmp_path)  # Its last folded reply left nothing here.
    personal = Trained({"weights": np.array([7.0, 8.0])}, {}, 0.0)
    content = RecordDict({"metrics": work.metrics(train_loss=0.5)})
    finish(work, load_personal(work), personal, content, {"step-limit": 3.0})
    assert dict(content["metrics"]) == {"num-examples": 2, "train-loss": 0.5, "store-lost": 1.0, "step-limit": 3.0}
    after = work_of(tmp_path, server_round=3, last_folded=2)
    assert load_personal(after).model["weights"].tolist() == [7.0, 8.0]
    content = RecordDict({"metrics": work.metrics(train_loss=0.5)})
    finish(after, load_personal(after), personal, content)
    assert dict(content["metrics"]) == {"num-examples": 2, "train-loss": 0.5}
