"""Errors compose themselves: where, expected, got, what to do; and survive the way from a worker process."""

from __future__ import annotations

import pickle

import pytest

from fedapps.errors import FedAppsError, MessageError, did_you_mean


@pytest.mark.parametrize(
    ("where", "do", "text"),
    [
        ("layer 'fc1'", "fold the bias", "layer 'fc1': expected 5, got 6; fold the bias"),
        ("", "fold the bias", "expected 5, got 6; fold the bias"),
        ("layer 'fc1'", "", "layer 'fc1': expected 5, got 6"),
    ],
    ids=["whole", "no-place", "no-advice"],
)
def test_an_error_is_one_sentence(where: str, do: str, text: str) -> None:
    assert str(MessageError(where, expected="5", got="6", do=do)) == text


def test_a_sentence_of_ones_own_stays_as_it_is() -> None:
    assert str(FedAppsError("round 3 failed")) == "round 3 failed"


def test_an_error_passes_between_processes() -> None:
    """Worker processes pickle what they raise."""
    error = MessageError("client 1", expected="a model", got="nothing", do="send one")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (MessageError, str(error))


def test_the_nearest_known_name_is_advised() -> None:
    assert did_you_mean("fedpn", ["fedavg", "fedpm"]) == "did you mean 'fedpm'?"
    assert did_you_mean("zzz", ["fedavg", "fedpm"], "see the list") == "see the list"
