"""A line search in a second exchange of the round: what goes out, what comes back, and what the row of the round says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fedapps.curvature.line_search import Chosen, along
from fedapps.messages.line_search import read_losses, search_records
from fedapps.messages.schema import Arrays, Reply
from fedapps.strategies.rounds import FollowUp, Rounds

ONE_EXCHANGE = "no line search, since only one exchange a round is possible here: the step is 1"


@dataclass
class LineSearch:
    """The line search of a round.

    Attributes:
        start: The model at step 0: the old parameters, and the buffers of the mean.
        direction: Name -> direction, of every parameter.
        steps: Candidates, > 0.
        losses: Partition -> its losses at step 0 and at the candidates.
    """

    start: Arrays
    direction: Arrays
    steps: Sequence[float]
    losses: dict[int, list[float]] = field(default_factory=dict)

    def ask(self, partitions: Iterable[int]) -> FollowUp:
        """Ask clients for their losses; one without usable losses has no say in the step."""
        return FollowUp(
            "line search", dict.fromkeys(partitions, search_records(self.start, self.direction, self.steps))
        )

    def take(self, answer: Reply) -> None:
        """Take the losses of a client."""
        self.losses[answer.partition] = read_losses(answer, len(self.steps))

    def moved(self, choose: Callable[[dict[int, list[float]]], Chosen], rounds: Rounds) -> Arrays:
        """Choose the step from the losses, note it in the round's row, and go that far."""
        chosen = choose(self.losses)
        rounds.report.values |= {
            "line-search-step": chosen.step,
            "line-search-loss": chosen.loss,
            "line-search-start-loss": chosen.start_loss,
        }
        return along(self.start, self.direction, chosen.step)
