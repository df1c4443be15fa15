"""Prompts as token ids: label words checked, long texts shortened, rows padded.

Rows of unequal length lie in one array, filled up with `PADDING`, which is no token id, so that the mask of a batch needs
no array of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import TaskError
from fedapps.tasks.language.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PADDING = -1
"""Stands where a row has no token."""


def label_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Find the token of each class's label word, as it follows the template; each must be one token of its own."""
    ids: list[int] = []
    before = prompt.fill(dict.fromkeys(prompt.fields, "this"))
    for word, pieces in zip(prompt.words, following_ids(tokenizer, before, prompt.words), strict=True):
        fault = None
        if len(pieces) != 1:
            fault = f"{len(pieces)} pieces"
        elif pieces[0] in tokenizer.all_special_ids:
            fault = "a special token"
        elif pieces[0] in ids:
            fault = "the token of another label word"
        if fault:
            tokens = tokenizer.convert_ids_to_tokens(pieces)
            raise TaskError(
                f"label word {word!r}",
                expected="one token that no other label word has, after the template's end",
                got=f"{fault}: {', '.join(map(repr, tokens))}",
                do="use another model, or a task of your own with other label words",
            )
        ids.append(pieces[0])
    return tuple(ids)


def following_ids(tokenizer: PreTrainedTokenizerBase, before: str, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts as they follow another one; the two must fall apart into tokens where they meet."""
    plain, *wholes = _plain_ids(tokenizer, [before, *(before + text for text in texts)])
    for text, whole in zip(texts, wholes, strict=True):
        if whole[: len(plain)] != plain:
            tokens = tokenizer.convert_ids_to_tokens(whole)
            raise TaskError(
                "answer",
                expected=f"a token that begins after {before[-10:]!r}",
                got=f"{', '.join(map(repr, tokens[-5:]))} for {text!r}",
                do="use another model, or a task of your own with another template",
            )
    return [whole[len(plain) :] for whole in wholes]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, examples: Sequence[Mapping[str, str]], max_length: int
) -> list[list[int]]:
    """Turn examples into prompts of token ids, with the special tokens that the model expects in front.

    Of a prompt of more than ``max_length`` tokens the fields in `Prompt.shorten` are cut from behind; the template stays whole.

    Raises:
        TaskError: The template alone is too long.
    """
    front = leading_ids(tokenizer)
    room = max_length - len(front)
    rows = _plain_ids(tokenizer, [prompt.fill(fields) for fields in examples])
    return [
        front + (row if len(row) <= room else _shortened(tokenizer, prompt, fields, room))
        for row, fields in zip(rows, examples, strict=True)
    ]


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Find the ids of the special tokens that a text begins with, such as OPT's ``</s>``; often none."""
    plain = _plain_ids(tokenizer, ["a"])[0]
    whole = cast("list[int]", tokenizer("a")["input_ids"])
    return whole[: next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)]


def pad(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Put token ids of rows of unequal length into one array ``(n, longest)``, filled up with `PADDING` behind."""
    array = np.full((len(rows), max(map(len, rows), default=0)), PADDING, np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


def lengths(ids: NDArray[Any]) -> NDArray[np.intp]:
    """Count the tokens of each row, ``(n,)``."""
    return np.asarray(np.count_nonzero(ids != PADDING, axis=1), np.intp)


def trim(ids: NDArray[Any]) -> NDArray[Any]:
    """Cut off the columns that hold nothing but padding at the end, but for one at least."""
    return ids[:, : max(int(lengths(ids).max(initial=0)), 1)]


def _plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # verbose: a long text is shortened by us, so the tokenizer need not warn of it.
    return cast("list[list[int]]", tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])


def _shortened(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, fields: Mapping[str, str], room: int) -> list[int]:
    cut = dict(fields)

    def with_first(name: str, characters: int) -> list[int]:
        text = fields[name][:characters].rstrip()
        return _plain_ids(tokenizer, [prompt.fill({**cut, name: text})])[0]

    for name in prompt.shorten:
        best, low, high = with_first(name, 0), 0, len(fields[name])
        if len(best) > room:
            cut[name] = ""
            continue
        while high - low > 1:  # low characters fit, high ones do not
            middle = (low + high) // 2
            ids = with_first(name, middle)
            if len(ids) <= room:
                best, low = ids, middle
            else:
                high = middle
        return best
    raise TaskError(
        "task option 'max-length'",
        expected="room for the template",
        got=f"{room} tokens for a prompt without {', '.join(prompt.shorten)}",
        do="raise it in task-options",
    )
