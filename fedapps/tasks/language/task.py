"""The language tasks with classes, and what all language tasks share: model, tokenizer, data and options.

A causal language model reads a prompt, and the label word with the largest logit behind it is the answer (MeZO, arXiv
2305.17333). What travels is the whole model, or with ``lora-rank`` the adapters only.

The prompts are `fedapps.tasks.language.prompts`, the data `fedapps.tasks.language.readers`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.settings import setting
from fedapps.tasks.base import Data, FirstModel
from fedapps.tasks.language.adapters import add_adapters
from fedapps.tasks.language.encoding import encode_prompts, label_ids, lengths, pad, trim
from fedapps.tasks.language.forward import check_logits, label_logits
from fedapps.tasks.language.models import identify, load_causal_lm, load_tokenizer
from fedapps.tasks.language.prompts import PROMPTS, Prompt
from fedapps.tasks.language.readers import Example, read_examples
from fedapps.tasks.splits import Indices, Purpose, stream
from fedapps.tasks.torch_task import TorchTask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVALUATION_TOKENS = 8192
"""Most tokens, padding included, in a batch of an evaluation."""

TEST_SEED = 0
"""Seed of the draw of ``eval-examples``; fixed, so that runs of every seed are tested on the same examples."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Values of the option ``dtype``."""


class LanguageTask(TorchTask):
    """What the language tasks share: model, tokenizer, data and options.

    Raises:
        TaskError: An option is wrong.
    """

    PROMPT: ClassVar[str]
    """Key of `PROMPTS` and of `fedapps.tasks.language.readers.SOURCES`."""

    ANSWER_LENGTH: ClassVar[int] = 0
    """Most tokens that are read or generated behind a prompt."""

    class Options(TorchTask.Options):
        """Options of the language tasks."""

        model: str = setting(
            "smollm2", "hub id (facebook/opt-125m), folder, .gguf file, or name for `fedapps models get`", path=True
        )
        dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "numbers of the model")
        lora_rank: int = setting(
            0, "rank of LoRA adapters, which then are all that trains and travels; 0 = whole model", ge=0
        )
        lora_alpha: float = setting(16.0, "scale of the adapters times their rank", gt=0)
        lora_targets: str = setting(
            "", "layers that get adapters, as q_proj,v_proj; empty = peft's choice for the model"
        )
        max_length: int = setting(
            256, "most tokens of a prompt; the text in it is cut from behind, the template is not", ge=1
        )
        train_examples: int = setting(0, "size of the training pool, drawn by the seed; 0 = all", ge=0)
        eval_examples: int = setting(0, "size of the test set, the same for every seed; 0 = all", ge=0)

    @cached_property
    @override
    def first_model(self) -> FirstModel:
        """The language model's source and revision; adapters start at random, so nobody else has those."""
        first = identify(self.options.model)
        return replace(first, published=first.published and self.options.lora_rank == 0)

    @property
    def prompt(self) -> Prompt:
        """The task's prompt."""
        return PROMPTS[self.PROMPT]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.options.model)

    @override
    def agree(self, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Agree on nothing: prompts differ in length."""
        return {}

    @abstractmethod
    def encode(self, examples: list[Example]) -> Data:
        """Turn examples into arrays: inputs ``(n, longest)`` int32 token ids padded behind, and targets."""

    @override
    def load(self) -> tuple[Data, Data]:
        """Read and tokenise the examples."""
        train, test = read_examples(self.PROMPT, self.prompt.fields, self.data_dir)
        train = self._some_of(
            "train-examples", self.options.train_examples, train, stream(Purpose.SUBSET, self.config.seed)
        )
        test = self._some_of("eval-examples", self.options.eval_examples, test, stream(Purpose.TEST_SET, TEST_SEED))
        return self.encode(train), self.encode(test)

    def _some_of(self, key: str, wanted: int, examples: list[Example], random: np.random.Generator) -> list[Example]:
        if wanted > len(examples):
            raise self._refused(key, f"0 (all) to {len(examples)}, the examples that there are", wanted)
        return [examples[i] for i in random.permutation(len(examples))[:wanted]] if wanted else examples

    @override
    def build_model(self) -> torch.nn.Module:
        """Load the model, and freeze it and add adapters if the options say so."""
        rank = self.options.lora_rank
        if rank == 0:
            return self._load_model()
        # Adapted models share the memory of the frozen parameters, since nothing writes to them.
        shared = {id(p): torch.nn.Parameter(p.data, requires_grad=False) for p in self._frozen_model.parameters()}
        model = copy.deepcopy(self._frozen_model, memo=shared)
        targets = tuple(name.strip() for name in self.options.lora_targets.split(",") if name.strip())
        add_adapters(model, rank, self.options.lora_alpha, targets)
        return model

    @cached_property
    def _frozen_model(self) -> PreTrainedModel:
        # Loaded once, so it must not take part in the draws that the adapters are made from.
        with torch.random.fork_rng(devices=[]):
            return self._load_model().requires_grad_(False)

    def _load_model(self) -> PreTrainedModel:
        model = load_causal_lm(self.options.model, DTYPES[self.options.dtype])
        check_logits(model)
        places = getattr(model.config, "max_position_embeddings", None)
        if places is not None:
            longest = self.options.max_length
            less = f" less {self.ANSWER_LENGTH} for the answer" if self.ANSWER_LENGTH else ""
            if longest + self.ANSWER_LENGTH > places:
                raise self._refused("max-length", f"at most the {places} positions of the model{less}", longest)
        model.train()
        return model

    @override
    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Turn examples into int64 tensors, ids ``(n, longest)`` and targets, no longer than the longest of them."""
        arrays = np.asarray(data.inputs), data.targets
        ids, targets = (torch.tensor(trim(a) if a.ndim > 1 else a, dtype=torch.int64) for a in arrays)
        return ids.to(device), targets.to(device)

    @override
    def evaluation_batches(self, data: Data) -> Iterator[Indices]:
        """Group examples of similar length, so that there is little padding."""
        sizes = lengths(np.asarray(data.inputs))
        order = np.argsort(-sizes, kind="stable")
        start = 0
        while start < len(order):
            stop = start + max(1, EVALUATION_TOKENS // max(1, int(sizes[order[start]])))
            yield order[start:stop]
            start = stop

    def _refused(self, key: str, expected: str, value: int) -> TaskError:
        return TaskError(
            f"task '{self.name}', option '{key}'", expected=expected, got=str(value), do="change it in task-options"
        )


class ClassificationTask(LanguageTask):
    """Tell the class by the label word that the model finds likeliest after the prompt."""

    @cached_property
    def label_ids(self) -> tuple[int, ...]:
        """Token of the label word of each class."""
        return label_ids(self.tokenizer, self.prompt)

    @override
    def encode(self, examples: list[Example]) -> Data:
        """Turn examples into prompts; targets ``(n,)`` are class numbers."""
        _ = self.label_ids  # A tokenizer that does not fit is told before anything trains.
        fields = [example.fields for example in examples]
        rows = encode_prompts(self.tokenizer, self.prompt, fields, self.options.max_length)
        return Data(pad(rows), np.array([example.label for example in examples], np.int64))

    @override
    def outputs(self, model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the label words' logits, ``(n, classes)`` float32, of token ids ``(n, length)``."""
        labels = torch.tensor(self.label_ids, device=inputs.device)
        return label_logits(cast("PreTrainedModel", model), inputs, labels)


class Sst2Task(ClassificationTask):
    """Sentiment of sentences from film reviews (SST-2, Socher et al. 2013; GLUE)."""

    PROMPT = "sst2"


class QqpTask(ClassificationTask):
    """Whether two questions ask the same (Quora Question Pairs; GLUE)."""

    PROMPT = "qqp"


class RteTask(ClassificationTask):
    """Whether one text entails another (Recognizing Textual Entailment; GLUE)."""

    PROMPT = "rte"


class CbTask(ClassificationTask):
    """Whether a text entails or contradicts another, or neither (CommitmentBank, de Marneffe et al. 2019; SuperGLUE)."""

    PROMPT = "cb"


class BoolqTask(ClassificationTask):
    """Yes-or-no questions about a passage (BoolQ, Clark et al. 2019; SuperGLUE)."""

    PROMPT = "boolq"


class WicTask(ClassificationTask):
    """Whether a word means the same in two sentences (WiC, Pilehvar & Camacho-Collados 2019; SuperGLUE)."""

    PROMPT = "wic"
