"""Bytes that a client sends in a round of FedPM, by form of ``P``: triangle, bfloat16, block-limited, factor.

The bytes are those of real replies, after one step on a batch of random images: they depend on shapes alone. ``M`` and
the tensors without a block are the size of the model, which is what FedAvg sends. A factor has as many rows as the batch
has examples (times positions, in a convolution), so it is smaller only where those are fewer than the layer's width.

Usage: ``python benchmarks/fedpm_bytes.py [--batch 64] [--smoke] [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedapps.client_apps.fedpm import fedpm_reply
from fedapps.curvature.blocks import WireDtype
from fedapps.curvature.foof import FoofPreconditioner
from fedapps.messages.blocks import CURVATURE
from fedapps.messages.schema import payload_bytes
from fedapps.results.environment import describe_environment
from fedapps.results.units import human_bytes
from fedapps.tasks.images import resnet18_groupnorm, simple_cnn

ROOT = Path(__file__).resolve().parent.parent
MODELS: dict[str, Callable[[], nn.Module]] = {
    "simple CNN": lambda: simple_cnn((3, 32, 32), 10),
    "ResNet-18": lambda: resnet18_groupnorm(10),
}
FORMS: dict[str, dict[str, Any]] = {
    "triangle": {},
    "bfloat16": {"wire": WireDtype.BFLOAT16},
    "blocks of at most 4096": {"max_width": 4096},
    "blocks of at most 1024": {"max_width": 1024},
    "blocks of at most 256": {"max_width": 256},
    "blocks of at most 256, bfloat16": {"max_width": 256, "wire": WireDtype.BFLOAT16},
    "factor": {"factor_min_rows": 2},
    "factor, bfloat16": {"factor_min_rows": 2, "wire": WireDtype.BFLOAT16},
}


def reply_bytes(build: Callable[[], nn.Module], batch: int, *, wire: WireDtype, **options: int) -> dict[str, int]:
    """Take one step and count the bytes of the reply's arrays by record."""
    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    with FoofPreconditioner(model, damping=0.1, **options) as foof:
        nn.functional.cross_entropy(model(x), y).backward()
        foof.step(0.1)
    reply = fedpm_reply(foof, model, num_examples=batch, wire=wire)
    return {name: size for name, size in payload_bytes(reply).items() if name in reply.array_records}


def main() -> None:
    """Count, print, and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="the simple CNN only, on a small batch")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = 4 if arguments.smoke else arguments.batch
    results: dict[str, Any] = {}
    for name, build in MODELS.items():
        if arguments.smoke and name != "simple CNN":
            continue
        model_bytes = sum(4 * p.numel() for p in build().parameters())
        forms = {}
        for form, options in FORMS.items():
            sizes = reply_bytes(build, batch, **{"wire": WireDtype.FLOAT32, **options})
            total, curvature = sum(sizes.values()), sizes[CURVATURE]
            forms[form] = {"curvature": curvature, "total": total, "times-fedavg": total / model_bytes}
            print(f"{name:>10}  {form:<32} P {human_bytes(curvature):>9}  reply {human_bytes(total):>9}  "
                  f"{total / model_bytes:6.2f} x FedAvg", flush=True)  # fmt: skip
            gc.collect()
        results[name] = {"fedavg": model_bytes, "forms": forms}
    record = {
        "batch": batch, "estimate": "last-batch", "models": results,
        "environment": describe_environment(device="cpu", data_checksums={}),
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fedpm_bytes.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
