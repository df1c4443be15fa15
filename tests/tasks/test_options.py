from __future__ import annotations

import pytest

from fedapps.errors import TaskError
from fedapps.tasks.options import Option, resolve_options

KNOWN = {"examples": Option(100, "number of examples"), "rate": Option(0.5, "a rate"), "word": Option("a", "text")}


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({}, {"examples": 100, "rate": 0.5, "word": "a"}),
        ({"examples": 7, "rate": 2}, {"examples": 7, "rate": 2.0, "word": "a"}),
    ],
    ids=["defaults", "given"],
)
def test_options(given, resolved):
    options = resolve_options("made", KNOWN, given)
    assert options == resolved
    assert [type(v) for v in options.values()] == [int, float, str]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exampels": 3}, "option 'exampels'.*did you mean 'examples'"),
        ({"zzz": 3}, "one of examples, rate, word.*remove it from task-options"),
        ({"examples": 3.0}, r"option 'examples': expected a value of type int \(number of examples\), got 3.0"),
        ({"examples": True}, "expected a value of type int.*got True"),
        ({"word": 3}, "expected a value of type str.*got 3"),
        ({"rate": "x"}, "expected a value of type float.*got 'x'; write for example rate = 0.5"),
    ],
    ids=["misspelt", "unknown", "float-for-int", "bool-for-int", "int-for-text", "text-for-float"],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(TaskError, match=message):
        resolve_options("made", KNOWN, given)


def test_a_task_without_options_says_so():
    with pytest.raises(TaskError, match="task 'made', option 'a': expected no options, since the task has none"):
        resolve_options("made", {}, {"a": 1})
