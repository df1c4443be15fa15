"""Make a tiny causal language model for SST-2, so that methods can be compared on one in minutes.

A Llama of two layers of width 64 (about 0.4 million parameters) with a byte-level vocabulary of its own, trained on half of the
training sentences, each followed by the prompt and an opinion in **other words than the label words of the task**: " good" or
" bad". Like a published model it knows the words and tells an opinion from a sentence, and like one it does not yet answer in
the label words " great" and " terrible": that is what is left to learn.

Usage: ``python benchmarks/tiny_language_model.py OUT [--data-dir DATA] [--epochs 3]``
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedapps.tasks.language.prompts import PROMPTS
from fedapps.tasks.language.readers import Example, read_examples

PROMPT = PROMPTS["sst2"]
OPINIONS = (" bad", " good")
"""What the base model answers, in the order of the task's label words."""

BEGINNING, PADDING = "<s>", "<pad>"


def make_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        texts: What to train on.
        vocabulary: Number of tokens, special ones included.

    Returns:
        The tokenizer; it puts no special token in front by itself.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PADDING, BEGINNING], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PADDING, bos_token=BEGINNING, eos_token=BEGINNING)


def make_model(vocabulary: int, width: int, layers: int) -> LlamaForCausalLM:
    """Build a Llama at random.

    Args:
        vocabulary: Number of tokens.
        width: Width of the hidden states.
        layers: Number of layers.

    Returns:
        The model, embedding and output tied.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


def train(
    model: LlamaForCausalLM, rows: list[list[int]], epochs: int, lr: float, batch: int, random: np.random.Generator
) -> None:
    """Train with AdamW and a rate that falls linearly to 0, on the mean loss a token plus the mean loss of the last one.

    Args:
        model: Trained in place.
        rows: Token ids of the texts; the last is the answer.
        epochs: Passes over them.
        lr: First learning rate.
        batch: Texts a step, of similar length.
        random: Draws the order.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = [[rows[i] for i in by_length[start : start + batch]] for start in range(0, len(rows), batch)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(batches))
    for _ in range(epochs):
        for index in random.permutation(len(batches)):
            optimizer.zero_grad()
            _loss(model, batches[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


def _loss(model: LlamaForCausalLM, rows: list[list[int]]) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    ids = torch.tensor(
        [[0] * (longest - len(row)) + row for row in rows]
    )  # Padded in front: the answer is the last column.
    real = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    logits = model(input_ids=ids, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits[:, :-1]
    targets = ids[:, 1:].masked_fill(real[:, :-1] == 0, -100)
    everywhere = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return everywhere + cross_entropy(logits[:, -1], ids[:, -1])


def share_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example], words: tuple[str, ...]
) -> float:
    """Ask for opinions in given words.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        examples: Sentences and their labels.
        words: Answers in the order of the labels, one token each.

    Returns:
        Share of the sentences whose right answer has the larger logit.
    """
    answers = [tokenizer.encode(word)[0] for word in words]
    right = 0
    for example in examples:
        ids = torch.tensor([tokenizer.encode(PROMPT.fill(example.fields), add_special_tokens=False)])
        with torch.no_grad():
            right += int(model(input_ids=ids).logits[0, -1, answers].argmax()) == example.label
    return right / len(examples)


def main() -> None:
    """Make the model folder, and say how it answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the model folder")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDAPPS_DATA"), help="default: $FEDAPPS_DATA")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    examples, test = read_examples("sst2", PROMPT.fields, args.data_dir and Path(args.data_dir))
    half = [examples[i] for i in random.permutation(len(examples))[: len(examples) // 2]]
    texts = [PROMPT.fill(example.fields) + OPINIONS[example.label] for example in half]
    tokenizer = make_tokenizer([*texts, *(PROMPT.ending + word for word in PROMPT.words)], args.vocabulary)
    model = make_model(len(tokenizer), args.width, args.layers)
    rows = [list(row) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    train(model, rows, args.epochs, args.lr, args.batch, random)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    for words in (OPINIONS, PROMPT.words):
        print(
            f"{share_right(model, tokenizer, test, words):.3f} of {len(test)} test sentences right in{''.join(words)}"
        )
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(rows)} texts, in {args.out}")


if __name__ == "__main__":
    main()
