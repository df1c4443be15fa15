"""Nodes with a table each, on the in-process grid: what they agree on, and the bits of one table with all rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fedapps.errors import RosterError

from ..simulation import runs
from .test_own_data import _no_waiting, own_run  # noqa: F401 - the fixture is for every test here

COMMON = 'label = "ill"\ncategories = "ward, ill"\nmissing = "indicator"\nregularisation = 0.1'
TABLE: dict[str, Any] = {
    "task": "table", "partition": "local", "client-test-fraction": 0.0, "client-validation-fraction": 0.0,
    "client-evaluation": "none", "num-server-rounds": 2, "node-wait": 1.0, "min-available-nodes": 3,
    "task-options": COMMON, "evaluate-every": 0,
}  # fmt: skip
WARDS = (("A",), ("A", "C"), ("B", "C"))  # no node has all
NAMES = ("age", "dose", "ward", "ill", "site")


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """Tables of 30, 50 and 20 rows, one of them without anybody ill: a CSV, a German one, and Parquet.

    ``whole.csv`` has all rows, with a column ``site``.
    """
    random = np.random.default_rng(0)
    whole, configs = [], []
    for site, n in enumerate((30, 50, 20)):
        rows = []
        for _ in range(n):
            age = "" if site == 1 and random.random() < 0.2 else str(random.integers(20, 90))
            ill = "no" if site == 0 else str(random.choice(["no", "yes"]))
            rows.append([age, f"{random.normal(1e3 * site, 5):.3f}", str(random.choice(WARDS[site])), ill])
        whole += [[*row, str(site)] for row in rows]
        folder = tmp_path / f"site-{site}"
        folder.mkdir()
        options = f'file = "{folder}/own.csv"'
        if site == 0:
            (folder / "own.csv").write_text("".join(",".join(row) + "\n" for row in [NAMES[:4], *rows]))
        elif site == 1:
            text = "".join(";".join(row).replace(".", ",") + "\r\n" for row in [NAMES[:4], *rows])
            (folder / "own.csv.gz").write_bytes(gzip.compress(text.encode("cp1252")))
            options += '\ndelimiter = ";"\ndecimal = ","\nencoding = "cp1252"'
        else:
            columns = dict(zip(NAMES[:4], zip(*rows, strict=True), strict=True))
            numbers = {"age": list(map(int, columns["age"])), "dose": list(map(float, columns["dose"]))}
            parquet.write_table(pyarrow.table({**columns, **numbers}), folder / "own.csv")
        configs.append({"name": f"site-{site}", "task-options": options})
    (tmp_path / "whole.csv").write_text("".join(",".join(row) + "\n" for row in [NAMES, *whole]))
    return configs


@pytest.mark.parametrize(
    ("task", "method", "more"),
    [
        ("table", "fedpm", {"weighting": "examples", "lr": 1.0, "batch-size": 0}),
        ("table", "fedclup", {}),
        ("table-net", "fedpm", {}),
        ("table-net", "fedavg", {}),
    ],
)
def test_tables_of_nodes_give_the_bits_of_one_table(
    tmp_path: Path, nodes: list[dict[str, Any]], task: str, method: str, more: dict[str, Any]
) -> None:
    options = COMMON.replace("regularisation = 0.1", 'hidden = "4"') if task == "table-net" else COMMON
    steps = {"lr": 0.1, "batch-size": 8, "local-epochs": 1}
    config = {**TABLE, "task": task, "method": method, "task-options": options, **steps, **more}
    local = own_run(tmp_path / "local", config, nodes[::-1])
    cut = {**config, "partition": "column", "partition-column": "site", "validation-fraction": 0.0}
    whole = runs.short_run(tmp_path / "cut", {**cut, "task-options": f'{options}\nfile = "{tmp_path}/whole.csv"'}, 3)
    runs.assert_same_model(local.model, whole.model)
    told = [(row["num-examples"], row["features"], row["classes"]) for row in local.folder.read_nodes()]
    assert told == [(30, [3], ["no"]), (50, [3], ["no", "yes"]), (20, [3], ["no", "yes"])]
    age, dose, ward = local.folder.load_checkpoint().roster["agreed"]["columns"]
    assert (age["indicator"], dose["count"], ward["values"]) == (True, 100, ["A", "B", "C"])


def test_one_newton_step_on_standardised_features(tmp_path: Path, nodes: list[dict[str, Any]]) -> None:
    """From zero, in float64 by NumPy alone: s (1 - s) = 1/4, and the gradient of log(1 + exp(-y x'theta)) is -y x / 2."""
    config = {**TABLE, "method": "fedpm", "weighting": "examples", "lr": 1.0, "local-steps": 1, "num-server-rounds": 1}
    found = own_run(tmp_path / "run", config, nodes).model["weights"]
    rows = [line.split(",") for line in (tmp_path / "whole.csv").read_text().splitlines()[1:]]
    age = np.array([float(row[0]) if row[0] else np.nan for row in rows])
    absent = np.isnan(age)
    age = np.where(absent, 0, (age - np.nanmean(age)) / np.nanstd(age))
    dose = np.array([float(row[1]) for row in rows])
    ward = [[row[2] == value for value in "ABC"] for row in rows]
    X = np.column_stack([age, absent, (dose - dose.mean()) / dose.std(), ward, np.ones(100)]).astype(float)
    y = np.array([1 if row[3] == "yes" else -1 for row in rows])
    step = np.linalg.solve(X.T @ X / 400 + 0.1 * np.eye(7), X.T @ y / 200)
    np.testing.assert_allclose(found, step, rtol=1e-9)


def test_a_table_with_another_column_is_refused_by_name_and_counts_nowhere(
    tmp_path: Path, nodes: list[dict[str, Any]], log: Any
) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("age,weight,ward,ill\n1e6,70,Z,yes\n")
    config = {**TABLE, "method": "fedavg", "lr": 0.1}
    mixed = [*nodes, {"name": "odd", "task-options": f'file = "{odd}"'}]
    run = own_run(tmp_path / "run", config, mixed)
    assert [row["node"] for row in run.folder.read_nodes()] == ["site-0", "site-1", "site-2"]
    assert "(odd), column 'weight': expected absent, as on the other nodes, got numbers" in log.text
    assert run.folder.load_checkpoint().roster["agreed"]["examples"] == 100
    with pytest.raises(RosterError, match=r"\(odd\), column 'weight'"):
        own_run(tmp_path / "again", {**config, "min-available-nodes": 4}, mixed)


def test_a_bad_row_is_refused_with_its_line_and_the_run_s_log_says_it(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    bad = tmp_path / "site-0" / "own.csv"
    bad.write_text(bad.read_text() + "\n1,2,A\n")
    with pytest.raises(RosterError, match=r"own\.csv, line 33: expected 4 fields"):
        own_run(tmp_path / "run", {**TABLE, "method": "fedavg", "lr": 0.1}, nodes)


def test_what_was_agreed_outlives_the_run_that_agreed(tmp_path: Path, nodes: list[dict[str, Any]]) -> None:
    """A resume, and a node that has fewer values now, keep the features; one with another ward no longer fits."""
    config = {**TABLE, "method": "fedavg", "lr": 0.1}
    straight = own_run(tmp_path / "straight", {**config, "num-server-rounds": 4}, nodes)
    own_run(tmp_path / "run", config, nodes)
    resumed = own_run(tmp_path / "run", {**config, "num-server-rounds": 4, "resume": True}, nodes[::-1])
    runs.assert_same_model(straight.model, resumed.model)
    file = tmp_path / "site-0" / "own.csv"
    text = file.read_text()
    file.write_text("".join(text.splitlines(keepends=True)[:10]))
    fewer = own_run(tmp_path / "run", {**config, "num-server-rounds": 5, "resume": True}, nodes)
    assert fewer.rows("train")[-1]["folded"] == [0, 1, 2]
    file.write_text(text + "44,1.5,Q,no\n")
    more = own_run(
        tmp_path / "run", {**config, "num-server-rounds": 6, "resume": True, "min-available-nodes": 2}, nodes
    )
    assert more.rows("train")[-1]["folded"] == [1, 2]
    assert json.dumps(more.folder.load_checkpoint().roster["agreed"]) == json.dumps(
        straight.folder.load_checkpoint().roster["agreed"]
    )
