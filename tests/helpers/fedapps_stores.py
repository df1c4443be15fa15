"""What nodes have on disk."""

from __future__ import annotations

from pathlib import Path

from fedapps.results.replay import replay
from fedapps.zeroth_order.journal import Journal
from fedapps.zeroth_order.store import Store


def replica_round(run: Path, state: Path) -> int:
    """The round of a node's replica; its state is the journal's at that round."""
    journal = Journal.read(run / "journal.jsonl")
    [folder] = (state / "replicas").iterdir()
    with Store(folder, journal.header, lambda: {}) as store:
        expected = replay(run / "journal.jsonl", run / "initial.safetensors", store.replica.round)
        assert store.replica.fingerprint() == expected.fingerprint
        return store.replica.round
