"""Scalar-only runs with bad replies, other kernels, other models, and runs that diverge."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message

from fedapps.errors import RosterError, RoundFailedError
from fedapps.results.replay import replay, write_replayed
from fedapps.results.run_folder import RunFolder
from fedapps.tasks.torch_task import TorchTask
from fedapps.zeroth_order.journal import Journal
from fedapps.zeroth_order.wire import pack_scalars

from ..simulation import runs
from .scalar_runs import journal_of, tiny
from .test_run import empty, raised

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


def scalars_of(values: Any, **change: Any) -> Callable[[Message], Message]:
    def fault(reply: Message) -> Message:
        record = dict(reply.content.config_records["scalars"])
        reply.content["scalars"] = ConfigRecord({**record, "values": pack_scalars(values), **change})
        return reply

    return fault


FAULTS = {
    "NaN": (scalars_of([np.nan] * 10), "expected finite scalars"),
    "wrong shape": (scalars_of([1.0] * 5), "expected 2 rows of 5 numbers"),
    "too many": (scalars_of([1.0] * 20), "expected 2 rows of 5 numbers"),
    "a past round": (scalars_of([1.0] * 10, **{"server-round": 1}), "expected scalars of round 2, got round 1"),
    "an error": (raised, "sensor offline"),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_a_bad_reply_is_named_and_its_client_goes_on(tmp_path: Path, log: Any, fault: Any, reason: str) -> None:
    run = tiny(tmp_path / "run", {"num-server-rounds": 4}, faults={(2, 1): fault})
    row = run.rows("train")[1]
    assert reason in row["refused"]["1"]
    assert "round 2, client 1" in log.text
    assert [r["folded"] for r in run.rows("train")][2:] == [[0, 1, 2, 3, 4, 5]] * 2
    same = tiny(tmp_path / "same", {"num-server-rounds": 4}, faults={(2, 1): empty})
    assert journal_of(run) == journal_of(same)


def test_a_round_below_the_quorum_leaves_no_record(tmp_path: Path) -> None:
    faults = {(2, p): raised for p in range(6)}
    run = tiny(tmp_path / "run", {"num-server-rounds": 4}, faults=faults)
    records = Journal.read(run.folder.journal_path).records
    assert [(r.round, r.first_step) for r in records] == [(1, 0), (3, 4), (4, 6)]
    assert [row["accepted"] for row in run.rows("train")] == [True, False, True, True]
    runs.assert_same_model(run.model, replay(run.folder.journal_path, run.folder.initial_path).arrays)


def test_a_node_that_draws_other_directions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed with other numbers on one device would lead replicas astray in silence."""
    monkeypatch.setattr(sys.modules["fedapps.client_apps.app"], "_kernel", lambda device: "0" * 64)
    with pytest.raises(RosterError, match=r"partition 5\), kernel: expected directions with checksum .*got 0000"):
        tiny(tmp_path / "run", {"node-wait": 0.0})


def test_directions_depend_on_no_global_state(tmp_path: Path) -> None:
    """Whatever the process has drawn before, journals are equal, and the global generators are left alone."""
    first = tiny(tmp_path / "first")
    torch.manual_seed(1234)
    np.random.seed(99)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr, index] # noqa: NPY002
    second = tiny(tmp_path / "second")
    assert journal_of(first) == journal_of(second)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index] # noqa: NPY002


def test_buffers_stay_and_tied_weights_are_one(tmp_path: Path) -> None:
    """Probes leave statistics of batches alone, and a tensor of two names is perturbed once."""
    run = tiny(tmp_path / "run", {"task": "fedapps_testing:BatchNormSites"})
    assert (run.model["1.running_mean"] == 0).all()
    assert int(run.model["1.num_batches_tracked"]) == 0
    assert Journal.read(run.folder.journal_path).header.layout.size == 4 * 8 + 8 + 8 + 8 + 8 * 2 + 2
    tied = tiny(tmp_path / "tied", {"task": "fedapps_testing:TiedSites"})
    assert list(tied.model) == ["embedding.weight", "head.bias"]
    written = write_replayed(replay(tied.folder.journal_path, tied.folder.initial_path), tmp_path / "out")
    assert written.read_bytes() == tied.folder.model_path.read_bytes()


def test_a_diverging_run_fails_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError):
        tiny(tmp_path / "run", {"method": "decomfl", "lr": 1e38, "num-server-rounds": 9})
    run = runs.Left(RunFolder.open(tmp_path / "run"))
    assert run.summary["status"] == "failed"
    replayed = replay(run.folder.journal_path, run.folder.initial_path)
    assert write_replayed(replayed, tmp_path / "out").read_bytes() == run.folder.model_path.read_bytes()


def test_a_client_with_another_first_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(task: TorchTask, device: str = "cpu") -> torch.nn.Module:
        return task.module(task.initial_arrays(1234), device)

    monkeypatch.setattr(TorchTask, "initial_module", other)
    with pytest.raises(RoundFailedError, match="the shapes fit but the weights differ"):
        tiny(tmp_path / "run", {"max-consecutive-failed-rounds": 1})
