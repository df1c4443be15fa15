"""Drives DeComFL's published code (github.com/ZidongLiu/DeComFL) through its own classes, for comparison of time.

Nothing of it lies in this repository: its folder is given by the user. The HiSo of arXiv 2506.02370 is its estimator type
``adam_forward``, in two classes: one with a direction for the whole model and ``torch.optim.SGD`` (``Batch``, the default of
its command line), and one that draws tensor by tensor and updates without an optimizer (``Paramwise``, ``--no-optim``).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FUNCTIONS = {
    "client job": "cezo_fl.run_client_jobs.parallalizable_client_job with cezo_fl.client.ResetClient",
    "steps only": "update_model_given_seed_and_grad, update_gradient_estimator_given_seed_and_grad, then "
    "_zo_grad_estimate (Batch) or _zo_grad_estimate_paramwise (Paramwise) of the estimator",
    "catch-up": "update_model_given_seed_and_grad, update_gradient_estimator_given_seed_and_grad",
    "forward": "cezo_fl.util.model_helpers.model_forward with cezo_fl.util.language_utils.last_token_cross_entropy_loss",
    "hiso": "cezo_fl.gradient_estimators.adam_forward.AdamForwardGradientEstimator{Batch,Paramwise}",
    "decomfl": "cezo_fl.gradient_estimators.random_gradient_estimator_splitted.RandomGradientEstimator{Batch,Paramwise}",
}
"""What is called for each figure."""

LR, MU, SMOOTH, WEIGHT_DECAY = 1e-6, 1e-3, 0.95, 5e-4
"""Its defaults for language models."""


def load(folder: Path) -> None:
    """Make the code importable.

    Args:
        folder: A checkout with the package ``cezo_fl``.
    """
    if not (folder / "cezo_fl" / "client.py").is_file():
        raise SystemExit(f"{folder} is no checkout of DeComFL: cezo_fl/client.py is missing")
    sys.path.append(str(folder))
    token = types.ModuleType("experiment_helper.hf_token")  # nothing is downloaded here, so no account is needed
    token.HF_TOKEN = None  # type: ignore[attr-defined]
    sys.modules["experiment_helper.hf_token"] = token


def commit_of(folder: Path) -> str:
    """Name the version: the commit, or what a file ``COMMIT`` in the folder says.

    Args:
        folder: The checkout.

    Returns:
        The commit.
    """
    if (folder / "COMMIT").is_file():
        return (folder / "COMMIT").read_text().strip()
    found = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


class Published:
    """A client of the published code on a model and one batch.

    Args:
        model: The model; changed in place.
        input_ids: Tokens, (batch, length).
        answers: Token ids of the right label words, (batch,).
        label_words: Token ids of the words of label 0 and 1.
        method: ``hiso`` or ``decomfl``.
        kind: ``Batch`` or ``Paramwise``.
        client: Whether a whole client is made, with its copy of the model, or the estimator alone.
    """

    def __init__(
        self, model: torch.nn.Module, input_ids: torch.Tensor, answers: torch.Tensor, label_words: list[int],
        method: str, kind: str, *, client: bool,
    ) -> None:  # fmt: skip
        language = importlib.import_module("cezo_fl.util.language_utils")
        self._forward = importlib.import_module("cezo_fl.util.model_helpers").model_forward
        words = dict(enumerate(label_words))
        self._criterion = language.get_lm_loss("last_token", verbalizer_id_map=words)
        accuracy = language.get_lm_loss("accuracy", verbalizer_id_map=words)
        self._model = model
        self._batch = language.LLMBatchInput(input_ids, torch.ones_like(input_ids)), answers.view(-1, 1)
        self._paramwise = kind == "Paramwise"
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0, weight_decay=WEIGHT_DECAY)
        with contextlib.redirect_stdout(io.StringIO()):
            self.estimator = self._estimator(method, kind)
        self._seeds = itertools.count(1)
        self._client: Any = None
        if client:
            reset_client = importlib.import_module("cezo_fl.client").ResetClient
            self._client = reset_client(
                model, self._forward, [self._batch], self.estimator, self._optimizer, self._criterion, accuracy,
                torch.device("cpu"),
            )  # fmt: skip

    def _estimator(self, method: str, kind: str) -> Any:
        options: dict[str, Any] = {"mu": MU, "num_pert": 1, "device": "cpu", "torch_dtype": torch.float32}
        if method == "hiso":
            module = importlib.import_module("cezo_fl.gradient_estimators.adam_forward")
            made: Callable[..., Any] = getattr(module, f"AdamForwardGradientEstimator{kind}")
            return made(self._model.parameters(), hessian_smooth=SMOOTH, **options)
        module = importlib.import_module("cezo_fl.gradient_estimators.random_gradient_estimator_splitted")
        made = getattr(module, f"RandomGradientEstimator{kind}")
        return made(self._model.parameters(), grad_estimate_method="rge-forward", **options)

    def client_job(self) -> None:
        """Run one round of a client as its server would: pull one record, one local step."""
        job = importlib.import_module("cezo_fl.run_client_jobs").parallalizable_client_job
        seeds = next(self._seeds), next(self._seeds)
        job(self._client, [[seeds[0]]], [[torch.tensor([0.5])]], [seeds[1]], torch.device("cpu"))

    def steps_only(self) -> None:
        """Apply one record and estimate one scalar, without the client's copies, local update and statistics."""
        self.catch_up()
        with torch.no_grad():
            estimate = (
                self.estimator._zo_grad_estimate_paramwise if self._paramwise else self.estimator._zo_grad_estimate
            )
            estimate(*self._batch, self._loss, next(self._seeds))

    def catch_up(self) -> None:
        """Apply one record to the model and to the estimator's diagonal."""
        seeds, scalars = [next(self._seeds)], [torch.tensor([0.5])]
        with torch.no_grad():
            self.estimator.update_model_given_seed_and_grad(self._optimizer, seeds, scalars)
            self.estimator.update_gradient_estimator_given_seed_and_grad(seeds, scalars)

    def forward(self) -> None:
        """Evaluate the loss once."""
        with torch.no_grad():
            self._loss(*self._batch)

    def _loss(self, inputs: Any, answers: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._criterion(self._forward(self._model, inputs), answers)
        return loss
