"""Extra forward passes that leave no trace in a torch model or in the random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def no_traces(model: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics) and torch's random generators back afterwards, those of the model's devices too."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
