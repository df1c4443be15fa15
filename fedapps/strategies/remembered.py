"""Which clients the server's sums over all of them hold, and when these sums start anew.

A client that has lost its store cannot take back what a sum holds of it. It says so in its reply, and the sum starts anew:
from the next round on every client's reply counts as its first, whatever it knew. Generations of the sum are counted, and a
client voids what it keeps of an older one (`fedapps.client_apps.kept`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedapps.messages.schema import GENERATION, STORE_LOST, Entries, Reply


class Remembered:
    """The clients that the server's sums hold.

    Attributes:
        generation: How often the sums have started anew.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._heard_of: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._folded: set[int] = set()
        self._lost = False

    @property
    def entries(self) -> Entries:
        """What a client is told in its message's ``config``."""
        return {GENERATION: self.generation}

    def is_first(self, reply: Reply) -> bool:
        """Tell whether a reply comes from a client without a past: one not heard of yet, or whose store is lost."""
        return reply.partition not in self._heard_of or STORE_LOST in reply.metrics

    def fold(self, reply: Reply) -> bool:
        """Take note of a reply, once it is known to be good.

        Returns:
            Whether the sums still stand.
        """
        self._folded.add(reply.partition)
        self._lost = self._lost or (STORE_LOST in reply.metrics and reply.partition in self._heard_of)
        return not self._lost

    @property
    def lost(self) -> bool:
        """Whether the sums start anew at the end of this round."""
        return self._lost

    def end(self) -> None:
        """End a round that counts."""
        self._heard_of = frozenset() if self._lost else self._heard_of | self._folded
        self.generation += self._lost

    def state(self) -> dict[str, Any]:
        """Give the plain state for a checkpoint."""
        return {GENERATION: self.generation, "heard-of": sorted(self._heard_of)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back the plain state of a checkpoint."""
        self.generation, self._heard_of = state[GENERATION], frozenset(state["heard-of"])
