"""The task ``table``: logistic regression on a table of one's own, and what the tasks on tables share.

A table is a CSV or Parquet file with a column to predict, the label, and columns to learn from, numbers or categories
(`fedapps.tasks.table_files`). Nodes with a file each agree on what all must share in the handshake, and on nothing else
(`fedapps.tasks.table_agreement`); one that is alone, or a table that a run cuts into partitions, agrees with itself.
`docs/tables.md` is the page for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError, field_validator
from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.settings import setting
from fedapps.tasks.base import Data
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.own_files import OwnFilesTask
from fedapps.tasks.partitioning import PartitionKind
from fedapps.tasks.table_agreement import (
    MAX_LENGTH,
    MAX_VALUES,
    Agreement,
    Categories,
    Column,
    Numbers,
    Told,
    agree,
    ascending,
    shown,
)
from fedapps.tasks.table_files import Table, TableFormat, read_table


class TableData(OwnFilesTask):
    """Data of a table: columns to features, in the order of the columns.

    A number gives one feature, standardised by mean and standard deviation of all training rows of all nodes; a category gives
    one of 0 or 1 for each of its values; a column that lacks values gives one more with ``missing = "indicator"``.
    """

    DTYPE: ClassVar[str] = "float64"
    """Of the inputs."""

    FOLDER = "tables"
    FORMAT = "a CSV or Parquet file"
    EXAMPLE = "patients.csv"
    ADVICE = "put it there"

    class Options(OwnFilesTask.Options):
        """How the table is written, and what its columns are; lists are separated by commas, values by ``|``."""

        label: str = setting("", "column to predict")
        classes: str = setting(
            "", "values of the label, such as no | yes; empty = all that occur on any node, ascending"
        )
        features: str = setting("", "columns to learn from; empty = all others")
        ignore: str = setting("", "columns to leave out")
        categories: str = setting(
            "", "columns that hold categories, each with its values or (empty) all that occur: sex = f | m, ward"
        )
        missing: Literal["refuse", "mean", "indicator"] = setting(
            "refuse",
            "what a missing value becomes: an error, the mean (of a category: none of its values), or that and one more "
            "feature that says so",
        )
        missing_marks: str = setting(
            "NA | N/A | NaN | nan | NULL | null", "what stands for a missing value, beside nothing"
        )
        standardise: bool = setting(True, "whether numbers get mean 0 and variance 1 over all nodes")
        delimiter: str = setting(",", "character between the fields of CSV; \\t is a tab")
        header: bool = setting(True, "whether the first line of CSV names the columns; else they are 1, 2, ...")
        decimal: Literal[".", ","] = setting(".", "decimal sign of CSV")
        encoding: str = setting("utf-8", "encoding of CSV, such as cp1252")

        @field_validator("delimiter")
        @classmethod
        def _one_character(cls, value: str) -> str:
            if len(value.encode()) != 1 or value in '"\r\n':
                raise ValueError("one ASCII character that is neither a quotation mark nor the end of a line")
            return value

        @field_validator("encoding")
        @classmethod
        def _known(cls, value: str) -> str:
            try:
                b"a".decode(value)
            except UnicodeError:  # such as UTF-16, of which one byte is no text
                pass
            except (LookupError, ValueError):
                raise ValueError("an encoding of text", "take for example utf-8, cp1252 or latin-1") from None
            return value

        @field_validator("categories")
        @classmethod
        def _named(cls, value: str) -> str:
            for column, values in _categories(value).items():
                if not column or "" in values or len(set(values)) < len(values):
                    raise ValueError("columns, each with different values or none: sex = f | m, ward")
            return value

        @field_validator("classes")
        @classmethod
        def _different(cls, value: str) -> str:
            values = _split(value, "|")
            if len(set(values)) < len(values):
                raise ValueError("different values")
            return value

    @property
    def num_features(self) -> int:
        """The number of features, the same on all nodes."""
        return len(self.feature_names)

    @property
    def feature_names(self) -> list[str]:
        """What each feature is: ``age``, ``sex = f``, ``age is missing``."""
        return [feature for column in self.agreement.columns for feature in column.features]

    @cached_property
    def agreement(self) -> Agreement:
        """What all nodes share: as the server sent it, or of this table alone.

        Raises:
            TaskError: It was made for another task, or nothing can be learned from it.
        """
        agreed = self.config.agreed or self.agree({"": self.tell()})
        try:
            agreement = Agreement.model_validate(agreed)
        except ValidationError as error:
            raise TaskError(
                f"task '{self.name}'",
                expected="what the nodes have agreed on",
                got=f"{agreed!r:.200}",
                do="run the same version and task on all machines",
            ) from error
        if self.config.agreed or not self._is_local:  # Before nodes have agreed, one need not have all classes.
            self._check_agreement(agreement)
        return agreement

    def _check_agreement(self, agreement: Agreement) -> None:
        """Refuse columns without any value, and a label that cannot be learned."""
        for column in agreement.columns:
            if not column.count:
                raise TaskError(
                    f"column '{column.name}'", expected="a value on some node", got="none", do="name it in ignore"
                )
        self._check_label(agreement.label)

    @override
    def tell(self) -> dict[str, Any]:
        """Tell what all must share: of each column counts, sums and sums of squares, or its values unless they are stated.

        Rows of the test file are counted in no sum; only values that they alone have are told, too. ``features`` is the
        number of columns, since how many features they become is not known before all have told.

        Raises:
            TaskError: The files cannot be read, or do not fit the options.
        """
        table, options, label = self._tables[0], self.options, self._label_told()
        told = Told(
            examples=len(table),
            columns={name: self._column_told(name) for name in self._features(table)},
            label=label,
            missing=options.missing,
            standardise=options.standardise,
        )
        classes = label.values if isinstance(label, Categories) else []
        return {"features": [len(told.columns)], "dtype": self.DTYPE, "classes": classes, **told.model_dump()}

    @override
    def agree(self, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Make the shared columns and label from what each node told."""
        return agree(told).model_dump()

    @override
    def misfit(self, told: Mapping[str, Any], agreed: Mapping[str, Any]) -> str:
        """Say in which column or option a node differs from what was agreed; ``""`` if in none."""
        return Agreement.model_validate(agreed).misfit(told)

    def _label_told(self) -> Numbers | Categories:
        """Tell about the label, by default that it has classes."""
        return self._categories_told(self._label, _split(self.options.classes, "|"))

    def _check_label(self, label: Column) -> None:
        """Refuse a label that the task cannot learn; by default one with less than two classes."""
        if label.values is None or len(label.values) < 2:
            raise TaskError(
                f"task '{self.name}', label '{self.options.label}'",
                expected="at least two classes",
                got=shown(label.values or []),
                do="take another column for label, or state classes",
            )

    @override
    def load(self) -> tuple[Data, Data]:
        """Read the files: inputs ``(n, d)``, targets ``(n,)``; without a test file the test set is empty."""
        train, *tests = [self._data(table) for table in self._tables]
        return train, tests[0] if tests else train.take(np.empty(0, dtype=np.intp))

    def _data(self, table: Table) -> Data:
        inputs = np.concatenate([self._encoded(table, column) for column in self.agreement.columns], axis=1)
        columns = {}
        group = self._group
        if group and table is self._tables[0]:
            texts = table.texts(group)
            self._refuse_missing(table, group, np.array([text is None for text in texts]))
            # Numbered in ascending order, so that client i is the same for the numbers 9 and 10 as for the texts.
            numbers = {value: number for number, value in enumerate(ascending(filter(None, texts)))}
            columns[group] = np.array([numbers[text or ""] for text in texts])
        return Data(inputs.astype(self.DTYPE), self._targets(table), columns)

    def _targets(self, table: Table) -> NDArray[Any]:
        """Give the number of each row's class, ``(n,)`` int64."""
        codes = self._codes(table, self._label, self.agreement.label.values or [])
        self._refuse_missing(table, self._label, codes < 0)
        return codes

    def _encoded(self, table: Table, column: Column) -> NDArray[np.float64]:
        """Turn a column into its features, ``(n, k)``."""
        if column.values is None:
            numbers = table.numbers(column.name)
            absent = np.isnan(numbers)
            own = np.where(absent, column.mean, numbers)[:, None]
            if self.options.standardise:
                own = (own - column.mean) / column.scale
        else:
            codes = self._codes(table, column.name, column.values)
            absent = codes < 0
            own = (codes[:, None] == np.arange(len(column.values))).astype(np.float64)
        if self.options.missing == "refuse":
            self._refuse_missing(table, column.name, absent)
        return np.concatenate([own, absent[:, None].astype(np.float64)], axis=1) if column.indicator else own

    def _codes(self, table: Table, name: str, values: list[str]) -> NDArray[np.int64]:
        """Number a column's texts by their place among the values; -1 where there is none."""
        places: dict[str | None, int] = {None: -1, **{value: i for i, value in enumerate(values)}}
        texts = table.texts(name)
        codes = np.array([places.get(text, len(values)) for text in texts], dtype=np.int64)
        if (codes == len(values)).any():
            row = int(np.argmax(codes == len(values)))
            raise TaskError(
                f"{table.place(row)}, column '{name}'",
                expected="one of the values that are stated or agreed on, " + shown(values),
                got=repr(texts[row]),
                do="correct it, or state all values",
            )
        return codes

    def _refuse_missing(self, table: Table, name: str, absent: NDArray[np.bool_]) -> None:
        if absent.any():
            raise TaskError(
                f"{table.place(int(np.argmax(absent)))}, column '{name}'",
                expected="a value",
                got="none",
                do='fill it in, leave the row out, or for a feature set missing = "mean" or "indicator" in task-options',
            )

    @property
    def _label(self) -> str:
        if not self.options.label:
            raise TaskError(
                f"task '{self.name}', option 'label'",
                expected="the column to predict",
                got="nothing",
                do="set task-options='label = \"outcome\"'",
            )
        return str(self.options.label)

    @property
    def _group(self) -> str:
        """The column whose values are the clients, if the partition is by column."""
        partition = self.config.partition
        return partition.column if partition.kind is PartitionKind.COLUMN else ""

    def _features(self, table: Table) -> list[str]:
        """List the columns to learn from."""
        named, ignored = _split(self.options.features, ","), _split(self.options.ignore, ",")
        others = {self._label, self._group, *ignored}
        for name in filter(None, {*others, *named, *_categories(self.options.categories)}):
            table.check_name(name)
        features = named or [name for name in table.names if name not in others]
        if twice := [name for name in features if name == self._label or features.count(name) > 1]:
            raise TaskError(
                f"task '{self.name}', option 'features'",
                expected="different columns, and not the label",
                got=f"'{twice[0]}'",
                do="remove it",
            )
        if not features:
            raise TaskError(f"file {table.path}", expected="a column to learn from", got="none", do="see the delimiter")
        return features

    @cached_property
    def _tables(self) -> list[Table]:
        """The training table, and the test table if there is one."""
        options = self.options
        form = TableFormat(
            options.delimiter,
            options.header,
            options.decimal,
            options.encoding,
            tuple(_split(options.missing_marks, "|")),
        )
        tables = [read_table(path, form) for path in self.files.values()]
        for table in tables:
            if len(table) == 0:
                raise TaskError(f"file {table.path}", expected="at least one row", got="none", do="check the file")
        return tables

    def _column_told(self, name: str) -> Numbers | Categories:
        categories, options = _categories(self.options.categories), self.options
        if name in categories:
            return self._categories_told(name, categories[name])
        numbers = self._tables[0].numbers(name)
        if options.missing == "refuse":
            self._refuse_missing(self._tables[0], name, np.isnan(numbers))
        return Numbers.of(numbers, mean=options.missing != "refuse", variance=options.standardise)

    def _categories_told(self, name: str, stated: list[str]) -> Categories:
        texts, *others = [table.texts(name) for table in self._tables]
        absent = np.array([text is None for text in texts])
        if self.options.missing == "refuse" or name == self._label:
            self._refuse_missing(self._tables[0], name, absent)
        count = int(np.sum(~absent))
        if stated:
            return Categories(count=count, values=stated, stated=True)
        values = {text for part in (texts, *others) for text in part if text is not None}
        longest = max(map(len, values), default=0)
        if len(values) > MAX_VALUES or longest > MAX_LENGTH:
            raise TaskError(
                f"file {self._tables[0].path}, column '{name}'",
                expected=f"at most {MAX_VALUES} different values of at most {MAX_LENGTH} characters",
                got=f"{len(values)}, the longest of {longest} characters",
                do="an identifier or free text is no category: name the column in ignore",
            )
        return Categories(count=count, values=ascending(values), stated=False)


class TableTask(TableData, ConvexTask):
    """L2-regularised logistic regression on a table with two classes.

    The second class is +1 and the first -1: in ascending order, or as ``classes`` says. The last feature is 1 for every
    row, for the intercept; it is regularised as the others are.
    """

    class Options(ConvexTask.Options, TableData.Options):
        """The table, and the penalty."""

    @property
    @override
    def feature_names(self) -> list[str]:
        return [*super().feature_names, "intercept"]

    @override
    def _check_label(self, label: Column) -> None:
        super()._check_label(label)
        if len(label.values or []) > 2:
            raise TaskError(
                f"task '{self.name}', label '{self.options.label}'",
                expected="two classes",
                got=shown(label.values or []),
                do="take --task table-net for several classes, or table-regression for a number",
            )

    @override
    def _data(self, table: Table) -> Data:
        data = super()._data(table)
        inputs = np.concatenate([np.asarray(data.inputs), np.ones((len(data), 1))], axis=1)
        return Data(inputs, 2.0 * data.targets - 1.0, data.columns)


def _split(text: str, by: str) -> list[str]:
    return [part.strip() for part in text.split(by) if part.strip()]


def _categories(text: str) -> dict[str, list[str]]:
    """Read ``sex = f | m, ward``: column -> values, none if they are to be agreed on."""
    found = {}
    for entry in _split(text, ","):
        column, given, values = entry.partition("=")
        found[column.strip()] = [value.strip() for value in values.split("|")] if given else []
    return found
