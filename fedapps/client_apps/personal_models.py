"""A client's personal model over rounds: kept in its store, measured beside the global one, written for use elsewhere.

A client that has no folded reply yet has the global model as its personal one (LocalTrain: the initial model). So has one
whose store is lost: it says so in its reply (`fedapps.messages.schema.STORE_LOST`), and the server notes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import RecordDict

import fedapps
from fedapps.client_apps.problem import LocalProblem, Pull, Trained
from fedapps.client_apps.work import ClientWork
from fedapps.errors import MessageError, TaskError
from fedapps.messages.schema import METRICS, STEP_LIMIT, STORE_LOST, Arrays
from fedapps.personalization.proximal import safe_step, unstable_step
from fedapps.private_files import OWNER_ONLY
from fedapps.results.storage import save_arrays, sync_file, to_json, write_atomically

MODEL = "personal/"
KNOWN = "known/"
GENERATION = "generation"
"""Names in the store: prefixes of tensors, and the generation of ``known``."""


@dataclass(frozen=True)
class PersonalModel:
    """What a client keeps over rounds.

    Attributes:
        tensors: The personal tensors: trainable ones, and the buffers if every parameter is personal.
        known: FedCLUP: what the server's sum holds of this client since its last folded reply, float64; None for nothing.
        generation: FedCLUP: generation of the sum that ``known`` belongs to.
    """

    tensors: Arrays
    known: Arrays | None = None
    generation: int = 0


@dataclass(frozen=True)
class Kept:
    """What a client finds at the start of a round.

    Attributes:
        model: The whole personal model: personal tensors of its own, the rest as received.
        known: As in `PersonalModel`.
        generation: As in `PersonalModel`.
        lost: Whether the client once had a state that is gone.
    """

    model: Arrays
    known: Arrays | None
    generation: int
    lost: bool


class Descent(NamedTuple):
    """A model that a client trains in a round."""

    start: Arrays
    pull: Pull


class Begun(NamedTuple):
    """A round of a personalised method before its training, which the package's loop takes, or one of a user's own.

    Each method's module has ``begin``, which gives it, and ``end``, which packs what came of the descents.
    """

    kept: Kept
    descents: tuple[Descent, ...]


def load_personal(work: ClientWork) -> Kept:
    """Load the personal model that the client's last folded reply left.

    Args:
        work: The round.

    Returns:
        The model; the received (LocalTrain: the initial) one if there is none.

    Raises:
        MessageError: The stored model has another architecture.
    """
    received = work.arrays or work.task.initial_arrays(work.settings.seed)
    stored = work.store.load(work.last_folded)
    if stored is None:
        return Kept(dict(received), None, 0, lost=work.last_folded > 0)
    own, known = _part(stored, MODEL), _part(stored, KNOWN)
    _check_fits(own, received, work.where)
    model = {name: own.get(name, value) for name, value in received.items()}
    return Kept(model, known or None, int(stored[GENERATION]), lost=False)


def save_personal(work: ClientWork, personal: PersonalModel) -> None:
    """Keep what this round leaves; it takes effect once the server has folded the reply.

    Args:
        work: The round.
        personal: The model, and what the server will hold of it.
    """
    state = {f"{MODEL}{name}": np.asarray(value) for name, value in personal.tensors.items()}
    state |= {f"{KNOWN}{name}": value for name, value in (personal.known or {}).items()}
    state[GENERATION] = np.array(personal.generation, dtype=np.int64)
    work.store.save(work.server_round, state, last_folded=work.last_folded)


@contextmanager
def stable_step(work: ClientWork, problem: LocalProblem, lam: float, step: float) -> Iterator[dict[str, float]]:
    """Watch whether descent on the loss with a pull is stable: a step of ``2/(L + lambda)`` or more is not.

    A client estimates ``L`` in its first round only: it costs six gradients, which training does not need.

    Args:
        work: The round.
        problem: The client's local problem.
        lam: ``lambda``.
        step: The step of the personal model.

    Yields:
        The metric `STEP_LIMIT` if the step is not below it.

    Raises:
        TaskError: The training inside diverged; the message says so if the step was not below the limit.
    """
    limit = np.inf
    if not work.last_folded:
        limit = 2 * safe_step(problem.rough_curvature(work.arrays, problem.names), lam)
    if step < limit:
        yield {}
        return
    try:
        yield {STEP_LIMIT: limit}
    except TaskError as error:
        do = "; ".join(filter(None, (error.do, unstable_step(limit))))
        raise TaskError(error.where, expected=error.expected, got=error.got, do=do) from error


def finish(
    work: ClientWork, kept: Kept, personal: Trained, content: RecordDict, metrics: Mapping[str, float] | None = None
) -> RecordDict:
    """Keep the personal model that a round leaves, and complete the reply.

    Args:
        work: The round.
        kept: What the client found at its start.
        personal: The personal model after training.
        content: The content of the reply.
        metrics: Further metrics.

    Returns:
        The same content.
    """
    save_personal(work, PersonalModel({**personal.arrays, **personal.buffers}))
    lost = {STORE_LOST: 1.0} if kept.lost else {}
    content.metric_records[METRICS].update({**lost, **(metrics or {})})
    return content


def evaluate_model(work: ClientWork) -> dict[str, float]:
    """Measure the received model on the client's own held-out data.

    Args:
        work: The round; its arrays are the model.

    Returns:
        ``validation-...`` and ``test-...``.
    """
    return _measure(work, work.arrays, "")


def evaluate(work: ClientWork) -> dict[str, float]:
    """Measure the personal and the global model on the client's own held-out data; nothing that training uses changes.

    After the last round the personal model is exported if the settings say so.

    Args:
        work: The round; its arrays are the global model, or empty for a method without one.

    Returns:
        ``personal-validation-...``, ``personal-test-...`` and, if there is one, the same of the global model as
        ``global-...``.
    """
    personal = load_personal(work).model
    metrics = _measure(work, personal, "personal-")
    if work.settings.own.export and work.server_round == work.settings.num_server_rounds:
        export_personal(work, personal, metrics)
    return metrics | (_measure(work, work.arrays, "global-") if work.arrays else {})


def evaluate_global(work: ClientWork) -> dict[str, float]:
    """Measure the global model, which is every client's personal one too.

    Args:
        work: The round; its arrays are the model.

    Returns:
        ``personal-...`` and ``global-...``, which are equal.
    """
    measured = _measure(work, work.arrays, "")
    return {f"{model}-{name}": value for model in ("personal", "global") for name, value in measured.items()}


def export_personal(work: ClientWork, model: Arrays, metrics: Mapping[str, float]) -> Path:
    """Write a personal model for use elsewhere: ``personal/<partition>.safetensors`` and ``<partition>.json``.

    Args:
        work: The round.
        model: The whole personal model.
        metrics: What it was measured at, for the manifest.

    Returns:
        Path of the model. The folder ``personal`` lies beside the stores of the experiment's clients; as they, it is for
        its owner only.
    """
    path = work.store.private_folder("personal") / f"{work.node.partition}.safetensors"
    aside = path.with_name(f".{path.name}.tmp")
    save_arrays(aside, model)
    aside.chmod(OWNER_ONLY)
    sync_file(aside)
    aside.replace(path)
    manifest: dict[str, Any] = {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "partition": work.node.partition,
        "num-partitions": work.node.num_partitions,
        "method": work.settings.method,
        "task": work.settings.task,
        "task-options": work.settings.task_options,
        "experiment": work.experiment,
        "round": work.server_round,
        "trained-in-round": work.last_folded,
        "num-examples": work.num_examples,
        "fedapps": fedapps.__version__,
        "tensors": {name: {"shape": list(value.shape), "dtype": str(value.dtype)} for name, value in model.items()},
        "metrics": dict(metrics),
    }
    write_atomically(path.with_suffix(".json"), to_json(manifest, indent=2) + "\n", mode=OWNER_ONLY)
    return path


def _measure(work: ClientWork, arrays: Arrays, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}{split}-{name}": value
        for split, data in (("validation", work.data.validation), ("test", work.data.test))
        for name, value in work.task.evaluate(arrays, data, work.device).items()
    }


def _part(stored: Mapping[str, np.ndarray], prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}


def _check_fits(own: Arrays, received: Arrays, where: str) -> None:
    for name, value in own.items():
        expected = received.get(name)
        if expected is None or (value.shape, value.dtype) != (expected.shape, expected.dtype):
            raise MessageError(
                f"{where}, stored personal model, tensor '{name}'",
                expected="none" if expected is None else f"shape {expected.shape} and dtype {expected.dtype}",
                got=f"shape {value.shape} and dtype {value.dtype}",
                do="it belongs to another architecture: start a new experiment, or put the client's state back",
            )
