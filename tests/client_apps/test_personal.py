"""Personalised methods around a project's own loop: the bits of the package's own clients, state, and wrong uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

from fedapps.client_apps.personal import personal, personal_model
from fedapps.errors import MessageError, SettingsError, TaskError
from fedapps.messages import pack_arrays
from fedapps.messages.method_facts import tell_method
from fedapps.messages.plans import AskedCurvature, RoundPlan
from fedapps.methods.personalised import DittoSettings, FedClupSettings
from fedapps.personalization.torch_proximal import add_proximal_gradient, take_anchor
from fedapps.results.storage import load_arrays
from fedapps.simulation.inprocess import InProcessGrid
from fedapps.strategies import Ditto, FedAvg, FedCLUP, LocalTrain, PFedMe, RoundStrategy
from fedapps.tasks import TaskConfig
from fedapps.tasks.torch_arrays import module_arrays

from ..simulation.runs import assert_same_model, client_states, short_run

pytestmark = pytest.mark.usefixtures("own_module")

UNIFORM = {"weighting": "uniform"}
STRATEGIES: dict[str, Any] = {
    "fedclup": lambda **words: FedCLUP(**UNIFORM, **words, own=FedClupSettings(lambda_=0.3, gamma_rule="average")),
    "pfedme": lambda **words: PFedMe(**UNIFORM, **words, beta=0.5),
    "ditto": lambda **words: Ditto(**UNIFORM, **words),
    "localtrain": lambda **words: LocalTrain(**UNIFORM, **words),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedclup": {"fedclup.lambda": 0.3, "fedclup.gamma-rule": "average"},
    "pfedme": {"pfedme.lambda": 0.3, "pfedme.eta": 1.0, "pfedme.beta": 0.5, "pfedme.inner-steps": 2},
    "ditto": {"ditto.lambda": 0.3},
    "localtrain": {},
}


def first_model() -> dict[str, np.ndarray]:
    from fedapps_testing import Sites

    return Sites(TaskConfig()).initial_arrays(0)


def run(strategy: RoundStrategy, rounds: int, arrays: Any, app: str = "app", **config: Any) -> Any:
    """Flower's own ``start`` with clients that have no state but what they keep themselves."""
    grid = InProcessGrid(3, config, client_app=f"fedapps_own_client:{app}")
    return strategy.start(
        grid=grid, initial_arrays=pack_arrays(arrays), num_rounds=rounds, train_config=ConfigRecord({"lr": 0.1})
    )


def kept(tmp_path: Path, server_round: int) -> dict[int, dict[str, np.ndarray]]:
    return {
        i: load_arrays(tmp_path / "state" / "run-1" / f"client-{i}" / f"round-{server_round}.safetensors")
        for i in range(3)
    }


def numpy_of(result: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize("method", STRATEGIES)
def test_a_loop_of_ones_own_gives_the_bits_of_the_packages_client(tmp_path: Path, method: str) -> None:
    """Three rounds; the global model, and what each client keeps. Also where the optimizer calls a closure."""
    config = {
        "method": method, "num-server-rounds": 3, "weighting": "uniform", "client-test-fraction": 0.0,
        "client-validation-fraction": 0.0, "client-evaluation": "none", **OPTIONS[method],
    }  # fmt: skip
    package = short_run(tmp_path / "package", config)
    for closure in (False, True):
        result = run(STRATEGIES[method](handshake=True), 3, first_model(), app="named", method=method, closure=closure)
        if method != "localtrain":
            assert_same_model(numpy_of(result), package.model)
        theirs, ours = client_states(tmp_path / "package"), kept(tmp_path, 3)
        for partition, state in theirs.items():
            assert_same_model(ours[partition], state)


def test_state_is_there_after_all_nodes_were_restarted(tmp_path: Path) -> None:
    """Flower's context of each node is a new one; two rounds and two more are four."""
    straight, halves = STRATEGIES["fedclup"](), STRATEGIES["fedclup"]()
    whole = run(straight, 2, first_model(), method="fedclup")
    straight_state = kept(tmp_path, 2)
    for path in (tmp_path / "state").rglob("*.safetensors"):
        path.unlink()
    half = run(halves, 1, first_model(), method="fedclup")
    # The second start counts from 1 again: move on as a server that resumes does.
    halves.evaluate_clients = False
    grid = InProcessGrid(3, {"method": "fedclup"}, client_app="fedapps_own_client:app")
    messages = halves.configure_train(2, half.arrays, ConfigRecord({"lr": 0.1}), grid)
    arrays, _ = halves.aggregate_train(2, grid.send_and_receive(messages))
    assert arrays is not None
    assert_same_model({name: array.numpy() for name, array in arrays.items()}, numpy_of(whole))
    for partition, state in kept(tmp_path, 2).items():
        assert_same_model(state, straight_state[partition])


def test_the_evaluation_twin_gives_the_personal_model(tmp_path: Path) -> None:
    result = run(Ditto(**UNIFORM), 2, first_model(), method="ditto")
    sums = [
        sum(float(v.astype(np.float64).sum()) for name, v in state.items() if name.startswith("personal/"))
        for state in kept(tmp_path, 2).values()
    ]
    assert result.evaluate_metrics_clientapp[2]["total"] == pytest.approx(np.mean(sums), rel=1e-12)


# One client by hand ---------------------------------------------------------------------------------------

CONTEXT = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={})


def line() -> nn.Linear:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    return layer


def message_of(model: nn.Module, told: dict[str, Any], **config: Any) -> Message:
    entries = {"server-round": 1, "last-folded": 0, "lr": 0.1, **told, **config}
    content = RecordDict({"arrays": pack_arrays(module_arrays(model)), "config": ConfigRecord(entries)})
    return Message(content, dst_node_id=5, message_type="train")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(torch.tensor([[1.0, 2.0]])).sum() ** 2).backward()
    optimizer.step()


def test_fedclups_second_reply_is_the_change_since_the_folded_one() -> None:
    """The client's difference ``w - w_i`` in float64: the first reply is it, the second what it has changed by."""
    plan = RoundPlan(0.3, 0, fitting=False, curvature=AskedCurvature.NOTHING)
    told = tell_method("fedclup", FedClupSettings(gamma_rule="average")) | plan.to_entries()
    w, sent, differences = line().weight.detach().double().numpy(), [], []
    for server_round in (1, 2):
        model = line()
        message = message_of(model, told, **{"server-round": server_round, "last-folded": server_round - 1})
        with personal(message, CONTEXT, model, "fedclup") as p:
            step(model, torch.optim.SGD(model.parameters(), lr=p.lr / 4))
        differences.append(w - model.weight.detach().double().numpy())
        sent.append(p.reply(num_examples=1, train_loss=0.0)["arrays"]["weight"].numpy())  # type: ignore[index,union-attr,call-overload]
    np.testing.assert_allclose(sent[0], differences[0], rtol=1e-6)
    np.testing.assert_allclose(sent[1], differences[1] - differences[0], rtol=1e-5)
    assert np.abs(sent).min() > 0.05


def test_each_step_is_that_of_the_proximal_gradient(tmp_path: Path) -> None:
    """Three steps of SGD with momentum, gradients accumulated over two batches, and clipped before the step."""
    ours, theirs = line(), line()
    anchor = take_anchor(theirs)
    with personal(message_of(ours, tell_method("ditto")), CONTEXT, ours, "ditto", lambda_=0.5) as p:
        for _ in p:
            optimizer = torch.optim.SGD(ours.parameters(), lr=p.lr, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad()
                for x in (torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -1.0]])):
                    (ours(x).sum() ** 2).backward()
                nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
                optimizer.step()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1 / (1 / 0.1 + 0.5), momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for x in (torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -1.0]])):
            (theirs(x).sum() ** 2).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        add_proximal_gradient(theirs, anchor, 0.5)
        optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    # Outside the context nothing pulls any more.
    before = ours.weight.detach().clone()
    step(ours, torch.optim.SGD(ours.parameters(), lr=0.0))
    assert torch.equal(ours.weight.detach(), before)
    plain = line()
    plain.load_state_dict(ours.state_dict())
    for model in (ours, plain):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(ours.weight, plain.weight)


@pytest.mark.parametrize(
    ("told", "got"),
    [({}, "none, as from another strategy"), (tell_method("pfedme"), "'pfedme'"),
     ({**tell_method("ditto"), "version": "0.0"}, "fedapps 0.0")],
)  # fmt: skip
def test_a_strategy_of_another_method_or_version_is_refused(told: dict[str, Any], got: str) -> None:
    with pytest.raises(MessageError, match=got):
        personal(message_of(line(), told), CONTEXT, line(), "ditto")
    with pytest.raises(MessageError, match=got):
        personal_model(message_of(line(), told), CONTEXT, line(), "ditto")


def test_fedavgs_strategy_refuses_a_personalised_client(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedAvg(**UNIFORM)
    run(strategy, 1, first_model(), method="ditto")
    assert "expected ditto" in strategy.rounds.report.refused[0]


def test_a_number_that_client_and_server_both_name_must_be_the_same() -> None:
    plan = {"lambda": 0.3, "generation": 0, "fitting": False, "curvature": "nothing"}
    told = {**tell_method("fedclup", FedClupSettings(lambda_=0.3)), **plan}
    personal(message_of(line(), told), CONTEXT, line(), "fedclup", lambda_=0.3)
    with pytest.raises(SettingsError, match=r"'lambda_' on the client: expected 0.3 as on the server.*got 0.2"):
        personal(message_of(line(), told), CONTEXT, line(), "fedclup", lambda_=0.2)
    with pytest.raises(SettingsError, match="inner_accuracy"):
        personal(message_of(line(), tell_method("pfedme")), CONTEXT, line(), "pfedme", inner_accuracy=0.1)
    with pytest.raises(SettingsError, match="curvature_loss"):
        personal(message_of(line(), {**told, "curvature": "for-gamma"}), CONTEXT, line(), "fedclup")
    with pytest.raises(SettingsError, match="adaptive"):
        personal(message_of(line(), {**told, "fitting": True}), CONTEXT, line(), "fedclup")


def test_the_theorys_curvature_comes_from_the_loss_that_is_given(tmp_path: Path) -> None:
    """``L = 2 |x|^2 = 10`` for ``(w x)^2`` and ``x = (1, 2)``."""
    plan = {"lambda": 0.3, "generation": 0, "fitting": False, "curvature": "for-gamma"}
    model, x = line(), torch.tensor([[1.0, 2.0]])
    message = message_of(model, {**tell_method("fedclup", FedClupSettings()), **plan})
    with personal(message, CONTEXT, model, "fedclup", curvature_loss=lambda: model(x).sum() ** 2) as p:
        step(model, torch.optim.SGD(model.parameters(), lr=p.lr))
    content = p.reply(num_examples=3, train_loss=1.0, accuracy=0.5)
    metrics = content.metric_records["metrics"]
    assert metrics["largest-curvature"] == pytest.approx(10.0, rel=1e-5)
    assert (metrics["num-examples"], metrics["accuracy"]) == (3, 0.5)


def test_training_another_model_or_once_too_little_is_told() -> None:
    model, other = line(), line()
    message = message_of(model, tell_method("pfedme"))
    with (
        pytest.raises(TaskError, match=r"steps of a torch optimizer.*inside the context, got none"),
        personal(message, CONTEXT, model, "pfedme"),
    ):
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with (
        pytest.raises(TaskError, match=r"p.batches\(loader\)"),
        personal(message, CONTEXT, model, "pfedme"),
    ):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with personal(message_of(model, tell_method("ditto")), CONTEXT, model, "ditto") as p:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TaskError, match=r"2 trainings.*got 1"):
        p.reply(num_examples=3, train_loss=1.0)


def test_dittos_trainings_see_the_same_random_numbers() -> None:
    model = line()
    drawn = []
    with personal(
        message_of(model, tell_method("ditto")), CONTEXT, model, "ditto", lambda_=DittoSettings().lambda_
    ) as p:
        for trained in p:
            drawn.append(torch.rand(3).tolist())
            step(trained, torch.optim.SGD(trained.parameters(), lr=p.lr))
    assert drawn[0] == drawn[1]
