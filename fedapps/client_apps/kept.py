"""What a client keeps over rounds beside its model: where it belongs to a sum of the server's, void once that starts anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.work import ClientWork
from fedapps.messages.schema import GENERATION, METRICS, STORE_LOST, Arrays


class Kept(NamedTuple):
    """What `load_kept` gives."""

    state: Arrays | None  # what the last folded reply left; None if there is none, or if it is void
    lost: bool  # whether there was a state that is gone


def load_kept(work: ClientWork) -> Kept:
    """Load what the client's last folded reply left."""
    stored = work.store.load(work.last_folded)
    lost = stored is None and work.last_folded > 0
    if stored is None or int(stored.pop(GENERATION)) != work.config.get(GENERATION, 0):
        return Kept(None, lost)
    return Kept(stored, lost)


def keep(work: ClientWork, kept: Kept, state: Mapping[str, np.ndarray], content: RecordDict) -> RecordDict:
    """Keep what this round leaves, which takes effect once the server has folded the reply, and say in it what was lost.

    Args:
        work: The round.
        kept: What the client found at its start.
        state: Name -> array.
        content: The content of the reply.

    Returns:
        The same content.
    """
    generation = np.array(work.config.get(GENERATION, 0), dtype=np.int64)
    work.store.save(work.server_round, {**state, GENERATION: generation}, last_folded=work.last_folded)
    if kept.lost:
        content.metric_records[METRICS][STORE_LOST] = 1.0
    return content
