"""The tasks on a table of one's own: features, labels, and that nodes with a part each learn from the same numbers."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from fedapps.errors import TaskError
from fedapps.methods import resolve_settings
from fedapps.tasks import PartitionConfig, PartitionKind, Task, TaskConfig, task_class
from fedapps.tasks.convex_task import ConvexTask

PATIENTS = """\
id,age,sex,ward,outcome,hospital
p1,30,f,A,no,10
p2,50,m,B,yes,9
p3,40,f,B,no,9
p4,80,m,C,yes,10
"""
OPTIONS = {"file": "patients.csv", "label": "outcome", "ignore": "id, hospital", "categories": "sex = m | f, ward"}
LOCAL = PartitionConfig(PartitionKind.LOCAL)


def task_of(
    folder: Path, text: str = PATIENTS, name: str = "table", config: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A task on a file with this text; options that are None are left out."""
    folder.mkdir(exist_ok=True)
    (folder / "patients.csv").write_text(text)
    given = {key.replace("_", "-"): value for key, value in {**OPTIONS, **options}.items() if value is not None}
    return task_class(name)(TaskConfig(data_dir=folder, options=given, **(config or {})), name)


def test_features_and_labels(tmp_path: Path) -> None:
    """Ages 30, 50, 40, 80: mean 50, variance (400 + 0 + 100 + 900) / 4 = 350."""
    task = task_of(tmp_path)
    train, test = task.load()
    assert task.feature_names == ["age", "sex = m", "sex = f", "ward = A", "ward = B", "ward = C", "intercept"]
    age = (np.array([30, 50, 40, 80]) - 50) / np.sqrt(350)
    others = [[0, 1, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1], [1, 0, 0, 0, 1, 1]]
    assert train.inputs.dtype == train.targets.dtype == np.float64
    assert train.inputs == pytest.approx(np.column_stack([age, others]), rel=1e-15)
    assert train.targets.tolist() == [-1, 1, -1, 1]
    assert (len(test), test.inputs.shape) == (0, (0, 7))
    assert task.initial_arrays(0)["weights"].tolist() == [0] * 7
    task.check_targets(train, "targets")


def test_the_positive_class_is_the_second(tmp_path: Path) -> None:
    assert task_of(tmp_path, classes="yes | no").load()[0].targets.tolist() == [1, -1, 1, -1]
    numbers = PATIENTS.replace(",no,", ",10,").replace(",yes,", ",9,")
    assert task_of(tmp_path, numbers).load()[0].targets.tolist() == [1, -1, 1, -1]  # 9 < 10


def test_columns_may_be_named_in_an_order(tmp_path: Path) -> None:
    task = task_of(tmp_path, features="ward, age", ignore=None)
    assert task.feature_names == ["ward = A", "ward = B", "ward = C", "age", "intercept"]


def test_without_standardisation_numbers_are_as_they_are(tmp_path: Path) -> None:
    task = task_of(tmp_path, standardise=False, features="age")
    assert task.load()[0].inputs[:, 0].tolist() == [30, 50, 40, 80]
    assert task.tell()["columns"]["age"] == {"count": 4, "sum": [], "squares": []}


HOLES = PATIENTS.replace("p3,40,f", "p3,,f").replace("m,C", ",C")


def test_missing_values_are_refused_by_line(tmp_path: Path) -> None:
    for part, options, message in [
        (HOLES, {}, "line 4, column 'age': expected a value, got none.*missing"),
        (HOLES, {"features": "sex"}, "line 5, column 'sex': expected a value"),
        (PATIENTS.replace("yes,9", "NA,9"), {"missing": "mean"}, "line 3, column 'outcome': expected a value"),
    ]:
        for call in ("tell", "load"):
            with pytest.raises(TaskError, match=rf"patients\.csv, {message}"):
                getattr(task_of(tmp_path, part, **options), call)()


def test_a_missing_value_of_a_test_file_is_refused_by_line_or_the_training_rows_mean(tmp_path: Path) -> None:
    """In the training file nothing is missing, so no indicator is agreed on."""
    tmp_path.joinpath("test.csv").write_text("outcome,age\nyes,50\nno,\n")
    options = {"features": "age", "test-file": "test.csv"}
    with pytest.raises(TaskError, match=r"test\.csv, line 3, column 'age': expected a value, got none"):
        task_of(tmp_path, **options).load()
    _, test = task_of(tmp_path, missing="indicator", **options).load()
    assert test.inputs.tolist() == [[0, 1], [0, 1]]


def test_a_missing_number_is_the_mean_and_a_missing_category_none(tmp_path: Path) -> None:
    """Ages 30, 50, 80: mean 160/3."""
    task = task_of(tmp_path, HOLES, missing="mean", features="age, sex")
    inputs = task.load()[0].inputs
    assert task.feature_names == ["age", "sex = m", "sex = f", "intercept"]
    assert inputs[2, 0] == 0
    assert inputs[:, 0] == pytest.approx((np.array([30, 50, 160 / 3, 80]) - 160 / 3) / np.std([30, 50, 80]), rel=1e-14)
    assert inputs[3, 1:3].tolist() == [0, 0]
    plain = task_of(tmp_path, HOLES, missing="mean", features="age", standardise=False).load()[0].inputs
    assert plain[2, 0] == 160 / 3


def test_an_indicator_says_what_is_missing(tmp_path: Path) -> None:
    task = task_of(tmp_path, HOLES, missing="indicator", features="age, sex, ward")
    assert task.feature_names == [
        "age", "age is missing", "sex = m", "sex = f", "sex is missing", "ward = A", "ward = B", "ward = C", "intercept",
    ]  # fmt: skip
    assert task.load()[0].inputs[:, [1, 4]].tolist() == [[0, 0], [0, 0], [1, 0], [0, 1]]


def test_a_test_file_is_seen_with_the_training_file_s_eyes(tmp_path: Path) -> None:
    tmp_path.joinpath("test.csv").write_text("outcome,ward,age,sex\nyes,D,50,f\nno,A,400,m\n")
    task = task_of(tmp_path, **{"test-file": "test.csv"})
    train, test = task.load()
    assert task.feature_names[3:7] == ["ward = A", "ward = B", "ward = C", "ward = D"]
    assert test.inputs[:, 0] == pytest.approx([0, 350 / np.sqrt(350)], rel=1e-15)
    assert test.inputs[:, 1:].tolist() == [[0, 1, 0, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0, 1]]
    assert (test.targets.tolist(), len(train)) == ([1, -1], 4)
    assert task.tell()["columns"]["age"]["count"] == 4
    assert list(task.checksums()) == [f"{tmp_path.name}/patients.csv", f"{tmp_path.name}/test.csv"]


def test_clients_are_the_values_of_a_column(tmp_path: Path) -> None:
    config = {"partition": PartitionConfig(PartitionKind.COLUMN, column="hospital")}
    task = task_of(tmp_path, config=config, ignore="id")
    assert "hospital" not in task.feature_names
    assert [task.client_data(i, 2).train.targets.tolist() for i in range(2)] == [[1, -1], [-1, 1]]  # 9 is before 10
    as_feature = task_of(tmp_path, config=config, features="age, hospital")
    assert as_feature.feature_names == ["age", "hospital", "intercept"]
    with pytest.raises(TaskError, match=r"line 3, column 'hospital': expected a value, got none"):
        task_of(tmp_path, PATIENTS.replace("yes,9", "yes,"), config=config).load()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        pytest.param(PATIENTS, {"file": None}, "option 'file': .*a CSV or Parquet file, got nothing", id="no-file"),
        pytest.param(PATIENTS, {"label": None}, "option 'label': expected the column to predict", id="no-label"),
        pytest.param(PATIENTS, {"label": "outcom"}, "a column 'outcom', .*did you mean 'outcome'", id="other-label"),
        pytest.param(PATIENTS, {"ignore": "ID"}, "expected a column 'ID'", id="other-ignored"),
        pytest.param(PATIENTS, {"categories": "sexe"}, "expected a column 'sexe', .*did you mean 'sex'", id="other-category"),
        pytest.param(PATIENTS, {"features": "age, age"}, "option 'features': .*got 'age'", id="twice"),
        pytest.param(PATIENTS, {"features": "age, outcome"}, "option 'features': .*got 'outcome'", id="label-as-feature"),
        pytest.param("outcome\nyes\n", {"ignore": None, "categories": None}, "a column to learn from, got none", id="none"),
        pytest.param(PATIENTS, {"delimiter": ";"}, "a column 'outcome', got 1 columns.*delimiter", id="delimiter"),
        pytest.param(PATIENTS, {"categories": None}, "line 2, column 'sex': expected a number.*categories", id="undeclared"),
        pytest.param(PATIENTS, {"categories": "sex = m, ward"}, r"line 2, column 'sex': .*one of the values .* m", id="beyond"),
        pytest.param(PATIENTS, {"classes": "no | maybe"}, r"line 3, column 'outcome': .*no \| maybe", id="other-class"),
        pytest.param(PATIENTS.replace("yes", "no"), {}, "expected at least two classes, got no", id="one-class"),
        pytest.param(PATIENTS, {"label": "ward", "categories": "sex, outcome"}, r"got A \| B \| C; .*table-net", id="three"),
        pytest.param("\n".join(PATIENTS.splitlines()[:1]), {}, "expected at least one row, got none", id="only-a-header"),
        pytest.param(PATIENTS, {"delimiter": "::"}, "option 'delimiter': expected one ASCII character", id="long-delimiter"),
        pytest.param(PATIENTS, {"delimiter": '"'}, "option 'delimiter': expected one ASCII", id="quote-as-delimiter"),
        pytest.param(PATIENTS, {"encoding": "rot13"}, "option 'encoding': expected an encoding of text", id="no-encoding"),
        pytest.param(PATIENTS, {"encoding": "utf-17"}, "option 'encoding'", id="unknown-encoding"),
        pytest.param(PATIENTS, {"decimal": "·"}, "option 'decimal': expected one of ., ,", id="decimal"),
        pytest.param(PATIENTS, {"categories": "sex = m | m"}, "option 'categories': expected columns", id="value-twice"),
        pytest.param(PATIENTS, {"categories": "sex = m || f"}, "option 'categories'", id="empty-value"),
        pytest.param(PATIENTS, {"categories": "= m"}, "option 'categories'", id="no-column"),
        pytest.param(PATIENTS, {"classes": "yes | yes"}, "option 'classes': expected different values", id="class-twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        task_of(tmp_path, text, **options).load()


def test_a_missing_file_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"expected a file of that name.*tables/absent\.csv; put it there and set --data-dir"
    ):
        task_of(tmp_path, file="absent.csv").load()


def test_an_identifier_is_no_category(tmp_path: Path) -> None:
    many = "id,x,y\n" + "".join(f"p{i},1,{'ab'[i % 2]}\n" for i in range(1001))
    long = f"id,x,y\n{'x' * 101},1,a\nz,2,b\n"
    for text, got in [(many, "1001, the longest of 5"), (long, "2, the longest of 101")]:
        task = task_of(tmp_path, text, label="y", ignore=None, categories="id")
        with pytest.raises(TaskError, match=f"column 'id': expected at most 1000 different values .*, got {got}"):
            task.tell()


def write_tumours(folder: Path) -> Path:
    """569 tumours, 30 numbers each (scikit-learn's copy of UCI Breast Cancer Wisconsin Diagnostic, CC BY 4.0)."""
    data = load_breast_cancer()
    with (folder / "tumours.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(str(name) for name in data.feature_names), "diagnosis"])
        for row, target in zip(data.data.tolist(), data.target, strict=True):
            writer.writerow([*row, data.target_names[target]])
    return folder / "tumours.csv"


@pytest.fixture(scope="module")
def tumours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tumours(tmp_path_factory.mktemp("tumours"))


def split_file(file: Path, sizes: list[int]) -> list[Path]:
    """Write the file's rows into files of so many rows each, in folders of their own."""
    header, *rows = file.read_text().splitlines(keepends=True)
    files = []
    for number, (start, stop) in enumerate(zip(np.cumsum([0, *sizes]), np.cumsum(sizes), strict=False)):
        folder = file.parent / f"node-{len(sizes)}-{number}"
        folder.mkdir(exist_ok=True)
        (folder / file.name).write_text(header + "".join(rows[start:stop]))
        files.append(folder / file.name)
    return files


def of_file(file: Path, name: str = "table", agreed: Mapping[str, Any] | None = None, **options: Any) -> Any:
    config = TaskConfig(
        data_dir=file.parent, partition=LOCAL, agreed=agreed or {},
        options={"file": file.name, "label": "diagnosis", **{key.replace("_", "-"): v for key, v in options.items()}},
    )  # fmt: skip
    return task_class(name)(config, name)


def over_the_wire(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("name", ["table", "table-net"])
def test_nodes_with_a_part_each_see_the_numbers_of_the_whole_bit_by_bit(tumours: Path, name: str) -> None:
    """Parts of unequal sizes, one of which has one class only; the server needs no file."""
    whole = of_file(tumours, name)
    alone = whole.load()[0]
    files = split_file(tumours, [3, 66, 500])
    told = {f"node {i}": over_the_wire(of_file(file, name).tell()) for i, file in enumerate(files)}
    assert [one["examples"] for one in told.values()] == [3, 66, 500]
    assert told["node 0"]["classes"] == ["malignant"]
    assert len(of_file(files[0], name).client_data(-1, 0).train) == 3, "one class is no reason to refuse a node"
    server = of_file(Path("/absent/tumours.csv"), name)
    agreed = over_the_wire(server.agree(told))
    assert [server.misfit(one, agreed) for one in told.values()] == ["", "", ""]
    parts = [of_file(file, name, agreed).load()[0] for file in files]
    assert np.concatenate([part.inputs for part in parts]).tobytes() == alone.inputs.tobytes()
    assert np.concatenate([part.targets for part in parts]).tobytes() == alone.targets.tobytes()
    on_server = of_file(Path("/absent/tumours.csv"), name, agreed)
    for key, array in on_server.initial_arrays(0).items():
        assert array.tobytes() == whole.initial_arrays(0)[key].tobytes()
    on_server.check_sampling()
    on_server.check_square_root()


def test_standardised_means_are_0_and_variances_1(tumours: Path) -> None:
    inputs = of_file(tumours).load()[0].inputs
    assert inputs.shape == (569, 31)
    assert inputs[:, :-1].mean(axis=0) == pytest.approx(np.zeros(30), abs=1e-12)
    assert inputs[:, :-1].var(axis=0) == pytest.approx(np.ones(30), rel=1e-12)
    raw = load_breast_cancer().data
    assert inputs[:, :-1] == pytest.approx((raw - raw.mean(axis=0)) / raw.std(axis=0), rel=1e-9, abs=1e-9)


def test_what_is_told_is_small_and_holds_no_row(tumours: Path) -> None:
    told = of_file(tumours).tell()
    assert set(told) == {"features", "dtype", "classes", "examples", "columns", "label", "missing", "standardise"}
    assert (told["features"], told["classes"], told["dtype"]) == ([30], ["benign", "malignant"], "float64")
    assert len(json.dumps(told)) < 10_000  # the file has 120 kB
    assert all(len(column["sum"]) + len(column["squares"]) < 12 for column in told["columns"].values())


def test_stated_values_are_all_that_is_told_of_them(tmp_path: Path) -> None:
    task = task_of(tmp_path, categories="sex = m | f, ward = A | B | C | D", classes="no | yes")
    told = task.tell()
    assert told["columns"]["ward"] == {"count": 4, "values": ["A", "B", "C", "D"], "stated": True}
    assert told["label"] == {"count": 4, "values": ["no", "yes"], "stated": True}
    assert task.feature_names[3:7] == ["ward = A", "ward = B", "ward = C", "ward = D"]


def test_a_node_whose_file_has_changed_since_is_told_the_line(tmp_path: Path) -> None:
    agreed = task_of(tmp_path).agree({"": task_of(tmp_path).tell()})
    changed = task_of(tmp_path, PATIENTS.replace("m,C", "m,Z"), config={"agreed": agreed, "partition": LOCAL})
    with pytest.raises(TaskError, match=r"line 5, column 'ward': .*agreed on, A \| B \| C, got 'Z'"):
        changed.load()


def test_nothing_to_learn_is_found_when_all_have_told(tmp_path: Path) -> None:
    """A node alone may lack a class or every value of a column; all together may not."""
    for text, options, message in [
        (PATIENTS.replace("yes", "no"), {}, "expected at least two classes, got no"),
        (
            re.sub(r",\d\d,", ",,", PATIENTS),
            {"missing": "mean"},
            "column 'age': expected a value on some node, got none",
        ),
    ]:
        node = task_of(tmp_path, text, config={"partition": LOCAL}, **options)
        assert len(node.client_data(-1, 0).train) == 4
        server = task_of(tmp_path, config={"partition": LOCAL, "agreed": node.agree({"a": node.tell()})}, **options)
        with pytest.raises(TaskError, match=message):
            server.initial_arrays(0)


@pytest.mark.parametrize("agreed", [{"examples": 1}, {"columns": 3}, {"examples": 4, "columns": [{}], "label": {}}])
def test_an_agreement_of_another_task_is_refused(tmp_path: Path, agreed: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="expected what the nodes have agreed on"):
        task_of(tmp_path, config={"agreed": agreed}).load()


def test_nodes_write_their_files_as_they_like(tmp_path: Path) -> None:
    """One with semicolons, decimal commas, another encoding and another order of columns; what is learned is the same."""
    task = task_of(tmp_path)
    mine = 'WARD_;"Alter";outcome;sex\n'.replace("WARD_", "ward").replace("Alter", "age")
    text = mine + "".join(f"{w};{a},0;{o};{s}\n" for w, a, o, s in [("A", 30, "no", "f"), ("B", 50, "yes", "m")])
    other = task_of(tmp_path / "other", text, delimiter=";", decimal=",", encoding="cp1252", ignore=None)
    agreed = task.agree({"a": task.tell(), "b": other.tell()})
    config = dataclasses.replace(other.config, agreed=agreed)
    there = type(other)(config, "table").load()[0]
    here = type(task)(dataclasses.replace(task.config, agreed=agreed), "table").load()[0]
    assert there.inputs.tobytes() == here.inputs[:2].tobytes()


def test_a_table_learns_what_it_holds(tumours: Path) -> None:
    """Newton's method on all rows: 98 % of the training rows are right, as is known of this data."""
    task = of_file(tumours)
    assert isinstance(task, ConvexTask)
    data = task.load()[0]
    objective, theta = task.objective(data), np.zeros(31)
    for _ in range(12):
        theta -= np.linalg.solve(objective.hessian(theta), objective.gradient(theta))
    assert np.abs(objective.gradient(theta)).max() < 1e-9
    assert task.evaluate({"weights": theta}, data)["accuracy"] > 0.98


@pytest.mark.parametrize("name", ["table", "table-net", "table-regression"])
def test_a_run_on_one_file_measures_something(name: str) -> None:
    """A fifth is held out on the server, unless nodes have data of their own; a number has no classes to split by."""
    settings = resolve_settings({"task": name, "method": "fedavg"})
    assert settings.validation_fraction == 0.2
    assert settings.partition == ("iid" if name == "table-regression" else "dirichlet")
    local = resolve_settings({"task": name, "method": "fedavg", "partition": "local"})
    assert (local.validation_fraction, local.client_evaluation) == (0, "last")


def test_every_table_task_is_one(tmp_path: Path) -> None:
    for name in ("table", "table-net", "table-regression"):
        assert isinstance(task_of(tmp_path, name=name), Task)
