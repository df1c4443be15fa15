"""Forward passes of a causal language model over padded rows: hidden states, logits of label words, generation.

A row's results do not depend on the padding beside it, on either side, nor on other rows: the mask and the positions come
from where the tokens are, and only tokens are inputs of a layer's curvature block. Only what is needed is multiplied with
the output embedding: the label words' rows, or the answer's places.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

from fedapps.curvature.layers import count_only
from fedapps.errors import TaskError
from fedapps.tasks.language.encoding import PADDING
from fedapps.tasks.language.packing import pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PACKING = frozenset({"gpt2", "llama", "opt"})
"""Model types whose rows of unequal length are packed; others might carry something from row to row past the mask."""


def hidden_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Compute the last hidden states ``(n, length, width)``; what is at padding has no meaning.

    ``ids`` are token ids ``(n, length)``, here and below with `PADDING` before or behind each row's tokens.
    """
    packed = pack(ids) if model.config.model_type in PACKING else None
    if packed is None:
        mask = (ids != PADDING).long()
        with count_only(mask):
            return _base(model, ids.clamp(min=0), mask, (mask.cumsum(dim=1) - 1).clamp(min=0))
    lowest = torch.finfo(model.dtype).min
    mask = torch.zeros(packed.attends.shape, dtype=model.dtype, device=ids.device)
    mask = mask.masked_fill(~packed.attends, lowest)[:, None]  # one mask for all heads, added to the scores
    held = torch.zeros_like(packed.ids).index_put(packed.place, torch.ones_like(packed.place[0]))
    with count_only(held):
        hidden = _base(model, packed.ids, mask, packed.positions)
    return packed.unpack(hidden, ids.shape)


def _base(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    base = model.base_model
    takes_positions = "position_ids" in inspect.signature(base.forward).parameters
    where = {"position_ids": positions} if takes_positions else {}
    hidden: torch.Tensor = base(input_ids=ids, attention_mask=mask, use_cache=False, **where).last_hidden_state
    return hidden


def label_logits(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the logits ``(n, classes)`` of label words ``(classes,)`` after each row's last token, in float32."""
    hidden = hidden_states(model, ids)
    places = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(ids != PADDING, places, 0).argmax(dim=1)
    answer = hidden[torch.arange(len(ids), device=ids.device), last]
    head = output_embedding(model)
    # By index, so that only these rows are ever displaced by a probe.
    bias = None if head.bias is None else head.bias[labels].float()
    return functional.linear(answer.float(), head.weight[labels].float(), bias)


def answer_losses(model: PreTrainedModel, ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy ``(n,)`` of each answer's tokens given all before them, in float32.

    A row is a prompt with its answer behind, whose tokens are ``counts`` ``(n,)``, at least 1.
    """
    answer = _last_tokens(ids, counts)
    before = answer.roll(-1, dims=1)
    head = output_embedding(model)
    logits = functional.linear(hidden_states(model, ids)[before], head.weight, head.bias)
    losses = functional.cross_entropy(logits.float(), ids[answer], reduction="none")
    rows = answer.nonzero()[:, 0]
    return losses.new_zeros(len(ids)).index_add(0, rows, losses) / counts


def without_answers(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Leave the prompts of prompts with answers, whose last ``counts`` ``(n,)`` tokens become `PADDING`."""
    return ids.masked_fill(_last_tokens(ids, counts), PADDING)


def continuations(model: PreTrainedModel, ids: torch.Tensor, stops: Sequence[int], most: int) -> torch.Tensor:
    """Continue prompts by the likeliest token each time: ids ``(n, at most most)``, with `stops[0]` behind each end.

    The first of ``stops`` that comes ends a continuation.
    """
    from transformers import GenerationConfig

    front = pad_in_front(ids)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=most, eos_token_id=list(stops), pad_token_id=stops[0]
    )
    mask = (front != PADDING).long()
    # In the place of the model's own configuration, which may ask for sampling or penalties, not beside it: what ours
    # leaves open would be taken from there.
    own = model.generation_config
    model.generation_config = config
    try:
        whole = model.generate(front.clamp(min=0), attention_mask=mask)  # type: ignore[operator]
    finally:
        model.generation_config = own
    return cast("torch.Tensor", whole)[:, ids.shape[1] :]


def pad_in_front(ids: torch.Tensor) -> torch.Tensor:
    """Move the padding of each row to its front."""
    order = torch.argsort((ids != PADDING).long(), dim=1, stable=True)
    return ids.gather(1, order)


def check_logits(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not simply the product with its output embedding: one that scales or caps them."""
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(model.config, key, None)
        if value is not None and value != 1:
            raise TaskError(
                f"model {type(model).__name__}",
                expected="logits that are the output embedding times the hidden state",
                got=f"{key} = {value} in its configuration",
                do="use a model without it, such as one of the OPT, GPT-2 and Llama families",
            )


def output_embedding(model: PreTrainedModel) -> torch.nn.Linear:
    """Get the layer that turns hidden states into logits, which must be a plain linear one."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear):
        raise TaskError(
            f"model {type(model).__name__}",
            expected="a plain linear layer as output embedding",
            got=type(head).__name__,
            do="use a causal language model, and leave its output embedding out of lora-targets",
        )
    return head


def _last_tokens(ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mark the last tokens of each row, as many as its count says."""
    mask = ids != PADDING
    from_behind = mask.flip(1).cumsum(1).flip(1)  # 1 at the last token, 2 at the one before, ...
    return mask & (from_behind <= counts[:, None])
