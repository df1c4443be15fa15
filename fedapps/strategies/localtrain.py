"""LocalTrain's server: it asks for metrics, and that is all. The baseline of clients that share nothing."""

from __future__ import annotations

from typing_extensions import override

from fedapps.errors import MessageError
from fedapps.messages.method_facts import tell_method
from fedapps.messages.schema import ARRAYS, Arrays, Entries, Records, Reply
from fedapps.strategies.base import RoundStrategy


class LocalTrain(RoundStrategy):
    """No model travels in either direction; the server's stays the initial one.

    Example:
        >>> LocalTrain().records_for(0, 0, {})
        {'arrays': {}}
    """

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Send nothing: every client starts from the initial model of the task, which it builds itself."""
        return {ARRAYS: {}}

    @override
    def told_clients(self) -> Entries:
        return tell_method("localtrain")

    @override
    def begin(self, model: Arrays) -> None:
        self._model = model

    @override
    def fold(self, reply: Reply) -> None:
        """Check that the client kept its model to itself."""
        if reply.arrays or reply.buffers:
            raise MessageError(
                reply.where,
                expected="metrics only",
                got=f"{len(reply.arrays) + len(reply.buffers)} tensors",
                do="use fedapps.client_apps.localtrain.train",
            )

    @override
    def finish(self) -> Arrays:
        return self._model
