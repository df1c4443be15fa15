from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.errors import TaskError
from fedapps.tasks.torch_arrays import array_tensor, buffer_names, load_module_arrays, module_arrays, trainable_names


class Mixed(nn.Module):
    """Tied, frozen and free parameters, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


TRAINABLE = ["scale", "embedding.weight", "norm.weight", "norm.bias"]
BUFFERS = ["mask", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_names_trainable_first_tied_once_nothing_frozen_or_volatile():
    model = Mixed()
    assert trainable_names(model) == TRAINABLE
    assert buffer_names(model) == BUFFERS
    assert list(module_arrays(model)) == TRAINABLE + BUFFERS


def test_round_trip_keeps_names_shapes_dtypes_and_values():
    """The way there and back changes no shape or dtype: 0-dimensional int64 and float64 stay what they are."""
    source, target = Mixed(), Mixed()
    with torch.no_grad():
        source.norm.num_batches_tracked.fill_(7)
        source.mask.logical_not_()
    arrays = module_arrays(source)
    assert arrays["norm.num_batches_tracked"].shape == ()
    assert arrays["norm.num_batches_tracked"].dtype == np.int64
    assert arrays["scale"].dtype == np.float64
    for array in arrays.values():
        array.flags.writeable = False
    load_module_arrays(target, arrays)
    again = module_arrays(target)
    assert list(again) == list(arrays)
    for name, array in arrays.items():
        assert (again[name].shape, again[name].dtype) == (array.shape, array.dtype)
        assert np.array_equal(again[name], array)


def test_loading_is_in_place_keeps_ties_and_copies():
    model = Mixed()
    weight = model.embedding.weight
    arrays = module_arrays(model)
    arrays["embedding.weight"] = np.full((5, 3), 2, dtype=np.float32)
    load_module_arrays(model, arrays)
    assert model.head.weight is model.embedding.weight is weight
    arrays["embedding.weight"][:] = 9
    assert torch.equal(weight, torch.full((5, 3), 2.0))


def test_arrays_do_not_share_memory_with_the_model():
    model = Mixed()
    arrays = module_arrays(model)
    before = arrays["norm.weight"].copy()
    with torch.no_grad():
        model.norm.weight.add_(1)
    assert np.array_equal(arrays["norm.weight"], before)


def test_half_precision_travels_as_it_is():
    arrays = module_arrays(nn.Linear(2, 2).half())
    assert arrays["weight"].dtype == np.float16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda a: a.pop("norm.bias"), "missing: 'norm.bias'; unknown: none", id="missing"),
        pytest.param(
            lambda a: a.update(extra=np.zeros(1)),
            "expected arrays for exactly its 8 tensors.*unknown: 'extra'",
            id="extra",
        ),
        pytest.param(
            lambda a: a.update({"norm.bias": np.zeros((3, 1))}),
            r"tensor 'norm.bias': expected shape \(3,\), got \(3, 1\)",
            id="shape",
        ),
        pytest.param(
            lambda a: a.update({"norm.num_batches_tracked": np.zeros(1, dtype=np.int64)}),
            r"'norm.num_batches_tracked': expected shape \(\), got \(1,\)",
            id="counter-with-a-dimension",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(change, message):
    model = Mixed()
    arrays = {name: array + 1 if array.dtype != bool else array for name, array in module_arrays(model).items()}
    change(arrays)
    before = module_arrays(model)
    with pytest.raises(TaskError, match=message):
        load_module_arrays(model, arrays)
    assert all(np.array_equal(before[name], array) for name, array in module_arrays(model).items())


def test_bfloat16_is_its_patterns():
    """The patterns are the upper halves of the float32 numbers."""
    layer, other = nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2).to(torch.bfloat16)
    arrays = module_arrays(layer)
    assert arrays["weight"].dtype == np.uint16
    np.testing.assert_array_equal(
        (arrays["weight"].astype(np.uint32) << 16).view(np.float32), layer.weight.detach().float().numpy()
    )
    load_module_arrays(other, arrays)
    assert torch.equal(layer.weight, other.weight)
    assert other.weight.dtype == torch.bfloat16


def test_a_dtype_without_arrays_is_refused_by_name():
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2).to(torch.float8_e5m2))
    with pytest.raises(TaskError, match=r"tensor 'scale': expected a dtype.*got torch.float8_e5m2"):
        module_arrays(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_of_an_array_is_a_copy_like_another(dtype):
    source = torch.tensor([1, 2, 1024]).to(dtype)
    layer = nn.Module()
    layer.register_buffer("values", source)
    array = module_arrays(layer)["values"]
    array.flags.writeable = False
    copy = array_tensor(array, source)
    assert copy.dtype == dtype
    assert torch.equal(copy, source)
    copy.add_(1)
    assert source.tolist() == [1, 2, 1024]
    assert array_tensor(np.array([1.5]), torch.zeros(1, dtype=torch.float32)).dtype == torch.float32
