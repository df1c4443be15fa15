r"""How an example becomes a prompt, and which words answer it: one table for all language tasks.

Templates and label words follow MeZO (Malladi et al. 2023, arXiv 2305.17333, appendix E: prompts for OPT), which took
most of them from PromptSource; the one for qqp is DeComFL's (Li et al. 2024, arXiv 2405.15861). The title line of squad is
left out, since not every copy of the data has titles.

A label word is written as it follows the template's last character: with a space in front after a word, without one after
a line break.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """The prompt of one task."""

    template: str  # the text before the answer, with ``{field}`` where a field of the example goes
    words: tuple[str, ...]  # label words in the order of the class numbers; empty if the answer is free text
    shorten: tuple[str, ...]  # fields that are cut from behind if the prompt is too long, in this order
    questions: tuple[str, ...] = ()  # fields that begin with a capital letter and whose question mark is the template's

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in the order of the template."""
        return tuple(name for _, name, _, _ in string.Formatter().parse(self.template) if name)

    @property
    def ending(self) -> str:
        """The template's text after the last field, which the answer follows."""
        return self.template[self.template.rindex("}") + 1 :]

    def fill(self, fields: Mapping[str, str]) -> str:
        """Fill the template, from name -> text, up to where the answer begins."""
        return self.template.format(**{**fields, **{name: _as_question(fields[name]) for name in self.questions}})


PROMPTS: dict[str, Prompt] = {
    "sst2": Prompt("{sentence} It was", (" terrible", " great"), shorten=("sentence",)),
    "qqp": Prompt(
        "Question 1: {question1}\nQuestion 2: {question2}\nAre they semantically equivalent? Yes or No?\n",
        ("No", "Yes"),
        shorten=("question1", "question2"),
    ),
    "rte": Prompt(
        '{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n',
        ("Yes", "No"),
        shorten=("premise", "hypothesis"),
    ),
    "cb": Prompt(
        'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
        shorten=("premise", "hypothesis"),
    ),
    "boolq": Prompt("{passage} {question}?\n", ("No", "Yes"), shorten=("passage", "question"), questions=("question",)),
    "wic": Prompt(
        'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n{sentence1}\n{sentence2}\n',
        ("No", "Yes"),
        shorten=("sentence1", "sentence2"),
    ),
    "squad": Prompt("Context: {context}\nQuestion: {question}\nAnswer:", (), shorten=("context", "question")),
}
"""Task -> its prompt."""


def _as_question(text: str) -> str:
    text = text.rstrip("? ")
    return text[:1].upper() + text[1:]
