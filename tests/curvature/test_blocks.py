"""What a client sends for a block: every form against the matrices that it stands for, and the check of what came."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedapps.curvature.blocks import (
    Block,
    WireDtype,
    check_block,
    factor_block,
    from_bfloat16,
    identity_block,
    pack_trapezoid,
    to_bfloat16,
    trapezoid_size,
    triangle_block,
    unpack_trapezoid,
)
from fedapps.curvature.layout import BlockSpec
from fedapps.curvature.mixing import add_block, mix_block, start_block
from fedapps.curvature.packing import pack_upper, unpack_upper
from fedapps.errors import MessageError

LINEAR = BlockSpec("fc1", ("fc1.weight", "fc1.bias"), rows=4, width=6)
SPECS = {
    "whole": LINEAR,
    "two groups": BlockSpec("conv", ("conv.weight", "conv.bias"), rows=4, width=6, groups=2),
    "cut": BlockSpec("wide", ("wide.weight",), rows=3, width=11, cut=4),
    "groups and cut": BlockSpec("conv", ("conv.weight",), rows=4, width=9, groups=2, cut=5),
}
DAMPING = 0.3


def factors_of(spec: BlockSpec, k: int) -> list[np.ndarray]:
    """Upper triangular ``U`` ``(k, width)`` of each tile, float32."""
    random = np.random.default_rng(0)
    return [np.triu(random.normal(size=(k, tile.width))).astype(np.float32) for tile in spec.tiles]


def blocks_of(spec: BlockSpec, delta: np.ndarray, dtype: WireDtype) -> dict[str, tuple[Block, list[np.ndarray]]]:
    """The same ``P = U'U + 0.3 I`` in each form, with the matrices that it should stand for."""
    factors = factors_of(spec, 2)
    matrices = [U.T @ U + np.float32(DAMPING) * np.eye(U.shape[1], dtype=np.float32) for U in factors]
    return {
        "triangle": (triangle_block(spec, matrices, delta, dtype), matrices),
        "factor": (factor_block(spec, factors, [DAMPING] * len(factors), delta, dtype), matrices),
    }


@pytest.mark.parametrize("form", ["triangle", "factor"])
@pytest.mark.parametrize("dtype", list(WireDtype))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_form_stands_for_its_matrices(spec: BlockSpec, dtype: WireDtype, form: str) -> None:
    """bfloat16 has a relative error of 2^-9; the factor form squares it into ``P``, where entries are sums of two products."""
    delta = np.random.default_rng(1).normal(size=(spec.rows, spec.width))
    block, matrices = blocks_of(spec, delta, dtype)[form]
    check_block(block, "client 3")
    relative = 1e-6 if dtype is WireDtype.FLOAT32 else 2.0**-9 if form == "triangle" else 4 * 2.0**-9
    largest = max(np.abs(matrix).max() for matrix in matrices)
    for (tile, packed, product), matrix in zip(block.tiles(), matrices, strict=True):
        P = unpack_upper(packed)
        np.testing.assert_allclose(P, matrix, rtol=relative, atol=relative * largest)
        assert (np.abs(P - matrix).max() > 0) or dtype is WireDtype.FLOAT32
        # M belongs to the P that the receiver sees, not to the one before rounding.
        np.testing.assert_allclose(product, delta[tile.rows, tile.columns] @ P, rtol=1e-5, atol=1e-6)
    assert block.product.dtype == np.float32


@pytest.mark.parametrize("form", ["triangle", "factor"])
@pytest.mark.parametrize("dtype", list(WireDtype))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_client_gets_its_own_model_back_from_every_form(spec: BlockSpec, dtype: WireDtype, form: str) -> None:
    delta = np.random.default_rng(1).normal(size=(spec.rows, spec.width))
    block, _ = blocks_of(spec, delta, dtype)[form]
    for tile, packed, product in block.tiles():
        sums = start_block(*product.shape)
        add_block(sums, 2.0, packed, product, where="test")
        part = delta[tile.rows, tile.columns]
        np.testing.assert_allclose(mix_block(np.zeros_like(part), sums, where="test").W, part, atol=1e-4)


def test_bytes_of_each_form() -> None:
    """Width 6: a triangle of 21 numbers; two rows of a factor and the damping, 6 + 5 + 1; half of it in bfloat16."""
    delta = np.zeros((4, 6))
    sizes = {
        (dtype, form): block.curvature.nbytes
        for dtype in WireDtype
        for form, (block, _) in blocks_of(LINEAR, delta, dtype).items()
    }
    assert sizes == {
        (WireDtype.FLOAT32, "triangle"): 84, (WireDtype.FLOAT32, "factor"): 48,
        (WireDtype.BFLOAT16, "triangle"): 42, (WireDtype.BFLOAT16, "factor"): 24,
    }  # fmt: skip
    assert identity_block(LINEAR, 0.1, delta.astype(np.float32)).curvature.nbytes == 4


def test_factor_of_one_row_is_the_row_up_to_sign() -> None:
    """Why a minimum number of rows is asked for."""
    row = torch.tensor([[1.0, -2.0, 3.0]])
    torch.testing.assert_close(torch.linalg.qr(row, mode="r").R.abs(), row.abs())


def test_identity_is_expanded_for_every_tile() -> None:
    spec = SPECS["groups and cut"]
    delta = np.random.default_rng(1).normal(size=(4, 9)).astype(np.float32)
    block = identity_block(spec, 0.25, delta)
    check_block(block, "client 3")
    assert block.is_identity
    for tile, packed, product in block.tiles():
        np.testing.assert_array_equal(unpack_upper(packed), 0.25 * np.eye(tile.width))
        np.testing.assert_array_equal(product, 0.25 * delta[tile.rows, tile.columns])


def test_bfloat16_is_torchs() -> None:
    """To nearest even, ties, subnormals, signed zeros and overflow to infinity included."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    ties = (bits[:2000] & 0xFFFF0000) | 0x8000
    values = np.concatenate([bits, ties, np.array([0, 0x80000000, 0x7F7FFFFF, 1], np.uint32)]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16)
    np.testing.assert_array_equal(to_bfloat16(values).view(np.int16), expected.view(torch.int16).numpy())
    np.testing.assert_array_equal(from_bfloat16(to_bfloat16(values)), expected.float().numpy())


@pytest.mark.parametrize(("k", "width"), [(1, 4), (3, 4), (4, 4)])
def test_trapezoid_round_trip(k: int, width: int) -> None:
    U = np.triu(np.arange(1.0, 1 + k * width).reshape(k, width))
    packed = pack_trapezoid(U)
    assert packed.size == trapezoid_size(k, width)
    np.testing.assert_array_equal(unpack_trapezoid(packed, k, width), U)


FACTOR_SIZE = trapezoid_size(2, 6) + 1


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            Block(LINEAR, np.ones(FACTOR_SIZE - 1), np.ones((4, 6)), factor_rows=2),
            "expected P as block 6 x 6 as factors of 2 rows: 12 numbers, got an array of shape (11,)",
        ),
        (
            Block(SPECS["two groups"], pack_upper(np.eye(6)), np.ones((4, 6))),
            "layer 'conv', client 3: expected P as 2 blocks 6 x 6: 42 numbers, got an array of shape (21,)",
        ),
        (Block(LINEAR, np.full(21, 0x7F80, np.uint16), np.ones((4, 6))), "finite numbers in P, got 21 of 21"),
        (Block(LINEAR, np.array([np.inf]), np.ones((4, 6))), "finite numbers in P, got 1 of 1"),
        (Block(LINEAR, np.ones((1, 1)), np.ones((4, 6))), "got an array of shape (1, 1) that is not packed"),
    ],
    ids=["short factor", "one of two groups", "infinite bfloat16", "infinite identity", "matrix of one number"],
)
def test_form_that_does_not_fit_is_refused(block: Block, message: str) -> None:
    with pytest.raises(MessageError, match=re.escape(message)):
        check_block(block, "client 3")


def test_block_that_fits_passes() -> None:
    check_block(Block(LINEAR, pack_upper(np.eye(6)), np.ones((4, 6))), "client 3")


@pytest.mark.parametrize(
    ("curvature", "product", "message"),
    [
        (
            pack_upper(np.eye(5)),
            np.ones((4, 6)),
            r"^layer 'fc1', client 3: expected P of shape \(6, 6\), got \(5, 5\); "
            r"fold the bias on both ends or on neither$",
        ),
        (pack_upper(np.eye(6)), np.ones((4, 5)), r"layer 'fc1', client 3: expected M of shape \(4, 6\), got \(4, 5\)"),
        (np.ones(20), np.ones((4, 6)), r"got 20 numbers, which are no triangle"),
        (np.eye(6), np.ones((4, 6)), r"got an array of shape \(6, 6\) that is not packed"),
        (pack_upper(np.diag([1, 1, np.nan, 1, 1, 1])), np.ones((4, 6)), "finite numbers in P, got 1 of 21"),
        (pack_upper(np.eye(6)), np.full((4, 6), np.inf), "finite numbers in M, got 24 of 24"),
    ],
    ids=["P without bias", "M without bias", "no triangle", "not packed", "NaN in P", "infinity in M"],
)
def test_block_that_does_not_fit_is_refused(curvature: np.ndarray, product: np.ndarray, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        check_block(Block(LINEAR, curvature, product), "client 3")


def _negative(spec: BlockSpec, least: float) -> np.ndarray:
    """A block of ones whose last eigenvalue is ``least``, packed."""
    Q, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(spec.width, spec.width)))
    return pack_upper((Q * np.array([1.0] * (spec.width - 1) + [least])) @ Q.T).astype(np.float32)


@pytest.mark.parametrize(
    ("block", "least"),
    [
        (Block(LINEAR, _negative(LINEAR, -0.5), np.zeros((4, 6), np.float32)), "-0.5"),
        (Block(LINEAR, to_bfloat16(_negative(LINEAR, -0.5)), np.zeros((4, 6), np.float32)), "-0.49"),
        (Block(LINEAR, 1e30 * _negative(LINEAR, -0.5), np.zeros((4, 6), np.float32)), r"-5e\+29"),
        (Block(LINEAR, np.array([-2.0], np.float32), np.zeros((4, 6), np.float32)), "-2"),
        (factor_block(LINEAR, factors_of(LINEAR, 2), [-0.3], np.zeros((4, 6)), WireDtype.FLOAT32), "-0.3"),
    ],
    ids=["triangle", "bfloat16", "whose square overflows", "scaled identity", "factor"],
)
def test_a_curvature_with_a_negative_eigenvalue_is_refused_when_it_arrives(block: Block, least: str) -> None:
    """Folded, it would end the round for everybody in the solve."""
    with pytest.raises(MessageError, match=rf"layer 'fc1', client 3: .*negative eigenvalues, got one of {least}"):
        check_block(block, "client 3")


@pytest.mark.parametrize("dtype", list(WireDtype))
def test_rounding_does_not_refuse_an_honest_block(dtype: WireDtype) -> None:
    """One row and no damping: rank one, so rounding leaves eigenvalues a little below zero."""
    random = np.random.default_rng(5)
    for _ in range(50):
        row = random.normal(size=(1, 6)).astype(np.float32) * 10 ** random.uniform(-4, 4)
        check_block(triangle_block(LINEAR, [row.T @ row], np.zeros((4, 6)), dtype), "client 3")
    check_block(triangle_block(LINEAR, [np.zeros((6, 6), np.float32)], np.zeros((4, 6)), dtype), "client 3")


def test_a_cut_into_a_billion_tiles_is_refused_before_they_are_made() -> None:
    spec = BlockSpec("fc", ("fc.weight",), rows=1, width=10**9, cut=1)
    with pytest.raises(MessageError, match="1000000000 tiles"):
        check_block(Block(spec, np.zeros(1, np.float32), np.zeros((1, 1), np.float32)), "client 3")
