"""Scores of question answering, as the evaluation of SQuAD v1.1 defines them (Rajpurkar et al. 2016, arXiv 1606.05250).

Answers are compared without case, punctuation and articles; of several right answers the best score counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Drop what the comparison ignores.

    Args:
        text: An answer.

    Returns:
        Its words, with one space between them.
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """Tell whether a prediction is one of the right answers.

    Args:
        predicted: The prediction.
        answers: The right answers, at least one.

    Returns:
        1 or 0.
    """
    return float(any(normalise(predicted) == normalise(answer) for answer in answers))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """Compute the harmonic mean of precision and recall of words, with the best of the right answers.

    Args:
        predicted: The prediction.
        answers: The right answers, at least one.

    Returns:
        A number in [0, 1].
    """
    return max(_f1(normalise(predicted).split(), normalise(answer).split()) for answer in answers)


def _f1(predicted: list[str], answer: list[str]) -> float:
    if not predicted or not answer:
        return float(predicted == answer)
    common = sum((Counter(predicted) & Counter(answer)).values())
    return 2 * common / (len(predicted) + len(answer))
