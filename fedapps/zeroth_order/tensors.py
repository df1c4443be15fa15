"""Torch tensors and NumPy arrays as flat windows of memory that the kernels take, without a copy.

This module imports torch only when it is handed a torch tensor, so a server without torch can use NumPy arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order.errors import DirectionError

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "NDArray[Any] | torch.Tensor"
"""Where parameters or state lie; bfloat16 in NumPy is `uint16`."""

ALIGNMENT = 64
"""Bytes; tensors start at multiples."""


def device_of(tensor: Tensor) -> str:
    """Tell the type of device where a tensor lies, such as `cpu`."""
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device.type)


def flat_view(tensor: Tensor, what: str = "parameters") -> Tensor:
    """View a contiguous tensor as one dimension of the same memory: a NumPy array if it is on the CPU, else a torch tensor.

    `what` is what it is, for the message to one whose elements do not lie end to end.

    Raises:
        DirectionError: The elements do not lie end to end.
    """
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous:
            raise _not_contiguous(what)
        return tensor.reshape(-1)
    if not tensor.is_contiguous():
        raise _not_contiguous(what)
    flat = tensor.detach().view(-1)
    return _to_numpy(flat) if flat.device.type == "cpu" else flat


def contiguous(tensor: Tensor) -> Tensor:
    """Give a tensor whose elements lie end to end: itself, or a copy in their logical order (of ``channels_last``)."""
    return np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) else tensor.contiguous()


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Get a tensor's elements as a NumPy array (bfloat16 as `uint16`), copied only if they lie elsewhere than on the CPU."""
    return tensor if isinstance(tensor, np.ndarray) else _to_numpy(tensor.detach().cpu())


def like(array: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give new flat elements, as of `flat_view` or in NumPy, the kind, dtype and device of a tensor, and a shape.

    In the tensor's own shape they are copied to its memory format if that is not the contiguous one.
    """
    if isinstance(tensor, np.ndarray):
        return array.reshape(shape)
    import torch  # only with a torch tensor

    if isinstance(array, np.ndarray):
        bits = array.view(np.int16) if array.dtype == np.uint16 else array
        array = torch.from_numpy(bits)
    if array.dtype != tensor.dtype:
        array = array.view(tensor.dtype)
    shaped = array.to(tensor.device).view(shape)
    if tensor.is_contiguous() or tuple(tensor.shape) != shape:
        return shaped
    return torch.empty_like(tensor).copy_(shaped)


def aligned_empty(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Allocate elements without defined values, (count,), at a multiple of 64 bytes, as torch does.

    Products of matrices may round differently, and are slower, at other addresses.
    """
    raw = np.empty(count * dtype.itemsize + ALIGNMENT, np.uint8)
    return aligned(raw, count * dtype.itemsize).view(dtype)


def aligned(raw: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """View that part, (size,), of a buffer at least 64 bytes longer, which starts at a multiple of 64 bytes."""
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    import torch

    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _not_contiguous(what: str) -> DirectionError:
    return DirectionError(
        what, expected="elements end to end in memory", got="strides", do="call contiguous() on it first"
    )
