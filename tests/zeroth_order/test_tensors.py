"""Windows of memory: the same elements without a copy, whatever holds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedapps.errors import FedAppsError
from fedapps.zeroth_order.tensors import ALIGNMENT, aligned, aligned_empty, device_of, flat_view, like, to_numpy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_is_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=dtype).reshape(2, 3).requires_grad_()
    view = flat_view(tensor)
    assert isinstance(view, np.ndarray)
    assert view.shape == (6,)
    assert view.dtype == (np.uint16 if dtype is torch.bfloat16 else np.dtype(str(dtype).removeprefix("torch.")))
    view[5] = view[1]
    assert tensor[1, 2] == 1
    array = np.zeros((2, 3), np.float32)
    flat_view(array)[4] = 1
    assert array[1, 1] == 1


@pytest.mark.parametrize("strided", [np.zeros((2, 3)).T, torch.zeros(2, 3).T], ids=["NumPy", "torch"])
def test_elements_that_do_not_lie_end_to_end_are_refused_by_name(strided: np.ndarray | torch.Tensor) -> None:
    with pytest.raises(FedAppsError, match=r"H of layer 3.*strides"):
        flat_view(strided, "H of layer 3")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, -0.0], [float("inf"), 1e-3]], dtype=dtype)
    back = like(to_numpy(tensor).reshape(-1).copy(), tensor, (2, 2))
    assert isinstance(back, torch.Tensor)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    array = np.arange(4, dtype=np.uint16)
    assert like(array, np.empty(0, np.uint16), (2, 2)).base is array
    assert to_numpy(array) is array


def test_the_device_is_named() -> None:
    assert device_of(np.zeros(1)) == device_of(torch.zeros(1)) == "cpu"
    assert device_of(torch.zeros(1, device="meta")) == "meta"


@pytest.mark.parametrize("shift", [0, 1, 63])
def test_memory_starts_at_a_multiple_of_the_alignment(shift: int) -> None:
    raw = np.empty(8 + 2 * ALIGNMENT, np.uint8)[shift:]
    cut = aligned(raw, 8)
    assert cut.ctypes.data % ALIGNMENT == 0
    assert cut.size == 8
    assert np.shares_memory(cut, raw)
    empty = aligned_empty(5, np.dtype(np.float32))
    assert (empty.ctypes.data % ALIGNMENT, empty.shape, empty.dtype) == (0, (5,), np.float32)
