r"""What nodes with a table each must share, and what each tells for it: counts, sums, sums of squares, values of categories.

**Mean and variance** of a column of numbers are those of all rows of all nodes, as if they lay in one file: with ``n`` values,
:math:`\mu = \frac1n \sum x` and :math:`\sigma^2 = \frac1n \sum x^2 - \mu^2` (divisor ``n``). A node tells both sums exactly,
each as a few float64 numbers that add up to it; the server computes with fractions and rounds once, at the end. So nothing
cancels, and the result does not depend on how the rows are spread over nodes.

**Values** of a column of categories are those that some node has, in ascending order, unless they are stated: then a node
tells nothing but what was stated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapps.errors import TaskError, explain

MAX_VALUES = 1000
"""Most values of a column of categories, and of a label with classes; what has more is an identifier or free text."""

MAX_LENGTH = 100
"""Most characters of such a value."""


Part = Annotated[float, Field(ge=-1e300, le=1e300)]
"""A number of an exact sum; bounded, so that no sum of what nodes tell is beyond float64."""

Value = Annotated[str, Field(max_length=MAX_LENGTH)]


LABEL = "(label)"
"""What errors call the column to predict: nodes may name it differently."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="forbid")


class Numbers(_Model):
    """What a node tells about a column of numbers.

    Attributes:
        count: How many values it has; fewer than examples where some are missing.
        sum: A few numbers whose sum is that of the values, exactly; none where nobody needs it.
        squares: The same for their squares.
    """

    count: int = Field(ge=0)
    sum: list[Part] = Field(default=[], max_length=100)
    squares: list[Part] = Field(default=[], max_length=100)

    @classmethod
    def of(cls, values: NDArray[np.float64], *, mean: bool, variance: bool) -> Self:
        """Sum up a column ``(n,)`` with NaN for missing values; every magnitude is at most 1e100."""
        present = values[~np.isnan(values)]
        return cls(
            count=len(present),
            sum=exact_sum(present) if mean or variance else [],
            squares=exact_sum_of_squares(present) if variance else [],
        )


class Categories(_Model):
    """What a node tells about a column of categories: its values, or those that were stated; ``count`` as for numbers."""

    count: int = Field(ge=0)
    values: list[Value] = Field(max_length=MAX_VALUES)
    stated: bool


class Told(_Model, extra="ignore"):
    """What a node tells about its table; every task tells more beside it.

    Attributes:
        examples: Rows of its training file.
        columns: The columns to learn from, in the file's order or as they were named.
        label: The column to predict.
        missing: The option of that name.
        standardise: The option of that name.
    """

    examples: int = Field(ge=1)
    columns: dict[str, Numbers | Categories]
    label: Numbers | Categories
    missing: str
    standardise: bool

    def common(self) -> dict[str, str]:
        """Say what must be equal on all nodes: what -> how it is here."""
        kinds = {name: isinstance(column, Categories) for name, column in [*self.columns.items(), (LABEL, self.label)]}
        return _common(kinds, self.missing, self.standardise)


class Column(_Model):
    """How a column becomes features.

    Attributes:
        name: Of the column.
        count: Values on all nodes.
        mean: Taken off each number, and put in the place of a missing one.
        scale: What each number is then divided by.
        values: Of a column of categories: each value is a feature, 0 or 1. None for numbers.
        indicator: Whether one more feature says that the value is missing.
    """

    name: str
    count: int = Field(ge=0)
    mean: float = 0.0
    scale: float = Field(default=1.0, gt=0)
    values: list[str] | None = None
    indicator: bool = False

    @property
    def features(self) -> list[str]:
        """Name the features: ``age``, ``sex = f``, ``age is missing``."""
        own = [self.name] if self.values is None else [f"{self.name} = {value}" for value in self.values]
        return [*own, f"{self.name} is missing"] if self.indicator else own


class Agreement(_Model, extra="ignore"):
    """What all nodes share: how columns become features, and the label.

    Attributes:
        examples: Rows on all nodes.
        columns: In the order of the features.
        label: Its classes, or mean and scale of its numbers.
        missing: The option of that name.
        standardise: The option of that name.
    """

    examples: int = Field(ge=1)
    columns: list[Column]
    label: Column
    missing: str
    standardise: bool

    def misfit(self, told: Mapping[str, Any]) -> str:
        """Say why a node's table does not fit; ``""`` if it does.

        Its columns and options must be the agreed ones, and its categories among the agreed values.

        Raises:
            TaskError: What it tells is not about a table.
        """
        node = _parse("", told)
        agreed = {column.name: column for column in [*self.columns, self.label]}
        expected = _common({name: c.values is not None for name, c in agreed.items()}, self.missing, self.standardise)
        mine = node.common()
        for what in [*mine, *expected]:
            here, there = (one.get(what, "absent") for one in (mine, expected))
            if here != there:
                return explain(what, expected=f"{there}, as on the other nodes", got=here, do=_ALIKE)
        for name, column in [*node.columns.items(), (LABEL, node.label)]:
            known = agreed[name].values or []
            if isinstance(column, Categories) and (others := [value for value in column.values if value not in known]):
                return explain(
                    f"column '{name}'", expected=f"values among {shown(known)}", got=shown(others), do=_ALIKE
                )
        return ""


_ALIKE = "give all nodes the same columns and options"


def _common(categories: Mapping[str, bool], missing: str, standardise: bool) -> dict[str, str]:
    kinds = {f"column '{name}'": "categories" if has else "numbers" for name, has in categories.items()}
    return kinds | {"missing": missing, "standardise": str(standardise).lower()}


def agree(told: Mapping[str, Mapping[str, Any]]) -> Agreement:
    """Make what all share from what each node told: the same for the same rows, however they are spread.

    Only nodes whose columns and options are like those of most nodes count; the others do not fit (`Agreement.misfit`).

    Args:
        told: Name of a node -> what it told (`Told`).

    Raises:
        TaskError: What a node told is not about a table, or a column has too many values.
    """
    nodes = {node: _parse(f"node '{node}'" if node else "", told[node]) for node in sorted(told)}
    ways = [tuple(sorted(one.common().items())) for one in nodes.values()]
    most = max(range(len(ways)), key=lambda i: (ways.count(ways[i]), -i))
    alike = [one for one, way in zip(nodes.values(), ways, strict=True) if way == ways[most]]
    model = alike[0]
    columns = []
    for name in model.columns:
        lacks = any(one.columns[name].count < one.examples for one in alike)
        columns.append(_column(name, [one.columns[name] for one in alike], lacks and model.missing == "indicator"))
    return Agreement(
        examples=sum(one.examples for one in alike),
        columns=columns,
        label=_column(LABEL, [one.label for one in alike], False),
        missing=model.missing,
        standardise=model.standardise,
    )


def _parse(where: str, content: Mapping[str, Any]) -> Told:
    try:
        told = Told.model_validate(dict(content))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise TaskError(
            where,
            expected="what a node tells about its table",
            got=f"{fault['msg']}, at '{place}'",
            do="run the same version and task on all nodes",
        ) from error
    for name, column in [*told.columns.items(), (LABEL, told.label)]:
        impossible = column.count > told.examples
        if isinstance(column, Numbers) and (told.standardise or column.squares):
            # The square of a mean is at most the mean of the squares.
            impossible |= _total(column.sum) ** 2 > column.count * _total(column.squares)
        if impossible:
            raise TaskError(
                f"{where}, column '{name}'".removeprefix(", "),
                expected="sums that numbers can have",
                got="others",
                do="look at that node",
            )
    return told


def _column(name: str, told: Sequence[Numbers | Categories], indicator: bool) -> Column:
    count = sum(column.count for column in told)
    if categories := [column for column in told if isinstance(column, Categories)]:
        return Column(name=name, count=count, values=_values(name, categories), indicator=indicator)
    mean, deviation = pooled([column for column in told if isinstance(column, Numbers)])
    return Column(name=name, count=count, mean=mean, scale=deviation or 1.0, indicator=indicator)


def _values(name: str, told: Sequence[Categories]) -> list[str]:
    """Give the values that most of those state who state any, else all that are told."""
    if stated := Counter(tuple(column.values) for column in told if column.stated):
        return list(stated.most_common(1)[0][0])
    values = ascending(value for column in told for value in column.values)
    if len(values) > MAX_VALUES:
        raise TaskError(
            f"column '{name}'",
            expected=f"at most {MAX_VALUES} different values on all nodes",
            got=f"{len(values)}",
            do="name it in ignore",
        )
    return values


def shown(values: Sequence[str]) -> str:
    """List values for a message, the first ten of them."""
    return " | ".join(values[:10]) + (f" | ... ({len(values)} in all)" if len(values) > 10 else "") or "none"


def ascending(values: Iterable[str]) -> list[str]:
    """Sort different values: numbers by their size, then texts."""

    def key(value: str) -> tuple[bool, float, str]:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        return (False, number, value) if math.isfinite(number) else (True, 0.0, value)

    return sorted(set(values), key=key)


def exact_sum(values: NDArray[np.float64] | Sequence[float]) -> list[float]:
    """Give a few numbers whose sum is exactly that of the values: each is what the sum still lacks, rounded.

    Example:
        >>> exact_sum([0.1] * 10)
        [1.0, 5.551115123125783e-17]
    """
    terms = list(map(float, values))
    parts: list[float] = []
    while rest := math.fsum(terms):
        parts.append(rest)
        terms.append(-rest)
    return parts


def exact_sum_of_squares(values: NDArray[np.float64]) -> list[float]:
    r"""Give a few numbers whose sum is exactly that of the squares, of values of magnitude 1e-140 to 1e100, or 0.

    With ``x = h + l``, halves of 26 bits, :math:`x^2 = p + (h^2 - p + 2hl + l^2)` exactly for ``p`` the rounded square
    (Dekker 1971, Numerische Mathematik 18).
    """
    scaled = 134217729.0 * values  # 2**27 + 1
    high = scaled - (scaled - values)
    low = values - high
    rounded = values * values
    error = ((high * high - rounded) + 2 * high * low) + low * low
    return exact_sum(np.concatenate([rounded, error]))


def pooled(columns: Sequence[Numbers]) -> tuple[float, float]:
    """Give mean and standard deviation (divisor n) of all nodes' values; the latter is 0 where no squares were told."""
    count = sum(column.count for column in columns)
    if not count:
        return 0.0, 0.0
    mean = sum((_total(column.sum) for column in columns), Fraction()) / count
    if not any(column.squares for column in columns):
        return float(mean), 0.0
    variance = sum((_total(column.squares) for column in columns), Fraction()) / count - mean**2
    return float(mean), math.sqrt(variance)


def _total(parts: Sequence[float]) -> Fraction:
    return sum(map(Fraction, parts), Fraction())
