from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.layout import Layout, TensorSpec, fingerprint, layout_of
from fedapps.zeroth_order.number_formats import NumberFormat

THETA = {
    "b": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1, 2, 3], np.uint16),
    "s": np.array(0.5, np.float16),
}
H = {name: np.full(values.shape, 2 + i, np.float32) for i, (name, values) in enumerate(THETA.items())}


def test_tensors_lie_end_to_end_in_their_order() -> None:
    layout = layout_of(THETA)
    assert layout.tensors[1] == TensorSpec("a", (3,), NumberFormat.BFLOAT16)
    assert layout.offsets == {"b": 0, "a": 6, "s": 9}
    assert layout.size == 10


def test_the_fingerprint_is_a_hash_of_all_bytes_in_order() -> None:
    layout = layout_of(THETA)
    theta = b"".join(values.tobytes() for values in THETA.values())
    h = b"".join(values.tobytes() for values in H.values())
    assert fingerprint(layout, THETA, {"H": H}) == hashlib.sha256(theta + h).hexdigest()
    m = {"m": H, "H": H}
    assert fingerprint(layout, THETA, m) == hashlib.sha256(theta + h + h).hexdigest()


def test_without_hessian_it_is_one_everywhere() -> None:
    ones = {name: np.ones(values.shape, np.float32) for name, values in THETA.items()}
    layout = layout_of(THETA)
    assert fingerprint(layout, THETA) == fingerprint(layout, THETA, {}) == fingerprint(layout, THETA, {"H": ones})


def test_large_tensors_are_hashed_in_parts() -> None:
    theta = {"w": np.arange(2_500_000, dtype=np.float32)}
    expected = hashlib.sha256(theta["w"].tobytes() + np.ones(2_500_000, np.float32).tobytes()).hexdigest()
    assert fingerprint(layout_of(theta), theta) == expected


def test_torch_tensors_have_the_fingerprint_of_their_numbers() -> None:
    torch = pytest.importorskip("torch", reason="parameters as torch tensors")
    theta = {
        "b": torch.from_numpy(THETA["b"]),
        "a": torch.from_numpy(THETA["a"].view(np.int16)).view(torch.bfloat16),
        "s": torch.tensor(0.5, dtype=torch.float16),
    }
    assert layout_of(theta) == layout_of(THETA)
    assert fingerprint(layout_of(theta), theta) == fingerprint(layout_of(THETA), THETA)


@pytest.mark.parametrize("bad", [{}, {"w": np.ones((0, 3), np.float32)}], ids=["no tensor", "no element"])
def test_a_model_without_trainable_parameters_is_refused(bad: dict[str, np.ndarray]) -> None:
    with pytest.raises(DirectionError, match=r"model: .*trainable parameter, got none"):
        layout_of(bad)


def test_bad_tensors_are_refused() -> None:
    with pytest.raises(DirectionError, match="tensor 'w': expected float32, bfloat16 or float16, got float64"):
        layout_of({"w": np.ones(2)})
    with pytest.raises(DirectionError, match="expected different names"):
        Layout((TensorSpec("w", (2,)), TensorSpec("w", (2,))))


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (Layout((TensorSpec("w", (2, 3)), TensorSpec("v", (4,)))), None),
        (
            Layout((TensorSpec("w", (3, 2)), TensorSpec("v", (4,)))),
            r"'w' \[3, 2\] float32 in the place of 'w' \[2, 3\]",
        ),
        (Layout((TensorSpec("w", (2, 3)),)), "1 tensors instead of 2"),
        (Layout((TensorSpec("w", (2, 3)), TensorSpec("v", (4,), NumberFormat.FLOAT16))), "'v' .* float16 in the place"),
    ],
    ids=["equal", "shape", "fewer", "format"],
)
def test_the_first_difference_is_named(other: Layout, phrase: str | None) -> None:
    found = Layout((TensorSpec("w", (2, 3)), TensorSpec("v", (4,)))).difference(other)
    assert (found is None) if phrase is None else re.search(phrase, found or "")
