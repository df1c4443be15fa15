"""Errors compose themselves: where, expected, got, what to do; and survive the way from a worker process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fedapps.errors import FedAppsError, MessageError, SettingsError, TaskError, did_you_mean
from fedapps.methods import get_method
from fedapps.tasks import task_class


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


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("no_such_package.tasks", ["folder that holds 'no_such_package'", "every SuperNode's", "shipped with the run"]),
        ("needs_another", ["install 'no_such_dependency', which it imports", "every SuperNode's"]),
        ("is_wrong", ["correct the module"]),
    ],
)
def test_a_module_that_cannot_be_imported_says_what_to_install_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, told: list[str]
) -> None:
    """By the task and by the method; nodes tell the advice only, since what came may be the content of a file."""
    (tmp_path / "needs_another.py").write_text("import no_such_dependency.part\n")
    (tmp_path / "is_wrong.py").write_text("1 +\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TaskError) as of_task:
        task_class(f"{module}:X")
    if module == "is_wrong":
        assert told[0] in of_task.value.outside()
        return
    with pytest.raises(SettingsError) as of_method:
        get_method(f"{module}:X")
    for error in (of_task.value, of_method.value):
        assert all(part in error.outside() for part in told), error.outside()
