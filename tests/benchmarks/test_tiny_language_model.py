"""The script that makes the tiny language model of the LoRA comparison, on sentences written here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedapps.tasks.language.encoding import label_ids
from fedapps.tasks.language.models import load_causal_lm, load_tokenizer
from fedapps.tasks.language.prompts import PROMPTS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PLAIN = ["a great many friends", "the music in this film", "one terrible road", "its second half"]

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not part of the package"),
]


def write_sst2(folder: Path) -> None:
    random = np.random.default_rng(0)
    sentences = (f"{random.choice(PLAIN)} is {('awful', 'lovely')[i % 2]}\t{i % 2}" for i in range(400))
    rows = ["sentence\tlabel", *sentences]
    folder.mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_the_model_tells_opinions_in_other_words_than_the_label_words(tmp_path: Path) -> None:
    write_sst2(tmp_path / "data" / "sst2")
    script, out = str(BENCHMARKS / "tiny_language_model.py"), tmp_path / "tiny"
    command = [sys.executable, script, str(out), "--data-dir", str(tmp_path / "data"), "--vocabulary", "400"]
    done = subprocess.run([*command, "--width", "32", "--epochs", "30"], capture_output=True, text=True, check=True)
    assert "200 texts" in done.stdout
    assert "1.000 of 400 test sentences right in bad good" in done.stdout
    model, tokenizer = load_causal_lm(str(out), torch.float32), load_tokenizer(str(out))
    prompt = PROMPTS["sst2"]
    assert len(label_ids(tokenizer, prompt)) == 2
    opinions = [tokenizer.encode(word)[0] for word in (" bad", " good")]
    for plain in PLAIN:
        for label, word in enumerate(("awful", "lovely")):
            ids = tokenizer(prompt.fill({"sentence": f"{plain} is {word}"}), return_tensors="pt").input_ids
            with torch.no_grad():
                logits = model(ids).logits[0, -1]
            assert logits[opinions].argmax() == label, (plain, word)
            assert logits.argmax() == opinions[label]
