"""Blocks as matrices, the layout as JSON, and the check of what a client sent."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedapps.curvature.layout import BlockSpec, Layout, from_matrix, layout_from_json, to_matrix
from fedapps.errors import MessageError

LINEAR = BlockSpec("fc1", ("fc1.weight", "fc1.bias"), rows=4, width=6)
LAYOUT = Layout(
    (LINEAR, BlockSpec("attn.c_attn", ("attn.c_attn.weight",), rows=3, width=2, transposed=True)),
    {"embed.weight": "Embedding has no block"},
)


def _numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)


CASES = {
    "linear with bias": (LINEAR, {"fc1.weight": (4, 5), "fc1.bias": (4,)}),
    "linear without bias": (BlockSpec("fc", ("fc.weight",), 4, 5), {"fc.weight": (4, 5)}),
    "convolution": (
        BlockSpec("conv", ("conv.weight", "conv.bias"), 4, 19),
        {"conv.weight": (4, 2, 3, 3), "conv.bias": (4,)},
    ),
    "transposed": (BlockSpec("c", ("c.weight", "c.bias"), 4, 6, True), {"c.weight": (5, 4), "c.bias": (4,)}),
    "parameter vector": (BlockSpec("", ("weights",), 1, 7), {"weights": (7,)}),
    "one output": (BlockSpec("fc", ("fc.weight", "fc.bias"), 1, 3), {"fc.weight": (1, 2), "fc.bias": (1,)}),
}


@pytest.mark.parametrize(("spec", "shapes"), CASES.values(), ids=CASES)
def test_matrix_round_trip_keeps_shape_dtype_and_value(spec: BlockSpec, shapes: dict[str, tuple[int, ...]]) -> None:
    arrays = {name: _numbers(*shape) for name, shape in shapes.items()}
    W = to_matrix(arrays, spec)
    assert W.shape == (spec.rows, spec.width)
    back = from_matrix(W.astype(np.float64, order="C"), spec, arrays)
    assert list(back) == list(spec.parameters)
    for name, array in arrays.items():
        assert back[name].dtype == np.float32
        assert back[name].flags.c_contiguous
        np.testing.assert_array_equal(back[name], array)


def test_bias_is_the_last_column() -> None:
    W = to_matrix({"fc1.weight": _numbers(4, 5), "fc1.bias": -_numbers(4)}, LINEAR)
    np.testing.assert_array_equal(W[:, -1], [-1, -2, -3, -4])
    np.testing.assert_array_equal(W[1, :-1], [6, 7, 8, 9, 10])


def test_transposed_weight_has_one_row_for_each_output() -> None:
    spec, _ = CASES["transposed"]
    weight = _numbers(5, 4)
    W = to_matrix({"c.weight": weight, "c.bias": np.zeros(4)}, spec)
    np.testing.assert_array_equal(W[2, :-1], weight[:, 2])


@pytest.mark.parametrize(
    ("spec", "arrays", "message"),
    [
        (LINEAR, {"fc1.weight": _numbers(4, 5)}, "layer 'fc1', client 3: expected a parameter 'fc1.bias'"),
        (
            LINEAR,
            {"fc1.weight": _numbers(5, 4), "fc1.bias": _numbers(4)},
            r"make a matrix of shape \(4, 6\), got 'fc1.weight' \(5, 4\) and 'fc1.bias' \(4,\)",
        ),
        (LINEAR, {"fc1.weight": _numbers(4, 6), "fc1.bias": _numbers(4)}, r"\(4, 6\), got 'fc1.weight' \(4, 6\) and"),
        (LINEAR, {"fc1.weight": _numbers(4, 5), "fc1.bias": _numbers(5)}, r"'fc1.bias' \(5,\)"),
    ],
    ids=["no bias", "weight turned", "weight too wide", "bias too long"],
)
def test_parameters_that_do_not_fit_are_refused(spec: BlockSpec, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(MessageError, match=message):
        to_matrix(arrays, spec, "client 3")
    with pytest.raises(MessageError, match="layer 'fc1': expected"):
        from_matrix(_numbers(4, 6), spec, arrays)


def test_matrix_of_another_shape_is_refused() -> None:
    arrays = {"fc1.weight": _numbers(4, 5), "fc1.bias": _numbers(4)}
    with pytest.raises(MessageError, match=r"layer 'fc1': expected W of shape \(4, 6\), got \(4, 5\)"):
        from_matrix(_numbers(4, 5), LINEAR, arrays)


def test_layout_round_trip_through_json() -> None:
    assert layout_from_json(LAYOUT.to_json(), "client 3") == LAYOUT


def test_report_names_every_tensor_with_its_block_or_the_reason() -> None:
    model = dict.fromkeys((*LAYOUT.preconditioned, *LAYOUT.averaged, "norm.mean"), np.zeros(1, np.float32))
    counters = {"norm.count": np.array(3), "norm.mask": np.array([True])}
    assert LAYOUT.report(model | counters).splitlines() == [
        "preconditioned, block 6 x 6: fc1.weight, fc1.bias",
        "preconditioned, block 2 x 2: attn.c_attn.weight",
        "averaged (Embedding has no block): embed.weight",
        "averaged (buffer): norm.mean",
        "maximum (integer buffer): norm.count, norm.mask",
    ]
    assert LAYOUT.preconditioned == ("fc1.weight", "fc1.bias", "attn.c_attn.weight")


def _changed(**changes: object) -> str:
    content = json.loads(LAYOUT.to_json())
    content["blocks"][0].update(changes)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fc1", "client 3, layout: expected what Layout.to_json writes, got 'fc1'"),
        ("[]", "client 3, layout"),
        ("{}", "client 3, layout: .*KeyError: 'blocks'"),
        (_changed(color="red"), "client 3, layout: .*color"),
        (_changed(rows="4"), "client 3, layout: .*rows = '4'"),
        (_changed(width=True), "client 3, layout: .*width = True"),
        (_changed(parameters=[1]), "client 3, layout: .*parameters"),
        (_changed(parameters=[]), "layer 'fc1': expected a weight and at most one bias"),
        (_changed(rows=0), "layer 'fc1': .*0 rows"),
        (_changed(groups=3), "layer 'fc1': expected groups that divide the rows.* got 3 groups of 4 rows"),
        (_changed(cut=-1), "layer 'fc1': .*cut -1"),
    ],
    ids=[
        "no JSON",
        "a list",
        "empty",
        "unknown key",
        "text as number",
        "bool as number",
        "number as name",
        "no weight",
        "no rows",
        "groups that do not divide",
        "negative cut",
    ],
)
def test_malformed_layout_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        layout_from_json(text, "client 3")


def test_tiles_go_group_by_group_and_from_left_to_right() -> None:
    spec = BlockSpec("conv", ("conv.weight",), rows=4, width=5, groups=2, cut=3)
    assert [(t.rows, t.columns) for t in spec.tiles] == [
        (slice(0, 2), slice(0, 2)), (slice(0, 2), slice(2, 5)), (slice(2, 4), slice(0, 2)), (slice(2, 4), slice(2, 5)),
    ]  # fmt: skip
    assert spec.curvature_size == 2 * (3 + 6)
    report = Layout((spec,)).report({"conv.weight": np.zeros((4, 5))})
    assert report == "preconditioned, 4 blocks 3 x 3 or 2 x 2: conv.weight"
