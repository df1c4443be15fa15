"""F1 and exact match of SQuAD."""

from __future__ import annotations

import pytest

from fedapps.tasks.language.scoring import exact_match, f1, normalise


def test_case_punctuation_articles_and_blanks_do_not_count() -> None:
    assert normalise(" The  Old-Mill, an anthem! ") == "oldmill anthem"


@pytest.mark.parametrize(
    ("predicted", "answers", "score", "exact"),
    [
        ("the Mill.", ["Mill"], 1, 1),
        ("old mill", ["mill"], 2 / 3, 0),  # precision 1/2, recall 1
        ("mill mill", ["mill"], 2 / 3, 0),  # a word counts as often as it occurs
        ("river", ["mill"], 0, 0),
        ("", ["mill"], 0, 0),
        ("the", ["a"], 1, 1),  # both empty
        ("end of Long Lane", ["at the end of Long Lane", "Long Lane"], 8 / 9, 0),  # precision 1, recall 4/5
        ("Long Lane", ["at the end of Long Lane", "Long Lane"], 1, 1),
    ],
)
def test_scores(predicted: str, answers: list[str], score: float, exact: float) -> None:
    assert f1(predicted, answers) == pytest.approx(score)
    assert exact_match(predicted, answers) == exact
