"""Which run may be resumed, and with which settings."""

from __future__ import annotations

from fedapps.errors import CheckpointError
from fedapps.methods import Method
from fedapps.results.checkpoint import Checkpoint
from fedapps.results.run_folder import RunFolder
from fedapps.settings import Settings, flatten

MAY_CHANGE = frozenset(
    {
        "num-server-rounds", "run-dir", "resume", "device", "round-timeout", "node-wait", "min-replies", "on-failure",
        "max-consecutive-failed-rounds", "fold-buffer-mb", "max-message-mb", "evaluate-every", "client-evaluation",
        "data-dir",
    }
)  # fmt: skip
"""Settings that a resume may change; any other would make another experiment."""


def load_checkpoint(folder: RunFolder, settings: Settings, method: Method) -> Checkpoint:
    """Load the checkpoint that a run goes on from.

    Args:
        folder: The run folder.
        settings: The settings of the resumed run.
        method: Its method.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: There is none, it is another experiment's, or its rounds are done.
    """
    checkpoint = folder.load_checkpoint()
    before, now = folder.read_settings(), flatten(settings, method.group)
    changed = sorted(
        (k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and k not in MAY_CHANGE),
        key=lambda k: ("." in k, k),  # shared keys first: another method has other keys, too
    )
    if changed:
        raise CheckpointError(
            f"resume of {folder.path}",
            expected="the settings of the run",
            got=", ".join(f"{k} = {now.get(k)!r} where it was {before.get(k)!r}" for k in changed[:5]),
            do="leave them as they were, or start a new run",
        )
    total = settings.num_server_rounds
    if settings.lr_schedule == "cosine" and total != before["num-server-rounds"]:
        raise CheckpointError(
            f"resume of {folder.path}",
            expected=f"num-server-rounds = {before['num-server-rounds']}, since the cosine schedule runs over it",
            got=str(total),
            do="keep the total, or use another schedule from the start",
        )
    if checkpoint.server_round >= total:
        raise CheckpointError(
            f"resume of {folder.path}",
            expected=f"more than {checkpoint.server_round} rounds, since those are done",
            got=f"num-server-rounds = {total} (it is the total)",
            do="raise --rounds",
        )
    return checkpoint
