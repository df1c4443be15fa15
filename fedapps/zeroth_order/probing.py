"""Scalars of a client: `f(x + mu z)` for any torch module, without a second copy of the model.

Local steps `k = 0..tau-1` from `theta_r`, with `H_r` fixed and the same batch in every pass of a step:

    forward:  g_p = [f(x + mu z_p) - f(x)] / mu                 (P + 1 passes)
    central:  g_p = [f(x + mu z_p) - f(x - mu z_p)] / (2 mu)    (2 P passes)
    x <- x - eta (1/P) sum_p g_p z_p

On the sphere a probe has the length mu and the direction v_p = z_p / |z_p|, and the step is

    x <- x - eta (d/P) sum_p v_p [f(x + mu v_p) - f(x)] / mu

which is the form above with the radius mu / |z_p| and the scalar g_p d / |z_p|^2.

`x` is never stored: a tensor is materialised from `theta_r`, the local steps so far and the probe, for as long as one
operation needs it. Losses are reduced in float32; the quotient is taken in float64 and rounded to float32 once.

References:
    DeComFL, arXiv 2405.15861. HiSo, arXiv 2506.02370, Algorithm 1. MeZO, arXiv 2305.17333, Algorithm 1. On the sphere: FedZO,
    arXiv 2201.09531.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.dispatch import perturb
from fedapps.zeroth_order.errors import ProbeError
from fedapps.zeroth_order.layout import Ranges, layout_of
from fedapps.zeroth_order.perturbed import Perturbed
from fedapps.zeroth_order.quiet import check_model, quiet, same_noise, trainable_parameters
from fedapps.zeroth_order.scheme import LocalStep, Probe, Scalars, Scheme
from fedapps.zeroth_order.tensors import ALIGNMENT, aligned, aligned_empty

LOG = logging.getLogger("flwr")
"""Flower's logger."""

Loss: TypeAlias = Callable[[torch.nn.Module, Any], torch.Tensor]
"""`(model, batch) -> losses`: one a row in any floating format, or one float32 number."""

LEAST_MOVED = 0.5
"""Share of half-precision elements below which a warning says that probes hardly move them.

Where less than half of the elements move, the median move is less than half of the spacing of numbers there, and what is
measured is the slope along a direction that rounding has chosen as much as the draw.
"""

_CHUNK = 1 << 20
"""Elements of a direction that are drawn at a time for its length."""

_HALF = (torch.bfloat16, torch.float16)


class Difference(StrEnum):
    """How a directional derivative is estimated."""

    FORWARD = "forward"
    """`[f(x + mu z) - f(x)] / mu`: one pass a probe, and one a step."""

    CENTRAL = "central"
    """`[f(x + mu z) - f(x - mu z)] / (2 mu)`: two passes a probe, an order more accurate."""


@dataclass(frozen=True)
class ProbeResult:
    """What a client's local steps gave.

    Attributes:
        scalars: `g`, float32 values, (tau, P); not finite where the loss was not.
        losses: Loss at `x` of each step (central: mean of all its passes), (tau,).
        lost: `(k, p)` of the scalars that are exactly 0: the probe was lost in rounding.
        moved: Share of the half-precision elements used that the probes of the first step changed; None without such.
        unused: Names of trainable parameters that no pass read.
    """

    scalars: Scalars
    losses: tuple[float, ...]
    lost: tuple[tuple[int, int], ...]
    moved: float | None
    unused: tuple[str, ...]


class Prober:
    """Evaluates the loss of a model at displaced parameters; the model is bitwise as before after every call.

    Args:
        model: Any torch module on the CPU or CUDA; its trainable parameters hold `theta_r`.
        scheme: The run's scheme.
        state: The rule's state, slot -> parameter name -> float32 tensor; may be empty if the scale is 1.
        fixed: Parameter name -> elements that neither probes nor local steps move.
        threads: Of the kernels on the CPU.

    Raises:
        ProbeError: The model has no trainable parameter, or one that cannot be followed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        scheme: Scheme,
        state: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        fixed: Mapping[str, Ranges] | None = None,
        threads: int | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self.scheme = scheme
        self.parameters = trainable_parameters(model)
        self._state = state or {}
        self._layout = layout_of(self.parameters, fixed)
        self._fixed = self._layout.fixed
        self._threads = threads
        self._scratch = _Scratch(max(p.numel() * p.element_size() for p in self.parameters.values()))
        self._moved: list[tuple[torch.Tensor, int]] = []
        self._used: set[str] = set()

    def loss(
        self, loss: Loss, batch: Any, *, steps: Sequence[LocalStep] = (), probe: Probe | None = None, noise: int = 0
    ) -> float:
        """Evaluate the loss where a client stands after its local steps, displaced by a probe.

        Dropout is off, buffers stay as they are, and torch's random numbers drawn in the forward pass are a function of
        the seed and `noise`, and leave the global generators untouched.

        Args:
            loss: See `Loss`.
            batch: Handed to `loss`.
            steps: Local steps taken so far.
            probe: The probe, or None for the loss at `x`.
            noise: Names the random numbers; the same in every pass that is compared, such as the global step.

        Returns:
            The mean loss, a float32 value.

        Raises:
            ProbeError: The forward pass writes parameters or large buffers, or the loss is no float32 number.
        """
        displaced = bool(steps) or probe is not None

        def displace(name: str, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
            return self._displaced(name, steps, probe, rows)

        mode = Perturbed(self.parameters, displace if displaced else None)
        with torch.no_grad(), quiet(self.model), same_noise(self.model, self.scheme.seed, noise), mode:
            value = loss(self.model, batch)
        self._used |= mode.used
        return _reduced(value)

    def probe(
        self,
        loss: Loss,
        batches: Sequence[Any],
        *,
        first_step: int,
        num_probes: int,
        mu: float,
        lr: float,
        difference: Difference = Difference.FORWARD,
        sphere: bool = False,
    ) -> ProbeResult:
        """Take `tau` local steps, one a batch, and return the scalars; parameters stay at `theta_r`.

        Args:
            loss: See `Loss`.
            batches: One for each local step, (tau,).
            first_step: Global step of the first.
            num_probes: `P`.
            mu: Radius, above 0.
            lr: `eta` of the local steps.
            difference: Forward or central.
            sphere: Whether `mu` is the length of a probe, and not the factor of a direction of length about `sqrt(d)`.

        Raises:
            ProbeError: `mu` or `P` is out of range, there is no batch, or see `loss`.
        """
        _check_options(len(batches), num_probes, mu)
        self._moved, self._used = [], set()
        steps: list[LocalStep] = []
        losses = []
        for k, batch in enumerate(batches):
            squares = [self._square(first_step + k, p) if sphere else 1.0 for p in range(num_probes)]
            radii = [mu / square**0.5 for square in squares]
            g, value = self._one_step(loss, batch, first_step + k, radii, difference, steps)
            if sphere:
                g = tuple(
                    float(np.float32(a * self._num_moving / square)) for a, square in zip(g, squares, strict=True)
                )
            steps.append(LocalStep(first_step + k, g, lr))
            losses.append(value)
        scalars = tuple(step.scalars for step in steps)
        lost = tuple((k, p) for k, row in enumerate(scalars) for p, g in enumerate(row) if g == 0)
        touched = sum(size for _, size in self._moved)
        moved = sum(int(changed) for changed, _ in self._moved) / touched if touched else None
        unused = tuple(name for name in self.parameters if name not in self._used)
        result = ProbeResult(scalars, tuple(losses), lost, moved, unused)
        self._report(result, mu)
        return result

    def displaced(self, steps: Sequence[LocalStep]) -> dict[str, torch.Tensor]:
        """Materialise the whole model after local steps, name -> new tensor: what FedZO sends (arXiv 2201.09531)."""
        return {name: self._displaced(name, steps, None, None, fresh=True) for name in self.parameters}

    def _one_step(
        self, loss: Loss, batch: Any, step: int, radii: Sequence[float], difference: Difference,
        steps: Sequence[LocalStep],
    ) -> tuple[tuple[float, ...], float]:  # fmt: skip
        def at(probe: int, sign: int) -> float:
            return self.loss(loss, batch, steps=steps, probe=Probe(step, probe, radii[probe], sign), noise=step)

        widths = [float(np.float32(mu)) for mu in radii]
        plus = [at(p, 1) for p in range(len(radii))]
        if difference is Difference.CENTRAL:
            minus = [at(p, -1) for p in range(len(radii))]
            g = tuple(_quotient(a, b, 2 * width) for a, b, width in zip(plus, minus, widths, strict=True))
            return g, sum(plus + minus) / (2 * len(radii))
        base = self.loss(loss, batch, steps=steps, noise=step)
        return tuple(_quotient(a, base, width) for a, width in zip(plus, widths, strict=True)), base

    @property
    def _num_moving(self) -> int:
        """Number of elements that probes move, `d`."""
        fixed = sum(stop - start for ranges in self._fixed.values() for start, stop in ranges)
        return self._layout.size - fixed

    def _square(self, step: int, probe: int) -> float:
        """Compute `|z|^2` over the elements that probes move, in float64; for a scheme without state, where `z = u`."""
        scheme, total = self.scheme, 0.0
        for name, offset in self._layout.offsets.items():
            edges = [0, *(edge for one in self._fixed.get(name, ()) for edge in one), self.parameters[name].numel()]
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                for first in range(start, stop, _CHUNK):
                    last = min(first + _CHUNK, stop)
                    u = direction(scheme.seed, step, probe, offset + first, offset + last, scheme.distribution)
                    total += float(np.square(u, dtype=np.float64).sum())
        return total

    def _displaced(
        self,
        name: str,
        steps: Sequence[LocalStep],
        probe: Probe | None,
        rows: NDArray[np.int64] | None,
        *,
        fresh: bool = False,
    ) -> torch.Tensor:
        parameter = self.parameters[name].detach()
        result = perturb(
            parameter,
            {slot: tensors[name] for slot, tensors in self._state.items()},
            self.scheme,
            offset=self._layout.offsets[name],
            steps=steps,
            probe=probe,
            rows=rows,
            fixed=self._fixed.get(name, ()),
            scratch=aligned_empty if fresh else self._scratch.take,
            threads=self._threads,
        )
        moved = cast("torch.Tensor", result)
        if probe is not None and not steps and parameter.dtype in _HALF:
            before = parameter if rows is None else parameter[torch.from_numpy(rows).to(parameter.device)]
            changed = torch.count_nonzero(moved != before)  # by value: -0 in place of 0 is no move
            self._moved.append((changed, moved.numel()))
        return moved

    def _report(self, result: ProbeResult, mu: float) -> None:
        if result.unused:
            LOG.warning("trainable parameters that the loss never reads: %s", ", ".join(result.unused[:5]))
        moved = 1.0 if result.moved is None else result.moved
        if result.lost:
            lost, count = len(result.lost), sum(len(row) for row in result.scalars)
            said = f"{lost} of {count} probes were lost in rounding: the loss did not change at all"
        elif moved < LEAST_MOVED:
            said = "most of a probe is lost in rounding"
        else:
            return
        formats = "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in self.parameters.values()}))
        share = "" if result.moved is None else f", {100 * moved:.1f} % of the elements moved"
        LOG.warning("%s (mu %g, %s%s); raise mu or keep the parameters in float32", said, mu, formats, share)


class _Scratch:
    """One buffer for the tensor that is materialised at the moment; more only while somebody still holds it.

    New memory costs a page fault for every 4 KiB, about as much as drawing the direction.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._raw: NDArray[np.uint8] | None = None

    def take(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        size = count * dtype.itemsize
        if self._raw is None:
            self._raw = np.empty(self._size + ALIGNMENT, np.uint8)
        # Every array or tensor over the buffer holds a reference to it: two are this attribute and the call's argument.
        if size > self._size or sys.getrefcount(self._raw) > 2:
            return aligned_empty(count, dtype)
        return aligned(self._raw, size).view(dtype)


def _quotient(plus: float, other: float, width: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32((plus - other) / width))


def _reduced(value: torch.Tensor) -> float:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        got = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        do = "return one loss a row, or their mean in float32"
        raise ProbeError("loss", expected="a floating-point tensor with elements", got=got, do=do)
    if value.numel() == 1 and value.dim() == 0 and value.dtype in _HALF:
        do = "return one loss a row, or compute the loss of logits.float()"
        raise ProbeError("loss", expected="a mean in float32", got=str(value.dtype), do=do)
    return float(value.detach().to(torch.float32).mean().item())


def _check_options(tau: int, num_probes: int, mu: float) -> None:
    if tau < 1 or num_probes < 1:
        got = f"{tau} batches, P = {num_probes}"
        raise ProbeError("local steps", expected="a batch and a probe", got=got, do="raise tau or P")
    if not (np.isfinite(np.float32(mu)) and np.float32(mu) > 0):
        do = "choose mu near 1e-3"
        raise ProbeError("mu", expected="a float32 number above 0", got=repr(mu), do=do)
