"""LocalTrain's server: it asks for metrics, and that is all. The baseline of clients that share nothing."""

from __future__ import annotations

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedapps.errors import MessageError
from fedapps.records import Arrays, Reply
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin


class LocalTrain(RoundMixin, Strategy):
    """No model travels in either direction; the server's stays the initial one.

    Args:
        options: The shared options.

    Example:
        >>> LocalTrain(options=RoundOptions(fraction_train=0.5)).options.fraction_train
        0.5
    """

    def __init__(self, *, options: RoundOptions | None = None) -> None:
        self.set_up_rounds(options or RoundOptions())

    def arrays_to_send(self, arrays: ArrayRecord) -> ArrayRecord:
        """Send nothing: every client starts from the initial model of the task, which it builds itself.

        Args:
            arrays: The model.

        Returns:
            An empty record.
        """
        return ArrayRecord({})

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The server's model, by name.
        """
        self._model = arrays

    def fold(self, reply: Reply) -> None:
        """Check that the client kept its model to itself.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: It has tensors.
        """
        if reply.arrays or reply.buffers:
            raise MessageError(
                reply.where,
                expected="metrics only",
                got=f"{len(reply.arrays) + len(reply.buffers)} tensors",
                do="use fedapps.client_apps.localtrain.train",
            )

    def finish(self) -> Arrays:
        """Leave the server's model as it is.

        Returns:
            The model.
        """
        return self._model
