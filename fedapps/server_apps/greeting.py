"""A ServerApp that only greets the nodes: what each would train on, and which the run would refuse. Nothing is trained."""

from __future__ import annotations

import json
import platform
from logging import getLogger
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedapps
from fedapps.errors import FedAppsError
from fedapps.messages.node_facts import TOLD
from fedapps.methods import get_method, resolve_settings
from fedapps.results.environment import installed_versions
from fedapps.strategies.roster import fingerprint
from fedapps.tasks.from_settings import load_task_of

logger = getLogger("flwr")

MARK = "fedapps-greeting "
"""What the line of the log begins with that holds the answers as a JSON object."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Greet the nodes as the run with these settings would, and log what came of it.

    The line's keys: ``versions`` of the server; ``nodes``, each with Flower's ``id``, the ``label`` that it was registered
    under, the fingerprint of its ``key``, and either ``facts`` or the reason it was ``refused`` for; ``problem`` that would
    keep the run from its start, or ``""``.

    Args:
        grid: Flower's grid.
        context: Flower's context of the server.
    """
    settings = resolve_settings(context.run_config)
    roster = get_method(settings.method).load_strategy().from_settings(settings, "greeting").roster
    problem = ""
    if settings.partition == "local":
        roster.task = load_task_of(settings)
    try:
        roster.refresh(grid)
        if roster.task is not None:
            # The model that the nodes have agreed on can be built.
            load_task_of(settings, roster.agreed).initial_arrays(settings.seed)
    except FedAppsError as error:
        problem = str(error)
    nodes: list[dict[str, Any]] = []
    for node in sorted(grid.get_nodes(), key=lambda node: (node.name, node.node_id)):
        row: dict[str, Any] = {"id": str(node.node_id), "label": node.name, "key": fingerprint(node.public_key)}
        number = roster.partition_of(node.node_id)
        if number is not None:
            facts = roster.facts[number]
            told = {key: facts.told.get(key) for key in TOLD}
            row["facts"] = {
                "name": facts.name, "num-examples": facts.num_examples, **told, "device": facts.device,
                "version": facts.version,
            }  # fmt: skip
        else:
            row["refused"] = roster.refused.get(node.node_id, "it did not answer")
        nodes.append(row)
    versions = {"fedapps": fedapps.__version__, "python": platform.python_version(), **installed_versions()}
    logger.info("%s%s", MARK, json.dumps({"versions": versions, "nodes": nodes, "problem": problem}))
