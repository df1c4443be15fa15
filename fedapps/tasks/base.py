"""The small interface of a task: model, loss, data and metrics behind one class.

A task hands out the data of one client (`Task.client_data`) and of the server (`Task.server_data`), the initial model
as named arrays, and evaluates a model on data. Deep-learning tasks derive from `fedapps.tasks.torch_task.TorchTask`,
whose module docstring holds a complete task of one's own; convex ones from `fedapps.tasks.convex_task.ConvexTask`.

What happens to the data, in this order:

1. `Task.load` gives the training pool and the test set. The test set is never trained on.
2. The server's validation examples are cut from the pool, by the task's seed and stratified by class (for a split by
   column, by that column), before any client gets one.
3. The rest is split among the clients; each of its examples belongs to exactly one client.
4. A client's own test and validation examples are cut from its share; by default it trains on all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import FedAppsError, TaskError, explain
from fedapps.settings import SettingsModel
from fedapps.tasks.partitioning import (
    PartitionConfig,
    PartitionKind,
    partition_indices,
    partition_summary,
    partition_table,
)
from fedapps.tasks.splits import Indices, Purpose, hold_out, stream

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from fedapps.zeroth_order.layout import Ranges

DATA_VARIABLE = "FEDAPPS_DATA"
"""Environment variable with the folder of data files, for a run without the setting ``data-dir``."""


MOST_CLASSES = 1000
"""Classes that a node lists in the handshake; of more it tells the number."""

SAMPLING = "curvature from labels that are drawn from the model"
ROOT = "square root of the Hessian"
"""What some methods need of a task, for errors."""


class TaskKind(StrEnum):
    """What a task's model is, which decides what clients can do with it."""

    TORCH = "torch"
    """A torch module; arrays are its parameters and buffers."""
    CONVEX = "convex"
    """A convex objective in float64 NumPy with gradient and Hessian; one array of weights."""


@dataclass(frozen=True)
class TaskConfig:
    """What the settings of a run say about its task.

    Attributes:
        data_dir: Folder with data files; None takes the environment variable ``FEDAPPS_DATA``.
        options: The task's own options (``task-options``); left-out keys take their default.
        seed: Seed of the splits.
        partition: How the training pool is split among the clients.
        validation_fraction: Share of the training pool kept on the server for validation.
        client_validation_fraction: Share of a client's examples kept for validation on the client.
        client_test_fraction: Share of a client's examples kept for testing on the client.
        agreed: With ``partition = local``, what the nodes agreed on in the handshake (`Task.agree`); empty before it.
    """

    data_dir: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    validation_fraction: float = 0.0
    client_validation_fraction: float = 0.0
    client_test_fraction: float = 0.0
    agreed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = self.client_validation_fraction + self.client_test_fraction
        for name, share in [
            ("validation-fraction", self.validation_fraction),
            ("client-validation-fraction", self.client_validation_fraction),
            ("client-test-fraction", self.client_test_fraction),
            ("client-validation-fraction + client-test-fraction", own),
        ]:
            if not 0 <= share < 1:
                raise TaskError(name, expected="a share in [0, 1)", got=f"{share:g}", do="make it smaller")


def _shape(features: Any) -> str:
    numbers = isinstance(features, list) and len(features) < 10 and all(isinstance(n, int) for n in features)
    return f"({', '.join(map(str, features))})" if numbers else f"{features!r:.100}"


def describe_targets(targets: NDArray[Any]) -> str:
    """Describe targets for a message: ``"1 to 3 (int64, shape (20,))"``, or the first of them where they have no order."""
    kind = f"({targets.dtype}, shape {targets.shape})"
    if targets.dtype.kind in "biuf" and targets.size:
        return f"{targets.min()} to {targets.max()} {kind}"
    return f"{', '.join(repr(str(target)) for target in targets.ravel()[:3])} {kind}"


@dataclass(frozen=True, eq=False)
class Data:
    """Examples: inputs, targets and further columns, with equal first dimension.

    Attributes:
        inputs: ``(n, ...)``; a CSR matrix is allowed for convex tasks.
        targets: ``(n,)`` labels, or ``(n, ...)``.
        columns: Name -> ``(n,)`` values, for the split by column.
    """

    inputs: NDArray[Any] | csr_array
    targets: NDArray[Any]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {"targets": self.targets, "inputs": self.inputs, **self.columns}
        for name, array in arrays.items():
            if not hasattr(array, "dtype") or not isinstance(array.dtype, np.dtype) or array.dtype.hasobject:
                raise TaskError(
                    f"data, {name}",
                    expected="a NumPy array of numbers or of text of fixed width",
                    got=f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}",
                    do="convert it, for example with numpy.array(...) or tensor.numpy()",
                )
            if array.shape[0] != self.targets.shape[0]:
                raise TaskError(
                    f"data, {name}",
                    expected=f"as many rows as targets, {self.targets.shape[0]}",
                    got=str(array.shape[0]),
                    do="give every example one row in each array",
                )

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Indices) -> Data:
        """Copy some of the examples, in the order of ``indices``."""
        columns = {name: values[indices] for name, values in self.columns.items()}
        return Data(self.inputs[indices], self.targets[indices], columns)

    def sha256(self) -> str:
        """Give a checksum of all values, dtypes and shapes, 64 hexadecimal digits."""
        inputs: Any = self.inputs
        sparse = not isinstance(inputs, np.ndarray)
        parts = [inputs.indptr, inputs.indices, inputs.data] if sparse else [inputs]
        digest = hashlib.sha256(repr(inputs.shape).encode())
        for array in [*parts, self.targets, *(self.columns[name] for name in sorted(self.columns))]:
            # Index arrays may be 32 or 64 bits wide, by the version of SciPy.
            values = array.astype(np.int64) if sparse and array.dtype.kind == "i" else array
            digest.update(f"{values.dtype.str}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class ClientData:
    """The data of one client."""

    train: Data  # examples to train on, at least one
    validation: Data  # examples held out for choices; may be empty
    test: Data  # examples held out for reporting; may be empty


@dataclass(frozen=True)
class ServerData:
    """The data of the server."""

    validation: Data  # examples cut from the training pool, for choices such as the best round; may be empty
    test: Data  # the test set; may be empty


@dataclass(frozen=True)
class FirstModel:
    """Which model training starts from.

    Attributes:
        id: What it is called: a task, or the source of a language model.
        revision: Of the hub, a checksum of a file, or None.
        published: Whether everybody can get these very weights by id and revision, so that a run need not keep them.
    """

    id: str
    revision: str | None = None
    published: bool = False


class Task(ABC):
    """Model, loss, data and metrics of one learning problem.

    Args:
        config: What the settings say about the task.
        name: Name by which the task was asked for; the class's name if left out.

    Raises:
        TaskError: An option is unknown or has the wrong type.
    """

    kind: ClassVar[TaskKind]
    """What the model is; set by `TorchTask` and `ConvexTask`."""

    metric: ClassVar[str] = "accuracy"
    """The metric that runs are judged by; larger is better, unless its name ends in ``loss`` or ``error``."""

    class Options(SettingsModel):
        """The keys of ``task-options``; a task with keys of its own derives its ``Options`` from those of its base."""

        ERROR: ClassVar[type[FedAppsError]] = TaskError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__bases__:
            if issubclass(base, Task) and not issubclass(cls.Options, base.Options):
                raise TaskError(
                    f"task '{cls.__name__}', class Options",
                    expected=f"one derived from {base.__name__}.Options",
                    got=f"one of {', '.join(b.__qualname__ for b in cls.Options.__bases__)}",
                    do=f"write `class Options({base.__name__}.Options):`",
                )

    def __init__(self, config: TaskConfig, name: str | None = None) -> None:
        self.config = config
        self.name = name or type(self).__name__
        self.options: Any = self.Options.from_keys(config.options, f"task '{self.name}', option")
        self._parts: dict[int, tuple[Indices, ...]] = {}

    @property
    def first_model(self) -> FirstModel:
        """The model that training starts from, as a journal names it: by the task, unless it comes from elsewhere."""
        return FirstModel(self.name)

    @abstractmethod
    def load(self) -> tuple[Data, Data]:
        """Read the training pool (at least one example) and the test set (may be empty, ``train.take([])``)."""

    @abstractmethod
    def initial_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        """Give what travels of the model that training starts from, by name; ``seed`` is that of the random initialisation."""

    def trainable_names(self) -> list[str]:
        """List the trainable tensors in the order of `initial_arrays`, without buffers."""
        return list(self.initial_arrays(self.config.seed))

    def fixed_elements(self) -> Mapping[str, Ranges]:
        """Say which elements of trainable tensors zeroth-order methods never move: name -> ranges of the flattened tensor."""
        return {}

    def check_sampling(self) -> None:
        """Refuse a task whose loss does not say how the model would draw labels, which FedSophia's curvature needs.

        Raises:
            TaskError: Why they cannot be drawn, and what to do.
        """
        raise self._lacks(SAMPLING, "labels that the model gives a distribution", "a task of another kind")

    def check_square_root(self) -> None:
        """Refuse a task that knows no square root of its Hessian, which FedNS sketches.

        Raises:
            TaskError: Why there is none, and what to do.
        """
        raise self._lacks(ROOT, "an objective with square_root(theta)", "a task of another kind")

    def _lacks(self, what: str, expected: str, got: str) -> TaskError:
        return TaskError(
            f"task '{self.name}', {what}",
            expected=expected,
            got=got,
            do="write it, or take another method: ltda, fedpm or fedavg",
        )

    @abstractmethod
    def evaluate(self, arrays: Mapping[str, NDArray[Any]], data: Data, device: str = "cpu") -> dict[str, float]:
        """Measure a model: ``loss`` and metrics, means over the examples; nothing if there are no examples.

        ``arrays`` has the names of `initial_arrays`; only models of torch can leave the CPU.
        """

    @property
    def data_dir(self) -> Path | None:
        """Folder with data files: the setting ``data-dir``, else ``FEDAPPS_DATA``, else None."""
        folder = self.config.data_dir or os.environ.get(DATA_VARIABLE)
        return Path(folder).expanduser() if folder else None

    def places(self, name: str) -> list[Path]:
        """Tell where a file or folder that an option names is looked for; such options are declared with ``path=True``.

        Without the ending of a compression; by default as seen from the working folder.
        """
        return [Path(name).expanduser()]

    def client_data(self, partition: int, num_partitions: int) -> ClientData:
        """Give the data of the client with a partition id from 0, the same on every call and in every process.

        With ``partition = local`` all that the task loads here, whatever the two numbers; its test set, if it has one, in
        place of a share held out.

        Raises:
            TaskError: The partition id is out of range, or the data cannot be split so.
        """
        if self._is_local:
            # What a node holds out may not depend on how many nodes there are: they come and go.
            partition, num_partitions = 0, 1
        if not 0 <= partition < num_partitions:
            raise TaskError(
                f"task '{self.name}', partition {partition}",
                expected=f"a partition id in 0..{num_partitions - 1}, since num-partitions is {num_partitions}",
                got=str(partition),
                do="give every client the same num-partitions and its own partition-id",
            )
        mine, own_test = (
            self._loaded if self._is_local else (self._pool.take(self._split(num_partitions)[partition]), None)
        )
        generator = stream(Purpose.CLIENT_HOLD_OUT, self.config.seed, num_partitions, partition)
        if own_test is not None and len(own_test):
            rest, validation = hold_out(mine.targets, self.config.client_validation_fraction, generator)
            return ClientData(mine.take(rest), mine.take(validation), own_test)
        rest, test = hold_out(mine.targets, self.config.client_test_fraction, generator)
        # The second share is of what the client has, not of what the first cut left.
        share = self.config.client_validation_fraction * len(mine) / len(rest)
        train, validation = hold_out(mine.targets[rest], share, generator)
        return ClientData(mine.take(rest[train]), mine.take(rest[validation]), mine.take(test))

    def tell(self) -> dict[str, Any]:
        """Say what a node with data of its own tells the server of them in the handshake, as JSON; run on the node.

        Returns:
            ``examples``, how many its training data hold, those that a run holds out included; ``features``, the shape of
            one input; ``dtype`` of the inputs; ``classes``, the distinct targets where they are
            whole numbers, or how many there are if more than `MOST_CLASSES`. A task adds what `agree` needs.
        """
        train = self._loaded[0]
        told: dict[str, Any] = {
            "examples": len(train), "features": list(train.inputs.shape[1:]), "dtype": str(train.inputs.dtype),
        }  # fmt: skip
        values = train.targets
        if values.ndim == 1 and (values.dtype.kind in "biu" or (values.dtype.kind == "f" and (values % 1 == 0).all())):
            classes = np.unique(values)
            told["classes"] = [int(c) for c in classes] if len(classes) <= MOST_CLASSES else len(classes)
        return told

    def agree(self, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Make of what the nodes told what they all must share, as JSON; run on the server, before the first model is made.

        Both sides then load the task with it as ``config.agreed``. What a node tells may be anything: it is first given alone,
        and the node is refused if that raises.

        Args:
            told: Name of a node -> what its `tell` gave.

        Returns:
            ``features``, the shape of one input that most nodes have. A task whose inputs differ in length gives none.

        Raises:
            TaskError: Nothing that they all could share comes of it.
        """
        votes = Counter(json.dumps(each["features"]) for _, each in sorted(told.items()))
        return {"features": json.loads(votes.most_common(1)[0][0])}

    def misfit(self, told: Mapping[str, Any], agreed: Mapping[str, Any]) -> str:
        """Say why a node's data do not fit what was agreed, for its refusal; ``""`` if they do."""
        expected, got = agreed.get("features"), told.get("features")
        if expected is None or got == expected:
            return ""
        return explain(
            "its data",
            expected=f"inputs of shape {_shape(expected)} as the other nodes have",
            got=_shape(got),
            do="correct its file or its task-options",
        )

    def server_data(self) -> ServerData:
        """Give the data of the server: validation examples and the test set; none with ``partition = local``."""
        if self._is_local:
            none = Data(np.zeros((0, 1)), np.zeros(0))
            return ServerData(none, none)
        return ServerData(self._pool_and_validation[1], self._loaded[1])

    def checksums(self) -> dict[str, str]:
        """Identify the data, for the record of a run: what -> SHA-256, 64 hexadecimal digits."""
        train, test = self._loaded
        return {"train": train.sha256(), "test": test.sha256()}

    def summary(self, num_partitions: int) -> str:
        """Describe who of so many clients got what, in a few lines of text with a table."""
        if self._is_local:
            return f"task {self.name}: each of {num_partitions} clients trains on all data of its own machine; server: none"
        server = self.server_data()
        head = (
            f"task {self.name}: {len(self._pool)} training examples over {num_partitions} clients"
            f" ({self.config.partition.describe()}, seed {self.config.seed});"
            f" server: {len(server.validation)} validation, {len(server.test)} test"
        )
        rows = partition_summary(self._pool.targets, self._split(num_partitions))
        return f"{head}\n{partition_table(rows)}"

    @cached_property
    def _loaded(self) -> tuple[Data, Data]:
        train, test = self.load()
        if len(train) == 0:
            raise TaskError(
                f"task '{self.name}'",
                expected="at least one training example",
                got="none",
                do="check the data that the task loads",
            )
        for what, data in (("training pool", train), ("test set", test)):
            if len(data):
                self.check_targets(data, f"task '{self.name}', targets of the {what}")
        return train, test

    def check_targets(self, data: Data, where: str) -> None:  # noqa: B027 - a task need not check anything
        """Refuse targets that the task's loss cannot take, as soon as they are loaded; by default none are.

        Raises:
            TaskError: Which targets came, and which are expected.
        """

    def server_checksums(self) -> dict[str, str]:
        """Identify the data that the server has: `checksums`, or nothing where every node has its own."""
        return {} if self._is_local else self.checksums()

    @property
    def _is_local(self) -> bool:
        return self.config.partition.kind is PartitionKind.LOCAL

    @cached_property
    def _pool_and_validation(self) -> tuple[Data, Data]:
        train = self._loaded[0]
        generator = stream(Purpose.SERVER_VALIDATION, self.config.seed)
        # By the clients' column where there is one: no client may lose its only example.
        partition = self.config.partition
        column = partition.column if partition.kind is PartitionKind.COLUMN else ""
        strata = train.columns.get(column, train.targets)
        kept, held = hold_out(strata, self.config.validation_fraction, generator)
        return train.take(kept), train.take(held)

    @property
    def _pool(self) -> Data:
        return self._pool_and_validation[0]

    def _split(self, num_partitions: int) -> tuple[Indices, ...]:
        if num_partitions not in self._parts:
            pool, config = self._pool, self.config
            self._parts[num_partitions] = partition_indices(
                pool.targets, num_partitions, config.partition, config.seed, pool.columns
            )
        return self._parts[num_partitions]
