r"""LocalNewton: local second-order steps, simple mixing.

.. math:: \theta' = \sum_i p_i \theta_i

Gupta et al. 2021, arXiv 2105.07320. The client is FedPM's; only the mixing differs, so the two show what the
preconditioned mixing is worth. With candidate steps ``S`` a global line search follows (Bischoff et al., arXiv 2109.02388):

.. math:: \theta' = \theta + s^* d, \qquad d = \sum_i p_i \theta_i - \theta, \qquad
          s^* = \arg\min_{s \,\in\, S \cup \{0\}} \sum_i p_i f_i(\theta + s\, d)

in a second exchange of the same round, with the clients whose models are in the mean: ``theta`` and ``d`` go down, one loss a
candidate comes up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedapps.curvature.line_search import along, choose_step
from fedapps.curvature.mixing import TensorSums, add_mean, finish_mean, start_mean
from fedapps.errors import MessageError
from fedapps.records import (
    ARRAYS,
    CONFIG,
    DIRECTION,
    LINE_SEARCH,
    LOSSES,
    STEPS,
    Arrays,
    Reply,
    check_complete,
    check_size,
    pack_arrays,
)
from fedapps.settings import Settings
from fedapps.strategies.exchange import exchange
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin

logger = getLogger("flwr")


@dataclass
class _Search:
    """The line search of a round.

    Attributes:
        start: The model at step 0: the old parameters, and the buffers of the mean.
        direction: Name -> mean minus old value, of every parameter.
        asked: Partitions that were asked.
        answers: Partition -> its losses at step 0 and at the candidates; None for one that failed.
    """

    start: Arrays
    direction: Arrays
    asked: list[int]
    answers: dict[int, list[float] | None] = field(default_factory=dict)

    @property
    def losses(self) -> dict[int, list[float]]:
        """The usable answers."""
        return {partition: losses for partition, losses in self.answers.items() if losses is not None}


class LocalNewton(RoundMixin, Strategy):
    """The weighted mean of the clients' models; integer buffers take the maximum.

    Args:
        options: The shared options.
        steps: Candidates of the line search, > 0; without any the step is 1.

    Example:
        >>> LocalNewton(options=RoundOptions(weighting="uniform"), steps=(1.0, 0.5)).steps
        (1.0, 0.5)
    """

    def __init__(self, *, options: RoundOptions | None = None, steps: Sequence[float] = ()) -> None:
        self.set_up_rounds(options or RoundOptions())
        self.steps = tuple(steps)
        self._search: _Search | None = None
        self._grid: Grid | None = None

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> LocalNewton:
        """Build the strategy of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The strategy.
        """
        return cls(options=RoundOptions.from_settings(settings, experiment), steps=settings.own.steps)

    # The mean --------------------------------------------------------------------------------

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """
        self._model = arrays
        self._sums: TensorSums = start_mean(arrays)
        self._weights: dict[int, float] = {}
        self._parameters: set[str] = set()
        self._search = None

    def fold(self, reply: Reply) -> None:
        """Add the client's model to the sums.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: A tensor of the model is missing.
        """
        check_complete(reply, set(), self._model)
        weight = self.options.weight(reply.num_examples)
        add_mean(self._sums, weight, {**reply.arrays, **reply.buffers}, where=reply.where)
        self._weights[reply.partition] = weight
        self._parameters |= {k for k, v in reply.arrays.items() if np.issubdtype(v.dtype, np.floating)}

    def finish(self) -> Arrays:
        """Take the mean, or the step of the line search.

        Returns:
            The new model, by name, in the order of the old one.
        """
        if self._search is None:
            if self.steps:
                self.note("no line search, since only one exchange a round is possible here: the step is 1")
            new = finish_mean(self._sums)
            return {name: new[name] for name in self._model}
        search, self._search = self._search, None
        chosen = choose_step(self.steps, search.losses, self._weights)
        self.report.values |= {
            "line-search-step": chosen.step,
            "line-search-loss": chosen.loss,
            "line-search-start-loss": chosen.start_loss,
        }
        return along(search.start, search.direction, chosen.step)

    # The line search -------------------------------------------------------------------------

    def take_resends(self) -> list[Message]:
        """Compose the messages of the line search, once the first replies are in.

        Returns:
            One message for each client whose model is in the mean; none without candidates, below the quorum, or if the
            clients were asked already.

        Raises:
            MessageError: A message is larger than ``max_message_mb``.
        """
        if not self.steps or self._search is not None or self._order is None:
            return []
        self._give_up_waiting()
        asked = [partition for partition in self.report.folded if partition in self._messages]
        if not asked or self._num_valid() < self.options.min_replies:
            return []
        mean = finish_mean(self._sums)
        start = {name: old if name in self._parameters else mean[name] for name, old in self._model.items()}
        direction = {name: mean[name] - old for name, old in self._model.items() if name in self._parameters}
        self._search = _Search(start, direction, asked)
        shared = RecordDict(
            {
                ARRAYS: pack_arrays(start),
                DIRECTION: pack_arrays(direction),
                LINE_SEARCH: ConfigRecord({STEPS: list(self.steps)}),
            }
        )
        check_size(shared, self.options.max_message_mb)
        self._messages = {partition: self._ask(self._messages[partition], shared) for partition in asked}
        return list(self._messages.values())

    def _ask(self, sent: Message, shared: RecordDict) -> Message:
        return Message(
            RecordDict({**shared, CONFIG: sent.content[CONFIG]}),
            dst_node_id=sent.metadata.dst_node_id,
            message_type=MessageType.TRAIN,
            group_id=sent.metadata.group_id,
            ttl=sent.metadata.ttl,
        )

    def receive(self, partition: int, content: RecordDict | None, error: str = "") -> None:
        """Take the reply of a client: its model, or in the line search its losses.

        A client without usable losses stays in the mean, but has no say in the step.

        Args:
            partition: Partition id of the client.
            content: The content of its reply; None if it failed.
            error: Why it failed.

        Raises:
            RoundFailedError: The client failed and the policy is ``fail-fast``.
        """
        if self._search is None:
            super().receive(partition, content, error)
            return
        if partition not in self._awaited():
            logger.warning("client %d: an answer that nobody waits for is ignored", partition)
            return
        losses = None
        if content is not None:
            try:
                losses = read_losses(content, len(self.steps), f"client {partition}")
            except MessageError as problem:
                error = str(problem)
        if losses is None:
            self._refuse(partition, f"line search: {error}")
        self._search.answers[partition] = losses

    def _awaited(self) -> list[int]:
        if self._search is None:
            return super()._awaited()
        return [partition for partition in self._search.asked if partition not in self._search.answers]

    def _num_valid(self) -> int:
        return super()._num_valid() if self._search is None else len(self._search.losses)

    # Under Flower's own loop -----------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose the messages of a round, as `RoundMixin` does, and keep the grid for the line search.

        Args:
            server_round: The round, from 1.
            arrays: The model.
            config: Entries to send to every client.
            grid: Flower's grid.

        Returns:
            One message for each sampled partition.
        """
        self._grid = grid
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold all replies of a round, and hold the line search: Flower's own loop knows one exchange a round.

        Args:
            server_round: The round.
            replies: The replies, in any order.

        Returns:
            The new model and the mean train metrics, or None twice if the round is below the quorum.

        Raises:
            RoundFailedError: As the failure policy says.
        """
        for reply in replies:
            self.receive_message(reply)
        if self._grid is not None:
            for answer in exchange(self._grid, self.take_resends(), self.options.round_timeout):
                self.receive_message(answer)
        return super().aggregate_train(server_round, ())


def read_losses(content: RecordDict, num_steps: int, where: str) -> list[float]:
    """Read a client's answer to the line search.

    Args:
        content: The content of its reply.
        num_steps: Number of candidates.
        where: Whose reply it is, for messages.

    Returns:
        Its loss at step 0, then at every candidate; infinity or NaN where the candidate is no good.

    Raises:
        MessageError: The record is absent or malformed, or the loss at step 0 is not finite.
    """
    record = content.get(LINE_SEARCH)
    losses = record.get(LOSSES) if isinstance(record, ConfigRecord) else None
    if (
        not isinstance(losses, list)
        or len(losses) != num_steps + 1
        or not all(isinstance(loss, float) for loss in losses)
        or not np.isfinite(losses[0])
    ):
        raise MessageError(
            f"{where}, entry '{LOSSES}' of record '{LINE_SEARCH}'",
            expected=f"{num_steps + 1} numbers, the first finite",
            got=repr(losses)[:200],
            do="reply with fedapps.client_apps.localnewton.losses_along",
        )
    return [float(loss) for loss in losses]
