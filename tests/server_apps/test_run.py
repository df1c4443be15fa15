"""Runs end to end in the in-process engine: order, failures, resume, buffers, tiny clients, memory of clients."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict

from fedapps.client_apps import work
from fedapps.errors import CheckpointError, FedAppsError, RoundFailedError, SettingsError
from fedapps.messages import pack_arrays, unpack_arrays
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import load_arrays
from fedapps.server_apps import run
from fedapps.strategies.roster import Roster
from fedapps.tasks import TaskConfig, load_task
from fedapps.tasks.torch_task import TorchTask

from ..methods.rows import ROWS
from ..simulation import runs

short_run, assert_same_model = runs.short_run, runs.assert_same_model

EVERY = [name for name, method in ROWS.items() if "torch" in method.task_kinds]
ONE_MODEL = [
    name
    for name, method in ROWS.items()
    if "torch" in method.task_kinds and method.travels_down.startswith("model") and method.client_state == "none"
]
"""Methods with one model, which the server sends and clients train from: neither replicas nor models of their own."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


def raised(reply: Message) -> Message:
    return Message(
        Error(2, "Traceback (most recent call last):\n...\nRuntimeError: sensor offline"), reply_to=_asked(reply)
    )


def died(reply: Message) -> Message:
    return Message(Error(0, "ray.exceptions.ActorDiedError: the actor died"), reply_to=_asked(reply))


def lost(reply: Message) -> None:
    return None


def empty(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


def nan(reply: Message) -> Message:
    record = next(name for name in ("products", "arrays") if name in reply.content)
    arrays = {k: v.copy() for k, v in unpack_arrays(reply.content, record, "").items()}
    next(iter(arrays.values())).flat[0] = np.nan
    reply.content[record] = pack_arrays(arrays)
    return reply


def no_examples(reply: Message) -> Message:
    reply.content["metrics"] = MetricRecord({"num-examples": 0})
    return reply


def _asked(reply: Message) -> Message:
    """A message to which ``reply`` is the reply, for composing another one."""
    meta = reply.metadata
    message = Message(
        RecordDict(), dst_node_id=meta.src_node_id, message_type=meta.message_type, group_id=meta.group_id
    )
    message.metadata.__dict__["_message_id"] = meta.reply_to_message_id
    return message


# The same bits, whatever the order and the number of workers --------------------------------------------


@pytest.mark.parametrize("method", EVERY)
def test_workers_order_of_arrival_and_waiting_on_disk_change_nothing(tmp_path: Path, method: str) -> None:
    """Neither the order of arrival nor the number of workers changes a bit."""
    config = {"method": method, "num-server-rounds": 3}
    straight = short_run(tmp_path / "straight", config)
    ways: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("late", {}, {"late": [0, 1]}),
        ("on-disk", {"fold-buffer-mb": 0.0}, {"late": [0]}),
    ]
    if method == "fedpm":  # Workers are slow to start, and know nothing of the method.
        ways.append(("two-workers", {}, {"workers": 2}))
    for name, extra, how in ways:
        other = short_run(tmp_path / name, {**config, **extra}, **how)
        assert_same_model(straight.model, other.model)
        sampled = [[row["sampled"] for row in run.rows("train")] for run in (straight, other)]
        assert sampled[0] == sampled[1]


def test_extra_evaluation_changes_neither_sampling_nor_model(tmp_path: Path) -> None:
    config = {"fraction-train": 0.34, "num-server-rounds": 5, "client-test-fraction": 0.34}
    plain = short_run(tmp_path / "plain", config)
    more = short_run(tmp_path / "more", {**config, "client-evaluation": "every"})
    assert [r["sampled"] for r in plain.rows("train")] == [r["sampled"] for r in more.rows("train")]
    assert len({tuple(r["sampled"]) for r in plain.rows("train")}) > 1
    assert_same_model(plain.model, more.model)
    assert len(more.rows("client-evaluate")) == 5
    assert 0 <= more.rows("client-evaluate")[-1]["client-test-accuracy-worst-decile"] <= 1


@pytest.mark.parametrize("method", EVERY)
def test_another_seed_gives_another_model(tmp_path: Path, method: str) -> None:
    first = short_run(tmp_path / "1", {"method": method, "seed": 1})
    second = short_run(tmp_path / "2", {"method": method, "seed": 2})
    assert first.model["0.weight"].tobytes() != second.model["0.weight"].tobytes()


def test_models_are_measured_on_the_device_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    evaluate = TorchTask.evaluate

    def spied(self: TorchTask, arrays: Any, data: Any, device: str = "cpu") -> dict[str, float]:
        used.add(device)
        return evaluate(self, arrays, data, device)

    monkeypatch.setattr(TorchTask, "evaluate", spied)
    names = {"auto": "cpu:0", "cpu": "cpu"}  # The processor, under a name for each way of asking.
    for module in (run, work):
        monkeypatch.setattr(module, "choose_device", names.__getitem__)
    config = {"method": "fedclup", "num-server-rounds": 1, "evaluate-every": 1}
    for setting, name in names.items():
        used.clear()
        short_run(tmp_path / setting, {**config, "device": setting})
        assert used == {name}


# Failures ------------------------------------------------------------------------------------------------

FAULTS = {
    "raises": (raised, "RuntimeError: sensor offline"),
    "NaN": (nan, "expected finite numbers"),
    "nothing": (lost, "no reply within 0.5 s"),
    "an empty reply": (empty, "expected a record 'metrics'"),
    "zero examples": (no_examples, "expected a positive integer, got 0"),
}


@pytest.mark.parametrize("method", ["fedavg", "fedpm"])
@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_a_bad_client_is_named_and_the_others_go_on(
    tmp_path: Path, log: Any, method: str, fault: Any, reason: str
) -> None:
    """A fault is named and takes no part: with the other clients the round is what it would be without this one."""
    config = {"method": method, "round-timeout": 0.5, "num-server-rounds": 1}
    run = short_run(tmp_path / "faulty", config, faults={(1, 1): fault})
    row = run.rows("train")[0]
    assert row["folded"] == [0, 2]
    assert reason in row["refused"]["1"]
    assert "round 1, client 1" in log.text
    assert reason in log.text
    assert run.summary["status"] == "completed"
    # Weights are renormalised over what arrived: any other refusal of the same client gives the same model.
    same = short_run(tmp_path / "lost", config, faults={(1, 1): empty})
    assert_same_model(run.model, same.model)


def test_fail_fast_ends_the_run_with_client_round_and_cause(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError, match=r"(?s)round 2, client 1: .*sensor offline.*fail-fast"):
        short_run(tmp_path / "run", {"on-failure": "fail-fast", "num-server-rounds": 3}, faults={(2, 1): raised})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "round 2, client 1" in summary["reason"]
    assert summary["rounds"] == 1


@pytest.mark.parametrize("method", ["fedavg", "fedpm", "fedadam"])
def test_a_round_below_the_quorum_changes_nothing(tmp_path: Path, method: str) -> None:
    config = {"method": method, "min-replies": 3}
    one = short_run(tmp_path / "one", {**config, "num-server-rounds": 1})
    two = short_run(tmp_path / "two", {**config, "num-server-rounds": 2}, faults={(2, 0): raised})
    assert_same_model(one.model, two.model)
    assert [row["accepted"] for row in two.rows("train")] == [True, False]


def test_too_many_rounds_below_the_quorum_end_the_run(tmp_path: Path) -> None:
    faults = {(r, p): raised for r in (2, 3) for p in range(3)}
    config = {"max-consecutive-failed-rounds": 2, "num-server-rounds": 5}
    with pytest.raises(RoundFailedError, match=r"at least 1 valid replies, got 0 of 3 .*failure 2 in a row"):
        short_run(tmp_path / "run", config, faults=faults)
    # One good round between two bad ones starts the count anew.
    faults = {(r, p): raised for r in (2, 4) for p in range(3)}
    assert short_run(tmp_path / "other", config, faults=faults).summary["rounds"] == 5


def test_a_dead_worker_ends_the_run_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError, match=r"client 2: its worker process died .*use fewer workers.*--resume"):
        short_run(tmp_path / "run", {}, faults={(1, 2): died})


def test_a_task_that_raises_is_reported_with_its_own_error(tmp_path: Path) -> None:
    run = short_run(
        tmp_path / "run",
        {"task": "fedapps_testing:FailingSites", "task-options": 'sizes = "6,7,6"', "batch-size": 0},
    )
    assert "RuntimeError: sensor offline" in run.rows("train")[0]["refused"]["1"]
    assert run.rows("train")[0]["folded"] == [0, 2]


def test_a_diverged_client_is_refused_and_a_diverged_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError, match=r"got 0 of 3 .*finite"):
        short_run(tmp_path / "run", {"lr": 1e30, "local-epochs": 3, "max-consecutive-failed-rounds": 1})


# Resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*EVERY, "fedapps_testing:MEMORY"])
def test_three_rounds_and_a_resume_are_six_rounds(tmp_path: Path, method: str) -> None:
    """Model, metrics and sampled clients are those of a run that never stopped."""
    config = {"method": method, "fraction-train": 0.67, "client-test-fraction": 0.34, "client-evaluation": "every"}
    straight = short_run(tmp_path / "straight", {**config, "num-server-rounds": 6})
    short_run(tmp_path / "halves", {**config, "num-server-rounds": 3})
    halves = short_run(tmp_path / "halves", {**config, "num-server-rounds": 6, "resume": True})
    assert_same_model(straight.model, halves.model)

    def without_seconds(run: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "seconds" and "wire" not in k and "payload" not in k}
                for row in run.folder.read_metrics() if row["phase"] != "start-up"]  # fmt: skip

    assert without_seconds(straight) == without_seconds(halves)
    assert halves.summary["rounds"] == 6


def test_greeting_the_clients_is_start_up_and_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' processes take 28 s to answer, once a start: no round takes any time here, nor does an evaluation."""
    clock = [0.0]
    refresh = Roster.refresh

    def slow(roster: Roster, grid: Any) -> None:
        clock[0] += 0.0 if roster.num_partitions else 28.0
        refresh(roster, grid)

    monkeypatch.setattr(Roster, "refresh", slow)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    short_run(tmp_path / "run", {})
    resumed = short_run(tmp_path / "run", {"num-server-rounds": 3, "resume": True})
    assert [(row["round"], row["seconds"]) for row in resumed.rows("start-up")] == [(0, 28.0), (2, 28.0)]
    assert resumed.folder.read_metrics()[0]["phase"] == "start-up"
    assert resumed.summary["totals"]["seconds-by-phase"] == {"start-up": 56.0, "train": 0.0, "evaluate": 0.0}


def test_a_failed_run_is_gone_on_with_as_if_nothing_had_happened(tmp_path: Path) -> None:
    config = {"on-failure": "fail-fast", "num-server-rounds": 4, "method": "fedpm"}
    straight = short_run(tmp_path / "straight", config)
    with pytest.raises(RoundFailedError):
        short_run(tmp_path / "failed", config, faults={(3, 0): nan})
    resumed = short_run(tmp_path / "failed", {**config, "resume": True})
    assert_same_model(straight.model, resumed.model)
    assert [row["round"] for row in resumed.rows("train")] == [1, 2, 3, 4]
    assert resumed.summary["status"] == "completed"


@pytest.mark.parametrize(
    ("change", "clients", "match"),
    [
        ({"method": "localnewton", "num-server-rounds": 4}, 3, "method = 'localnewton' where it was 'fedavg'"),
        ({"seed": 5, "num-server-rounds": 4}, 3, "seed = 5 where it was 0"),
        ({"task": "fedapps_testing:BatchNormSites", "num-server-rounds": 4}, 3, "task = 'fedapps_testing:BatchNormSites'"),
        ({"num-server-rounds": 2}, 3, "more than 2 rounds, since those are done"),
        ({"num-server-rounds": 4, "partition-min-size": 1}, 2, "expected 3 clients as before, got 2"),
    ],
    ids=["another method", "another seed", "another model", "no round left", "another number of clients"],
)  # fmt: skip
def test_a_resume_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], clients: int, match: str
) -> None:
    config = {"partition": "iid", "partition-column": ""}
    short_run(tmp_path / "run", config)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=match):
        short_run(tmp_path / "run", {**config, **change, "resume": True}, clients)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_cosine_schedule_keeps_its_total(tmp_path: Path) -> None:
    short_run(tmp_path / "run", {"lr-schedule": "cosine"})
    with pytest.raises(CheckpointError, match="num-server-rounds = 2, since the cosine schedule runs over it"):
        short_run(tmp_path / "run", {"lr-schedule": "cosine", "num-server-rounds": 4, "resume": True})


def test_a_new_run_does_not_overwrite_another(tmp_path: Path) -> None:
    short_run(tmp_path / "run", {"num-server-rounds": 1})
    with pytest.raises(CheckpointError, match="a folder that holds a run"):
        short_run(tmp_path / "run", {"num-server-rounds": 1})


def test_a_wrong_setting_fails_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean 'batch-size'"):
        short_run(tmp_path / "run", {"batchsize": 3})
    assert not (tmp_path / "run").exists()


# Buffers, sizes, memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [name for name in ONE_MODEL if ROWS[name].family != "zeroth order"]
)  # Probes leave buffers alone.
def test_batch_norm_statistics_are_averaged_and_counters_kept(tmp_path: Path, method: str) -> None:
    """Statistics of batches travel and counters stay integers.

    Clients of 10 and 30 examples, shifted by 0 and 10; weights 0.25 and 0.75.
    """
    config = {
        "method": method, "task": "fedapps_testing:BatchNormSites", "task-options": 'sizes = "10,30"\nshift = 10.0',
        "batch-size": 5, "num-server-rounds": 1, "lr": 1e-3,
        "client-test-fraction": 0.0, "client-validation-fraction": 0.0, "client-evaluation": "none",
    }  # fmt: skip
    both = short_run(tmp_path / "both", config, 2).model
    alone = [short_run(tmp_path / f"only-{p}", config, 2, faults={(1, 1 - p): empty}).model for p in (0, 1)]
    expected = 0.25 * alone[0]["1.running_mean"].astype(np.float64) + 0.75 * alone[1]["1.running_mean"]
    np.testing.assert_allclose(both["1.running_mean"], expected, rtol=1e-6)
    assert np.abs(both["1.running_mean"]).max() > 0.1
    counter = both["1.num_batches_tracked"]
    assert (counter.dtype, counter.shape, int(counter)) == (np.int64, (), 6)
    assert (both["1.running_var"] > 0).all()


@pytest.mark.parametrize("method", ONE_MODEL)
def test_tied_weights_travel_once_and_stay_tied(tmp_path: Path, method: str) -> None:
    """Head and embedding are one tensor, under its first name."""
    run = short_run(tmp_path / "run", {"method": method, "task": "fedapps_testing:TiedSites"})
    size = 4 * (4 * 3 + 4)
    assert list(run.model) == ["embedding.weight", "head.bias"]
    ledger = [row for row in run.folder.read_ledger() if row["kind"] == "train"]
    assert {row["payload"]["arrays"] for row in ledger if row["direction"] == "down"} == {size}
    if ROWS[method].travels_up.startswith("model"):  # FedPM sends parameters in curvature blocks.
        assert {row["payload"]["arrays"] for row in ledger if row["direction"] == "up"} == {size}
    task = load_task("fedapps_testing:TiedSites", TaskConfig())
    assert isinstance(task, TorchTask)
    model = task.module(run.model)
    assert model.head.weight is model.embedding.weight
    assert sum(value.size for value in run.model.values()) == sum(p.numel() for p in model.parameters())
    assert not np.array_equal(run.model["embedding.weight"], task.initial_arrays(0)["embedding.weight"])


@pytest.mark.parametrize("method", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_variances_stay_positive_and_counters_integer_under_server_optimisers(tmp_path: Path, method: str) -> None:
    """With steps so long that a variance taken for a parameter would go below zero; see the strategies' own tests."""
    config = {
        "method": method, "task": "fedapps_testing:BatchNormSites", "num-server-rounds": 5, "lr": 0.01,
        f"{method}.server-lr": 3.0,
    }  # fmt: skip
    run = short_run(tmp_path / "run", config)
    counter = run.model["1.num_batches_tracked"]
    # Six examples in batches of four, twice a round on each client.
    assert (counter.dtype, counter.shape, int(counter)) == (np.int64, (), 10)
    assert (run.model["1.running_var"] > 0).all()
    assert run.summary["status"] == "completed"


@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("task", ["Sites", "BatchNormSites"])
def test_clients_of_any_size_from_one_example_work(tmp_path: Path, method: str, task: str) -> None:
    """Smaller than a batch, and a last batch of one.

    Batch 8, clients of 3, 8, 9 and 1 examples, with and without batch normalisation.
    """
    run = short_run(
        tmp_path / "run",
        {"method": method, "task": f"fedapps_testing:{task}", "task-options": 'sizes = "3,8,9,1"', "batch-size": 8},
        4,
    )
    assert run.rows("train")[-1]["folded"] == [0, 1, 2, 3]
    assert all(np.isfinite(value).all() for value in run.model.values())


def test_weights_are_examples_not_batches(tmp_path: Path) -> None:
    """By examples, not batches: 10 and 90 examples in batches of 50 (1 and 2 batches) weigh 0.1 and 0.9."""
    config = {"task-options": 'sizes = "10,90"', "batch-size": 50, "num-server-rounds": 1}
    both = short_run(tmp_path / "both", config, 2).model
    alone = [short_run(tmp_path / f"only-{p}", config, 2, faults={(1, 1 - p): empty}).model for p in (0, 1)]
    for name, value in both.items():
        np.testing.assert_allclose(value, 0.1 * alone[0][name] + 0.9 * alone[1][name], rtol=1e-5, atol=1e-7)
    uniform = short_run(tmp_path / "uniform", {**config, "weighting": "uniform"}, 2).model
    for name, value in uniform.items():
        np.testing.assert_allclose(value, 0.5 * alone[0][name] + 0.5 * alone[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("workers", [0, 2])
def test_client_state_is_that_of_the_last_folded_reply(tmp_path: Path, workers: int) -> None:
    """What a client keeps lasts, also for clients that were skipped, whose reply was lost, and with several workers."""
    config = {"method": "fedapps_testing:MEMORY", "num-server-rounds": 4}
    run = short_run(tmp_path / "run", config, workers=workers, faults={(2, 1): empty})
    # Client 1 lost round 2, so it remembers one round less than the others from then on.
    remembered = [row["remembered"] for row in run.rows("train")]
    assert remembered == pytest.approx([0, 1, (2 + 1 + 2) / 3, (3 + 2 + 3) / 3])
    last = [row["last-round"] for row in run.rows("train")]
    assert last == pytest.approx([0, 1, (2 + 1 + 2) / 3, 3])
    folders = sorted(path.name for path in (tmp_path / "run" / "clients").glob("*/*"))
    assert folders == ["client-0", "client-1", "client-2"]


def test_the_ledger_counts_what_travels(tmp_path: Path) -> None:
    """Traffic is measured: rows by round, partition, direction and kind; FedAvg sends the model both ways."""
    run = short_run(tmp_path / "run", {})
    ledger = [row for row in run.folder.read_ledger() if row["kind"] == "train"]
    size = 4 * (4 * 5 + 5 + 5 * 2 + 2)
    assert [(r["round"], r["partition"], r["direction"]) for r in ledger if r["direction"] == "up"] == [
        (r, p, "up") for r in (1, 2) for p in (0, 1, 2)
    ]
    assert {row["payload"]["arrays"] for row in ledger} == {size}
    assert all(row["serialised"] > sum(row["payload"].values()) for row in ledger)
    queries = [row for row in run.folder.read_ledger() if row["kind"] == "query"]
    assert sorted(row["partition"] for row in queries) == [0, 0, 1, 1, 2, 2]


def test_the_best_round_is_that_of_the_task_s_own_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "fedavg", "num-server-rounds": 4, "validation-fraction": 0.2}
    monkeypatch.setattr(TorchTask, "metric", "loss")
    folder = short_run(tmp_path / "run", config).folder
    losses = [row["validation-loss"] for row in folder.read_metrics() if row["phase"] == "evaluate"]
    summary = folder.read_summary() or {}
    assert summary["judged-by"] == "loss"
    assert summary["best"]["validation-loss"] == min(losses)


def test_the_model_of_the_best_validation_is_kept_when_a_later_round_spoils_it(tmp_path: Path) -> None:
    """In round 3 every client sends the same large finite update: the last model is spoiled, the best one is not."""

    def spoil(reply: Message) -> Message:
        arrays = unpack_arrays(reply.content, "arrays", "")
        reply.content["arrays"] = pack_arrays({k: v - np.float32(1e4) for k, v in arrays.items()})
        return reply

    config = {
        "method": "fedavg",
        "max-update-ratio": 0.0,
        "validation-fraction": 0.3,
        "num-server-rounds": 3,
        "task-options": 'sizes = "30,30,30"',
    }
    run = short_run(tmp_path / "run", config, faults={(3, p): spoil for p in range(3)})
    best = run.summary["best"]["round"]
    assert best < 3
    before = short_run(tmp_path / "before", {**config, "num-server-rounds": max(best, 1)})
    assert_same_model(load_arrays(tmp_path / "run" / "best.safetensors"), before.model)
    assert max(np.abs(value).max() for value in run.model.values()) > 1e3


@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        ({"method": "fedpm"}, "FOOF"),
        ({"method": "localnewton"}, "FOOF"),
        ({"method": "fedns"}, "FOOF"),
        ({"method": "fedclup"}, r"fedclup\.gamma-rule=average"),
        ({"method": "fedclup", "fedclup.gamma-rule": "average", "fedclup.adaptive": True}, r"fedclup\.adaptive=false"),
    ],
    ids=["fedpm", "localnewton", "fedns", "fedclup", "choice of lambda"],
)
def test_a_hessian_of_16_gib_is_refused_before_round_1_with_the_nearest_choice(
    tmp_path: Path, config: dict[str, Any], way_out: str
) -> None:
    """8 d^2 bytes for d = 47,236 weights."""
    with pytest.raises(FedAppsError, match=rf"47236 weights, whose Hessian has 16\.6 GiB.*{way_out}"):
        short_run(tmp_path / "run", {**config, "task": "fedapps_testing:Wide", "node-wait": 0.0})
    assert not runs.Left(RunFolder.open(tmp_path / "run")).rows("train")


@pytest.mark.parametrize("config", [{"method": "fedavg"}, {"method": "fedclup", "fedclup.gamma-rule": "average"}])
def test_the_nearest_choice_for_many_weights_works(tmp_path: Path, config: dict[str, Any]) -> None:
    for row in short_run(tmp_path / "run", {**config, "task": "fedapps_testing:Wide"}).rows("train"):
        assert row["folded"] == [0, 1, 2]
