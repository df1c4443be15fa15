"""Tiny language models for the tests: random weights, a tokenizer of a few sentences, no download."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import pytest
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from fedapps.tasks.language.published import Published

SENTENCES = (
    "It was great . It was terrible .",
    "the film is a warm and funny story of two friends and one long road",
    "a dull mess of a plot that never finds its way",
    "the acting is fine but the music is loud and the jokes are old",
    "Question : is the answer right ? Answer : Yes , No or Maybe",
    "Yes No Maybe yes no maybe great terrible good bad",
    "Paris is the capital of France . Who wrote the book ? She wrote it in one year .",
    "Suppose that it is true . Can we infer that it is true ? Do both sentences mean the same thing ?",
)
"""What the tokenizer is trained on."""

END = "<|endoftext|>"
HIDDEN, LAYERS, HEADS, POSITIONS = 32, 2, 4, 256


def tiny_folder(path: Path, family: str = "llama") -> Path:
    """Write a tiny random model with its tokenizer, the same bytes every time.

    Args:
        path: The folder; made if missing.
        family: ``llama`` (with grouped keys, untied), ``opt`` or ``gpt2`` (both tied).

    Returns:
        The folder.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_bytes_tokenizer(), bos_token=END, eos_token=END)
    if family == "opt":
        tokenizer.pad_token = "<pad>"
    model = _seeded(family, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    logging.disable_progress_bar()
    try:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    finally:
        logging.enable_progress_bar()
    return path


def tiny_gguf(path: Path) -> Path:
    """Write the tiny Llama as a GGUF file, float32, as llama.cpp lays it out.

    Args:
        path: The file.

    Returns:
        The file.
    """
    import gguf

    tokenizer = json.loads(_bytes_tokenizer().to_str())["model"]
    words = list(tokenizer["vocab"])
    model = _seeded("llama", len(words), words.index(END), None)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(words.index(END))
    writer.add_eos_token_id(words.index(END))
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_order(name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def offer_tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """Make a wheel with the tiny GGUF file the only published model, and a folder the only place that pip looks in.

    Args:
        folder: The folder; made if missing.
        monkeypatch: pytest's fixture.

    Returns:
        The model's row.
    """
    from fedapps.tasks.language.published import Published

    folder.mkdir(parents=True, exist_ok=True)
    path, member, info = tiny_gguf(folder / "tiny.gguf"), "tiny_model/tiny.gguf", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(path, member)
        # A requirement that exists nowhere: pip must not look at it.
        needs = "Requires-Dist: llama-cpp-of-nobody"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n{needs}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    path.unlink()
    model = Published(
        "tiny", "two layers", "tiny-model==1.0", member, digest, size, 10 * size, "CC0-1.0", "random numbers"
    )
    for module in ("tasks.language.published", "tasks.language.fetch", "cli.models"):
        monkeypatch.setattr(f"fedapps.{module}.PUBLISHED", (model,))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (("CONFIG_FILE", os.devnull), ("NO_INDEX", "1"), ("FIND_LINKS", str(folder))):
        monkeypatch.setenv(f"PIP_{name}", value)
    return model


def _gguf_name(name: str) -> str:
    renames = {
        "model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for old, new in renames.items():
        name = name.replace(old, new)
    return name


def _gguf_order(name: str, weight: np.ndarray) -> np.ndarray:
    """Interleave the two halves of a head, as llama.cpp's rotary embedding wants queries and keys."""
    heads = {"q_proj": HEADS, "k_proj": HEADS // 2}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))


def _seeded(family: str, words: int, end: int, pad: int | None) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return _model(family, words, end, pad)


def _bytes_tokenizer() -> Tokenizer:
    """Train byte-level pair encoding, as GPT-2, OPT and SmolLM2 have: ' great' is one token, and any text can be written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[END, "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _model(family: str, words: int, end: int, pad: int | None) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    shared = {"vocab_size": words, "bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    if family == "llama":
        sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        more = {"num_key_value_heads": HEADS // 2, "intermediate_size": 2 * HIDDEN}
        return LlamaForCausalLM(LlamaConfig(**shared, **sizes, **more, max_position_embeddings=POSITIONS))
    if family == "opt":
        sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        more = {"ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, "max_position_embeddings": POSITIONS}
        return OPTForCausalLM(OPTConfig(**shared, **sizes, **more))
    if family == "gpt2":
        sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS}
        return GPT2LMHeadModel(GPT2Config(**shared, **sizes))
    raise ValueError(f"family '{family}': expected llama, opt or gpt2")
