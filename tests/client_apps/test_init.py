"""What holds for the client of every method."""

from __future__ import annotations

import inspect

import pytest

from fedapps.methods import METHODS, Method


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_strategy_and_its_client_have_the_same_file_name(method: Method) -> None:
    """Where one side is FedAvg's, the other alone has a file."""
    server, client = (reference.partition(":")[0].rpartition(".")[2] for reference in (method.strategy, method.client))
    assert server == client or "fedavg" in (server, client)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_client_is_a_function_of_the_round(method: Method) -> None:
    train = method.load_client()
    assert train.__name__ == "train"
    assert list(inspect.signature(train).parameters) == ["work"]
