"""Tasks and a method for the tests: a module of a user's own, importable from worker processes too."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from scipy.sparse import csr_array, vstack

from fedapps.client_apps.fedavg import train as train_fedavg
from fedapps.client_apps.work import ClientWork
from fedapps.errors import TaskError
from fedapps.methods import Method
from fedapps.tasks import Data, TaskConfig, setting
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.libsvm import LibsvmTask, read_libsvm
from fedapps.tasks.synthetic import SyntheticLinearTask
from fedapps.tasks.torch_task import TorchTask


class Sites(TorchTask):
    """Two Gaussian classes; column ``site`` says which client an example belongs to, sizes are an option."""

    class Options(TorchTask.Options):
        sizes: str = setting("6,6,6", "examples of each site")
        shift: float = setting(0.0, "input offset a site")

    def load(self) -> tuple[Data, Data]:
        sizes = [int(size) for size in self.options.sizes.split(",")]
        random = np.random.default_rng(0)
        site = np.repeat(np.arange(len(sizes)), sizes)
        labels = np.arange(len(site)) % 2
        inputs = random.normal(size=(len(site), 4)) + 2.0 * labels[:, None] + self.options.shift * site[:, None]
        data = Data(inputs.astype(np.float32), labels, {"site": site})
        return data, data.take(np.arange(min(4, len(data))))

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))


class SvmSites(LibsvmTask):
    """Several LIBSVM files as one table, whose column ``site`` says which file a row is of."""

    class Options(LibsvmTask.Options):
        files: str = setting("", "the files, comma separated", path=True)

    def load(self) -> tuple[Data, Data]:
        parts = [read_libsvm(Path(name), 3) for name in self.options.files.split(",")]
        site = np.repeat(np.arange(len(parts)), [len(labels) for _, labels in parts])
        inputs = csr_array(vstack([features for features, _ in parts]))
        data = Data(inputs, np.concatenate([labels for _, labels in parts]), {"site": site})
        return data, data.take(np.arange(0))

    def checksums(self) -> dict[str, str]:
        return {}


class FragileSites(Sites):
    """The same, whose data of some seed cannot be read, or ends the process that reads it."""

    class Options(Sites.Options):
        broken_seed: int = setting(-1, "seed whose data cannot be read")
        deadly_seed: int = setting(-1, "seed whose data ends the process")

    def load(self) -> tuple[Data, Data]:
        if self.config.seed == self.options.broken_seed:
            raise TaskError("the sensor of this seed is broken")
        if self.config.seed == self.options.deadly_seed:
            os._exit(9)
        return super().load()


class BatchNormSites(Sites):
    """The same with batch normalisation, whose buffers travel."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


class TiedNet(torch.nn.Module):
    """A tiny language model: the head's weight is the embedding's, as in many transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


class TiedSites(Sites):
    """Tell the next token from the present one."""

    def load(self) -> tuple[Data, Data]:
        data, test = super().load()
        return (Data(np.arange(len(part)) % 4, (np.arange(len(part)) + 1) % 4, part.columns) for part in (data, test))

    def build_model(self) -> torch.nn.Module:
        return TiedNet()


class Wide(ConvexTask):
    """Logistic regression on text: 47,236 words, of which an example has three."""

    def load(self) -> tuple[Data, Data]:
        words = np.random.default_rng(0).integers(0, 47_236, (12, 3))
        inputs = csr_array((np.ones(36), words.ravel(), np.arange(0, 37, 3)), shape=(12, 47_236))
        data = Data(inputs, np.where(np.arange(12) % 2, 1, -1), {"site": np.arange(12) % 3})
        return data, data.take(np.arange(4))


class PaddedNet(torch.nn.Module):
    """Words in a window, padded with word 0, whose row is zero; a convolution in ``channels_last``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4, padding_idx=0)
        self.convolution = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        seen = self.embedding(words).view(-1, 2, 2, words.shape[1])
        return self.head(torch.tanh(self.convolution(seen)).mean(dim=(2, 3)))


class PaddedSites(Sites):
    """Whether there are more words above 2."""

    def load(self) -> tuple[Data, Data]:
        data, test = super().load()
        words = np.random.default_rng(1).integers(0, 5, (len(data), 4))
        data = Data(words, np.int64(np.sum(words > 2, axis=1) > 1), data.columns)
        return data, data.take(np.arange(len(test)))

    def build_model(self) -> torch.nn.Module:
        return PaddedNet()


class Conflict(Sites):
    """Three clients with the same sixteen inputs; client k says that everything is class k."""

    def load(self) -> tuple[Data, Data]:
        inputs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
        site = np.repeat(np.arange(3), 16)
        data = Data(np.tile(inputs, (3, 1)), site, {"site": site})
        return data, data

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


class Lines(SyntheticLinearTask):
    """Linear regression whose clients have unequal numbers of examples."""

    class Options(SyntheticLinearTask.Options):
        sizes: str = setting("6,18", "examples of each site")
        dimension: int = setting(3, "number of parameters")

    def load(self) -> tuple[Data, Data]:
        data, _ = super().load()
        sizes = [int(size) for size in self.options.sizes.split(",")]
        chosen = np.concatenate([np.flatnonzero(data.columns["client"] == i)[:n] for i, n in enumerate(sizes)])
        mine = data.take(chosen)
        mine = Data(mine.inputs, mine.targets, {**mine.columns, "site": mine.columns["client"]})
        return mine, mine.take([])


class TorchLines(TorchTask):
    """The same as a torch model."""

    class Options(TorchTask.Options):
        sizes: str = setting("6,18", "examples of each site")

    def load(self) -> tuple[Data, Data]:
        sizes = [int(size) for size in self.options.sizes.split(",")]
        config = TaskConfig(options={"sizes": self.options.sizes, "clients": len(sizes), "heterogeneity": 2.0})
        data, _ = Lines(config).load()
        return data, data.take([])

    def build_model(self) -> torch.nn.Module:
        layer = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        return layer

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * (outputs[:, 0] - targets).square().mean()

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, inputs, targets)}


class FailingSites(Sites):
    """A task whose client 1 has no usable loss: it raises from the second local step on."""

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 7:
            raise RuntimeError("sensor offline")
        return super().loss(model, inputs, targets)

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().metrics(model, inputs, targets)


class HangingSites(Sites):
    """A task whose client with 7 examples never ends a local step."""

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 7:
            time.sleep(3600)
        return super().loss(model, inputs, targets)

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().metrics(model, inputs, targets)


class BracketSites(Sites):
    """A task whose client with 7 examples raises an error that markup would stumble over."""

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 7:
            raise RuntimeError("a[/x] b[bold]c :boom:")
        return super().loss(model, inputs, targets)

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().metrics(model, inputs, targets)


def train_with_memory(work: ClientWork) -> RecordDict:
    """Train as FedAvg, and keep a counter and a trace of the rounds in the client store."""
    state: dict[str, Any] = work.store.load(work.last_folded) or {"rounds": np.zeros(0, dtype=np.int64)}
    content = train_fedavg(work)
    content["metrics"]["remembered"] = float(len(state["rounds"]))
    content["metrics"]["last-round"] = float(state["rounds"][-1]) if len(state["rounds"]) else 0.0
    work.store.save(
        work.server_round,
        {"rounds": np.append(state["rounds"], work.server_round)},
        last_folded=work.last_folded,
    )
    return content


MEMORY = Method(
    name="memory",
    title="FedAvg with a memory",
    family="test",
    mixing="mean",
    travels_down="model",
    travels_up="model",
    client_state="the rounds in which its reply was folded",
    paper="none",
    strategy="fedapps.strategies.fedavg:FedAvg",
    client="fedapps_testing:train_with_memory",
    tuned={"torch": {"lr": 0.1, "local-epochs": 1}},
)
