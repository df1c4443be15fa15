"""Steps on torch models, what is read from their blocks, and the server's side of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedapps.curvature.blocks import Block
from fedapps.curvature.foof import FoofPreconditioner
from fedapps.curvature.layout import from_matrix, to_matrix
from fedapps.curvature.mixing import add_block, mix_block, start_block
from fedapps.curvature.packing import unpack_upper

Batch = tuple[torch.Tensor, torch.Tensor]
Arrays = dict[str, np.ndarray]


def square_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``1/2`` summed over outputs, mean over rows: ``A`` is then the exact Hessian of each output's weights."""
    return 0.5 * (outputs - targets).square().flatten(1).sum(1).mean()


def train(model: nn.Module, batches: Sequence[Batch], *, lr: float = 1.0, **settings: Any) -> FoofPreconditioner:
    """Take one step a batch."""
    with FoofPreconditioner(model, **settings) as foof:
        for x, y in batches:
            model.zero_grad()
            square_loss(model(x), y).backward()
            foof.step(lr)
    return foof


def arrays_of(model: nn.Module) -> Arrays:
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


def mix(sent: Arrays, replies: Sequence[tuple[float, Sequence[Block]]]) -> Arrays:
    """What the server does with the blocks of a round."""
    sums = {block.spec: start_block(*block.product.shape) for block in replies[0][1]}
    for weight, blocks in replies:
        for block in blocks:
            add_block(sums[block.spec], weight, block.curvature, block.product, where="test")
    new: Arrays = {}
    for spec, total in sums.items():
        new |= from_matrix(mix_block(to_matrix(sent, spec), total, where=spec.layer).W, spec, sent)
    return new


def make_data(n: int, width: int, out: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64) + seed
    truth = torch.randn(out, width, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    y = x @ truth.T + 3.0 + 0.1 * torch.randn(n, out, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 2),
    )


def curvature(foof: FoofPreconditioner, damping: float) -> np.ndarray:
    (block,) = foof.blocks()
    P = unpack_upper(block.curvature)
    return P - damping * np.eye(len(P))


def covariance64(*inputs: torch.Tensor) -> np.ndarray:
    rows = np.concatenate([np.c_[x.reshape(-1, x.shape[-1]), np.ones(x.numel() // x.shape[-1])] for x in inputs])
    return rows.T @ rows / len(rows)


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
