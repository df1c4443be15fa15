"""The legacy adapter: FedPM's aggregate_fit is the same preconditioned mixing, and bad results are named."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.common import Code, EvaluateRes, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedapps.errors import MessageError, RosterError, RoundFailedError
from fedapps.settings import RoundSettings
from fedapps.strategies import FedPM
from fedapps.strategies.legacy import LegacyStrategy, from_fit_result, to_fit_result

from .test_fedpm import MODEL, SIZES, curvature, mix, reply_of, trained

OK = Status(Code.OK, "")


class Proxy(ClientProxy):
    """A client that is only looked at."""

    def get_properties(self, ins, timeout, group_id):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    get_parameters = fit = evaluate = reconnect = get_properties


def manager(*cids: str) -> SimpleClientManager:
    clients = SimpleClientManager()
    for cid in cids:
        clients.register(Proxy(cid))
    return clients


def fit_res(partition: int) -> FitRes:
    arrays, count, metrics = to_fit_result(reply_of(trained(partition), curvature(partition), SIZES[partition]))
    return FitRes(OK, ndarrays_to_parameters(arrays), count, metrics)


def begin(settings: RoundSettings | None = None, *cids: str) -> tuple[LegacyStrategy, list[ClientProxy]]:
    strategy = LegacyStrategy(FedPM(settings), MODEL, fit_config=lambda server_round: {"lr": 0.5 / server_round})
    clients = manager(*(cids or ("b", "a", "c")))
    parameters = strategy.initialize_parameters(clients)
    instructions = strategy.configure_fit(1, parameters, clients)
    assert instructions[0][1].config == {"lr": 0.5, "server-round": 1}
    return strategy, [client for client, _ in instructions]


def test_a_reply_survives_the_legacy_form() -> None:
    content = reply_of(trained(1), curvature(1), 30)
    back = from_fit_result(*to_fit_result(content), where="client 1")
    assert list(back.array_records) == list(content.array_records)
    for record, arrays in content.array_records.items():
        for name, array in arrays.items():
            value = back[record][name].numpy()
            assert value.dtype == array.numpy().dtype
            np.testing.assert_array_equal(value, array.numpy())
    assert back["layout"] == content["layout"]
    assert back["metrics"]["num-examples"] == 30


def test_aggregate_fit_is_preconditioned_mixing_bit_for_bit() -> None:
    strategy, clients = begin()
    assert [client.cid for client in clients] == ["a", "b", "c"]
    results = [(client, fit_res(i)) for i, client in enumerate(clients)]
    parameters, metrics = strategy.aggregate_fit(1, results[::-1], [])
    assert parameters is not None
    expected = mix(FedPM(), {i: reply_of(trained(i), curvature(i), SIZES[i]) for i in range(3)})
    for value, name in zip(parameters_to_ndarrays(parameters), MODEL, strict=True):
        assert value.tobytes() == expected[name].tobytes()
        assert value.dtype == MODEL[name].dtype
    assert metrics == {}
    assert strategy.arrays["fc.weight"].tobytes() == expected["fc.weight"].tobytes()


def test_failures_and_foreign_results_are_named_and_the_others_go_on() -> None:
    strategy, clients = begin()
    foreign = FitRes(OK, ndarrays_to_parameters([np.ones(3)]), 5, {"accuracy": 0.5})
    failed = FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "sensor offline"), ndarrays_to_parameters([]), 0, {})
    parameters, _ = strategy.aggregate_fit(1, [(clients[0], fit_res(0)), (clients[1], foreign)], [(clients[2], failed)])
    assert parameters is not None
    refused = strategy.strategy.rounds.report.refused
    assert "return fedapps.strategies.legacy.to_fit_result(...) from fit" in refused[1]
    assert refused[2] == "sensor offline"


def test_no_result_keeps_the_model_and_too_many_end_the_run() -> None:
    strategy, _ = begin(RoundSettings(max_consecutive_failed_rounds=1))
    with pytest.raises(RoundFailedError, match="at least 1 valid replies, got 0 of 3"):
        strategy.aggregate_fit(1, [], [RuntimeError("all is lost")])


def test_arrays_without_names_are_refused() -> None:
    arrays, count, metrics = to_fit_result(reply_of(trained(1), curvature(1)))
    with pytest.raises(MessageError, match=r"client 4: .*one name for each array"):
        from_fit_result(arrays[:-1], count, metrics, "client 4")


def test_too_few_clients_end_the_wait() -> None:
    strategy = LegacyStrategy(FedPM(RoundSettings(node_wait=0.0, min_available_nodes=3)), MODEL)
    with pytest.raises(RosterError, match="expected at least 3, got 2"):
        strategy.configure_fit(1, strategy.initialize_parameters(manager()), manager("a", "b"))


def test_flowers_words_hold_for_legacy_clients_as_well() -> None:
    strategy = LegacyStrategy(
        FedPM(fraction_train=0.5, min_train_nodes=1, fraction_evaluate=0.25, min_evaluate_nodes=3), MODEL
    )
    clients = manager(*"abcde")
    first = strategy.initialize_parameters(clients)
    assert len(strategy.configure_fit(1, first, clients)) == 2
    assert len(strategy.configure_evaluate(1, first, clients)) == 3
    strategy = LegacyStrategy(FedPM(fraction_train=0.0, fraction_evaluate=0.0), MODEL)
    assert strategy.configure_fit(1, first, clients) == strategy.configure_evaluate(1, first, clients) == []
    assert strategy.aggregate_fit(1, [], []) == (None, {})


def test_evaluation_is_weighted_by_examples_and_clients_without_any_are_left_out() -> None:
    strategy, clients = begin()
    results = [
        (client, EvaluateRes(OK, loss, count, {"accuracy": accuracy}))
        for client, loss, count, accuracy in zip(clients, (1.0, 2.0, 9.0), (10, 30, 0), (0.4, 0.8, 0.0), strict=True)
    ]
    loss, metrics = strategy.aggregate_evaluate(1, results, [])
    assert loss == pytest.approx(1.75)
    assert metrics == {"accuracy": pytest.approx(0.7)}
    assert strategy.aggregate_evaluate(1, [], []) == (None, {})
