"""Clients with one number each: ``f_i(x) = a_i (x - c_i)^2 / 2``, whose Newton step ends at ``c_i``."""

from __future__ import annotations

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedapps.curvature.line_search import along
from fedapps.messages import pack_arrays, unpack_arrays

app = ClientApp()


def numbers(context: Context, key: str) -> float:
    return float(str(context.run_config[key]).split(",")[int(str(context.node_config["partition-id"]))])


@app.train()
def train(message: Message, context: Context) -> Message:
    a, c = numbers(context, "a"), numbers(context, "c")
    if "line-search" not in message.content:
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": pack_arrays({"x": np.array([c])}), "metrics": metrics}), reply_to=message)
    theta, d = (unpack_arrays(message.content, record, "server") for record in ("arrays", "direction"))
    steps = message.content.config_records["line-search"]["steps"]
    points = [along(theta, d, step)["x"][0] for step in (0.0, *steps)]  # type: ignore[misc]
    losses = [float(a * (x - c) ** 2 / 2) for x in points]
    return Message(RecordDict({"line-search": ConfigRecord({"losses": losses})}), reply_to=message)
