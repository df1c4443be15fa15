"""The state of a torch module as named NumPy arrays, and back.

What travels, in this order: the trainable parameters by their `named_parameters` name (a tied one once, under its first
name), then the persistent buffers by their `named_buffers` name. Frozen parameters and non-persistent buffers stay
where they are. Shapes and dtypes are kept, also of 0-dimensional integer buffers; bfloat16, which NumPy lacks, is an array
of its 16-bit patterns (uint16).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedapps.errors import TaskError

ARRAY_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""The dtypes that travel as NumPy arrays of the same dtype."""


def trainable_names(model: torch.nn.Module) -> list[str]:
    """List the trainable parameters, which travel, a tied one once."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def buffer_names(model: torch.nn.Module) -> list[str]:
    """List the persistent buffers, which travel, a shared one once."""
    persistent = model.state_dict(keep_vars=True)
    return [name for name, _ in model.named_buffers() if name in persistent]


def module_arrays(model: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Copy what travels of a model, on any device: name -> array of the tensor's shape and dtype.

    Raises:
        TaskError: A tensor has a dtype that NumPy lacks, such as float8; bfloat16 is allowed.
    """
    return {name: _array(name, tensor) for name, tensor in _travelling(model).items()}


def load_module_arrays(model: torch.nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy arrays of `module_arrays` into a model, in place; nothing is changed if a name or a shape does not fit.

    Tied parameters stay tied, every tensor keeps its dtype and device, and read-only arrays are fine.

    Raises:
        TaskError: A name is missing or not known, or a shape differs.
    """
    tensors = _travelling(model)
    _check_names(model, tensors, arrays)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != np.shape(arrays[name]):
            raise TaskError(
                f"tensor '{name}'",
                expected=f"shape {tuple(tensor.shape)}",
                got=f"{np.shape(arrays[name])}",
                do="load arrays of the same model, built with the same options",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(array_tensor(arrays[name], tensor))


def array_tensor(array: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Copy an array that travelled, read-only too, into a tensor with the dtype and on the device of another."""
    # A copy, since torch cannot wrap read-only memory.
    values = torch.from_numpy(np.array(array))
    is_pattern = like.dtype == torch.bfloat16 and values.dtype == torch.uint16
    return (values.view(torch.bfloat16) if is_pattern else values).to(like)


def _travelling(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    return {name: parameters[name] for name in trainable_names(model)} | {
        name: buffers[name] for name in buffer_names(model)
    }


def _array(name: str, tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.detach().view(torch.uint16)
    elif tensor.dtype not in ARRAY_DTYPES:
        raise TaskError(
            f"tensor '{name}'",
            expected="a dtype that NumPy has (float64, float32, float16, an integer or bool), or bfloat16",
            got=str(tensor.dtype),
            do="build the model in float32",
        )
    array: NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array


def _check_names(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, NDArray[Any]]
) -> None:
    missing = [name for name in tensors if name not in arrays]
    unknown = [name for name in arrays if name not in tensors]
    if not missing and not unknown:
        return
    do = "load arrays of the same model, built with the same options"
    if not missing and model.state_dict().keys() >= set(unknown):
        do = (
            "start the server from pack_arrays(module_arrays(model)) (fedapps.messages, fedapps.tasks.torch_arrays), not from "
            "state_dict(): tied weights travel once, frozen ones not at all"
        )
    raise TaskError(
        "model",
        expected=f"arrays for exactly its {len(tensors)} tensors",
        got=f"{len(arrays)} arrays; missing: {_list(missing)}; unknown: {_list(unknown)}",
        do=do,
    )


def _list(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
