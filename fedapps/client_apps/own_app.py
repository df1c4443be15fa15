"""A round of a ClientApp of another project, as the `ClientWork` that the methods' clients take.

Such a project has its own model, data and training loop, and its own run config. What else a client must know its server's
strategy tells (`fedapps.messages.method_facts`).

State over rounds is kept in the client store (`fedapps.client_apps.store`), not in Flower's ``context.state``, which a
SuperNode loses when it is restarted, and which has no version for a reply that the server did not fold. The store lies in
``state-dir`` of the node's configuration, else in ``$FEDAPPS_STATE`` or ``~/.fedapps/clients``, there in a folder for each of
Flower's runs: a simulation needs no configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from fedapps.client_apps.rules import NodeRules
from fedapps.client_apps.work import ClientWork, Node
from fedapps.errors import MessageError, SettingsError
from fedapps.messages.method_facts import LOCAL_STEPS, SEED, read_own
from fedapps.messages.schema import ARRAYS, CLIENT, CONFIG, SERVER_ROUND, unpack
from fedapps.methods import get_method, resolve_settings
from fedapps.tasks.base import ClientData, Data, TaskConfig
from fedapps.tasks.torch_arrays import module_arrays
from fedapps.tasks.torch_task import TorchTask

ELSEWHERE = ("personal_steps", "inner_accuracy", "export")
"""Settings of methods that steer the package's own loop, or what it writes, and say nothing to a loop of one's own."""


class OwnModel(TorchTask):
    """A model of another project; its data stay with that project.

    Args:
        build: Builds the model, or gives one that is there.
        seed: Of torch's generator around the call.
    """

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        super().__init__(TaskConfig(seed=seed), name="own")
        self._build_own = build

    @override
    def load(self) -> tuple[Data, Data]:
        raise RuntimeError("the data of another project are its own")

    @override
    def build_model(self) -> nn.Module:
        return self._build_own()


class ModelAtHand(OwnModel):
    """A model that is there, as the project's client has built it."""

    @override
    def initial_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        return module_arrays(self.build_model())


def own_work(
    message: Message,
    context: Context,
    task: Callable[[int], OwnModel],
    method: str,
    *,
    num_examples: int = 0,
    num_steps: int = 0,
    given: Mapping[str, Any],
) -> ClientWork:
    """Read a message of one of this package's strategies, or of Flower's FedAvg, in another project's ClientApp.

    Args:
        message: A train or evaluate message.
        context: Flower's context of the node.
        task: Gives the model as a task, for the seed that the server tells; 0 if it tells none.
        method: Name of the method.
        num_examples: Examples that the client trains on.
        num_steps: Local steps ``K``, where the server does not say it.
        given: The method's own settings as the client's author wrote them, by field.

    Returns:
        The round; its data are no more than their number, and ``lr`` is NaN where the server sends none.

    Raises:
        MessageError: A record or an entry is absent, or of another form.
        SettingsError: A given setting is wrong, not the server's, or for the package's own loop.
    """
    records, config = unpack(message.content, "server's message"), dict(entries_of(message))
    arrays = records.pop(ARRAYS, {})
    kind = get_method(method).own_settings
    for name in ELSEWHERE:
        if name in given:
            raise SettingsError(
                f"'{name}' on the client",
                expected="a setting that a loop of one's own can follow",
                got=f"'{name}', which is for the package's own loop",
                do="leave it out, and say it in your loop",
            )
    own = None if kind is None else read_own(config, kind, given)
    seed = int(config.get(SEED, 0))
    steps = int(config.get(LOCAL_STEPS, num_steps))
    run = {"method": method, "seed": seed, "local-steps": steps}
    partition = int(config.get(CLIENT, context.node_config.get("partition-id", context.node_id)))
    state_dir = str(context.node_config.get("state-dir", ""))
    return ClientWork(
        settings=resolve_settings(run, "torch").model_copy(update={"own": own}),
        task=task(seed),
        node=Node(partition, 0, Path(state_dir).expanduser() if state_dir else None, NodeRules()),
        data=counted(num_examples),
        arrays=arrays,
        server_round=int(_number(config, SERVER_ROUND)),
        lr=float(_number(config, "lr")) if "lr" in config else math.nan,
        last_folded=int(config.get("last-folded", 0)),
        experiment=str(config.get("experiment", "")) or f"run-{context.run_id}",
        run_dir="",
        config=config,
        records=records,
    )


def entries_of(message: Message) -> Mapping[str, Any]:
    """Give the ``config`` of a message; nothing where it has none."""
    record = message.content.get(CONFIG)
    return record if isinstance(record, ConfigRecord) else {}


def counted(num_examples: int) -> ClientData:
    """Stand for data of another project: so many examples, which are not here."""
    examples = np.arange(num_examples)
    nothing = Data(examples[:0], examples[:0])
    return ClientData(Data(examples, examples), nothing, nothing)


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float):
        raise MessageError(
            f"server's message, entry '{key}'",
            expected="a number",
            got=repr(value),
            do="take a strategy of fedapps.strategies, and pass train_config=ConfigRecord({'lr': ...}) to its start",
        )
    return value
