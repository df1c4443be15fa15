'''Tasks whose model is a torch module, and a complete task of one's own.

The smallest task says where the data comes from and what the model is::

    from typing import Any

    import numpy as np
    import torch

    from fedapps.tasks import Data, setting
    from fedapps.tasks.torch_task import TorchTask


    class MyTask(TorchTask):
        """Two noisy moons, told apart by a small network."""

        class Options(TorchTask.Options):
            examples: int = setting(600, "number of examples")
            noise: float = setting(0.1, "deviation of the noise", ge=0)

        def load(self) -> tuple[Data, Data]:
            generator = np.random.default_rng(0)
            n = self.options.examples
            labels = np.arange(n) % 2
            angle = generator.uniform(0, np.pi, n)
            x = np.where(labels == 0, np.cos(angle), 1 - np.cos(angle))
            y = np.where(labels == 0, np.sin(angle), 0.5 - np.sin(angle))
            inputs = np.stack([x, y], axis=1) + self.options.noise * generator.normal(size=(n, 2))
            data = Data(inputs.astype(np.float32), labels, columns={"site": np.arange(n) % 3})
            order = generator.permutation(n)
            return data.take(order[n // 5 :]), data.take(order[: n // 5])

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

Saved as ``my_pkg/my_mod.py`` in a folder on the Python path, it is ``--task my_pkg.my_mod:MyTask``, its options are
``--set task-options='examples = 1000'``, and its column serves ``--partition column --set partition-column=site``.
Everything else has a default that a task may override: `TorchTask.outputs` (outputs that are not simply ``model(inputs)``),
`TorchTask.criterion` (another loss of the outputs), `TorchTask.sample_targets` (which targets they make likely),
`TorchTask.metrics` (other metrics), `TorchTask.loss` (a loss that needs more than the outputs), `TorchTask.augment`
(random changes of training examples), `TorchTask.tensors` (how examples become tensors), `TorchTask.unmoved` (elements that
no gradient moves). A model that reads padded sequences says which positions are data, for second-order methods, with
`fedapps.curvature.layers.count_only` around its forward pass.
'''

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.tasks.base import ROOT, SAMPLING, Data, Task, TaskConfig, TaskKind, describe_targets
from fedapps.tasks.splits import Indices
from fedapps.tasks.torch_arrays import load_module_arrays, module_arrays, trainable_names

if TYPE_CHECKING:
    from fedapps.zeroth_order.layout import Ranges

EVALUATION_BATCH = 256
"""Examples in a batch of an evaluation."""


class TorchTask(Task):
    """A task whose model is a torch module; see the module docstring for an example.

    Raises:
        TaskError: An option is wrong, or `loss` is overridden but not `metrics`.
    """

    kind: ClassVar[TaskKind] = TaskKind.TORCH

    def __init__(self, config: TaskConfig, name: str | None = None) -> None:
        super().__init__(config, name)
        self._trainable: list[str] | None = None
        self._fixed: dict[str, Ranges] = {}
        cls = type(self)
        if cls.loss is not TorchTask.loss and cls.metrics is TorchTask.metrics:
            raise TaskError(
                f"task '{self.name}'",
                expected="metrics() overridden together with loss()",
                got="only loss(), so that evaluation would report the loss of criterion()",
                do="override criterion() if your loss is a function of the outputs, else override metrics() too",
            )

    @abstractmethod
    def build_model(self) -> torch.nn.Module:
        """Build a new model on the CPU; torch's generator is seeded around the call.

        Its trainable parameters and persistent buffers travel.
        """

    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the outputs that `criterion` takes: what the model gives, unless overridden."""
        found: torch.Tensor = model(inputs)
        return found

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean loss of outputs ``(n, classes)`` for classes ``(n,)``: cross-entropy in float32 or better."""
        return functional.cross_entropy(_at_least_float32(outputs), targets)

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss that training minimises: a scalar, the mean over the examples of a batch."""
        return self.criterion(self.outputs(model, inputs), targets)

    def sample_targets(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw the targets that the model thinks likely, for FedSophia: those of which `criterion` is the log-likelihood.

        Args:
            outputs: ``(n, classes, ...)``.
            generator: Where every draw must come from, on the device of the outputs.

        Returns:
            By default classes ``(n, ...)`` with the softmax of the outputs as their probabilities, which is for cross-entropy.
        """
        probabilities = _at_least_float32(outputs).softmax(dim=1).movedim(1, -1)
        drawn = torch.multinomial(probabilities.flatten(end_dim=-2), 1, generator=generator)
        return drawn.view(probabilities.shape[:-1])

    @override
    def check_sampling(self) -> None:
        """Refuse a `loss` of one's own, and a `criterion` of one's own without `sample_targets`."""
        self._check_loss(SAMPLING)
        cls = type(self)
        if cls.criterion is not TorchTask.criterion and cls.sample_targets is TorchTask.sample_targets:
            raise self._lacks(SAMPLING, "sample_targets() beside criterion()", "a criterion() of its own alone")

    @override
    def check_square_root(self) -> None:
        """Refuse a `loss` of one's own: the root is that of the Gauss-Newton matrix, which is about the outputs."""
        self._check_loss(ROOT)

    def _check_loss(self, what: str) -> None:
        if type(self).loss is not TorchTask.loss:
            raise self._lacks(what, "a loss that outputs() and criterion() give", "a loss() of its own")

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute what an evaluation reports for one batch: ``loss`` and `Task.metric`, scalars, means over the examples.

        The model is in evaluation mode, on the device of the tensors.
        """
        outputs = self.outputs(model, inputs)
        hits = outputs.argmax(dim=1) == targets
        return {"loss": self.criterion(outputs, targets), "accuracy": hits.float().mean()}

    def augment(self, batch: Data, random: np.random.Generator) -> Data:
        """Change the examples of a training batch at random; not called in evaluation.

        Args:
            batch: The examples, before `tensors`; to be left unchanged.
            random: Where every draw must come from: seeded by seed, round and partition, equal in all engines.
        """
        return batch

    @override
    def initial_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        return module_arrays(self._build(seed))

    @override
    def trainable_names(self) -> list[str]:
        return list(self._noted()[0])

    @override
    def fixed_elements(self) -> dict[str, Ranges]:
        return self._noted()[1]

    def unmoved(self, model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Say which elements of trainable parameters no gradient moves, so that zeroth-order methods leave them alone, too.

        By default the rows at the ``padding_idx`` of embeddings; one that other modules use, such as a tied output layer, has
        none, since these may move it. A model whose gradients are masked, by a hook for example, returns the mask.

        Args:
            model: A new model of `build_model`.

        Returns:
            Parameter -> bool of its shape. It must not depend on values: every end builds a model of its own.
        """
        uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
        found = {}
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.padding_idx is not None:
                weight = module._parameters.get("weight")
                if isinstance(weight, torch.nn.Parameter) and uses[id(weight)] == 1:
                    found[weight] = torch.zeros(weight.shape, dtype=torch.bool)
                    found[weight][module.padding_idx] = True
        return found

    def module(self, arrays: Mapping[str, NDArray[Any]], device: str = "cpu") -> torch.nn.Module:
        """Build a model and fill it with what `initial_arrays` gives; torch's global generator is left as it was.

        What does not travel (frozen parameters, non-persistent buffers) is drawn from the task's seed, hence equal on
        all ends. The model is in training mode.

        Raises:
            TaskError: The arrays do not fit the model.
        """
        model = self._build(self.config.seed)
        load_module_arrays(model, arrays)
        return model.to(device)

    def initial_module(self, device: str = "cpu") -> torch.nn.Module:
        """Build the model that training starts from, once: what `module` gives for `initial_arrays`, without copies."""
        if type(self).initial_arrays is not TorchTask.initial_arrays:
            return self.module(self.initial_arrays(self.config.seed), device)
        return self._build(self.config.seed).to(device)

    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Turn examples into tensors, copied to a device: integers as int64, floating numbers as float32."""
        return _tensor(data.inputs, device), _tensor(data.targets, device)

    @override
    def check_targets(self, data: Data, where: str) -> None:
        """Refuse targets that are no numbers, or that the loss cannot take beside what the model gives for two examples.

        Cross-entropy takes class numbers, integers from 0 to the number of the model's outputs less 1; what a loss of one's
        own takes, it says itself. A task with a loss or outputs of its own is not asked.
        """
        if type(self).tensors is TorchTask.tensors and data.targets.dtype.kind not in "biuf":
            raise TaskError(
                where,
                expected="numbers",
                got=describe_targets(data.targets),
                do="number the classes from 0 in load(), for example with numpy.unique(..., return_inverse=True)",
            )
        if type(self).loss is not TorchTask.loss or type(self).outputs is not TorchTask.outputs:
            return
        model = self._build(self.config.seed).eval()
        with torch.random.fork_rng(devices=[]):
            try:
                inputs, targets = self.tensors(data.take(np.arange(min(2, len(data)))))
                outputs = model(inputs)
            except Exception:  # not about the targets: the first forward pass of the run tells it with its own words
                return
            if type(self).criterion is TorchTask.criterion and outputs.dim() > 1:
                self._check_classes(data.targets, outputs, where)
                return
            try:
                # Of shapes that do not fit torch only warns, and takes the loss of every output with every target.
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="Using a target size")
                    torch.autograd.backward(self.criterion(outputs, targets))
            except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
                got = f"{describe_targets(data.targets)} for outputs of shape (n, {str(tuple(outputs.shape[1:]))[1:]}"
                raise TaskError(
                    where,
                    expected="what criterion() takes beside the model's outputs",
                    got=f"{got} ({str(error).splitlines()[0]})",
                    do="give targets of the outputs' shape and kind in load(), or change criterion()",
                ) from error

    def _check_classes(self, targets: NDArray[Any], outputs: torch.Tensor, where: str) -> None:
        """Refuse what is no number of a class: of outputs ``(n, classes, ...)`` there is one for each ``(n, ...)``."""
        classes, places = outputs.shape[1], tuple(outputs.shape[2:])
        shaped = targets.shape[1:] == places
        if not shaped or targets.dtype.kind not in "biu" or targets.min() < 0 or targets.max() >= classes:
            shape = f"(n, {', '.join(map(str, places))})" if places else "(n,)"
            raise TaskError(
                where,
                expected=f"integers from 0 to {classes - 1}, a class of the model's {classes} outputs, of shape {shape}",
                got=describe_targets(targets),
                do="number the classes from 0 in load(), give the model as many outputs, or override criterion()",
            )

    @override
    def evaluate(self, arrays: Mapping[str, NDArray[Any]], data: Data, device: str = "cpu") -> dict[str, float]:
        return self.evaluate_module(self.module(arrays, device), data)

    def evaluate_module(self, model: torch.nn.Module, data: Data) -> dict[str, float]:
        """Measure a module in evaluation mode, without gradients, batch by batch; its submodules' training modes are restored.

        ``loss`` and metrics are means over the examples; there are none if there are no examples.
        """
        first = next(model.parameters(), None)
        device = "cpu" if first is None else str(first.device)
        totals: dict[str, float] = {}
        with evaluation_mode(model), torch.no_grad():
            for indices in self.evaluation_batches(data):
                batch = data.take(indices)
                for name, mean in self.metrics(model, *self.tensors(batch, device)).items():
                    # The last batch may be smaller: weigh by examples, not by batches.
                    totals[name] = totals.get(name, 0.0) + float(mean) * len(batch)
        return {name: total / len(data) for name, total in totals.items()}

    def evaluation_batches(self, data: Data) -> Iterator[Indices]:
        """Say which examples an evaluation takes together, every index once: `EVALUATION_BATCH` at a time, in order."""
        for start in range(0, len(data), EVALUATION_BATCH):
            yield np.arange(start, min(start + EVALUATION_BATCH, len(data)))

    def _noted(self) -> tuple[list[str], dict[str, Ranges]]:
        if self._trainable is None:
            self._build(self.config.seed)
        return self._trainable or [], self._fixed

    def _note(self, model: torch.nn.Module) -> None:
        self._trainable = trainable_names(model)
        masks = {id(parameter): mask for parameter, mask in self.unmoved(model).items()}
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in trainable.items():
            mask = masks.get(id(parameter))
            if mask is not None and mask.shape != parameter.shape:
                raise TaskError(
                    f"task '{self.name}', unmoved() for '{name}'",
                    expected=f"a mask of shape {tuple(parameter.shape)}",
                    got=f"{tuple(mask.shape)}",
                    do="mark every element",
                )
        self._fixed = {name: _ranges(masks[id(p)]) for name, p in trainable.items() if id(p) in masks}

    def _build(self, seed: int) -> torch.nn.Module:
        # devices=[] and the CPU's own generator: models are built on the CPU, and a GPU's generator is left alone.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = self.build_model()
        if self._trainable is None:
            self._note(model)  # A language model is not loaded once more for its names.
        return model


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for a while; each submodule gets its own mode back, also if an error passes through."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _ranges(mask: torch.Tensor) -> Ranges:
    """List the ranges of marked elements, in their logical order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.cpu().numpy().astype(np.int8).ravel(), [0]]))).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _tensor(array: Any, device: str) -> torch.Tensor:
    if not isinstance(array, np.ndarray):
        raise TaskError(
            "data of a torch task",
            expected="a dense NumPy array",
            got=type(array).__name__,
            do="call .toarray() on a sparse matrix in load()",
        )
    dtype = torch.float32 if array.dtype.kind == "f" else torch.int64
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch takes this machine's order of bytes only
    return torch.tensor(array, dtype=dtype, device=device)
