# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
"""The fused CUDA path in Triton: one pass over memory, the bits of the reference.

Division and square root are asked for correctly rounded (`div_rn`, `sqrt_rn`), and every launch turns the fusion of
multiplication and addition off (`OPTIONS`); Triton's defaults approximate and contract. A tile is a whole number of
generator blocks, so the eight (or 128) elements of a block are drawn once.

All numbers of a launch lie in arrays, not in arguments: Triton compiles anew for arguments with special values.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 1024  # elements a program
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
"""Options of every launch."""

FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PLAIN, HISO_MOMENTUM = tl.constexpr(0), tl.constexpr(2)
FROM_STEP, COLLECT, FROM_MEAN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _philox(c0, c1, c2, c3, keys):
    for r in tl.static_range(10):
        k0 = tl.load(keys + 2 * r).to(tl.uint32, bitcast=True)
        k1 = tl.load(keys + 2 * r + 1).to(tl.uint32, bitcast=True)
        m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
        m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
        low0, low1 = m0 * c0, m1 * c2
        c0, c2 = tl.umulhi(m1, c2) ^ c1 ^ k0, tl.umulhi(m0, c0) ^ c3 ^ k1
        c1, c3 = low1, low0
    return c0, c1, c2, c3


@triton.jit
def _direction(first, step, probe, keys, table, GAUSSIAN: tl.constexpr, TILE: tl.constexpr):
    """Draw the tile that starts at element `first`, which starts a block."""
    BLOCK: tl.constexpr = 8 if GAUSSIAN else 128
    block = first // BLOCK + tl.arange(0, TILE // BLOCK)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = (tl.zeros([TILE // BLOCK], tl.int64) + step).to(tl.uint32)
    c3 = (tl.zeros([TILE // BLOCK], tl.int64) + probe).to(tl.uint32)
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, keys)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE // BLOCK * 4])
    if GAUSSIAN:
        lanes = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [TILE])
        u = tl.load(table + lanes.to(tl.int32))
    else:
        bits = (words[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]) & 1
        u = tl.reshape(bits, [TILE]).to(tl.int32).to(tl.float32) * 2.0 - 1.0
    return u


@triton.jit
def _widen(stored, FORMAT: tl.constexpr):
    if FORMAT == BFLOAT16:
        return (stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif FORMAT == FLOAT16:  # noqa: RET505 (Triton takes one return a branch of a compile-time condition)
        return stored.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return stored


@triton.jit
def _narrow(x, FORMAT: tl.constexpr):
    if FORMAT == BFLOAT16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.int16, bitcast=True)
    elif FORMAT == FLOAT16:  # noqa: RET505
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return x


@triton.jit
def _mean_direction(
    first, step, num_probes, c, root, keys, table,
    SCALED: tl.constexpr, GAUSSIAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    D = tl.zeros([TILE], tl.float32)
    for p in range(num_probes):
        z = _direction(first, step, p, keys, table, GAUSSIAN, TILE)
        if SCALED:
            z = tl.div_rn(z, root)
        D = D + tl.load(c + p) * z
    return D


@triton.jit
def displace(
    theta, out, H, starts, place, keys, table, ints, floats, coefficients, probe_ints, mu,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, GAUSSIAN: tl.constexpr, PROBED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write where a client stands, for windows that start at `starts`, end to end. See `rules.displace`.

    `place` holds the window's offset, the width of the windows and the number of local steps. Grid: (tiles, windows).
    """
    offset, width, num_steps = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    start = tl.load(starts + tl.program_id(1))
    first = (offset + start) // 128 * 128 + tl.program_id(0).to(tl.int64) * TILE
    within = first - offset - start + tl.arange(0, TILE)
    inside = (within >= 0) & (within < width)
    x = _widen(tl.load(theta + start + within, mask=inside, other=0), FORMAT)
    root = tl.full([TILE], 1.0, tl.float32)
    if SCALED:
        root = tl.sqrt_rn(tl.load(H + start + within, mask=inside, other=1.0))
    c = coefficients
    for j in range(num_steps):
        num_probes = tl.load(ints + 4 * j + 1)
        D = _mean_direction(first, tl.load(ints + 4 * j), num_probes, c, root, keys, table, SCALED, GAUSSIAN, TILE)
        c += num_probes
        x = _widen(_narrow(x - tl.load(floats + 7 * j) * D, FORMAT), FORMAT)
    if PROBED:
        z = _direction(first, tl.load(probe_ints + 1), tl.load(probe_ints + 2), keys, table, GAUSSIAN, TILE)
        if SCALED:
            z = tl.div_rn(z, root)
        x = x + tl.load(mu) * z
    tl.store(out + tl.program_id(1).to(tl.int64) * width + within, _narrow(x, FORMAT), mask=inside)


@triton.jit
def apply(
    theta, H, m, place, keys, table, ints, floats, coefficients,
    FORMAT: tl.constexpr, RULE: tl.constexpr, GAUSSIAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Apply the steps of many rounds to a window, in place. See `rules.apply_round`.

    `place` holds the window's offset, its size and the number of steps. Grid: (tiles,).
    """
    offset, size, num_steps = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    first = offset // 128 * 128 + tl.program_id(0).to(tl.int64) * TILE
    within = first - offset + tl.arange(0, TILE)
    inside = (within >= 0) & (within < size)
    x = _widen(tl.load(theta + within, mask=inside, other=0), FORMAT)
    h = tl.full([TILE], 1.0, tl.float32)
    root = tl.full([TILE], 1.0, tl.float32)
    blended = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if RULE != PLAIN:
        h = tl.load(H + within, mask=inside, other=1.0)
    if RULE == HISO_MOMENTUM:
        blended = tl.load(m + within, mask=inside, other=0.0)
    c = coefficients
    for j in range(num_steps):
        num_probes, learn = tl.load(ints + 4 * j + 1), tl.load(ints + 4 * j + 3)
        if tl.load(ints + 4 * j + 2) != 0:
            total = tl.zeros([TILE], tl.float32)
            if RULE != PLAIN:
                root = tl.sqrt_rn(h)
        D = _mean_direction(
            first, tl.load(ints + 4 * j), num_probes, c, root, keys, table, RULE != PLAIN, GAUSSIAN, TILE
        )
        c += num_probes
        if RULE == HISO_MOMENTUM:
            blended = tl.load(floats + 7 * j + 4) * blended + tl.load(floats + 7 * j + 5) * D
            x = x - tl.load(floats + 7 * j) * blended
        else:
            x = x - tl.load(floats + 7 * j) * D
        x = _widen(_narrow(x, FORMAT), FORMAT)
        if RULE != PLAIN:
            if learn >= COLLECT:
                total = total + D
            if learn == FROM_MEAN:
                D = tl.div_rn(total, tl.zeros([TILE], tl.float32) + tl.load(floats + 7 * j + 6))
            if (learn == FROM_STEP) | (learn == FROM_MEAN):
                one_minus_nu, nu, eps = (
                    tl.load(floats + 7 * j + 1), tl.load(floats + 7 * j + 2), tl.load(floats + 7 * j + 3)
                )  # fmt: skip
                h = one_minus_nu * h + nu * (D * D + eps)
    tl.store(theta + within, _narrow(x, FORMAT), mask=inside)
    if RULE != PLAIN:
        tl.store(H + within, h, mask=inside)
    if RULE == HISO_MOMENTUM:
        tl.store(m + within, blended, mask=inside)
