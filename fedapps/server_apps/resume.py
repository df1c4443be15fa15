"""Which run may be resumed, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger

import fedapps
from fedapps.errors import CheckpointError
from fedapps.methods import Method, method_groups
from fedapps.results.checkpoint import Checkpoint, MadeWith
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.settings import AUTO, Scalar, Settings, default_config, flatten
from fedapps.tasks.base import Task

logger = getLogger("flwr")

MAY_CHANGE = frozenset(
    {
        "num-server-rounds", "run-dir", "resume", "device", "round-timeout", "node-wait", "min-replies", "on-failure",
        "max-consecutive-failed-rounds", "fold-buffer-mb", "max-message-mb", "evaluate-every", "client-evaluation",
        "data-dir", "accept-changes", "second-node", "min-available-nodes", "collect-mb",
    }
)  # fmt: skip
"""Settings that a resume may change; any other would make another experiment."""


def load_checkpoint(
    folder: RunFolder, settings: Settings, method: Method, task: Task, *, arrays: bool = True
) -> tuple[Checkpoint, list[str]]:
    """Load the checkpoint that a run goes on from, and compare what it was made with; changes nothing on disk.

    Args:
        folder: The run folder.
        settings: The settings of the resumed run.
        method: Its method.
        task: Its task.
        arrays: Whether to read the checkpoint's arrays; else they are left empty.

    Returns:
        The checkpoint, and what differs although ``accept-changes`` goes on with it.

    Raises:
        CheckpointError: There is none, it is another experiment's, its rounds are done, or something differs.
    """
    checkpoint = folder.load_checkpoint(arrays=arrays)
    now = flatten(settings, method.group)
    then = checkpoint.made_with.settings if checkpoint.made_with else folder.read_settings()
    changes = _changed_settings(then, now)
    if checkpoint.made_with is None:
        logger.warning(
            "%s: the checkpoint is of a version that noted neither version, data nor journal; these are not compared",
            folder.path,
        )
    else:
        changes += _other_changes(checkpoint, checkpoint.made_with, folder, task)
    where = f"resume of {folder.path}"
    if changes and not settings.accept_changes:
        raise CheckpointError(
            where,
            expected="what the run was made with",
            got="; ".join(changes[:5]),
            do="leave it as it was, start a new run, or go on all the same with --accept-changes",
        )
    total, done = settings.num_server_rounds, checkpoint.server_round
    if settings.lr_schedule == "cosine" and total != then["num-server-rounds"] and not settings.accept_changes:
        raise CheckpointError(
            where,
            expected=f"num-server-rounds = {then['num-server-rounds']}, since the cosine schedule runs over it",
            got=str(total),
            do="keep the total, or use another schedule from the start",
        )
    # A run that was killed after its last checkpoint lacks its end: model and summary.
    if done > total or (done == total and _has_ended(folder)):
        raise CheckpointError(
            where,
            expected=f"more than {done} rounds, since those are done",
            got=f"num-server-rounds = {total} (it is the total)",
            do="raise --rounds",
        )
    return checkpoint, changes


def _has_ended(folder: RunFolder) -> bool:
    return (folder.read_summary() or {}).get("status") == RunStatus.COMPLETED and folder.model_path.exists()


def _changed_settings(then: Mapping[str, Scalar], now: Mapping[str, Scalar]) -> list[str]:
    defaults = default_config(method_groups())

    def differs(key: str) -> bool:
        if key not in then:  # The version that the run was started with did not know it.
            return defaults.get(key) not in (now[key], AUTO)
        return then[key] != now.get(key)

    changed = (key for key in then.keys() | now.keys() if key not in MAY_CHANGE and differs(key))
    # Shared keys first: another method has other keys, too.
    in_order = sorted(changed, key=lambda k: ("." in k, k))
    return [f"{k} = {now.get(k)!r} where it was {then.get(k)!r}" for k in in_order]


def _other_changes(checkpoint: Checkpoint, then: MadeWith, folder: RunFolder, task: Task) -> list[str]:
    changes = []
    if then.version != fedapps.__version__:
        changes.append(f"fedapps {fedapps.__version__} where it was {then.version}")
    data = task.server_checksums()
    for part in sorted(then.data.keys() | data.keys()):
        before, after = then.data.get(part, "none"), data.get(part, "none")
        if before != after:
            changes.append(f"data '{part}' with checksum {after[:16]} where it was {before[:16]}")
    journal = folder.journal_sum(checkpoint.server_round)
    if journal != then.journal:
        changes.append(f"{folder.journal_path.name} with checksum {journal[:16]} where it was {then.journal[:16]}")
    return changes
