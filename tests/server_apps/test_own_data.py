"""Nodes with data of their own on the in-process grid: who they are, what they agree on, what counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from fedapps.errors import RosterError
from fedapps.results.run_folder import RunFolder
from fedapps.server_apps import app as server_app
from fedapps.simulation.inprocess import InProcessGrid, set_server_identity

from ..simulation import runs

pytestmark = pytest.mark.usefixtures("own_module")

CONVEX: dict[str, Any] = {
    "task": "libsvm", "partition": "local", "local-steps": 1, "weighting": "examples", "client-test-fraction": 0.0,
    "client-validation-fraction": 0.0, "client-evaluation": "none", "num-server-rounds": 3, "node-wait": 1.0,
}  # fmt: skip
ROWS = (30, 50, 20)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.strategies.roster.NODE_POLL", 0.01)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files of 30, 50 and 20 rows; the last feature occurs in the first one only, as in sparse data it may."""
    random = np.random.default_rng(0)
    paths = []
    for place, n in enumerate(ROWS):
        lines = []
        for _ in range(n):
            x = random.normal(size=3 if place == 0 else 2).round(4)
            pairs = " ".join(f"{j + 1}:{v}" for j, v in enumerate(x))
            lines.append(f"{random.choice([-1, 1]):+d} {pairs}\n")
        paths.append(tmp_path / f"site-{place}.svm")
        paths[-1].write_text("".join(lines))
    return paths


def own_run(
    folder: Path, config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], there: Sequence[str] = ()
) -> runs.Left:
    """Run on nodes that have a configuration each and no partitions.

    `there` says the names, of a letter each, of the nodes that are online at the start and at each round; then all are.
    """
    settings = {**config, "run-dir": str(folder)}
    grid = InProcessGrid(len(nodes), settings)
    for context, node in zip(list(grid._contexts.values())[::-1], nodes, strict=True):
        context.node_config = {"trust-server": True, **node}
    looks = iter(there)

    def online() -> list[NodeInfo]:
        names = next(looks, "")
        contexts = grid._contexts.values()
        return [NodeInfo(node_id=c.node_id) for c in contexts if not names or c.node_config["name"] in names]

    grid.get_nodes = online  # type: ignore[method-assign]
    set_server_identity(grid.run.run_id)
    server_app(grid, Context(grid.run.run_id, 1, {}, RecordDict(), settings))
    return runs.Left(RunFolder.open(folder))


def own_file(path: Path, name: str) -> dict[str, Any]:
    return {"name": name, "task-options": f'file = "{path}"'}


@pytest.mark.parametrize("method", ["fedpm", "fedclup", "scaffold", "fednl"])
def test_local_files_give_the_bits_of_the_same_data_as_partitions(
    tmp_path: Path, files: list[Path], method: str
) -> None:
    """The split by column of one table with the three files' rows, whose columns the task's class adds."""
    config = {**CONVEX, "method": method, "lr": 0.5, "batch-size": 0}
    nodes = [own_file(path, f"site-{place}") for place, path in enumerate(files)]
    local = own_run(tmp_path / "local", {**config, "min-available-nodes": 3}, nodes[::-1])
    cut = {**config, "task": "fedapps_testing:SvmSites", "partition": "column", "partition-column": "site"}
    folder = ",".join(map(str, files))
    whole = runs.short_run(tmp_path / "cut", {**cut, "task-options": f'files = "{folder}"'}, 3)
    runs.assert_same_model(local.model, whole.model)
    told = [(row["node"], row["partition"], row["num-examples"]) for row in local.folder.read_nodes()]
    assert told == [("site-0", 0, 30), ("site-1", 1, 50), ("site-2", 2, 20)]


def test_the_first_model_has_the_shape_that_the_nodes_agree_on(tmp_path: Path, files: list[Path]) -> None:
    """The server has no file; the widest one has three features, the two others two."""
    nodes = [own_file(path, f"site-{place}") for place, path in enumerate(files)]
    run = own_run(tmp_path / "run", {**CONVEX, "method": "fedpm", "min-available-nodes": 3}, nodes)
    assert run.model["weights"].shape == (3,)
    assert {tuple(row["features"]) for row in run.folder.read_nodes()} == {(3,), (2,)}
    assert run.folder.load_checkpoint().roster["agreed"] == {"features": [3]}


def test_a_node_with_an_empty_file_is_refused_by_name_and_the_others_go_on(
    tmp_path: Path, files: list[Path], log: Any
) -> None:
    empty = tmp_path / "empty.svm"
    empty.write_text("\n")
    nodes = [own_file(files[0], "a"), own_file(empty, "b"), own_file(files[1], "c")]
    run = own_run(tmp_path / "run", {**CONVEX, "method": "fedavg", "lr": 0.1}, nodes)
    assert [row["node"] for row in run.folder.read_nodes()] == ["a", "c"]
    assert "refused" in log.text
    with pytest.raises(RosterError, match=r"empty\.svm"):
        own_run(tmp_path / "again", {**CONVEX, "method": "fedavg", "lr": 0.1, "min-available-nodes": 3}, nodes)


def test_nodes_come_and_go_and_a_resume_knows_them(tmp_path: Path, files: list[Path]) -> None:
    """Node b leaves before round 2 and returns for round 4, c comes in round 3; their personal models are found again."""
    nodes = [own_file(path, name) for path, name in zip(files, "abc", strict=True)]
    config = {**CONVEX, "method": "ditto", "lr": 0.1, "num-server-rounds": 6}
    there = ["ab"] * 3 + ["a", "ac", "abc"]
    first = own_run(tmp_path / "run", {**config, "num-server-rounds": 4}, nodes, there)
    for key in ("sampled", "folded"):
        assert [row[key] for row in first.rows("train")] == [[0, 1], [0], [0, 2], [0, 1, 2]]
    resumed = own_run(tmp_path / "run", {**config, "resume": True}, nodes[::-1], ["cb", "cb", "cb", "abc"])
    assert [row["folded"] for row in resumed.rows("train")][4:] == [[1, 2], [0, 1, 2]]
    checkpoint = resumed.folder.load_checkpoint()
    assert checkpoint.roster["names"] == ["a", "b", "c"]
    assert checkpoint.last_folded == {0: 6, 1: 6, 2: 6}
    assert [(row["node"], row["partition"]) for row in resumed.folder.read_nodes()] == [
        ("a", 0), ("b", 1), ("c", 2), ("b", 1), ("c", 2), ("a", 0),
    ]  # fmt: skip
    assert not any("lost" in note for row in resumed.rows("train") for note in row.get("notes", []))


@pytest.mark.parametrize("method", ["fednl", "scaffold", "fedclup"])
def test_a_method_that_sums_over_all_clients_takes_no_newcomer(tmp_path: Path, files: list[Path], method: str) -> None:
    nodes = [own_file(path, name) for path, name in zip(files, "abc", strict=True)]
    run = own_run(tmp_path / "run", {**CONVEX, "method": method, "lr": 0.1}, nodes, ["ab", "ab", "ab", "abc"])
    assert [row["folded"] for row in run.rows("train")] == [[0, 1]] * 3


def test_best_is_chosen_by_the_clients_where_the_server_has_no_data(tmp_path: Path, files: list[Path]) -> None:
    config = {
        **CONVEX, "method": "fedavg", "lr": 1.0, "client-validation-fraction": 0.3, "client-test-fraction": 0.2,
        "client-evaluation": "every", "num-server-rounds": 4,
    }  # fmt: skip
    run = own_run(tmp_path / "run", config, [own_file(path, name) for path, name in zip(files[:2], "ab", strict=True)])
    rows = [row for row in run.folder.read_metrics() if row["phase"] == "client-evaluate"]
    assert [row["clients-reported"] for row in rows] == [2] * 4
    values = [row["client-validation-accuracy-weighted"] for row in rows]
    best = rows[int(np.argmax(values))]["round"]
    assert run.folder.read_summary()["best"]["round"] == best  # type: ignore[index]
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert not [row for row in run.folder.read_metrics() if row["phase"] == "evaluate"]
