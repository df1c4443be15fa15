"""A second exchange (LocalNewton, FedNL): a direction and candidate steps go down, the client's losses along it come up.

===============  =============================================================================================
record           content
===============  =============================================================================================
``direction``    down: mean minus old value of every parameter; ``arrays`` is the model at step 0
``line-search``  down: ``steps``, the candidates
``line-search``  up: ``losses`` of the client's training data at step 0 and at the candidates; no other record
===============  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedapps.errors import MessageError
from fedapps.messages.schema import ARRAYS, DIRECTION, Arrays, Records, Reply

LINE_SEARCH = "line-search"
STEPS = "steps"
LOSSES = "losses"


def search_records(start: Arrays, direction: Arrays, steps: Sequence[float]) -> Records:
    """Give what a client receives.

    Args:
        start: The model at step 0.
        direction: Name -> direction, of every parameter.
        steps: The candidates.

    Returns:
        The records.
    """
    return {ARRAYS: start, DIRECTION: direction, LINE_SEARCH: {STEPS: list(steps)}}


def pack_losses(losses: Sequence[float]) -> RecordDict:
    """Pack a client's answer: its loss at step 0, then at every candidate."""
    return RecordDict({LINE_SEARCH: ConfigRecord({LOSSES: list(losses)})})


def read_losses(answer: Reply, num_steps: int) -> list[float]:
    """Read a client's answer.

    Args:
        answer: The answer.
        num_steps: Number of candidates.

    Returns:
        Its loss at step 0, then at every candidate; infinity or NaN where the candidate is no good.

    Raises:
        MessageError: The record is absent or malformed, or the loss at step 0 is not finite.
    """
    losses = answer.entries.get(LINE_SEARCH, {}).get(LOSSES)
    if (
        not isinstance(losses, list)
        or len(losses) != num_steps + 1
        or not all(isinstance(loss, float) for loss in losses)
        or not np.isfinite(losses[0])
    ):
        raise MessageError(
            f"{answer.where}, entry '{LOSSES}' of record '{LINE_SEARCH}'",
            expected=f"{num_steps + 1} numbers, the first finite",
            got=repr(losses)[:200],
            do="reply with fedapps.client_apps.localnewton.losses_along",
        )
    return [float(loss) for loss in losses]
