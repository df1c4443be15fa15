"""LocalNewton's line search: closed form on quadratics, failures, what travels, the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedapps.compute import generator
from fedapps.errors import RoundFailedError, SettingsError
from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import InProcessGrid
from fedapps.strategies import LocalNewton
from fedapps.tasks import TaskConfig, load_task

from ..simulation import runs

short_run, assert_same_model = runs.short_run, runs.assert_same_model

pytestmark = pytest.mark.usefixtures("own_module")

STEPS = "1,0.5,0.25,0.125"
TORCH = {"method": "localnewton", "localnewton.line-search": STEPS, "lr": 0.3}
CONVEX = {**TORCH, "task": "fedapps_testing:Lines", "task-options": 'sizes = "6,18,9"\nclients = 3', "lr": 3.0}


def play(a: str, c: str, start: float, rounds: int, steps: str = STEPS) -> tuple[LocalNewton, list[float]]:
    """Rounds on `fedapps_quadratics` under Flower's own ``start``, and the model after each."""
    grid = InProcessGrid(len(a.split(",")), {"a": a, "c": c}, client_app="fedapps_quadratics:app")
    strategy = LocalNewton(
        steps=tuple(float(s) for s in steps.split(",")), min_available_nodes=len(a.split(",")), fraction_evaluate=0.0
    )
    models = []
    strategy.start(
        grid=grid,
        initial_arrays=pack_arrays({"x": np.array([start])}),
        num_rounds=rounds,
        evaluate_fn=lambda number, arrays: models.append(float(arrays["x"].numpy()[0])) or None,  # type: ignore[func-returns-value]
    )
    return strategy, models


@pytest.mark.parametrize(
    ("a", "c", "start", "step"),
    [
        # Minimiser (sum a c) / (sum a). Equal curvatures: it is the mean of the c, which is LocalNewton's full step.
        pytest.param("3,3", "10,0", 0.0, 1.0, id="the mean is the minimiser"),
        # Minimiser 1, mean 5: from 0 the candidates lie at 5, 2.5, 1.25, 0.625, and the full step has 16 times the excess.
        pytest.param("1,9", "10,0", 0.0, 0.25, id="the full step raises the loss"),
        # From 2, d = 3: every candidate leads away from 1.
        pytest.param("1,9", "10,0", 2.0, 0.0, id="every step raises the loss"),
    ],
)
def test_the_step_of_quadratics_is_that_of_the_closed_form(a: str, c: str, start: float, step: float) -> None:
    strategy, models = play(a, c, start, 1)
    assert strategy.rounds.report.values["line-search-step"] == step
    mean = np.mean([float(part) for part in c.split(",")])
    assert models == [start, pytest.approx(start + step * (mean - start), abs=1e-12)]
    curvatures, centres = (np.array([float(part) for part in text.split(",")]) for text in (a, c))
    losses = [float(np.mean(curvatures * (x - centres) ** 2 / 2)) for x in models]
    values = strategy.rounds.report.values
    assert [values["line-search-start-loss"], values["line-search-loss"]] == pytest.approx(losses, rel=1e-12)
    assert losses[1] <= losses[0]


def test_without_candidates_the_full_step_is_taken() -> None:
    """From 0 to the mean 5, which has 16 times the excess loss (see above), and back to it in every round."""
    grid = InProcessGrid(2, {"a": "1,9", "c": "10,0"}, client_app="fedapps_quadratics:app")
    strategy = LocalNewton(fraction_evaluate=0.0)
    result = strategy.start(grid=grid, initial_arrays=pack_arrays({"x": np.zeros(1)}), num_rounds=2)
    assert result.arrays["x"].numpy() == 5.0
    assert strategy.rounds.report.values == {}


# In runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{**TORCH, "lr": 1.0}, CONVEX], ids=["torch", "convex"])
@pytest.mark.slow
def test_the_loss_never_rises(tmp_path: Path, config: dict[str, Any]) -> None:
    """At learning rates where the plain mean overshoots: without the search the same rounds end at a higher loss."""
    run = short_run(tmp_path / "search", {**config, "num-server-rounds": 6})
    rows = run.rows("train")
    starts = [row["line-search-start-loss"] for row in rows]
    ends = [row["line-search-loss"] for row in rows]
    assert all(end <= start * (1 + 1e-12) for start, end in zip(starts, ends, strict=True))
    # The model of a round is the one whose loss was measured in it.
    assert starts[1:] == pytest.approx(ends[:-1], rel=1e-6)
    assert ends[-1] < starts[0]
    assert {row["line-search-step"] for row in rows} - {1.0}


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (TORCH, {"late": [0, 1]}),
        (TORCH, {"workers": 2}),
        ({**TORCH, "fold-buffer-mb": 0.0}, {"late": [0]}),
        ({**TORCH, "task": "fedapps_testing:BatchNormSites", "fraction-train": 0.67}, {"late": [0]}),
        (CONVEX, {"late": [0, 1]}),
    ],
    ids=["torch", "workers", "on disk", "buffers and sampling", "convex"],
)
@pytest.mark.slow
def test_engines_order_and_resume_change_no_bit(tmp_path: Path, config: dict[str, Any], how: dict[str, Any]) -> None:
    straight = short_run(tmp_path / "straight", {**config, "fold-buffer-mb": 256.0, "num-server-rounds": 4})
    assert_same_model(straight.model, short_run(tmp_path / "other", {**config, "num-server-rounds": 4}, **how).model)
    config = {**config, "fold-buffer-mb": 256.0}
    short_run(tmp_path / "halves", {**config, "num-server-rounds": 2})
    halves = short_run(tmp_path / "halves", {**config, "num-server-rounds": 4, "resume": True})
    assert_same_model(straight.model, halves.model)
    steps = [[row["line-search-step"] for row in run.rows("train")] for run in (straight, halves)]
    assert steps[0] == steps[1]


def test_both_exchanges_are_in_the_ledger(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", {**TORCH, "task": "fedapps_testing:BatchNormSites", "num-server-rounds": 1})
    ledger = list(run.folder.read_ledger())
    rows = [row for row in ledger if row["kind"] == "train"]
    model = sum(value.nbytes for value in run.model.values())
    # Linear(4, 8), scale and shift of 8, Linear(8, 2): the parameters, in float32.
    parameters = 4 * (4 * 8 + 8 + 8 + 8 + 8 * 2 + 2)
    for partition in range(3):
        down, up = (
            [row["payload"] for row in rows if row["partition"] == partition and row["direction"] == way]
            for way in ("down", "up")
        )
        assert [set(payload) for payload in down] == [
            {"arrays", "config"},
            {"arrays", "config", "direction", "line-search"},
        ]
        assert [payload["arrays"] for payload in down] == [model, model]
        assert down[1]["direction"] == parameters
        assert [set(payload) for payload in up] == [{"arrays", "buffers", "metrics"}, {"line-search"}]
        assert 5 * 8 <= up[1]["line-search"] < 200  # five float64 losses
    row = run.rows("train")[0]
    assert row["payload-down"] == sum(sum(r["payload"].values()) for r in ledger if r["direction"] == "down")
    assert row["wire-up"] == sum(r["serialised"] for r in ledger if r["direction"] == "up")


def test_buffers_take_the_mean_whatever_the_step(tmp_path: Path) -> None:
    """The first round's replies are those of a run without a search, whose buffers are the mean (and the maximum)."""
    config = {**TORCH, "task": "fedapps_testing:BatchNormSites", "num-server-rounds": 1}
    search = short_run(tmp_path / "search", {**config, "localnewton.line-search": "0.125"})
    plain = short_run(tmp_path / "plain", {**config, "localnewton.line-search": ""})
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert search.model[name].tobytes() == plain.model[name].tobytes()
    assert search.model["1.num_batches_tracked"] == 2
    assert search.model["0.weight"].tobytes() != plain.model["0.weight"].tobytes()


# Failures --------------------------------------------------------------------------------------------------


def second(change: Callable[[Message], Message | None]) -> Callable[[Message], Message | None]:
    """A fault of the answer to the line search only."""
    return lambda reply: change(reply) if reply.has_content() and "line-search" in reply.content else reply


def losses(*values: float) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        reply.content["line-search"] = ConfigRecord({"losses": list(values)})
        return reply

    return change


def emptied(reply: Message) -> Message:
    reply.content = RecordDict({"metrics": MetricRecord({"num-examples": 3})})
    return reply


def raised(reply: Message) -> Message:
    meta = reply.metadata
    asked = Message(RecordDict(), dst_node_id=meta.src_node_id, message_type=meta.message_type, group_id=meta.group_id)
    asked.metadata.__dict__["_message_id"] = meta.reply_to_message_id
    return Message(Error(2, "RuntimeError: sensor offline"), reply_to=asked)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda reply: None, "no reply within 0.3 s"),
        (raised, "sensor offline"),
        (emptied, "expected 5 numbers, the first finite, got None"),
        (losses(1.0, 2.0), "expected 5 numbers, the first finite"),
        (losses(float("nan"), 1.0, 1.0, 1.0, 1.0), "expected 5 numbers, the first finite"),
    ],
    ids=["lost", "raised", "no record", "too few", "NaN at step 0"],
)
def test_a_client_without_losses_stays_in_the_mean_but_has_no_say(
    tmp_path: Path, fault: Callable[[Message], Message | None], reason: str
) -> None:
    config = {**TORCH, "num-server-rounds": 1, "round-timeout": 0.3}
    run = short_run(tmp_path / "run", config, faults={(1, 1): second(fault)})
    row = run.rows("train")[0]
    assert row["folded"] == [0, 1, 2]
    assert list(row["refused"]) == ["1"]
    assert row["refused"]["1"].startswith("line search: ")
    assert reason in row["refused"]["1"]
    # As if its losses were none: only those of clients 0 and 2 are in the mean, which the round reports.
    whole = short_run(tmp_path / "whole", {**config, "round-timeout": 3600.0}).rows("train")[0]
    assert row["accepted"]
    assert row["line-search-start-loss"] != whole["line-search-start-loss"]


def test_the_losses_of_others_decide(tmp_path: Path) -> None:
    """Clients 0 and 2 want the shortest step, client 1 is heard no more than they are."""
    config = {**TORCH, "num-server-rounds": 1, "weighting": "uniform"}
    want_short, want_long = losses(3.0, 3.0, 3.0, 3.0, 0.0), losses(3.0, 0.0, 3.0, 3.0, 3.0)
    faults = {(1, 0): second(want_short), (1, 1): second(want_long), (1, 2): second(want_short)}
    row = short_run(tmp_path / "run", config, faults=faults).rows("train")[0]
    assert row["line-search-step"] == 0.125
    assert row["line-search-loss"] == pytest.approx(1.0)


@pytest.mark.slow
def test_too_few_losses_are_a_round_below_the_quorum(tmp_path: Path) -> None:
    config = {**TORCH, "min-replies": 3}
    one = short_run(tmp_path / "one", {**config, "num-server-rounds": 1})
    two = short_run(tmp_path / "two", {**config, "num-server-rounds": 2}, faults={(2, 0): second(raised)})
    assert_same_model(one.model, two.model)
    assert [row["accepted"] for row in two.rows("train")] == [True, False]
    last = {"max-consecutive-failed-rounds": 1, "num-server-rounds": 1}
    with pytest.raises(RoundFailedError, match=r"at least 3 valid replies, got 2 of 3 \(client 0: .*sensor offline"):
        short_run(tmp_path / "ended", {**config, **last}, faults={(1, 0): second(raised)})


@pytest.mark.slow
def test_a_first_reply_that_failed_is_not_asked_again(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", {**TORCH, "num-server-rounds": 1}, faults={(1, 1): raised})
    assert run.rows("train")[0]["folded"] == [0, 2]
    downs = [r["partition"] for r in run.folder.read_ledger() if r["kind"] == "train" and r["direction"] == "down"]
    assert downs == [0, 1, 2, 0, 2]
    config = {**TORCH, "num-server-rounds": 1, "round-timeout": 0.3}
    row = short_run(tmp_path / "lost", config, faults={(1, 0): lambda reply: None}).rows("train")[0]
    assert row["folded"] == [1, 2]
    assert row["refused"] == {"0": "no reply within 0.3 s"}
    assert "line-search-step" in row
    below = {**TORCH, "num-server-rounds": 1, "min-replies": 3}
    with pytest.raises(RoundFailedError, match=r"got none of 1.*client 1: .*sensor offline"):
        short_run(tmp_path / "below", below, faults={(1, 1): raised})
    ledger = RunFolder.open(tmp_path / "below").read_ledger()
    assert len([r for r in ledger if r["kind"] == "train" and r["direction"] == "down"]) == 3


def test_fail_fast_holds_in_the_line_search(tmp_path: Path) -> None:
    config = {**TORCH, "on-failure": "fail-fast"}
    with pytest.raises(RoundFailedError, match=r"round 2, client 1: line search: .*sensor offline.*fail-fast"):
        short_run(tmp_path / "run", config, faults={(2, 1): second(raised)})


def test_a_loop_with_one_exchange_takes_the_full_step_and_says_so() -> None:
    """As the adapter for Flower's legacy server does."""
    strategy = LocalNewton(steps=(0.5,))
    model = {"x": np.zeros(1)}
    strategy.rounds.begin(1, model, [0])
    content = RecordDict({"arrays": pack_arrays({"x": np.ones(1)}), "metrics": MetricRecord({"num-examples": 1})})
    strategy.receive(0, content, model)
    new = strategy.rounds.end()
    assert new is not None
    assert new["x"] == 1.0
    assert "only one exchange a round is possible here: the step is 1" in strategy.rounds.report.notes[0]


@pytest.mark.parametrize("value", ["fast", "1,-1", "0", "1,,2", "inf", "nan"])
def test_candidates_must_be_numbers_above_zero(value: str) -> None:
    with pytest.raises(SettingsError, match=r"setting 'localnewton.line-search': expected numbers > 0"):
        resolve_settings({"method": "localnewton", "localnewton.line-search": value}, "torch")


def lines() -> list[tuple[np.ndarray, np.ndarray]]:
    data = load_task(CONVEX["task"], TaskConfig(seed=5, options={"sizes": "6,18,9", "clients": 3})).load()[0]
    sites = [np.flatnonzero(data.columns["site"] == i) for i in range(3)]
    return [(np.asarray(data.inputs)[mine], data.targets[mine]) for mine in sites]


@pytest.mark.slow
def test_sub_sampled_hessians_and_the_local_line_search_are_the_papers(tmp_path: Path) -> None:
    """Each step divides by the Hessian of a third of the examples, and is halved until the client's loss falls enough."""
    config: dict[str, Any] = {
        **CONVEX, "localnewton.line-search": "", "lr": 1.0, "local-epochs": 2, "num-server-rounds": 2, "seed": 5,
        "weighting": "uniform", "localnewton.hessian-share": 0.34, "localnewton.local-search": True,
        "localnewton.damping": 0.01,
    }  # fmt: skip
    left = short_run(tmp_path / "run", config)
    theta, halved = np.zeros(3), 0
    for number in (1, 2):
        ends = []
        for i, (X, y) in enumerate(lines()):
            random, w, n = generator(5, number, i, 4), theta.copy(), len(y)
            for _ in range(2):
                part = np.sort(random.choice(n, round(0.34 * n), replace=False))
                H = X[part].T @ X[part] / len(part) + 0.01 * np.eye(3)
                g = X.T @ (X @ w - y) / n
                step, size = np.linalg.solve(H, g), 1.0
                while ((X @ (w - size * step) - y) ** 2 - (X @ w - y) ** 2).mean() / 2 > -1e-4 * size * (g @ step):
                    size, halved = size / 2, halved + 1
                w = w - size * step
            ends.append(w)
        theta = np.mean(ends, axis=0)
    assert halved > 0
    np.testing.assert_allclose(left.model["weights"], theta, rtol=1e-9)


@pytest.mark.parametrize(("key", "value"), [("local-search", True), ("hessian-share", 0.5)])
def test_what_only_convex_tasks_have_is_refused_before_a_torch_model_trains(
    tmp_path: Path, key: str, value: bool | float
) -> None:
    with pytest.raises(SettingsError, match=rf"localnewton\.{key}: expected a convex task.*localnewton\.line-search"):
        short_run(tmp_path / "run", {"method": "localnewton", f"localnewton.{key}": value})
