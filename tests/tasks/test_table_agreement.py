"""What nodes with a table agree on: closed forms, equal bits however rows are spread, and told nonsense."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.tasks.table_agreement import (
    MAX_VALUES,
    Agreement,
    Numbers,
    agree,
    ascending,
    exact_sum,
    exact_sum_of_squares,
    pooled,
)

RANDOM = np.random.default_rng(0)
COLUMNS = {
    "normal": RANDOM.normal(size=500),
    "far from zero": 1e9 + RANDOM.normal(size=500),  # sums of squares in float64 lose all of this variance
    "of many magnitudes": RANDOM.normal(size=500) * 10.0 ** RANDOM.uniform(-60, 60, 500),
    "cancelling": np.concatenate([[1e90, -1e90, 1e-60], RANDOM.normal(size=497)]),
    "decimals": np.round(RANDOM.normal(size=500), 2),
}
columns = pytest.mark.parametrize("values", COLUMNS.values(), ids=COLUMNS)


def fractions(values: Any) -> list[Fraction]:
    return [Fraction(float(value)) for value in values]


@columns
def test_sums_are_exact_and_short(values: np.ndarray) -> None:
    parts, squares = exact_sum(values), exact_sum_of_squares(values)
    assert sum(fractions(parts)) == sum(fractions(values))
    assert sum(fractions(squares)) == sum(value**2 for value in fractions(values))
    assert len(parts) + len(squares) <= 40


@pytest.mark.parametrize(
    ("values", "total"), [([], []), ([0.0, -0.0], []), ([1.0, -1.0], []), ([1e100], [1e100]), ([5e-324], [5e-324])]
)
def test_sums_of_little(values: list[float], total: list[float]) -> None:
    assert exact_sum(np.array(values)) == total


@columns
def test_mean_and_deviation_are_those_of_all_rows_together(values: np.ndarray) -> None:
    """The oracle: fractions over all rows, rounded once. Parts of all sizes, the empty one included, give the same bits."""
    exact = fractions(values)
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    for cuts in ([], [1], [0, 250], [7, 7, 499]):
        parts = [Numbers.of(part, mean=True, variance=True) for part in np.split(values, cuts)]
        assert pooled(parts) == (float(mean), math.sqrt(float(variance)))


def test_float64_gives_the_same_where_it_can() -> None:
    values = COLUMNS["normal"]
    mean, deviation = pooled([Numbers.of(part, mean=True, variance=True) for part in np.split(values, 5)])
    assert mean == pytest.approx(np.mean(values), rel=1e-12)
    assert deviation == pytest.approx(np.std(values), rel=1e-12)


def test_a_constant_has_no_deviation_at_all() -> None:
    assert pooled([Numbers.of(np.full(n, 0.1), mean=True, variance=True) for n in (3, 7)]) == (0.1, 0.0)


def test_missing_values_are_in_no_sum() -> None:
    numbers = Numbers.of(np.array([1.0, math.nan, 3.0]), mean=True, variance=True)
    assert numbers == Numbers(count=2, sum=[4.0], squares=[10.0])
    assert Numbers.of(np.array([1.0, math.nan]), mean=False, variance=False) == Numbers(count=1)


def told(examples: int = 4, **changes: Any) -> dict[str, Any]:
    """What a node with ages 1, 2, 3 and one missing, two wards and labels no and yes tells."""
    return {
        "examples": examples,
        "columns": {
            "age": {"count": 3, "sum": [6.0], "squares": [14.0]},
            "ward": {"count": 4, "values": ["B", "A"], "stated": False},
        },
        "label": {"count": 4, "values": ["no", "yes"], "stated": False},
        "missing": "indicator",
        "standardise": True,
        "features": [2],
    } | changes  # fmt: skip


SUMS = {"count": 4, "sum": [1.0], "squares": [1.0]}


def with_column(name: str, **column: Any) -> dict[str, Any]:
    return told(columns=told()["columns"] | {name: column})


def test_what_is_agreed() -> None:
    """Ages 1, 2, 3 and 5: mean 11/4, variance 39/4 - 121/16 = 35/16."""
    other = with_column("age", count=1, sum=[5.0], squares=[25.0])
    other["columns"]["ward"] = {"count": 2, "values": ["10", "9", "C"], "stated": False}
    agreement = agree({"b": told(), "a": other})
    assert agreement.examples == 8
    age, ward = agreement.columns
    assert (age.mean, age.scale) == (2.75, math.sqrt(35 / 16))
    assert age.features == ["age", "age is missing"]
    assert ward.values == ["9", "10", "A", "B", "C"]
    assert ward.features == ["ward = 9", "ward = 10", "ward = A", "ward = B", "ward = C", "ward is missing"]
    assert agreement.label.values == ["no", "yes"]
    assert Agreement.model_validate(json.loads(json.dumps(agreement.model_dump()))) == agreement


def test_order_and_names_of_the_nodes_change_nothing() -> None:
    parts = [told(), with_column("age", count=3, sum=[0.3, 1e-17], squares=[1.0])]
    one, two = agree({"a": parts[0], "b": parts[1]}), agree({"y": parts[1], "x": parts[0]})
    assert one == two


def test_an_indicator_is_for_columns_that_lack_values_somewhere() -> None:
    whole = with_column("age", count=4, sum=[6.0], squares=[14.0])
    assert not agree({"a": whole, "b": whole}).columns[0].indicator
    assert agree({"a": whole, "b": told()}).columns[0].indicator
    assert not agree({"a": told(missing="mean")}).columns[0].indicator


def test_without_sums_nothing_is_scaled() -> None:
    plain = told(standardise=False, missing="refuse", columns={"age": {"count": 4}})
    assert agree({"": plain}).columns[0].model_dump() == {
        "name": "age", "count": 4, "mean": 0.0, "scale": 1.0, "values": None, "indicator": False,
    }  # fmt: skip


def test_stated_values_keep_their_order_and_bind_all_nodes() -> None:
    stated, turned = (with_column("ward", count=4, values=list(v), stated=True) for v in ("BAZ", "ABZ"))
    agreement = agree({"a": turned, "b": stated, "c": told(), "d": stated})
    assert agreement.columns[1].values == ["B", "A", "Z"]
    for node in (stated, turned, told()):
        assert agreement.misfit(node) == ""
    more = with_column("ward", count=4, values=["A", "Q"], stated=False)
    assert "column 'ward': expected values among B | A | Z, got Q" in agreement.misfit(more)
    assert "got Q" in agree({"a": stated, "b": more}).misfit(more)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        pytest.param(told(columns={"age": told()["columns"]["age"]}), "column 'ward': .*categories.*, got absent", id="lacks"),
        pytest.param(with_column("bmi", **SUMS), "column 'bmi': .* absent.*, got numbers", id="more"),
        pytest.param(with_column("ward", **SUMS), "column 'ward': .*got numbers", id="other-kind"),
        pytest.param(told(label=SUMS), "column '.label.': .* categories, .*, got numbers", id="label"),
        pytest.param(told(missing="mean"), "missing: expected indicator, as on the other nodes, got mean", id="missing"),
        pytest.param(told(standardise=False), "standardise: expected true, .*, got false", id="standardise"),
    ],
)  # fmt: skip
def test_a_node_that_differs_from_most_does_not_fit_and_does_not_count(odd: dict[str, Any], message: str) -> None:
    for name in "abc":
        agreement = agree({node: odd if node == name else told() for node in "abc"})
        assert agreement == agree({"a": told(), "b": told()})
        assert re.match(message, agreement.misfit(odd))
        assert agreement.misfit(told()) == ""


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        pytest.param({}, "got Field required, at 'examples'", id="nothing"),
        pytest.param(told(examples=0), "at 'examples'", id="no-rows"),
        pytest.param(told(examples="4"), "at 'examples'", id="text"),
        pytest.param(told(examples=2), "column 'age'.*expected sums that numbers can have", id="more-values-than-rows"),
        pytest.param(told(columns={"age": 3}), "at 'columns.age", id="no-column"),
        pytest.param(with_column("age", count=3, sum=[True], squares=[14.0]), "at 'columns.age", id="bool"),
        pytest.param(with_column("age", count=3, sum=[math.nan], squares=[14.0]), "at 'columns.age", id="nan"),
        pytest.param(with_column("age", count=3, sum=[math.inf], squares=[14.0]), "at 'columns.age", id="infinite"),
        pytest.param(with_column("age", count=3, sum=[1e307], squares=[1e308]), "at 'columns.age", id="huge"),
        pytest.param(with_column("age", count=3, sum=[0.0] * 101, squares=[1.0]), "at 'columns.age", id="long"),
        pytest.param(with_column("age", count=3, sum=[6.0], squares=[11.9]), "sums that numbers can", id="impossible"),
        pytest.param(with_column("age", count=3, sum=[6.0], squares=[]), "sums that numbers can", id="no-squares"),
        pytest.param(with_column("age", count=0, sum=[6.0], squares=[1.0]), "sums that numbers can", id="of-no-values"),
        pytest.param(with_column("age", count=-1), "at 'columns.age", id="negative"),
        pytest.param(with_column("ward", count=4, values=["x" * 101], stated=False), "at 'columns.ward", id="long-value"),
        pytest.param(with_column("ward", count=4, values=list(map(str, range(1001))), stated=False), "at 'columns.ward",
                     id="many-values"),
        pytest.param(with_column("ward", count=4, values=[1], stated=False), "at 'columns.ward", id="number-as-value"),
    ],
)  # fmt: skip
def test_what_no_honest_node_tells_is_refused_with_its_name(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"node 'b'.*{message}"):
        agree({"a": told(), "b": odd})
    with pytest.raises(TaskError):
        agree({"a": told()}).misfit(odd)


def test_all_nodes_together_may_have_too_many_values() -> None:
    names = [f"{i:04}" for i in range(MAX_VALUES + 2)]
    halves = [with_column("ward", count=4, values=part, stated=False) for part in (names[:600], names[600:])]
    with pytest.raises(TaskError, match=f"column 'ward': expected at most {MAX_VALUES} different values on all nodes"):
        agree({"a": halves[0], "b": halves[1]})


def test_a_node_without_a_value_agrees_with_itself_for_the_time_being() -> None:
    empty = with_column("age", count=0, sum=[], squares=[])
    assert agree({"a": empty}).columns[0].count == 0
    assert agree({"a": empty, "b": told()}).columns[0].model_dump() == agree({"b": told()}).columns[0].model_dump()


def test_ascending() -> None:
    assert ascending(["b", "10", "9", "nan", "a", "-1.5", "9"]) == ["-1.5", "9", "10", "a", "b", "nan"]
