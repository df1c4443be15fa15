r"""What a client sends for a layer, ``P`` and ``M = (W_i - W) P``, in the forms in which ``P`` travels; NumPy only.

=================  ===============================================================  ===================================
form               numbers for a tile of width ``w``                                comes out as
=================  ===============================================================  ===================================
triangle           upper triangle of ``P``, ``w (w + 1) / 2``                       ``P``
factor             first ``k`` rows of a triangular ``U``, then a damping ``d``     ``U'U + d I``
scaled identity    one number ``d`` for the whole layer                             ``d I``
=================  ===============================================================  ===================================

Numbers are float32 (float64 for a float64 model), or bfloat16 as its 16-bit pattern in uint16, since neither NumPy nor Flower's
records have the type. Whatever was rounded, ``M`` is computed with the ``P`` that the receiver will see, so a single client
still gets its own model back.

A factor says as much about the rows as ``P`` does, and with one row it *is* the row, up to sign. Replies in that form cannot be
added up before they are decoded, so they are no linear aggregate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.layout import BlockSpec, Tile, describe_tiles, misshapen
from fedapps.curvature.packing import (
    diagonal_places,
    pack_upper,
    scaled_identity,
    triangle_size,
    triangle_width,
    unpack_upper,
)
from fedapps.errors import CurvatureError, MessageError

Array = NDArray[Any]


MOST_TILES = 65_536
"""Tiles that a layer may be cut into where fewer numbers come."""


class WireDtype(StrEnum):
    """In which numbers ``P`` travels."""

    FLOAT32 = "float32"
    """As computed: float32, or float64 for a float64 model."""
    BFLOAT16 = "bfloat16"
    """Rounded to 8 significant bits, half the bytes. Rounding may cost a block with a small damping its definiteness; the
    server then adds some."""


@dataclass(frozen=True, eq=False)
class Block:
    """What a client sends for one layer.

    Attributes:
        spec: The layer's block.
        curvature: ``P`` that the last local step divided by, damping included, in one of the forms of the module: the numbers
            of all tiles one after another (of factors: then all dampings), ``(n,)``.
        product: ``M = (W_i - W) P``, ``(rows, width)``.
        factor_rows: ``k`` of the factor form; 0 for the others.
    """

    spec: BlockSpec
    curvature: Array
    product: Array
    factor_rows: int = 0

    @property
    def is_identity(self) -> bool:
        """Whether ``P`` is a multiple of the identity, of which only the factor travels."""
        return self.curvature.shape == (1,) and self.spec.curvature_size != 1

    def tiles(self) -> Iterator[tuple[Tile, Array, Array]]:
        """Go through the tiles: each with its ``P`` packed, ``(width (width + 1) / 2,)``, and its part of ``M``."""
        values = decode(self.curvature)
        start = 0
        for number, tile in enumerate(self.spec.tiles):
            size = trapezoid_size(self.factor_rows or tile.width, tile.width)
            if self.is_identity:
                packed: Array = scaled_identity(tile.width, float(values[0]))
            elif self.factor_rows:
                U = unpack_trapezoid(values[start : start + size], self.factor_rows, tile.width).astype(np.float64)
                damping = values[number - len(self.spec.tiles)]
                packed = pack_upper(U.T @ U) + scaled_identity(tile.width, float(damping))
            else:
                packed = values[start : start + size]
            yield tile, packed, self.product[tile.rows, tile.columns]
            start += size

    def trace(self) -> float:
        """Give ``tr P``, over all tiles, in float64: no entry of a positive semi-definite ``P`` is greater."""
        values = decode(self.curvature).astype(np.float64)
        widths = [tile.width for tile in self.spec.tiles]
        if self.is_identity:
            return float(values[0]) * sum(widths)
        if self.factor_rows:
            U, dampings = values[: -len(widths)], values[-len(widths) :]
            return float(U @ U + dampings @ widths)  # tr U'U is the sum of squares.
        starts = np.cumsum([0, *(triangle_size(width) for width in widths)])
        return float(
            sum(values[start + diagonal_places(width)].sum() for start, width in zip(starts, widths, strict=False))
        )


def triangle_block(spec: BlockSpec, matrices: Sequence[Array], delta: Array, dtype: WireDtype) -> Block:
    """Compose a block whose ``P`` travels as upper triangles; ``M`` is computed in float64 and stored in their precision.

    Args:
        spec: The layer's block.
        matrices: ``P`` of each tile, ``(width, width)``.
        delta: ``W_i - W``, ``(rows, width)``.
        dtype: In which numbers ``P`` travels.
    """
    packed = np.concatenate([pack_upper(matrix) for matrix in matrices])
    return _compose(spec, packed, delta, dtype, factor_rows=0)


def factor_block(
    spec: BlockSpec, factors: Sequence[Array], dampings: Sequence[float], delta: Array, dtype: WireDtype
) -> Block:
    """Compose a block whose ``P = U'U + d I`` travels as triangular factors; else as `triangle_block`.

    Args:
        spec: The layer's block.
        factors: ``U`` of each tile, ``(k, width)`` upper triangular, all with the same ``k``.
        dampings: ``d`` of each tile.
        delta: ``W_i - W``, ``(rows, width)``.
        dtype: In which numbers ``P`` travels.
    """
    parts = [pack_trapezoid(factor) for factor in factors]
    packed = np.concatenate([*parts, np.asarray(dampings, factors[0].dtype)])
    return _compose(spec, packed, delta, dtype, factor_rows=len(factors[0]))


def identity_block(spec: BlockSpec, scale: float, delta: Array) -> Block:
    """Compose a block for ``P = scale I``, of a layer without curvature on this client, in the precision of ``delta``."""
    return Block(spec, np.array([scale], delta.dtype), (delta * scale).astype(delta.dtype))


def _compose(spec: BlockSpec, packed: Array, delta: Array, dtype: WireDtype, *, factor_rows: int) -> Block:
    curvature = to_bfloat16(packed) if dtype is WireDtype.BFLOAT16 else packed
    product = np.empty((spec.rows, spec.width), packed.dtype)
    for tile, P, _ in Block(spec, curvature, product, factor_rows).tiles():
        part = delta[tile.rows, tile.columns].astype(np.float64)
        product[tile.rows, tile.columns] = part @ unpack_upper(P).astype(np.float64)
    return Block(spec, curvature, product, factor_rows)


def check_block(block: Block, who: str) -> None:
    r"""Check what a client sent for a block: shapes, finite numbers, and a ``P`` without negative eigenvalues.

    ``P`` passes if :math:`P + \epsilon |P|_F I` has a Cholesky factor, with ``epsilon`` for the rounding of its numbers: that
    of bfloat16 may cost a block its definiteness, which the sum over the clients makes up for.

    Raises:
        MessageError: ``P`` or ``M`` has another shape, a number is not finite, or ``P`` is not positive semi-definite.
    """
    spec = block.spec
    num_tiles = spec.groups * (-(-spec.width // spec.cut) if spec.cut else 1)
    if num_tiles > max(block.curvature.size, MOST_TILES):
        raise misshapen(spec, who, f"at most {MOST_TILES} tiles, or as many as numbers", f"{num_tiles} tiles")
    narrowest = min(tile.width for tile in spec.tiles)
    if block.factor_rows > narrowest:
        raise misshapen(spec, who, f"a factor of at most {narrowest} rows", f"{block.factor_rows}")
    if not block.is_identity and block.curvature.shape != (_size(block),):
        raise misshapen(spec, who, *_shapes(block))
    if block.product.shape != (spec.rows, spec.width):
        raise misshapen(spec, who, f"M of shape {(spec.rows, spec.width)}", f"{block.product.shape}")
    for name, values in (("P", decode(block.curvature)), ("M", block.product)):
        if not np.isfinite(values).all():
            raise MessageError(
                spec.where(who),
                expected=f"finite numbers in {name}",
                got=f"{int(values.size - np.isfinite(values).sum())} of {values.size} that are NaN or infinite",
                do="lower the learning rate or raise the damping on that client",
            )
    _check_definite(block, who)


def _check_definite(block: Block, who: str) -> None:
    values = decode(block.curvature)
    # Of a scaled identity and of factors, U'U + d I, only the dampings can be wrong.
    dampings = values if block.is_identity else values[-len(block.spec.tiles) :] if block.factor_rows else values[:0]
    least = float(dampings.min(initial=0.0))
    if not dampings.size:
        epsilon = 2.0**-8 if block.curvature.dtype == np.uint16 else 1e-5
        for _, packed, _ in block.tiles():
            # In units of its largest number, whose square would overflow from 1e19 on.
            unit = float(np.abs(packed).max()) or 1.0
            P = unpack_upper((packed / packed.dtype.type(unit)).astype(np.float32))
            np.einsum("ii->i", P)[...] += epsilon * np.linalg.norm(P) + np.finfo(np.float32).tiny
            try:
                np.linalg.cholesky(P)
            except np.linalg.LinAlgError:
                least = min(least, unit * float(np.linalg.eigvalsh(P)[0]))
    if least < 0:
        raise MessageError(
            block.spec.where(who),
            expected="P without negative eigenvalues",
            got=f"one of {least:.3g}",
            do="send P as the last step divided by it, damping included",
        )


def _size(block: Block) -> int:
    """Count the numbers that a block's form has."""
    tiles, k = block.spec.tiles, block.factor_rows
    if not k:
        return block.spec.curvature_size
    return sum(trapezoid_size(k, tile.width) for tile in tiles) + len(tiles)


def _shapes(block: Block) -> tuple[str, str]:
    """Say what shape ``P`` should have, and what it has."""
    spec, curvature = block.spec, block.curvature
    if len(spec.tiles) > 1 or block.factor_rows:
        form = f" as factors of {block.factor_rows} rows" if block.factor_rows else ""
        return f"P as {describe_tiles(spec)}{form}: {_size(block)} numbers", f"an array of shape {curvature.shape}"
    got = f"an array of shape {curvature.shape} that is not packed"
    if curvature.ndim == 1:
        try:
            width = triangle_width(curvature.size)
            got = f"{(width, width)}"
        except CurvatureError:
            got = f"{curvature.size} numbers, which are no triangle"
    return f"P of shape {(spec.width, spec.width)}", got


def trapezoid_size(k: int, width: int) -> int:
    """Count the numbers of a ``(k, width)`` triangular factor, from the diagonal to the right: ``k width - k (k - 1) / 2``."""
    return triangle_size(width) - triangle_size(width - k)


def pack_trapezoid(U: Array) -> Array:
    """Copy the upper triangular part of a factor ``(k, width)``, ``k <= width``, row by row; `trapezoid_size` numbers."""
    return np.concatenate([row[i:] for i, row in enumerate(U)])


def unpack_trapezoid(packed: Array, k: int, width: int) -> Array:
    """Rebuild a factor ``(k, width)``, zero below the diagonal; the inverse of `pack_trapezoid`."""
    U = np.zeros((k, width), packed.dtype)
    start = 0
    for i in range(k):
        U[i, i:] = packed[start : start + width - i]
        start += width - i
    return U


def to_bfloat16(values: Array) -> NDArray[np.uint16]:
    """Round finite numbers to bfloat16, to nearest even: 16-bit patterns in the same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Read bfloat16 patterns as float32, in the same shape."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def decode(curvature: Array) -> Array:
    """Give the numbers of a curvature array, which may be bfloat16 patterns in uint16."""
    return from_bfloat16(curvature) if curvature.dtype == np.uint16 else curvature
