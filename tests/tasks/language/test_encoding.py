"""Label words, shortened prompts, special tokens in front, padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.tasks.language.encoding import (
    PADDING,
    encode_prompts,
    following_ids,
    label_ids,
    leading_ids,
    lengths,
    pad,
    trim,
)
from fedapps.tasks.language.models import load_tokenizer
from fedapps.tasks.language.prompts import PROMPTS, Prompt


@pytest.fixture
def tokenizer(folder_of: Callable[[str], Path]) -> Any:
    return load_tokenizer(str(folder_of("llama")))


def with_start(tokenizer: Any) -> Any:
    """The same tokenizer, which puts a start token in front of every text, as OPT's does."""
    from tokenizers.processors import TemplateProcessing

    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start[0]} $A", pair=f"{start[0]} $A $B", special_tokens=[start]
    )
    return tokenizer


def sentencepiece() -> Any:
    """A tokenizer with Llama's marks for blanks, where a text gets a blank in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        "<s>",
        "</s>",
        "<unk>",
        "▁this",
        "▁It",
        "▁was",
        "▁great",
        "▁terrible",
        "great",
        "terrible",
        "▁",
        "?",
        "\n",
        "Yes",
        "No",
    ]
    inner = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=2))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# Label words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [False, True], ids=["plain", "with a start token"])
@pytest.mark.parametrize("name", [name for name, prompt in PROMPTS.items() if prompt.words])
def test_a_label_word_is_the_token_that_follows_the_template(tokenizer: Any, name: str, start: bool) -> None:
    tokenizer = with_start(tokenizer) if start else tokenizer
    prompt = PROMPTS[name]
    ids = label_ids(tokenizer, prompt)
    assert len(set(ids)) == len(prompt.words)
    assert not set(ids) & set(tokenizer.all_special_ids)
    text = prompt.fill(dict.fromkeys(prompt.fields, "a fine film"))
    for label, word in zip(ids, prompt.words, strict=True):
        assert tokenizer(text + word)["input_ids"] == [*tokenizer(text)["input_ids"], label]


def test_the_blank_in_front_of_a_word_belongs_to_its_token(tokenizer: Any) -> None:
    [[great], short] = following_ids(tokenizer, "It was", [" great", "!"])
    assert tokenizer.convert_ids_to_tokens(short) == ["!"]
    assert tokenizer.convert_ids_to_tokens(great) == "Ġgreat"
    assert label_ids(tokenizer, PROMPTS["sst2"])[1] == great


def test_a_blank_that_a_tokenizer_adds_to_every_text_is_no_part_of_a_word() -> None:
    tokens = sentencepiece()
    assert tokens.convert_ids_to_tokens(label_ids(tokens, PROMPTS["sst2"])) == ["▁terrible", "▁great"]
    ids = label_ids(tokens, Prompt("{text}?\n", ("No", "Yes"), ("text",)))
    assert tokens.convert_ids_to_tokens(ids) == ["No", "Yes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((" terrible", " marvellous"), r"label word ' marvellous'.*pieces: 'Ġm', "),
        ((" great", " great"), r"label word ' great'.*the token of another label word: 'Ġgreat'"),
        (("<|endoftext|>", " great"), r"label word '<\|endoftext\|>'.*a special token: '<\|endoftext\|>'"),
        (("", " great"), r"label word ''.*got 0 pieces"),
    ],
)
def test_other_words_are_refused_with_their_pieces(tokenizer: Any, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        label_ids(tokenizer, Prompt("{text} It was", words, ("text",)))


def test_a_word_that_melts_into_the_template_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TaskError, match=r"answer: .*after 'It was gre'.*'Ġgreat' for 'at'"):
        following_ids(tokenizer, "It was gre", ["at"])


# Too long prompts ------------------------------------------------------------------------------------------


def test_a_long_prompt_keeps_the_template_and_loses_the_end_of_the_text(tokenizer: Any) -> None:
    prompt = PROMPTS["squad"]
    words = " ".join(f"w{i}" for i in range(100))
    fields = {"context": words, "question": "Who wrote the book ?"}
    [whole] = encode_prompts(tokenizer, prompt, [fields], 10_000)
    [cut] = encode_prompts(tokenizer, prompt, [fields], 60)
    assert len(whole) > 60 >= len(cut) > 55
    text = tokenizer.decode(cut)
    assert text.startswith("Context: w0 w1 w2")
    assert text.endswith("\nQuestion: Who wrote the book ?\nAnswer:")
    assert words.startswith(text.split("\n")[0].removeprefix("Context: "))


def test_the_next_field_is_cut_when_the_first_is_gone(tokenizer: Any) -> None:
    fields = {"premise": "the film is old " * 20, "hypothesis": "the music is loud " * 20}
    [ids] = encode_prompts(tokenizer, PROMPTS["rte"], [fields], 60)
    text = tokenizer.decode(ids)
    assert len(ids) <= 60
    assert text.startswith('\nDoes this mean that "the music is loud')
    assert text.endswith('" is true? Yes or No?\n')


def test_prompts_that_fit_are_left_alone_beside_long_ones(tokenizer: Any) -> None:
    fields = [{"sentence": "good"}, {"sentence": "the film " * 50}]
    short, long = encode_prompts(tokenizer, PROMPTS["sst2"], fields, 12)
    assert tokenizer.decode(short) == "good It was"
    assert len(long) == 12


def test_the_start_token_counts_and_stays(tokenizer: Any) -> None:
    tokenizer = with_start(tokenizer)
    assert leading_ids(tokenizer) == [tokenizer.bos_token_id]
    short, long = encode_prompts(tokenizer, PROMPTS["sst2"], [{"sentence": "good"}, {"sentence": "the film " * 50}], 12)
    assert short == tokenizer("good It was")["input_ids"]
    assert (long[0], len(long)) == (tokenizer.bos_token_id, 12)
    assert tokenizer.bos_token_id not in long[1:]


def test_a_length_below_the_template_is_refused(tokenizer: Any) -> None:
    with pytest.raises(TaskError, match=r"'max-length': .*template, got 1 tokens"):
        encode_prompts(tokenizer, PROMPTS["sst2"], [{"sentence": "good"}], 1)


def test_no_examples_are_no_prompts(tokenizer: Any) -> None:
    assert encode_prompts(tokenizer, PROMPTS["sst2"], [], 12) == []


# Padding ---------------------------------------------------------------------------------------------------


def test_rows_are_padded_behind_with_what_is_no_token() -> None:
    ids = pad([[5, 6, 7], [0], []])
    np.testing.assert_array_equal(ids, [[5, 6, 7], [0, PADDING, PADDING], [PADDING] * 3])
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(lengths(ids), [3, 1, 0])
    np.testing.assert_array_equal(trim(ids[1:]), [[0], [PADDING]])
    assert pad([]).shape == (0, 0)
