"""A scalar-only client on OPT-125M with random weights, for `zeroth_order_cost.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)

from fedapps.tasks.language.forward import label_logits
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.probing import Prober
from fedapps.zeroth_order.quiet import trainable_parameters
from fedapps.zeroth_order.replica import Replica
from fedapps.zeroth_order.scheme import Record, Scheme

LABEL_WORDS = [205, 1099]
"""Two token ids of the vocabulary of OPT."""

LR, MU, NU, EPS = 1e-6, 1e-3, 0.05, 1e-8
OPT_125M = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "max_position_embeddings": 2048,
    "num_attention_heads": 12, "word_embed_proj_dim": 768, "do_layer_norm_before": True, "activation_function": "relu",
    "dropout": 0.1, "attention_dropout": 0.0, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
"""The published configuration of facebook/opt-125m."""

SMALL = {**OPT_125M, "vocab_size": 1200, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 2,
         "word_embed_proj_dim": 32, "max_position_embeddings": 64}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Prompts of one length and their labels.

    Attributes:
        input_ids: (batch, length).
        labels: 0 or 1, (batch,).
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


def make_model(config: dict[str, Any]) -> torch.nn.Module:
    """Build a model with random weights."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    return OPTForCausalLM(OPTConfig(**config)).eval()


def make_batch(config: dict[str, Any]) -> Batch:
    """Draw a batch of 8 prompts of 32 tokens."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config["vocab_size"], (8, 32), generator=draw)
    return Batch(ids, torch.randint(2, (8,), generator=draw))


def loss(model: Any, batch: Batch) -> torch.Tensor:
    """Cross-entropy between the label words at the answer position, one a row."""
    logits = label_logits(model, batch.input_ids, torch.tensor(LABEL_WORDS))
    return F.cross_entropy(logits, batch.labels, reduction="none")


class TimedProber(Prober):
    """Adds up the time of materialising displaced tensors, and their elements."""

    def __init__(self, *args: Any, now: Callable[[], float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.now = now
        self.seconds, self.elements = 0.0, 0

    def _displaced(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        started = self.now()
        result = super()._displaced(*args, **kwargs)
        self.seconds += self.now() - started
        self.elements += result.numel()
        return result


class Client:
    """Our client: a replica of the model, and a prober on it.

    Args:
        config: Of the model.
        method: The rule.
        now: The clock.
    """

    def __init__(
        self, config: dict[str, Any], method: str = "hiso", now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = make_model(config)
        self.batch = make_batch(config)
        self.scheme = Scheme(7, method)
        self.replica = Replica(self.scheme, trainable_parameters(self.model))
        self.prober = TimedProber(self.model, self.scheme, self.replica.state, now=now)

    @property
    def elements(self) -> int:
        """Number of trainable elements."""
        return sum(p.numel() for p in trainable_parameters(self.model).values())

    def forward(self) -> None:
        """Evaluate the loss where the client stands."""
        self.prober.loss(loss, self.batch)

    def probe(self) -> None:
        """Measure one scalar."""
        self.prober.probe(loss, [self.batch], first_step=self.replica.round, num_probes=1, mu=MU, lr=LR)

    def catch_up(self, rounds: int) -> None:
        """Apply records."""
        at = self.replica.round
        nu = NU if self.scheme.method == "hiso" else 0.0
        records = tuple(Record(r, r - 1, LR, MU, nu, EPS, ((0.5,),), 1) for r in range(at + 1, at + rounds + 1))
        self.replica.advance(Slice(at, at + rounds, records))

    def round(self) -> None:
        """Apply one record, then probe."""
        self.catch_up(1)
        self.probe()
