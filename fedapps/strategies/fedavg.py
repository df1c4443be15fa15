r"""FedAvg: Flower's own strategy, with this package's sampling, checks, order, failure policy and checkpoint.

.. math:: \theta' = \sum_i p_i \theta_i

McMahan et al., AISTATS 2017, arXiv 1602.05629. `FlowerStrategyMixin` is for Flower's other first-order strategies as well.

Flower's strategies average whatever they are given: an integer counter would come out as a float, and FedAdam would
normalise running statistics. So they see only the trainable tensors; buffers follow this package's rule (floating: mean;
integer: maximum, dtype kept).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedapps.curvature.mixing import TensorSums, add_mean, finish_mean, start_mean
from fedapps.errors import MessageError, explain
from fedapps.records import (
    ARRAYS,
    METRICS,
    NUM_EXAMPLES,
    Arrays,
    Reply,
    check_complete,
    pack_arrays,
    unpack_arrays,
)
from fedapps.settings import Settings
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin


class FlowerStrategyMixin(RoundMixin):
    """Gives one of Flower's averaging strategies this package's rounds.

    Put it before the strategy in the list of bases. All replies of a round are kept until its end, since Flower aggregates
    a list.
    """

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """
        self._model = arrays
        self._replies: list[Message] = []
        self._buffers: TensorSums | None = None

    def fold(self, reply: Reply) -> None:
        """Keep the trainable tensors for Flower, and add the buffers to their sums.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: A tensor of the model is missing.
        """
        check_complete(reply, set(), self._model)
        weight = self.options.weight(reply.num_examples)
        # A client written for Flower sends its whole state dict as one record: counters are told by their dtype.
        trainable = {k: v for k, v in reply.arrays.items() if np.issubdtype(v.dtype, np.inexact)}
        buffers = {k: v for k, v in {**reply.arrays, **reply.buffers}.items() if k not in trainable}
        if self._buffers is None:
            self._buffers = start_mean(buffers)
        elif buffers.keys() != self._buffers.names:
            raise MessageError(
                explain(
                    reply.where,
                    expected=f"the buffers {sorted(self._buffers.names)} as from the other clients",
                    got=str(sorted(buffers)),
                    do="build the same model on every client",
                )
            )
        add_mean(self._buffers, weight, buffers, where=reply.where)
        content = RecordDict({ARRAYS: pack_arrays(trainable), METRICS: MetricRecord({NUM_EXAMPLES: weight})})
        self._replies.append(_as_message(content, reply.partition))

    def finish(self) -> Arrays:
        """Let Flower aggregate the trainable tensors.

        Returns:
            The new model, by name, in the order of the old one.
        """
        record, _ = self.aggregate_with_flower(self.report.server_round, self._replies)
        new = unpack_arrays(RecordDict({ARRAYS: record}), ARRAYS, "Flower's strategy")
        if self._buffers is not None:
            new |= finish_mean(self._buffers)
        self._replies, self._buffers = [], None
        return {name: new[name].astype(old.dtype, copy=False) for name, old in self._model.items()}

    def aggregate_with_flower(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        """Call the aggregation of Flower's strategy that stands behind this mixin.

        Args:
            server_round: The round.
            replies: Valid replies, in order of partition ids.

        Returns:
            What Flower's ``aggregate_train`` gives.
        """
        # RoundMixin overrides aggregate_train, so Flower's is the next one after it in the method resolution order.
        arrays, metrics = super(RoundMixin, self).aggregate_train(server_round, replies)  # type: ignore[misc]
        return arrays, metrics


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


class FedAvg(FlowerStrategyMixin, FlowerFedAvg):
    """Flower's FedAvg with this package's rounds.

    Args:
        options: The shared options.
        **flower: Further arguments of Flower's strategy.

    Example:
        >>> FedAvg(options=RoundOptions(seed=1, weighting="uniform")).options.seed
        1
    """

    def __init__(self, *, options: RoundOptions | None = None, **flower: Any) -> None:
        super().__init__(**flower)
        self.set_up_rounds(options or RoundOptions())

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> FedAvg:
        """Build the strategy of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The strategy.
        """
        return cls(options=RoundOptions.from_settings(settings, experiment))
