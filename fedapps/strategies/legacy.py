"""The legacy adapter: a strategy of this package behind Flower's old ``flwr.server.strategy.Strategy``.

The old interface knows a model as a list of unnamed arrays and a reply as a list of arrays with a dictionary of scalars.
`to_fit_result` writes a reply in that form, for a ``NumPyClient``, and `LegacyStrategy` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.common import (
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    NDArrays,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from typing_extensions import override

from fedapps.errors import MessageError, RosterError
from fedapps.messages.schema import METRICS, NUM_EXAMPLES, SERVER_ROUND, Arrays, pack_arrays
from fedapps.strategies.base import RoundStrategy, mean_metrics

logger = getLogger("flwr")

FORM = "fedapps-form"
"""Key of the metrics under which a reply says what its arrays are."""


def to_fit_result(content: RecordDict) -> tuple[NDArrays, int, dict[str, Scalar]]:
    """Write a train reply as the result of ``NumPyClient.fit``.

    Args:
        content: The content of a train reply, as the client helpers of `fedapps.client_apps` make it.

    Returns:
        Arrays, number of examples and metrics.
    """
    arrays: NDArrays = []
    form: dict[str, Any] = {"records": {}, "configs": {}}
    for record, values in content.array_records.items():
        form["records"][record] = list(values)
        arrays += [value.numpy() for value in values.values()]
    for record, entries in content.config_records.items():
        form["configs"][record] = dict(entries)
    metrics: dict[str, Scalar] = {k: v for k, v in content[METRICS].items() if isinstance(v, int | float)}
    num_examples = int(metrics.pop(NUM_EXAMPLES))
    return arrays, num_examples, {**metrics, FORM: json.dumps(form)}


def from_fit_result(arrays: NDArrays, num_examples: int, metrics: Mapping[str, Scalar], where: str) -> RecordDict:
    """Read what `to_fit_result` wrote.

    Args:
        arrays: The arrays.
        num_examples: Number of examples.
        metrics: The metrics.
        where: Which client, for the error message.

    Returns:
        The content of the reply.

    Raises:
        MessageError: The metrics do not say what the arrays are.
    """
    try:
        form = json.loads(str(metrics[FORM]))
        names = [(record, name) for record, held in form["records"].items() for name in held]
        if len(names) != len(arrays):
            raise ValueError(f"{len(arrays)} arrays for {len(names)} names")
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(
            where,
            expected=f"metrics with '{FORM}', one name for each array",
            got=f"{sorted(metrics)} ({error})",
            do="return fedapps.strategies.legacy.to_fit_result(...) from fit",
        ) from error
    records: dict[str, Arrays] = {record: {} for record in form["records"]}
    for (record, name), array in zip(names, arrays, strict=True):
        records[record][name] = array
    content = RecordDict({record: pack_arrays(values) for record, values in records.items()})
    for record, entries in form["configs"].items():
        content[record] = ConfigRecord(entries)
    scalars = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    content[METRICS] = MetricRecord({**scalars, NUM_EXAMPLES: num_examples})
    return content


class LegacyStrategy(Strategy):
    """A strategy of this package for Flower's legacy server.

    Clients are known by their place in the sorted list of client ids, since the old interface has no partition ids. Flower's
    words of the strategy hold here, too, but for the names of records and ``evaluate_metrics_aggr_fn``: there are no records.

    Args:
        strategy: The strategy, such as ``FedPM()``.
        initial_arrays: The initial model by name, in the order in which the clients get the arrays.
        fit_config: Round -> entries for the clients' ``config``, such as the learning rate.
        evaluate_fn: Evaluates the model on the server, as in Flower's legacy FedAvg.
    """

    def __init__(
        self,
        strategy: RoundStrategy,
        initial_arrays: Arrays,
        *,
        fit_config: Callable[[int], dict[str, Scalar]] | None = None,
        evaluate_fn: Callable[[int, NDArrays, dict[str, Scalar]], tuple[float, dict[str, Scalar]] | None] | None = None,
    ) -> None:
        super().__init__()
        self.strategy = strategy
        self._arrays = dict(initial_arrays)
        self._fit_config = fit_config
        self._evaluate_fn = evaluate_fn
        self._partitions: dict[str, int] = {}

    @override
    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        return ndarrays_to_parameters(list(self._arrays.values()))

    @override
    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Sample clients and send them the model."""
        clients = self._clients(client_manager)
        sampled = self.strategy.places(MessageType.TRAIN, server_round, len(clients))
        if not sampled:
            return []
        self._take(parameters)
        self.strategy.check_model(self._arrays)
        self.strategy.rounds.begin(server_round, self._arrays, sampled)
        config: dict[str, Scalar] = self._fit_config(server_round) if self._fit_config else {}
        return [(clients[i], FitIns(parameters, {**config, SERVER_ROUND: server_round})) for i in sampled]

    def _clients(self, client_manager: ClientManager) -> list[ClientProxy]:
        wanted, node_wait = self.strategy.least_nodes, self.strategy.settings.node_wait
        if not client_manager.wait_for(wanted, timeout=int(node_wait)):
            raise RosterError(
                "clients",
                expected=f"at least {wanted}",
                got=f"{client_manager.num_available()} after {node_wait:g} s",
                do="start more clients or raise node_wait",
            )
        clients = sorted(client_manager.all().values(), key=lambda client: client.cid)
        self._partitions = {client.cid: partition for partition, client in enumerate(clients)}
        return clients

    def _take(self, parameters: Parameters) -> None:
        values = parameters_to_ndarrays(parameters)
        self._arrays = dict(zip(self._arrays, values, strict=True))

    @override
    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Fold the clients' results with the strategy: for FedPM this is preconditioned mixing."""
        if not self.strategy.words.trains:
            return None, {}
        for client, result in results:
            self._receive(client, result)
        for failure in failures:
            if isinstance(failure, BaseException):
                logger.error("round %d: a client failed: %s", server_round, failure)
            else:
                client, result = failure
                self.strategy.rounds.receive(self._partitions[client.cid], None, result.status.message)
        arrays = self.strategy.rounds.end()
        if arrays is None:
            return None, {}
        self._arrays = arrays
        metrics: dict[str, Scalar] = {k: float(v) for k, v in self.strategy.train_metrics().items()}  # type: ignore[arg-type]
        return ndarrays_to_parameters(list(arrays.values())), metrics

    def _receive(self, client: ClientProxy, result: FitRes) -> None:
        partition = self._partitions[client.cid]
        try:
            content = from_fit_result(
                parameters_to_ndarrays(result.parameters), result.num_examples, result.metrics, f"client {partition}"
            )
        except MessageError as problem:
            self.strategy.rounds.receive(partition, None, str(problem))
            return
        self.strategy.receive(partition, content, self._arrays)

    @override
    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Ask clients to evaluate the model: all of them, or ``fraction_evaluate``."""
        if not self.strategy.words.fraction_evaluate:
            return []
        clients = self._clients(client_manager)
        sampled = self.strategy.places(MessageType.EVALUATE, server_round, len(clients))
        return [(clients[i], EvaluateIns(parameters, {SERVER_ROUND: server_round})) for i in sampled]

    @override
    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Average the clients' evaluation, weighted by their number of examples."""
        counts = {self._partitions[c.cid]: r.num_examples for c, r in results if r.num_examples > 0}
        values = {
            self._partitions[c.cid]: {
                **{k: float(v) for k, v in r.metrics.items() if isinstance(v, int | float)},
                "loss": r.loss,
            }
            for c, r in results
            if r.num_examples > 0
        }
        if not values:
            return None, {}
        means: dict[str, Scalar] = {k: float(v) for k, v in mean_metrics(values, counts).items()}  # type: ignore[arg-type]
        return float(means.pop("loss")), means

    @override
    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the model on the server, if a function for it was given."""
        if self._evaluate_fn is None:
            return None
        return self._evaluate_fn(server_round, parameters_to_ndarrays(parameters), {})

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The current model, by name."""
        return dict(self._arrays)
