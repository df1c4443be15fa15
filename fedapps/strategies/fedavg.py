r"""FedAvg: Flower's own strategy, with this package's sampling, checks, order, failure policy and checkpoint.

.. math:: \theta' = \sum_i p_i \theta_i

McMahan et al., AISTATS 2017, arXiv 1602.05629. `FlowerStrategy` is for Flower's other first-order strategies as well.

Flower's strategies average whatever they are given: an integer counter would come out as a float, and FedAdam would
normalise running statistics, so that a variance can become negative. So they see only the trainable tensors; buffers
follow this package's rule (floating: mean; integer: maximum, dtype kept).
"""

from __future__ import annotations

from logging import getLogger
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from typing_extensions import override

from fedapps.averaging import TensorSums, add_mean, finish_mean, start_mean
from fedapps.errors import MessageError
from fedapps.messages.schema import (
    ARRAYS,
    METRICS,
    NUM_EXAMPLES,
    Arrays,
    Reply,
    check_complete,
    pack_arrays,
    unpack_arrays,
)
from fedapps.settings import RoundSettings
from fedapps.strategies.base import RoundStrategy
from fedapps.strategies.words import own_words

logger = getLogger("flwr")

BATCH_NORM_BUFFERS = ("running_mean", "running_var")
"""Last part of the names of floating buffers that torch's batch and instance normalisation keep."""


class FlowerStrategy(RoundStrategy):
    """Gives one of Flower's averaging strategies this package's rounds.

    All replies of a round are kept until its end, since Flower aggregates a list. A strategy that keeps state over rounds
    implements `set_model`, `state_arrays` and `load_state_arrays`; its state changes in rounds above the quorum only, since
    Flower is called at their end.

    Args:
        settings: As `RoundStrategy`.
        **words: As `RoundStrategy`, and the further arguments of Flower's strategy, by its own names.

    Attributes:
        flower: Flower's strategy.
    """

    FLOWER: ClassVar[type[FlowerFedAvg]] = FlowerFedAvg
    """Flower's class."""

    def __init__(self, settings: RoundSettings | None = None, **words: Any) -> None:
        further = own_words(self.FLOWER) - own_words(FlowerFedAvg)
        flower = {word: value for word, value in words.items() if word in further}
        super().__init__(settings, **{word: value for word, value in words.items() if word not in further})
        self.flower: Any = self.FLOWER(**flower)
        self._arguments = flower

    @override
    def summary(self) -> None:
        super().summary()
        logger.info("%s %s", type(self).__name__, self._arguments)

    @override
    def begin(self, model: Arrays) -> None:
        self._model = model
        self._replies: list[Message] = []
        self._buffers: TensorSums | None = None

    @override
    def fold(self, reply: Reply) -> None:
        """Keep the trainable tensors for Flower, and add the buffers to their sums."""
        check_complete(reply, set(), self._model)
        weight = self.settings.weight(reply.num_examples)
        buffers = {k: v for k, v in {**reply.arrays, **reply.buffers}.items() if self._is_buffer(k, v, reply)}
        # In the order of the model, whatever the client's: Flower's FedAvgM matches tensors by position.
        trainable = {name: reply.arrays[name] for name in self._model if name not in buffers}
        if self._buffers is None:
            self._buffers = start_mean(buffers)
        elif buffers.keys() != self._buffers.names:
            raise MessageError(
                reply.where,
                expected=f"the buffers {sorted(self._buffers.names)} as from the other clients",
                got=str(sorted(buffers)),
                do="build the same model on every client",
            )
        add_mean(self._buffers, weight, buffers, where=reply.where)
        content = RecordDict({ARRAYS: pack_arrays(trainable), METRICS: MetricRecord({NUM_EXAMPLES: weight})})
        self._replies.append(_as_message(content, reply.partition))

    @override
    def finish(self) -> Arrays:
        """Let Flower aggregate the trainable tensors."""
        buffers = self._buffers.names if self._buffers is not None else set()
        self.set_model({name: value for name, value in self._model.items() if name not in buffers})
        record, _ = self.flower.aggregate_train(self.rounds.report.server_round, self._replies)
        new = unpack_arrays(RecordDict({ARRAYS: record}), ARRAYS, "Flower's strategy")
        if self._buffers is not None:
            new |= finish_mean(self._buffers)
        self._replies, self._buffers = [], None
        return {name: new[name].astype(old.dtype, copy=False) for name, old in self._model.items()}

    def _is_buffer(self, name: str, value: np.ndarray, reply: Reply) -> bool:
        if self.trainable is not None:
            return name not in self.trainable
        # A client written for Flower sends its state dict as one.
        return (
            name in reply.buffers
            or not np.issubdtype(value.dtype, np.inexact)
            or name.rpartition(".")[2] in BATCH_NORM_BUFFERS
        )

    def set_model(self, arrays: Arrays) -> None:
        """Tell Flower's strategy the model that was sent out, as its own ``configure_train`` would; nothing by default.

        Args:
            arrays: The trainable tensors, by name.
        """


def _as_message(content: RecordDict, partition: int) -> Message:
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=partition,
        dst_node_id=0,
        reply_to_message_id="",
        group_id="",
        created_at=0.0,
        ttl=1.0,
        message_type="train",
    )
    message: Message = Message(metadata=metadata, content=content)  # type: ignore[call-overload]
    return message


class FedAvg(FlowerStrategy):
    """Flower's FedAvg with this package's rounds; arguments as `FlowerStrategy`.

    Example:
        >>> FedAvg(RoundSettings(seed=1, weighting="uniform")).settings.seed
        1
    """
