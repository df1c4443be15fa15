"""The table of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedapps.tasks.language.prompts import PROMPTS
from fedapps.tasks.language.readers import SOURCES


def test_prompts_read_as_in_the_literature() -> None:
    """MeZO (arXiv 2305.17333), prompts for OPT; squad without the title line."""
    filled = {
        name: PROMPTS[name].fill(fields)
        for name, fields in {
            "sst2": {"sentence": "a fine film"},
            "rte": {"premise": "It rains.", "hypothesis": "It is wet."},
            "cb": {"premise": "I know that it rains.", "hypothesis": "it rains"},
            "boolq": {"passage": "Rain is wet.", "question": "is rain wet"},
            "wic": {"word": "bank", "sentence1": "A bank.", "sentence2": "The bank."},
            "squad": {"context": "It rains in May.", "question": "When does it rain?"},
        }.items()
    }
    assert filled == {
        "sst2": "a fine film It was",
        "rte": 'It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n',
        "cb": 'Suppose I know that it rains. Can we infer that "it rains"? Yes, No, or Maybe?\n',
        "boolq": "Rain is wet. Is rain wet?\n",
        "wic": 'Does the word "bank" have the same meaning in these two sentences? Yes, No?\nA bank.\nThe bank.\n',
        "squad": "Context: It rains in May.\nQuestion: When does it rain?\nAnswer:",
    }


@pytest.mark.parametrize("question", ["is rain wet", "Is rain wet?", "is rain wet ?"])
def test_a_question_has_a_capital_letter_and_one_question_mark(question: str) -> None:
    assert PROMPTS["boolq"].fill({"passage": "P.", "question": question}) == "P. Is rain wet?\n"


@pytest.mark.parametrize("name", PROMPTS)
def test_words_fit_what_they_follow(name: str) -> None:
    """After a line break no space, else one; and what is cut are fields of the template."""
    prompt = PROMPTS[name]
    assert all(word.startswith(" ") != prompt.ending.endswith("\n") for word in prompt.words)
    assert set(prompt.shorten) <= set(prompt.fields)
    assert set(prompt.questions) <= set(prompt.fields)
    assert len(prompt.words) == len(SOURCES[name].labels)


@pytest.mark.parametrize("name", PROMPTS)
def test_the_documentation_shows_the_prompt(name: str) -> None:
    page = Path(__file__).parents[3] / "docs" / "language_models.md"
    prompt = PROMPTS[name]
    lines = [f"`{line}`" for line in prompt.template.split("\n") if line]
    shown = " ⏎ ".join(lines) + (" ⏎" if prompt.ending.endswith("\n") else "")
    answers = ", ".join(word.strip() for word in prompt.words) or "free text up to the end of the line"
    assert f"| `{name}` | {shown} | {answers} |\n" in page.read_text(encoding="utf-8")


def test_braces_in_a_text_are_text() -> None:
    assert PROMPTS["sst2"].fill({"sentence": "a {b} film"}) == "a {b} film It was"
