"""Ditto's server (arXiv 2012.04221, Algorithm 1): FedAvg over the clients' copies of the global model."""

from __future__ import annotations

from typing_extensions import override

from fedapps.messages.method_facts import tell_method
from fedapps.messages.schema import Entries, Reply
from fedapps.strategies.fedavg import FedAvg
from fedapps.strategies.pfedme import warn_of_step


class Ditto(FedAvg):
    """FedAvg that warns of clients whose personal models take unstable steps."""

    @override
    def told_clients(self) -> Entries:
        return tell_method("ditto")

    @override
    def fold(self, reply: Reply) -> None:
        super().fold(reply)
        warn_of_step(self, reply)
