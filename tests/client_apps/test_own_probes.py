"""Zeroth-order methods around a project's own model and loss: the bits of the package's own clients, and wrong uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

from fedapps.client_apps import replicas
from fedapps.client_apps.own_probes import first_model, probed_reply, replica_reply, scalar_reply
from fedapps.errors import MessageError, SettingsError, TaskError
from fedapps.messages import pack_arrays
from fedapps.messages.method_facts import tell_method
from fedapps.messages.scalars import need_of
from fedapps.methods.zeroth_order import DeComFLSettings, HiSoMomentumSettings, HiSoSettings
from fedapps.settings import key_of
from fedapps.simulation.inprocess import InProcessGrid
from fedapps.strategies import FedAvg, HiSo, RoundStrategy
from fedapps.tasks.torch_arrays import module_arrays
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.probing import Prober
from fedapps.zeroth_order.scheme import Scheme

from ..simulation.runs import assert_same_model, short_run

pytestmark = pytest.mark.usefixtures("own_module")

OWN: dict[str, Any] = {"decomfl": DeComFLSettings, "hiso": HiSoSettings, "hiso-momentum": HiSoMomentumSettings}


def run(strategy: RoundStrategy, rounds: int = 3, app: str = "app", **config: Any) -> Any:
    """Flower's own ``start`` with the project's clients."""
    from fedapps_own_probes import build

    grid = InProcessGrid(3, config, client_app=f"fedapps_own_probes:{app}")
    arrays = pack_arrays(module_arrays(first_model(build)))
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, train_config=ConfigRecord({"lr": 0.1}))


def package(folder: Path, method: str, **options: Any) -> Any:
    config = {
        "method": method, "num-server-rounds": 3, "weighting": "uniform", "local-steps": 2, "batch-size": 4, "lr": 0.1,
        "client-test-fraction": 0.0, "client-validation-fraction": 0.0, "client-evaluation": "none", "evaluate-every": 0,
        **options,
    }  # fmt: skip
    return short_run(folder, config)


@pytest.mark.parametrize("method", OWN)
def test_scalars_of_ones_own_loss_are_those_of_the_packages_client(tmp_path: Path, method: str) -> None:
    """Three rounds: the journal's scalars and the model that it leads to. Weights and order of the sum are equal in both."""
    own = OWN[method](num_probes=3, fingerprint_every=2)
    options = {f"{method}.{key_of(name)}": value for name, value in own.model_dump(mode="json").items()}
    theirs = package(tmp_path / "package", method, **options)
    strategy = HiSo(own=own, rule=method, tau=2)
    result = run(strategy, method=method)
    assert strategy.kept is not None
    records = [record.scalars for record in strategy.kept.journal.records]
    assert records == [record.scalars for record in theirs_records(theirs)]
    assert strategy.kept.journal.records[1].fingerprint == theirs_records(theirs)[1].fingerprint is not None
    assert_same_model(strategy.model(), theirs.model)
    total = sum(float(value.astype(np.float64).sum()) for value in strategy.model().values())
    assert result.evaluate_metrics_clientapp[3]["total"] == pytest.approx(total, rel=1e-12)


def theirs_records(theirs: Any) -> Any:
    from fedapps.zeroth_order.journal import Journal

    return Journal.read(theirs.folder.journal_path).records


def test_fedzo_around_ones_own_loss_has_the_bits_of_the_packages_client(tmp_path: Path) -> None:
    theirs = package(tmp_path / "package", "fedzo", **{"fedzo.num-probes": 3})
    result = run(FedAvg(weighting="uniform", fraction_evaluate=0.0, handshake=True), app="named", method="fedzo")
    assert_same_model({name: array.numpy() for name, array in result.arrays.items()}, theirs.model)


def test_clients_whose_state_is_lost_ask_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes and empty disks after two rounds: the journal is sent once more, and the run is the same."""
    straight, strategy = (HiSo(own=HiSoSettings(num_probes=2)) for _ in range(2))
    run(straight, rounds=3, method="hiso")
    half = run(strategy, rounds=2, method="hiso")
    for path in (tmp_path / "state").rglob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr(replicas, "_held", None)
    grid = InProcessGrid(3, {"method": "hiso"}, client_app="fedapps_own_probes:app")
    sent = strategy.configure_train(3, half.arrays, ConfigRecord({"lr": 0.1}), grid)
    strategy.aggregate_train(3, grid.send_and_receive(sent))
    assert strategy.rounds.report.values["resent"] >= 1  # Later clients of this process use the first one's journal.
    assert straight.kept is not None
    assert strategy.kept is not None
    assert strategy.kept.journal.records == straight.kept.journal.records


# One client by hand ---------------------------------------------------------------------------------------

CONTEXT = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={})
TAU, P, MU = 3, 2, 1e-2


def line() -> nn.Linear:
    return nn.Linear(3, 1, bias=False)


def zeros() -> nn.Linear:
    layer = line()
    nn.init.zeros_(layer.weight)
    return layer


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def message_of(build: Any = line, seed: int = 4, **config: Any) -> Message:
    """The first round's message of a strategy."""
    strategy = HiSo(own=HiSoSettings(num_probes=P, mu=MU), tau=TAU, seed=seed)
    strategy.open_journal(module_arrays(first_model(build, seed)))
    records = strategy.records_for(0, 0, {})
    entries = {"server-round": 1, "last-folded": 0, "lr": 0.1, **strategy.told_clients(), **config}
    content = RecordDict({"arrays": pack_arrays({}), "config": ConfigRecord(entries)})
    content["journal"] = ConfigRecord(dict(records["journal"]))
    return Message(content, dst_node_id=5, message_type="train")


def test_a_short_loader_begins_again_and_the_seed_is_the_strategys() -> None:
    """Three steps over two batches, as the prober computes them from the strategy's seed and first model."""
    batches = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 2.0]])]
    for loader in (batches, iter(batches)):
        content = scalar_reply(message_of(), CONTEXT, line, square, loader, num_examples=2)
        expected = Prober(first_model(line, 4), Scheme(4, "hiso"), {"H": {"weight": torch.ones(1, 3)}}).probe(
            square, [*batches, batches[0]], first_step=0, num_probes=P, mu=MU, lr=0.1
        )
        got = np.frombuffer(content["scalars"]["values"], np.float32)  # type: ignore[arg-type]
        np.testing.assert_array_equal(got, np.array(expected.scalars, np.float32).ravel())


def test_an_evaluation_without_the_journal_before_its_slice_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_held", None)  # of another test's run of the same name
    message = message_of()
    message.content["journal"]["after"] = message.content["journal"]["through"] = 1  # type: ignore[index,call-overload]
    content = replica_reply(message, CONTEXT, line, lambda model: {"num-examples": 1.0})
    assert need_of({name: dict(record) for name, record in content.items()}) == 0


def test_wrong_uses_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_held", None)  # of another test's run of the same name
    batch = [torch.ones(1, 3)]
    with pytest.raises(JournalError, match="the shapes fit but the weights differ"):
        scalar_reply(message_of(), CONTEXT, zeros, square, batch, num_examples=1)
    with pytest.raises(MessageError, match=r"expected decomfl or hiso or hiso-momentum, .* got 'fedclup'"):
        scalar_reply(message_of(method="fedclup"), CONTEXT, line, square, batch, num_examples=1)
    with pytest.raises(TaskError, match="expected at least one batch, got none"):
        scalar_reply(message_of(), CONTEXT, line, square, [], num_examples=1)
    with pytest.raises(TaskError, match="expected metrics with 'num-examples', got accuracy"):
        replica_reply(message_of(), CONTEXT, line, lambda model: {"accuracy": 1.0})
    told = tell_method("fedzo")
    message = Message(
        RecordDict({"arrays": pack_arrays(module_arrays(line())), "config": ConfigRecord({"server-round": 1, **told})}),
        dst_node_id=5, message_type="train",
    )  # fmt: skip
    with pytest.raises(SettingsError, match="num_probes"):
        probed_reply(message, CONTEXT, line(), square, batch, num_examples=1, num_probes=0)
