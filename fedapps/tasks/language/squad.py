"""Question answering in the model's own words: trained on the answer's tokens, scored on what the model generates.

Scores are those of the evaluation of SQuAD v1.1 (Rajpurkar et al. 2016, arXiv 1606.05250): answers are compared without
case, punctuation and articles; of several right answers the best score counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from typing_extensions import override

from fedapps.tasks.base import Data
from fedapps.tasks.language.encoding import PADDING, encode_prompts, following_ids, pad
from fedapps.tasks.language.forward import answer_losses, continuations, without_answers
from fedapps.tasks.language.readers import Example
from fedapps.tasks.language.task import LanguageTask
from fedapps.tasks.torch_task import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SquadTask(LanguageTask):
    """Answer questions about a passage (SQuAD v1.1, Rajpurkar et al. 2016), in the model's own words.

    Trained on the answer's tokens, scored on what the model generates up to the end of the line or the text: F1 and
    exact match.
    """

    PROMPT = "squad"
    metric = "f1"

    ANSWER_LENGTH = 48

    @override
    def encode(self, examples: list[Example]) -> Data:
        """Turn examples into prompts with their first answer behind.

        Returns:
            Inputs ``(n, longest)`` int32 prompt and answer, targets ``(n, longest answer)`` int32 answer, column
            ``answers`` ``(n,)`` all right answers, one a line.
        """
        prompts = encode_prompts(
            self.tokenizer, self.prompt, [example.fields for example in examples], self.options.max_length
        )
        answers = self._answer_ids([example.answers[0] for example in examples])
        texts = np.array(["\n".join(example.answers) for example in examples], np.str_)
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return Data(pad(rows), pad(answers), {"answers": texts})

    @override
    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the cross-entropy of the answers' tokens."""
        return answer_losses(cast("PreTrainedModel", model), inputs, _counts(targets)).mean()

    @override
    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute ``loss``; the scores need the right answers and come in `evaluate_module`."""
        return {"loss": self.loss(model, inputs, targets)}

    @override
    def evaluate_module(self, model: torch.nn.Module, data: Data) -> dict[str, float]:
        """Measure ``loss`` as for any task, and ``f1`` and ``exact-match`` of what the module generates; means."""
        measured = super().evaluate_module(model, data)
        if not len(data):
            return measured
        answers = [text.split("\n") for text in data.columns["answers"]]
        pairs = list(zip(self.generate(model, data), answers, strict=True))
        return {
            **measured,
            "f1": float(np.mean([f1(text, right) for text, right in pairs])),
            "exact-match": float(np.mean([exact_match(text, right) for text, right in pairs])),
        }

    def generate(self, model: torch.nn.Module, data: Data) -> list[str]:
        """Let a model answer each example: what it finds likeliest token by token, up to the end of the line or the text."""
        device = next(model.parameters()).device
        texts = [""] * len(data)
        with evaluation_mode(model), torch.no_grad():
            for indices in self.evaluation_batches(data):
                inputs, targets = self.tensors(data.take(indices), str(device))
                prompts = without_answers(inputs, _counts(targets))
                new = continuations(cast("PreTrainedModel", model), prompts, self._stops, self.ANSWER_LENGTH)
                for i, ids in zip(indices, new.tolist(), strict=True):
                    answer = list(takewhile(lambda token: token not in self._stops, ids))
                    texts[i] = str(self.tokenizer.decode(answer, skip_special_tokens=True)).split("\n")[0].strip()
        return texts

    def _answer_ids(self, answers: list[str]) -> list[list[int]]:
        lines = [f" {answer}\n" for answer in answers]
        return [ids[: self.ANSWER_LENGTH] for ids in following_ids(self.tokenizer, self.prompt.ending, lines)]

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        """The token that ends the line, and the one that ends a text, if there is one."""
        line, text = self._answer_ids(["x"])[0][-1], self.tokenizer.eos_token_id
        return (line,) if text is None else (line, text)


def _counts(targets: torch.Tensor) -> torch.Tensor:
    return (targets != PADDING).sum(dim=1)


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Drop what the comparison ignores: the words of an answer, with one space between them."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """Tell, 1 or 0, whether a prediction is one of the right answers."""
    return float(any(normalise(predicted) == normalise(answer) for answer in answers))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """Compute the harmonic mean of precision and recall of words, in [0, 1], with the best of the right answers."""
    return max(_f1(normalise(predicted).split(), normalise(answer).split()) for answer in answers)


def _f1(predicted: list[str], answer: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(answer)).values())
    return 2 * common / (len(predicted) + len(answer)) if common else 0.0  # also 0 where both are empty, as in v1.1
