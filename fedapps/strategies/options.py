"""Options that every strategy shares: who takes part, how clients are weighted, what happens when some fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedapps.settings import Settings


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """How a strategy runs its rounds.

    Attributes:
        fraction_train: Share of the clients sampled in a round; at least one is.
        weighting: ``examples`` (``p_i = n_i / sum n``) or ``uniform``, over the replies that arrived.
        seed: Seed of the sampling.
        min_replies: Quorum: a round with fewer valid replies changes nothing.
        on_failure: ``tolerate`` goes on with the other clients, ``fail-fast`` raises.
        round_timeout: Seconds that a round waits for replies.
        node_wait: Seconds to wait for all clients to connect.
        num_clients: Number of clients where the nodes cannot say it, since their ClientApp has no query handler;
            0 = as many as are online, at least two.
        max_consecutive_failed_rounds: Rounds below the quorum in a row that end the run.
        fold_buffer_mb: MB of replies ahead of their turn kept in memory; more waits in a scratch file.
        max_message_mb: Largest message to send, MB of payload.
        evaluate_clients: Whether clients evaluate the model after each round.
        experiment: Identity of the experiment; clients file their state under it.
        method: Name of the method, for the handshake.
    """

    fraction_train: float = 1.0
    weighting: Literal["examples", "uniform"] = "examples"
    seed: int = 0
    min_replies: int = 1
    on_failure: Literal["tolerate", "fail-fast"] = "tolerate"
    round_timeout: float = 3600.0
    node_wait: float = 120.0
    num_clients: int = 0
    max_consecutive_failed_rounds: int = 3
    fold_buffer_mb: float = 256.0
    max_message_mb: float = 2000.0
    evaluate_clients: bool = True
    experiment: str = ""
    method: str = ""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: A value is out of range.
        """
        if not 0 < self.fraction_train <= 1:
            raise ValueError(f"fraction_train: expected a number in (0, 1], got {self.fraction_train}")
        if self.weighting not in ("examples", "uniform"):
            raise ValueError(f"weighting: expected 'examples' or 'uniform', got {self.weighting!r}")
        if self.on_failure not in ("tolerate", "fail-fast"):
            raise ValueError(f"on_failure: expected 'tolerate' or 'fail-fast', got {self.on_failure!r}")
        if self.min_replies < 1 or self.max_consecutive_failed_rounds < 1:
            raise ValueError("min_replies and max_consecutive_failed_rounds: expected at least 1")

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> RoundOptions:
        """Take the options from the settings of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The options.
        """
        return cls(
            fraction_train=settings.fraction_train,
            weighting=settings.weighting,
            seed=settings.seed,
            min_replies=settings.min_replies,
            on_failure=settings.on_failure,
            round_timeout=settings.round_timeout,
            node_wait=settings.node_wait,
            max_consecutive_failed_rounds=settings.max_consecutive_failed_rounds,
            fold_buffer_mb=settings.fold_buffer_mb,
            max_message_mb=settings.max_message_mb,
            evaluate_clients=settings.client_evaluation != "none" or settings.exports,
            experiment=experiment,
            method=settings.method,
        )

    def weight(self, num_examples: int) -> float:
        """Give the weight of a reply, up to the common factor that renormalisation cancels.

        Args:
            num_examples: Examples that the client trained on.

        Returns:
            ``n_i`` or 1.
        """
        return float(num_examples) if self.weighting == "examples" else 1.0


def sample_partitions(seed: int, server_round: int, num_partitions: int, fraction: float) -> list[int]:
    """Sample the clients of a round.

    A pure function of its arguments: extra evaluations, other draws and the number of workers do not change it.

    Args:
        seed: Seed of the run.
        server_round: Round, from 1.
        num_partitions: Number of clients ``N``.
        fraction: Share ``C`` to sample; ``max(1, round(C N))`` are.

    Returns:
        Partition ids in increasing order.
    """
    size = max(1, round(fraction * num_partitions))
    if size == num_partitions:
        return list(range(num_partitions))
    generator = np.random.default_rng([seed, server_round])
    return sorted(int(i) for i in generator.choice(num_partitions, size, replace=False))
