"""Rows of every layer type against the layer itself, and which parameters get a block."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedapps.curvature import layers
from fedapps.curvature.foof import FoofPreconditioner
from fedapps.curvature.gram import covariance
from fedapps.curvature.layers import count_rows, input_moment, input_rows, model_layout, register_layer
from fedapps.curvature.layout import BlockSpec
from fedapps.errors import CurvatureError
from fedapps.tasks.torch_arrays import module_arrays

GEOMETRIES = {
    "1x1, stride 2": {"kernel_size": 1, "stride": 2},
    "3x3, stride 2, padding 1": {"kernel_size": 3, "stride": 2, "padding": 1},
    "3x3, dilation 2": {"kernel_size": 3, "dilation": 2},
    "kernel (1, 3)": {"kernel_size": (1, 3)},
    "padding same": {"kernel_size": 3, "padding": "same"},
    "padding same, even kernel": {"kernel_size": (2, 4), "padding": "same"},
    "padding same, dilation 2": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "padding valid": {"kernel_size": 3, "padding": "valid"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "reflect, same": {"kernel_size": 3, "padding": "same", "padding_mode": "reflect"},
    "replicate, all different": {
        "kernel_size": (3, 2),
        "stride": (1, 2),
        "padding": (2, 1),
        "dilation": (2, 1),
        "padding_mode": "replicate",
    },
}


def _images(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_convolution_is_its_matrix_times_its_rows(geometry: dict[str, object], bias: bool) -> None:
    """Order of unfolding, stride, padding and dilation are the layer's.

    ``W_flat`` (bias as last column) times each patch is the output at that position.
    """
    conv = nn.Conv2d(3, 4, bias=bias, dtype=torch.float64, **geometry)
    x = _images()
    rows = input_rows(conv, x)[0]
    W = conv.weight.flatten(1)
    if bias:
        W = torch.cat([W, conv.bias[:, None]], dim=1)
    expected = conv(x).permute(0, 2, 3, 1).flatten(0, 2)  # (batch * positions, out)
    torch.testing.assert_close(rows @ W.T, expected)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_covariance_is_the_mean_of_the_patches_outer_products(geometry: dict[str, object]) -> None:
    """Patch by patch: entry ``e`` of the patches is what a kernel that is 1 at ``e`` and 0 elsewhere gives."""
    conv = nn.Conv2d(3, 4, dtype=torch.float64, **geometry)
    x = _images()
    width = conv.weight[0].numel()
    probe = nn.Conv2d(3, width, bias=False, dtype=torch.float64, **geometry)
    probe.weight.data = torch.eye(width, dtype=torch.float64).reshape(probe.weight.shape)
    expected = torch.zeros(width + 1, width + 1, dtype=torch.float64)
    positions = probe(x).permute(0, 2, 3, 1).flatten(0, 2)
    for patch in positions:
        a = torch.cat([patch, torch.ones(1, dtype=torch.float64)])
        expected += torch.outer(a, a) / len(positions)
    torch.testing.assert_close(covariance(input_rows(conv, x))[0], expected)


def test_one_image_without_batch_is_a_batch_of_one() -> None:
    conv = nn.Conv2d(3, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(input_rows(conv, _images()[0]), input_rows(conv, _images()[:1]))


@pytest.mark.parametrize("shape", [(6,), (8, 6), (2, 5, 6), (2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_linear_flattens_batch_and_sequence(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(6, 3, bias=bias)
    (rows,) = input_rows(linear, torch.randn(shape))
    assert rows.shape == (torch.Size(shape[:-1]).numel(), 6 + bias)
    if bias:
        assert (rows[:, -1] == 1).all()


def test_rows_are_widened_and_carry_no_graph() -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
    rows = input_rows(nn.Linear(6, 3, dtype=torch.bfloat16), x)
    assert rows.dtype == torch.float32
    assert not rows.requires_grad


def test_layer_without_registered_type_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"LayerNorm .*register_layer"):
        input_rows(nn.LayerNorm(3), torch.randn(2, 3))


class Mixed(nn.Module):
    """One module of every kind without a block: embedding, norms, a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 6)
        self.group = nn.GroupNorm(2, 6)
        self.conv = nn.Conv2d(1, 2, (2, 3), bias=False)


def test_layout_says_for_every_trainable_parameter_what_happens() -> None:
    layout = model_layout(Mixed())
    assert layout.blocks == (
        BlockSpec("fc", ("fc.weight", "fc.bias"), 6, 5),
        BlockSpec("conv", ("conv.weight",), 2, 6),
    )
    assert layout.averaged == {
        "scale": "Mixed has no block",
        "embed.weight": "Embedding has no block",
        "norm.weight": "LayerNorm has no block",
        "norm.bias": "LayerNorm has no block",
        "group.weight": "GroupNorm has no block",
        "group.bias": "GroupNorm has no block",
    }


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("out", "groups"), [(8, 2), (4, 4), (8, 1)], ids=["grouped", "depthwise", "one group"])
def test_grouped_convolution_has_the_block_of_each_groups_channels(out: int, groups: int, bias: bool) -> None:
    """A group is not a dense layer.

    Each is a convolution of its own channels; ``functional.unfold`` of those is the brute force.
    """
    conv = nn.Conv2d(4, out, 3, groups=groups, padding=1, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
    (spec,) = model_layout(conv).blocks
    inner = 4 // groups
    assert (spec.rows, spec.width, spec.groups) == (out, inner * 9 + bias, groups)
    assert len(spec.tiles) == groups
    blocks = covariance(input_rows(conv, x))
    moment = input_moment(conv, x)
    for group in range(groups):
        channels = x[:, group * inner : (group + 1) * inner]
        patches = nn.functional.unfold(channels, 3, padding=1).transpose(1, 2).flatten(0, 1)
        if bias:
            patches = torch.cat([patches, torch.ones(len(patches), 1, dtype=torch.float64)], dim=1)
        torch.testing.assert_close(blocks[group], patches.T @ patches / len(patches))
        if moment is not None:
            torch.testing.assert_close(moment[group], patches.T @ patches)
    report = model_layout(conv).report(module_arrays(conv))
    assert (f"{groups} blocks {spec.width} x {spec.width}" in report) == (groups > 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("kind", "image", "options"),
    [
        (nn.Conv1d, (9,), {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}),
        (nn.Conv1d, (9,), {"kernel_size": 4, "padding": 2, "padding_mode": "reflect"}),
        (nn.Conv3d, (5, 6, 4), {"kernel_size": (2, 3, 1), "stride": (1, 2, 1), "padding": (1, 0, 1)}),
        (nn.Conv3d, (5, 6, 4), {"kernel_size": 2, "padding": "same", "dilation": 2, "padding_mode": "circular"}),
    ],
    ids=["1-d", "1-d, reflect", "3-d", "3-d, circular, same"],
)
def test_convolutions_of_one_and_three_dimensions(
    kind: type[nn.Conv1d | nn.Conv3d], image: tuple[int, ...], options: dict[str, Any], groups: int
) -> None:
    """``W_flat`` (bias as last column) of each group times its rows is the output of the group."""
    torch.manual_seed(0)
    conv = kind(4, 6, groups=groups, dtype=torch.float64, **options)
    x = torch.randn(2, 4, *image, dtype=torch.float64)
    rows = input_rows(conv, x)
    assert rows.shape[1] == count_rows(conv, x)
    W = torch.cat([conv.weight.flatten(1), conv.bias[:, None]], dim=1).unflatten(0, (groups, -1))
    expected = conv(x).flatten(2).transpose(1, 2).flatten(0, 1)  # (batch * positions, out)
    torch.testing.assert_close(torch.cat(list(rows @ W.mT), dim=1), expected)


def test_wide_layer_is_cut_into_even_blocks() -> None:
    model = nn.Sequential(nn.Linear(9, 2), nn.Linear(2, 3, bias=False))
    layout = model_layout(model, max_width=4)
    assert [tile.width for tile in layout.blocks[0].tiles] == [3, 3, 4]
    assert layout.blocks[1].tiles == model_layout(model).blocks[1].tiles
    assert "preconditioned, 3 blocks 4 x 4 or 3 x 3: 0.weight, 0.bias" in layout.report(module_arrays(model))


def test_tied_weight_is_averaged_once_and_the_bias_with_it() -> None:
    """Head and embedding are one tensor: it is listed once, and averaged."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    layout = model_layout(model)
    assert [spec.layer for spec in layout.blocks] == ["1"]
    assert layout.averaged == {"0.weight": "shared by several layers", "2.bias": "shared by several layers"}
    assert {*layout.preconditioned, *layout.averaged} == {name for name, _ in model.named_parameters()}


def test_module_under_two_names_has_one_block() -> None:
    model = nn.Module()
    model.first = nn.Linear(3, 3)
    model.second = model.first
    layout = model_layout(model)
    assert layout.preconditioned == ("first.weight", "first.bias")
    assert not layout.averaged


def test_frozen_weight_has_no_block_and_a_frozen_bias_is_not_folded() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    layout = model_layout(model)
    assert layout.blocks == (BlockSpec("2", ("2.weight",), 2, 3),)
    assert layout.averaged == {"1.bias": "its layer's weight is frozen"}
    assert input_rows(model[2], torch.randn(4, 3)).shape == (1, 4, 3)


def test_weight_computed_from_other_parameters_has_no_block() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    layout = model_layout(model)
    assert not layout.blocks
    assert layout.averaged["bias"] == "its layer's weight is computed from other parameters"
    assert set(layout.averaged) == {name for name, _ in model.named_parameters()}


def test_output_layer_of_attention_is_averaged() -> None:
    layout = model_layout(nn.MultiheadAttention(4, 2))
    assert not layout.blocks
    assert "without calling the layer" in layout.averaged["out_proj.weight"]


def test_subclass_is_covered_unless_it_computes_something_else() -> None:
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.abs())

    layout = model_layout(nn.Sequential(Same(3, 2), Other(2, 2)))
    assert [spec.layer for spec in layout.blocks] == ["0"]
    assert layout.averaged["1.weight"] == "Other has no block"


class Stored(nn.Module):
    """A linear layer ``(in, out)``, as GPT-2's."""

    def __init__(self, out: int = 4, width: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_layer_type_is_added_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_LAYER_TYPES", dict(layers._LAYER_TYPES))
    assert not model_layout(Stored()).blocks

    @register_layer(Stored, transposed=True)
    def rows(module: Stored, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, -2)

    assert model_layout(Stored()).blocks == (BlockSpec("", ("weight", "bias"), 4, 6, transposed=True),)
    assert input_rows(Stored(), torch.randn(2, 3, 5)).shape == (1, 6, 6)


ROWS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "not flattened": (lambda module, x: x, {}, r"rows of shape \(n, 5\), got \(2, 3, 5\)"),
    "flattened too far": (lambda module, x: x.flatten(), {}, r"rows of shape \(n, 5\), got \(30,\)"),
    "the other way round": (lambda module, x: x.flatten(0, -2).T, {}, r"rows of shape \(n, 5\), got \(5, 6\)"),
    "with the bias's 1": (
        lambda module, x: torch.cat([x.flatten(0, -2), torch.ones(6, 1)], dim=1), {}, r"\(n, 5\), got \(6, 6\)",
    ),
    "no result": (lambda module, x: None, {}, r"rows of shape \(n, 5\), got NoneType"),
    "groups": (lambda module, x: x.flatten(0, -2), {"groups": lambda m: 2}, r"shape \(2, n, 5\), got \(6, 5\)"),
    "another number": (
        lambda module, x, chosen: x.flatten(0, -2), {"num_rows": lambda m, x: 7}, r"\(7, 5\), got \(6, 5\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_fit_the_weight_are_refused_with_layer_and_advice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_LAYER_TYPES", dict(layers._LAYER_TYPES))
    function, options, message = ROWS[name]
    register_layer(Stored, transposed=True, **options)(function)
    model = nn.Sequential(nn.Tanh(), Stored())
    advice = r"; in what register_layer has for Stored, give a row for each use of the weight, as x.flatten\(0, -2\)"
    with (
        FoofPreconditioner(model, damping=0.1, where="client 3"),
        pytest.raises(CurvatureError, match=f"layer '1', client 3, Stored: expected .*{message}{advice}"),
    ):
        model(torch.randn(2, 3, 5))


def test_a_moment_that_does_not_fit_the_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_LAYER_TYPES", dict(layers._LAYER_TYPES))
    register_layer(Stored, transposed=True, moment=lambda m, x, bias: torch.eye(5)[None])(lambda m, x: x.flatten(0, -2))
    message = r"layer 'fc', Stored: expected a moment of shape \(1, 6, 6\), got \(1, 5, 5\); in what register_layer"
    with pytest.raises(CurvatureError, match=message):
        input_moment(Stored(), torch.randn(2, 3, 5), where="layer 'fc'")


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (Stored, {}, r"weight \(out, ...\) and bias \(out,\), got weight \(5, 4\) and bias \(4,\)"),
        (lambda: nn.Linear(5, 4), {"transposed": True}, r"as transposed=True says, .* got weight \(4, 5\) and bias"),
        (lambda: nn.Conv1d(5, 4, 2), {"transposed": True}, r"got \(4, 5, 2\) with transposed=True"),
        (lambda: nn.Linear(5, 4), {"groups": lambda m: 3}, "groups that divide its 4 outputs, got 3 groups"),
    ],
    ids=["transposed forgotten", "not transposed", "transposed convolution", "groups"],
)
def test_a_registration_that_does_not_fit_the_weight_is_refused_before_any_data(
    build: Callable[[], nn.Module], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_LAYER_TYPES", dict(layers._LAYER_TYPES))
    model = nn.Sequential(build())
    register_layer(type(model[0]), **options)(lambda module, x: x.flatten(0, -2))
    with pytest.raises(CurvatureError, match=rf"layer '0', {type(model[0]).__name__}: expected .*{message}"):
        model_layout(model)


def test_a_weight_wrongly_said_to_be_transposed_is_seen_from_its_rows_without_a_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "_LAYER_TYPES", dict(layers._LAYER_TYPES))
    register_layer(nn.Linear, transposed=True)(lambda module, x: x.flatten(0, -2))
    model = nn.Sequential(nn.Linear(5, 4, bias=False))
    with (
        FoofPreconditioner(model, damping=0.1),
        pytest.raises(CurvatureError, match=r"layer '0', Linear: expected rows of shape \(n, 4\), got \(6, 5\)"),
    ):
        model(torch.randn(2, 3, 5))


def _check_conv1d(layer: nn.Module) -> None:
    """``rows @ W'`` with ``W`` from the transposed weight is the layer's output."""
    (spec,) = model_layout(layer).blocks
    assert (spec.rows, spec.width, spec.transposed) == (4, 6, True)
    x = torch.randn(2, 3, 5)
    W = torch.cat([layer.weight.T, layer.bias[:, None]], dim=1)
    torch.testing.assert_close(input_rows(layer, x)[0] @ W.T, layer(x).flatten(0, 1))


@pytest.mark.slow
def test_conv1d_of_transformers_is_known_without_importing_it() -> None:
    """By name, so this stand-in, which says that it comes from there, is one."""
    assert not model_layout(Stored()).blocks
    named = type("Conv1D", (Stored,), {"__module__": "transformers.pytorch_utils", "forward": Stored.forward})
    _check_conv1d(named())
    code = "import sys, fedapps.curvature.foof; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_conv1d_of_transformers_itself() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils", reason="transformers is not installed")
    _check_conv1d(utils.Conv1D(4, 5))


# What the hook cannot vouch for ---------------------------------------------------------------


class OwnConvolution(nn.Conv2d):
    """A convolution with normalised weights, which keeps ``forward``."""

    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(x, weight / weight.norm(), bias)


def _patched(name: str) -> nn.Module:
    conv = nn.Conv2d(1, 2, 3)
    original = getattr(conv, name)
    setattr(conv, name, lambda *args: original(*args) * 2)
    return conv


class Renamed(nn.Linear):
    """A subclass that changes nothing that a call computes."""

    def extra_repr(self) -> str:
        return "renamed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: OwnConvolution(1, 2, 3), "its _conv_forward is not that of Conv2d"),
        (lambda: _patched("_conv_forward"), "its _conv_forward is not that of Conv2d"),
        (lambda: _patched("forward"), "its forward is not that of Conv2d"),
        (lambda: torch.compile(nn.Linear(3, 2)), layers.COMPILED),
        (lambda: nn.Sequential(torch.compile(nn.Sequential(nn.Linear(3, 2)))), layers.COMPILED),
        (lambda: _compiled_in_place(nn.Sequential(nn.Linear(3, 2))), layers.COMPILED),
        (lambda: Renamed(3, 2), None),
    ],
    ids=[
        "overridden",
        "patched method",
        "patched forward",
        "compiled",
        "compiled part",
        "compiled in place",
        "harmless",
    ],
)
def test_a_layer_that_may_compute_something_else_is_averaged(
    build: Callable[[], nn.Module], reason: str | None
) -> None:
    layout = model_layout(build())
    assert set(layout.averaged.values()) == ({reason} if reason else set())
    assert len(layout.blocks) == (reason is None)


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


# Which rows count -----------------------------------------------------------------------------

HELD = torch.tensor([[True, True, False], [False, True, False]])


@pytest.mark.parametrize(
    ("layer", "shape", "rows"),
    [
        (nn.Linear(4, 2), (2, 3, 4), [0, 1, 4]),
        (nn.Linear(4, 2), (6, 4), [0, 1, 4]),
        (nn.Linear(4, 2), (2, 3, 2, 4), [0, 1, 2, 3, 8, 9]),
        (nn.Linear(4, 2), (2, 4), None),
        (nn.Linear(4, 2), (6, 3, 4), None),
        (nn.Conv1d(4, 2, 3, padding=1), (2, 4, 3), [0, 1, 4]),
        (nn.Conv1d(3, 2, 2), (2, 3, 3), None),
        (nn.Conv2d(1, 2, 3), (2, 1, 5, 5), None),
    ],
    ids=["sequence", "flat", "heads", "pooled", "more rows", "convolution", "fewer positions", "images"],
)
def test_only_positions_with_data_count(layer: nn.Module, shape: tuple[int, ...], rows: list[int] | None) -> None:
    """Row ``r`` of an input of shape (2, 3, ...) belongs to position ``r // (rows / 6)``."""
    x = torch.randn(shape)
    with layers.count_only(HELD):
        found = layers.counted_rows(layer, x)
    assert (None if found is None else found.tolist()) == rows
    assert layers.counted_rows(layer, x) is None


def test_positions_in_the_order_of_another_model_are_refused() -> None:
    with layers.count_only(HELD), pytest.raises(CurvatureError, match=r"\(3, 2\).*\(2, 3\)"):
        layers.counted_rows(nn.Linear(4, 2), torch.randn(3, 2, 4), where="client 3")
