"""A model made quiet for probing: checked once, evaluated without dropout, without traces, with the same noise.

A probe compares two losses, so whatever changes between two passes other than the parameters is an error of the scalar.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedapps.zeroth_order.errors import ProbeError
from fedapps.zeroth_order.philox import philox4x32

_BUFFER_COPY_LIMIT = 1 << 24  # bytes; a larger buffer that the forward pass writes is an error
_NOISE = 0xFFFFFFFF  # counter words of the noise; no direction reaches block 2^64 - 1


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """List the parameters that a direction covers, in order, a tied one once; frozen ones are no part of `d`."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_model(model: torch.nn.Module) -> None:
    """Refuse a model whose trainable parameters cannot be followed into every use.

    Raises:
        ProbeError: Nothing is trainable, a part is compiled or scripted, elements of a parameter share memory, or two
            names do without being one parameter.
    """
    parameters = trainable_parameters(model)
    if not parameters:
        do = "leave some parameters unfrozen"
        raise ProbeError("model", expected="a trainable parameter", got="none", do=do)
    for name, parameter in parameters.items():
        if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
            do = "set its data to a clone"
            raise ProbeError(f"parameter '{name}'", expected="memory for each element", got="an expanded one", do=do)
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        if compiled or isinstance(module, torch.jit.ScriptModule):
            do = "pass the model as it was before torch.compile or torch.jit"
            raise ProbeError(f"module '{name}'", expected="plain Python", got="compiled code", do=do)
    _refuse_aliases(model, parameters)


@contextmanager
def quiet(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate a model without a trace: `eval()` inside; flags and buffers afterwards as before.

    A large buffer of which no copy is kept must not be written: a ProbeError.
    """
    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer._version, _copy_of(buffer))
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
        lost = []
        for module, name, buffer, version, copy in buffers:
            module._buffers[name] = buffer
            if buffer._version != version:
                if copy is None:
                    lost.append(name)
                else:
                    with torch.no_grad():
                        buffer.copy_(copy)
        if lost:
            do = "keep it out of the forward pass in eval mode"
            raise ProbeError(f"buffer '{lost[0]}'", expected="no change", got="a write", do=do)


@contextmanager
def same_noise(model: torch.nn.Module, seed: int, noise: int) -> Iterator[None]:
    """Seed torch's generators, CUDA's of the model's devices too, by (seed, noise); put their state back afterwards."""
    low, high, _, _ = philox4x32((_NOISE, _NOISE, noise & _NOISE, _NOISE), seed)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        number = (int(high) << 32 | int(low)) & (2**63 - 1)
        # Each generator by itself: torch.manual_seed formats a stack trace, which costs more than a small probe.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)):
            generator.manual_seed(number)
        yield


def _copy_of(buffer: torch.Tensor) -> torch.Tensor | None:
    return buffer.clone() if buffer.numel() * buffer.element_size() <= _BUFFER_COPY_LIMIT else None


def _refuse_aliases(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Find tensors that share memory with a trainable parameter without being it: they would not be displaced."""
    own = {id(parameter) for parameter in parameters.values()}
    ranges = [(*_range(tensor), name, True) for name, tensor in parameters.items()]
    for prefix, module in model.named_modules():
        held = {**module._parameters, **module._buffers, **module.__dict__}
        for name, tensor in held.items():
            # What torch.nn.utils (spectral_norm, prune) computes from `..._orig` before every forward pass is no alias.
            computed = f"{name}_orig" in module._parameters and bool(module._forward_pre_hooks)
            if isinstance(tensor, torch.Tensor) and id(tensor) not in own and not computed:
                ranges.append((*_range(tensor), f"{prefix}.{name}".lstrip("."), False))
    end, holder, trainable = 0, "", False
    for start, stop, name, is_trainable in sorted(r for r in ranges if r[0] < r[1]):
        if start < end and (trainable or is_trainable):
            do = "tie them by assigning the same Parameter to both"
            raise ProbeError(f"'{name}'", expected="memory of its own", got=f"that of '{holder}'", do=do)
        if stop > end:
            end, holder, trainable = stop, name, is_trainable


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0, 0
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
