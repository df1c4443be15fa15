"""``fedapps methods`` and ``fedapps tasks``."""

from __future__ import annotations

import json
from collections.abc import Callable

from fedapps.methods import METHODS

Call = Callable[..., str]


def test_lists_name_every_method_and_task(call: Call) -> None:
    methods = json.loads(call("methods", "--format", "json"))
    assert [row["name"] for row in methods] == [method.name for method in METHODS]
    tasks = json.loads(call("tasks", "--format", "json"))
    assert {"digits", "a9a", "w8a", "libsvm"} <= {row["name"] for row in tasks}
    for command in ("methods", "tasks"):
        table = call(command)
        assert all(row["name"] in table for row in (methods if command == "methods" else tasks))
