"""What a number about a run is of: which model, measured on whose data. Numbers of two views never share a column or curve."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class View:
    """A model on data."""

    model: Literal["global", "personal"]  # the one that all share, or each client's own
    data: Literal["server", "clients"]  # whose examples
    split: Literal["test", "validation"]
    prefixes: tuple[str, ...]  # of its metrics in ``metrics.jsonl``; a run has those of one of them

    def key(self, metric: str, held: Container[str]) -> str | None:
        """Name a metric of this view in ``metrics.jsonl``.

        Args:
            metric: What is measured, such as ``accuracy``.
            held: The keys that a run has.

        Returns:
            The first key that the run has; None if it has none.
        """
        return next((f"{prefix}-{metric}" for prefix in self.prefixes if f"{prefix}-{metric}" in held), None)


GLOBAL_ON_SERVER = View("global", "server", "test", ("test",))
GLOBAL_ON_CLIENTS = View("global", "clients", "test", ("client-global-test", "client-test"))
PERSONAL = View("personal", "clients", "test", ("client-personal-test",))

TEST_VIEWS = (GLOBAL_ON_SERVER, GLOBAL_ON_CLIENTS, PERSONAL)
"""What tables and figures report."""

VALIDATION_VIEWS = (
    View("global", "server", "validation", ("validation",)),
    View("global", "clients", "validation", ("client-global-validation", "client-validation")),
    View("personal", "clients", "validation", ("client-personal-validation",)),
)
"""What choices are made on; reported only where nothing was tested."""


@dataclass(frozen=True)
class Measure:
    """A column of a table, a curve of a figure: a metric of a view."""

    metric: str
    view: View
    clients: str = ""  # how many clients a mean is over, such as "10"; "" for the server's data, or if it is not known

    @property
    def key(self) -> str:
        """Name for programs, such as ``personal-clients-test-accuracy``."""
        return f"{self.view.model}-{self.view.data}-{self.view.split}-{self.metric}"

    @property
    def title(self) -> str:
        """Name for people: metric, model and data."""
        return f"{self.metric}, {self.where}"

    @property
    def where(self) -> str:
        """Model and data for people; of clients it is the mean over them."""
        model = "global model" if self.view.model == "global" else "personal models"
        whose = f"{self.clients} clients" if self.clients else "the clients"
        owner = "server's " if self.view.data == "server" else ""
        return f"{model}, {owner}{self.view.split} data" + (f" of {whose}" if self.view.data == "clients" else "")
