# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The fused CPU path: compiled by numba, tile by tile, the bits of the reference.

Every tile of elements is read once, all steps of all rounds are applied to it while it lies in the cache, and it is
written once. The caller splits a window between threads; elements do not depend on each other, so the bits do not
depend on the number of threads.

Rounding: numba compiles without `fastmath`, so no instruction carries LLVM's `contract` or `reassoc` flag, and LLVM
fuses or reorders nothing (a test reads the machine code for fused and approximate instructions). Half formats are
rounded with integer arithmetic, since not every processor has the instructions.

Layout: parameters come as two arrays of which one is used, `wide` (float32) or `packed` (uint16), with a format code, so
that one compiled function serves all formats and its start-up cost is paid once (numba keeps it in its file cache).
"""

from __future__ import annotations

import numpy as np
from numba import njit

TILE = 4096  # elements; a tile's buffers fit the first cache levels beside the table of directions
GAUSSIAN_BLOCK, RADEMACHER_BLOCK = 8, 128  # elements of a block of four words
ALIGN = RADEMACHER_BLOCK  # elements of the largest block
CHUNK = 64  # elements; so few that a processor looks up the next ones' directions while it divides for these

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
PLAIN, HISO, HISO_MOMENTUM = 0, 1, 2
FROM_STEP, COLLECT, FROM_MEAN = 1, 2, 3  # `program.Learn`

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def _jit(function):
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no folder can be written for the cache
        return njit(nogil=True, error_model="numpy")(function)


@_jit
def _philox_round(c0, c1, c2, c3, k0, k1):
    p0 = _M0 * (c0 & _LOW)
    p1 = _M1 * (c2 & _LOW)
    return (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW


@_jit
def _words(out, first_block, blocks, keys, step, probe):
    # The ten rounds stand in a row, without a loop, so that the loop over blocks is the innermost one and is vectorised.
    a0, a1, a2, a3, a4 = keys[0, 0], keys[1, 0], keys[2, 0], keys[3, 0], keys[4, 0]
    a5, a6, a7, a8, a9 = keys[5, 0], keys[6, 0], keys[7, 0], keys[8, 0], keys[9, 0]
    b0, b1, b2, b3, b4 = keys[0, 1], keys[1, 1], keys[2, 1], keys[3, 1], keys[4, 1]
    b5, b6, b7, b8, b9 = keys[5, 1], keys[6, 1], keys[7, 1], keys[8, 1], keys[9, 1]
    for i in range(blocks):
        block = first_block + np.uint64(i)
        c0, c1, c2, c3 = block & _LOW, block >> _HALF, step, probe
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a0, b0)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a1, b1)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a2, b2)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a3, b3)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a4, b4)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a5, b5)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a6, b6)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a7, b7)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a8, b8)
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, a9, b9)
        out[4 * i] = np.uint32(c0)
        out[4 * i + 1] = np.uint32(c1)
        out[4 * i + 2] = np.uint32(c2)
        out[4 * i + 3] = np.uint32(c3)


@_jit
def _gaussian(u, words, count, table):
    for i in range(count):
        word = words[i]
        u[2 * i] = table[word & np.uint32(0xFFFF)]
        u[2 * i + 1] = table[word >> np.uint32(16)]


@_jit
def _rademacher(u, words, count):
    for i in range(count):
        word = words[i]
        for bit in range(32):
            u[32 * i + bit] = np.float32(np.int32((word >> np.uint32(bit)) & np.uint32(1)) * 2 - 1)


@_jit
def _draw_words(words, first, n, per_block, keys, step, probe):
    """Draw the words of elements `first..first+n-1`; return how many of the first block's elements lie before them."""
    block = first // per_block
    shift = first - block * per_block
    blocks = (shift + n + per_block - 1) // per_block
    _words(words, np.uint64(block), blocks, keys, np.uint64(step), np.uint64(probe))
    return shift


@_jit
def _draw(u, words, first, n, keys, table, step, probe):
    """Draw elements `first..first+n-1` into the buffer and return them; an empty table means Rademacher."""
    if table.size:
        shift = _draw_words(words, first, n, GAUSSIAN_BLOCK, keys, step, probe)
        _gaussian(u, words, (shift + n + 1) // 2, table)
    else:
        shift = _draw_words(words, first, n, RADEMACHER_BLOCK, keys, step, probe)
        _rademacher(u, words, (shift + n + 31) // 32)
    return u[shift : shift + n]


# --- number formats: a tile in float32, `x`, and the same memory as integers, `bits` ---------------------------------


@_jit
def _copy(target, source):
    for i in range(target.size):
        target[i] = source[i]


@_jit
def _widen_bfloat16(bits, packed):
    for i in range(packed.size):
        bits[i] = np.uint32(packed[i]) << np.uint32(16)


@_jit
def _widen_float16(x, bits, packed):
    # As a float32 with the exponent of binary16 the number is 2^112 too small; the product is exact, subnormals included.
    for i in range(packed.size):
        bits[i] = np.uint32(packed[i] & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(packed.size):
        x[i] = x[i] * np.float32(2.0**112)
    for i in range(packed.size):
        half = np.uint32(packed[i])
        special = np.uint32(0x7F800000) if half & np.uint32(0x7C00) == np.uint32(0x7C00) else np.uint32(0)
        bits[i] = np.uint32(bits[i] | special | ((half & np.uint32(0x8000)) << np.uint32(16)))


@_jit
def _narrow_bfloat16(packed, bits):
    for i in range(packed.size):
        b = bits[i]
        rounded = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        packed[i] = np.uint16(np.uint32(0x7FC0) if b & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else rounded)


@_jit
def _narrow_float16(packed, bits, scratch, scratch_bits):
    for i in range(packed.size):
        scratch_bits[i] = bits[i] & np.uint32(0x7FFFFFFF)
    for i in range(packed.size):
        # Adding 0.5 leaves the last bit of a subnormal of binary16 in the last place of the float32: one rounding.
        scratch[i] = scratch[i] + np.float32(0.5)
    for i in range(packed.size):
        b = bits[i]
        size = b & np.uint32(0x7FFFFFFF)
        small = np.uint32(scratch_bits[i] - np.uint32(0x3F000000))
        odd = (size >> np.uint32(13)) & np.uint32(1)
        normal = np.uint32(size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        result = small if size < np.uint32(0x38800000) else normal
        result = np.uint32(0x7C00) if size >= np.uint32(0x47800000) else result
        result = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else result
        packed[i] = np.uint16(result | ((b >> np.uint32(16)) & np.uint32(0x8000)))


@_jit
def _load(x, bits, half, wide, packed, code):
    if code == FLOAT32:
        _copy(x, wide)
        return
    _copy(half, packed)
    if code == BFLOAT16:
        _widen_bfloat16(bits, half)
    else:
        _widen_float16(x, bits, half)


@_jit
def _round(x, bits, half, scratch, scratch_bits, code):
    """Round `x` in place to the format; it stays in float32, and `half` holds the pattern."""
    if code == BFLOAT16:
        _narrow_bfloat16(half, bits)
        _widen_bfloat16(bits, half)
    elif code == FLOAT16:
        _narrow_float16(half, bits, scratch, scratch_bits)
        _widen_float16(x, bits, half)


# --- arithmetic of a tile, one operation after the other as in `rules` ------------------------------------------------


@_jit
def _sqrt(root, H):
    for i in range(root.size):
        root[i] = np.sqrt(H[i])


@_jit
def _add_plain(D, c, u):
    for i in range(D.size):
        D[i] = D[i] + c * u[i]


@_jit
def _add_scaled(D, c, u, root):
    for i in range(D.size):
        D[i] = D[i] + c * (u[i] / root[i])


@_jit
def _move_plain(out, x, mu, u):
    for i in range(x.size):
        out[i] = x[i] + mu * u[i]


@_jit
def _move_scaled(out, x, mu, u, H):
    for i in range(x.size):
        out[i] = x[i] + mu * (u[i] / np.sqrt(H[i]))


@_jit
def _descend(x, lr, D):
    for i in range(x.size):
        x[i] = x[i] - lr * D[i]


@_jit
def _blend(m, beta, one_minus_beta, D):
    for i in range(m.size):
        m[i] = beta * m[i] + one_minus_beta * D[i]


@_jit
def _learn(H, D, one_minus_nu, nu, eps):
    for i in range(H.size):
        H[i] = one_minus_nu * H[i] + nu * (D[i] * D[i] + eps)


@_jit
def _divide(D, total, tau):
    for i in range(D.size):
        D[i] = total[i] / tau


@_jit
def _step_and_learn(x, H, u, c, lr, one_minus_nu, nu, eps):
    for i in range(x.size):
        D = np.float32(0) + c * (u[i] / np.sqrt(H[i]))
        x[i] = x[i] - lr * D
        H[i] = one_minus_nu * H[i] + nu * (D * D + eps)


# The usual round: one Gaussian direction, looked up and used chunk by chunk; `words` begin with the first element's. The loop
# over a chunk stands here once more since the compiler must see that its length is constant.


@_jit
def _usual_round(x, H, buffer, words, table, c, lr, one_minus_nu, nu, eps):
    whole = x.size - x.size % CHUNK
    for start in range(0, whole, CHUNK):
        x_c, H_c = x[start : start + CHUNK], H[start : start + CHUNK]
        _gaussian(buffer, words[start // 2 :], CHUNK // 2, table)
        for i in range(CHUNK):
            D = np.float32(0) + c * (buffer[i] / np.sqrt(H_c[i]))
            x_c[i] = x_c[i] - lr * D
            H_c[i] = one_minus_nu * H_c[i] + nu * (D * D + eps)
    _gaussian(buffer, words[whole // 2 :], (x.size - whole + 1) // 2, table)
    _step_and_learn(x[whole:], H[whole:], buffer, c, lr, one_minus_nu, nu, eps)


@_jit
def _mean_direction(D, buffer, words, root, scaled, first, keys, table, step, coefficients):
    D[:] = np.float32(0)
    for p in range(coefficients.size):
        u = _draw(buffer, words, first, D.size, keys, table, step, p)
        if scaled:
            _add_scaled(D, coefficients[p], u, root)
        else:
            _add_plain(D, coefficients[p], u)


# --- the two passes over memory ---------------------------------------------------------------------------------------


@_jit
def displace(
    wide, packed, wide_out, packed_out, code, H, offset, starts, width, keys, table, ints, floats, coefficients,
    has_probe, probe_step, probe, mu,
):  # fmt: skip
    """Write where a client stands, for windows of `width` elements that start at `starts`, end to end.

    See `rules.displace`; an empty `H` stands for 1.
    """
    buffers = np.empty((3, TILE), np.float32)
    all_bits = buffers.view(np.uint32)
    drawn, words = np.empty(TILE + 2 * ALIGN, np.float32), np.empty(TILE // 2 + ALIGN, np.uint32)
    halves = np.empty(TILE, np.uint16)
    scaled = H.size > 0
    for row in range(starts.size):
        for begin in range(0, width, TILE):
            n = min(TILE, width - begin)
            source, target = starts[row] + begin, row * width + begin
            first = offset + source
            if code == FLOAT32 and has_probe and ints.shape[0] == 0:
                # The usual probe in one loop, which is a fifth faster: memory is read while roots and quotients are taken.
                here, there = wide[source : source + n], wide_out[target : target + n]
                u = _draw(drawn, words, first, n, keys, table, probe_step, probe)
                if scaled:
                    _move_scaled(there, here, mu, u, H[source : source + n])
                else:
                    _move_plain(there, here, mu, u)
                continue
            x, root, D, bits, D_bits = buffers[0, :n], buffers[1, :n], buffers[2, :n], all_bits[0, :n], all_bits[2, :n]
            half = halves[:n]
            _load(x, bits, half, wide[source : source + n], packed[source : source + n], code)
            if scaled:
                _sqrt(root, H[source : source + n])
            taken = 0
            for j in range(ints.shape[0]):
                c = coefficients[taken : taken + ints[j, 1]]
                _mean_direction(D, drawn, words, root, scaled, first, keys, table, ints[j, 0], c)
                taken += ints[j, 1]
                _descend(x, floats[j, 0], D)
                _round(x, bits, half, D, D_bits, code)
            if has_probe:
                u = _draw(drawn, words, first, n, keys, table, probe_step, probe)
                if scaled:
                    _add_scaled(x, mu, u, root)
                else:
                    _add_plain(x, mu, u)
                _round(x, bits, half, D, D_bits, code)
            if code == FLOAT32:
                _copy(wide_out[target : target + n], x)
            else:
                _copy(packed_out[target : target + n], half)


@_jit
def apply(wide, packed, code, rule, H, m, offset, begin, end, keys, table, ints, floats, coefficients):
    """Apply the steps of many rounds, in place, to elements `begin..end-1` of a window. See `rules.apply_round`."""
    buffers = np.empty((5, TILE), np.float32)
    all_bits = buffers.view(np.uint32)
    drawn, words = np.empty(TILE + 2 * ALIGN, np.float32), np.empty(TILE // 2 + ALIGN, np.uint32)
    halves = np.empty(TILE, np.uint16)
    scaled = rule != PLAIN
    start = begin
    while start < end:
        first = offset + start
        n = min(TILE - first % GAUSSIAN_BLOCK, end - start)  # From the second tile on, tiles begin with a block.
        stop = start + n
        x, root, D, total, scratch = (buffers[0, :n], buffers[1, :n], buffers[2, :n], buffers[3, :n], buffers[4, :n])
        bits, scratch_bits, half, H_tile = all_bits[0, :n], all_bits[4, :n], halves[:n], H[start:stop]
        _load(x, bits, half, wide[start:stop], packed[start:stop], code)
        taken = 0
        for j in range(ints.shape[0]):
            c, learn = coefficients[taken : taken + ints[j, 1]], ints[j, 3]
            taken += ints[j, 1]
            alone = ints[j, 2] and (j + 1 == ints.shape[0] or ints[j + 1, 2])  # The round's only step.
            if (
                alone
                and rule == HISO
                and learn == FROM_STEP
                and c.size == 1
                and table.size
                and first % GAUSSIAN_BLOCK == 0
            ):
                _draw_words(words, first, n, GAUSSIAN_BLOCK, keys, ints[j, 0], 0)
                lr, one_minus_nu, nu, eps = floats[j, 0], floats[j, 1], floats[j, 2], floats[j, 3]
                _usual_round(x, H_tile, drawn, words, table, c[0], lr, one_minus_nu, nu, eps)
                _round(x, bits, half, scratch, scratch_bits, code)
                continue
            if ints[j, 2]:
                total[:] = np.float32(0)
                if scaled:
                    _sqrt(root, H_tile)
            _mean_direction(D, drawn, words, root, scaled, first, keys, table, ints[j, 0], c)
            if rule == HISO_MOMENTUM:
                _blend(m[start:stop], floats[j, 4], floats[j, 5], D)
                _descend(x, floats[j, 0], m[start:stop])
            else:
                _descend(x, floats[j, 0], D)
            _round(x, bits, half, scratch, scratch_bits, code)
            if learn >= COLLECT:
                _add_plain(total, np.float32(1), D)
            if learn == FROM_MEAN:
                _divide(D, total, floats[j, 6])
            if learn in (FROM_STEP, FROM_MEAN):
                _learn(H_tile, D, floats[j, 1], floats[j, 2], floats[j, 3])
        if code == FLOAT32:
            _copy(wide[start:stop], x)
        else:
            _copy(packed[start:stop], half)
        start = stop


COMPILED = (displace, apply)
"""The entry points; each holds the machine code of all that it calls."""
