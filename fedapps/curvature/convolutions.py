r"""Rows of convolutions in any number of dimensions, and their sum of outer products without unfolding.

The rows are the patches under the kernel at every output position, group by group:
``(groups, batch * positions, in / groups * kernel size)``.

For stride 1 and dilation 1 the block of kernel positions ``a`` and ``a + delta`` is a sum over a window of the image ``X``

.. math:: \sum_{y \in [a_y - p,\; a_y - p + H_o)} \sum_x X[y, x]\, X[y + d_y, x + d_x]', \qquad H_o = H + 2 p - k + 1

(``x`` alike, terms outside the image 0). All windows of one ``delta`` share nearly the whole overlap of the image with itself:
it is multiplied once, and the rows and columns at the border that a window leaves out are subtracted, with corners added
back. That is one product for each of half the ``(2 k - 1)^2`` offsets in place of ``k^4`` products of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

COPY = 100
"""Multiplications in a matrix product that take as long as one entry that is copied."""

CALLS = 10_000_000
"""Multiplications that take as long as the calls for one offset, apart from what they compute."""


def conv_rows(module: Convolution, x: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """Give the rows of a convolution: the patch under the kernel at every output position.

    Args:
        module: The layer, of any stride, padding, padding mode, dilation and number of groups.
        x: ``(batch, in, *image)``, or one image without the batch.
        chosen: Numbers of the rows to give, ``(k,)``; None for all.

    Returns:
        ``(groups, batch * positions, in / groups * kernel size)``, with ``k`` rows if they are chosen.
    """
    patches = _patches(module, x)
    dims = len(module.kernel_size)
    # (batch, in, *positions, *kernel) -> (batch, *positions, in, *kernel)
    ordered = patches.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    if chosen is not None:
        ordered = ordered[torch.unravel_index(chosen, ordered.shape[: 1 + dims])]
    width = prod(ordered.shape[-1 - dims :]) // module.groups
    return ordered.reshape(-1, module.groups, width).transpose(0, 1)


def _patches(module: Convolution, x: torch.Tensor) -> torch.Tensor:
    """View the patches, ``(batch, in, *positions, *kernel)``; only the padded image is copied."""
    dims = len(module.kernel_size)
    images = x if x.dim() == dims + 2 else x[None]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    patches = functional.pad(images, [side for pair in reversed(_padding(module)) for side in pair], mode)
    for axis, (k, stride, d) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        patches = patches.unfold(axis + 2, d * (k - 1) + 1, stride)[..., ::d]
    return patches


def _padding(module: Convolution) -> list[tuple[int, int]]:
    """Give the padding before and after each dimension of the image."""
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    elif module.padding == "valid":
        totals = [0] * len(module.kernel_size)
    else:
        totals = [2 * int(p) for p in module.padding]
    # Of an odd total the greater half comes after the image, as in torch.
    return [(total // 2, total - total // 2) for total in totals]


class _Geometry(NamedTuple):
    """A stride-1, dilation-1 convolution in two dimensions."""

    X: torch.Tensor  # images, ``(batch, in, height, width)``
    kernel: tuple[int, int]  # its sides
    before: tuple[int, int]  # padding with zeros above and to the left of the image
    out: tuple[int, int]  # sides of the output


def _geometry(module: Convolution, x: torch.Tensor) -> _Geometry | None:
    dims = len(module.kernel_size)
    if dims > 2 or any(s != 1 for s in module.stride) or any(d != 1 for d in module.dilation):
        return None
    X = x if x.dim() == dims + 2 else x[None]
    padding = _padding(module)
    if module.padding_mode != "zeros":
        X = functional.pad(X, [side for pair in reversed(padding) for side in pair], module.padding_mode)
        padding = [(0, 0)] * dims
    kernel = tuple(module.kernel_size)
    if dims == 1:
        X, padding, kernel = X[:, :, None], [(0, 0), *padding], (1, *kernel)
    sides = [n + sum(p) - k + 1 for n, p, k in zip(X.shape[2:], padding, kernel, strict=True)]
    return _Geometry(X, kernel, (padding[0][0], padding[1][0]), (sides[0], sides[1]))  # type: ignore[arg-type]


def conv_moment(module: Convolution, x: torch.Tensor, bias: bool) -> torch.Tensor:
    """Sum the outer products of a convolution's rows, without unfolding where that takes fewer operations.

    Gives ``rows' rows``, ``(groups, width, width)``; with ``bias`` the rows end with a 1.
    """
    shape = _geometry(module, x)
    if shape is not None and _borders_fit(shape) and _cheaper(shape, module.groups):
        return shifted_moment(shape, module.groups, bias)
    return unfolded_moment(module, x, bias)


def unfolded_moment(module: Convolution, x: torch.Tensor, bias: bool) -> torch.Tensor:
    """Sum the outer products of a convolution's rows by unfolding; see `conv_moment`."""
    patches = _patches(module, x)
    batch, channels, dims = patches.shape[0], patches.shape[1], len(module.kernel_size)
    grouped = patches.reshape(batch, module.groups, channels // module.groups, *patches.shape[2:])
    positions, kernel = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    # Positions last: they lie next to each other in the image, so that copying is fast.
    columns = grouped.permute(1, 2, *kernel, 0, *positions).flatten(2 + dims).flatten(1, 1 + dims)
    square = columns @ columns.mT
    return _with_bias(square, columns.sum(2), columns.shape[2]) if bias else square


def _with_bias(square: torch.Tensor, sums: torch.Tensor, count: int) -> torch.Tensor:
    """Extend ``rows' rows`` by what a trailing 1 adds: the sums of the rows, and their number."""
    size = square.shape[1]
    A = square.new_empty(len(square), size + 1, size + 1)
    A[:, :size, :size] = square
    A[:, :size, size] = A[:, size, :size] = sums
    A[:, size, size] = count
    return A


def num_positions(module: Convolution, x: torch.Tensor) -> int:
    """Count the rows of a convolution for an input, batch times output positions, without computing them."""
    dims = len(module.kernel_size)
    batch = x.shape[0] if x.dim() == dims + 2 else 1
    sides = [
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, p, k, s, d in zip(
            x.shape[-dims:], _padding(module), module.kernel_size, module.stride, module.dilation, strict=True
        )
    ]
    return int(batch * prod(sides))


def _cheaper(shape: _Geometry, groups: int) -> bool:
    """Compare the operations of shifting and of unfolding, copies included."""
    batch, channels, height, width = shape.X.shape
    inner, rows = channels // groups, batch * prod(shape.out)
    entries = inner * prod(shape.kernel)
    unfolded = groups * rows * entries * (entries + COPY)
    # The matrix is assembled from windows: border terms are added, and entries are moved to their place.
    shifted = groups * entries**2 * 3 * COPY
    padded = batch * (height + shape.kernel[0] - 1) * (width + shape.kernel[1] - 1)
    for dy, dx in _offsets(shape.kernel):
        border_y, border_x = (
            len(_border(_windows(side, k, before, out, d), side - abs(d)))
            for side, k, before, out, d in zip(
                (height, width), shape.kernel, shape.before, shape.out, (dy, dx), strict=True
            )
        )
        strips = batch * (border_y * width + border_x * height + border_y * border_x)
        # A product of few channels is bound by reading them.
        shifted += CALLS + groups * (padded * inner * (inner + COPY // 6) + strips * inner * (inner + 2 * COPY))
    return shifted < unfolded


def _offsets(kernel: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Go through half of the offsets between two kernel positions; the other half are their transposes."""
    for dy in range(kernel[0]):
        for dx in range(-kernel[1] + 1, kernel[1]):
            if dy > 0 or dx >= 0:
                yield dy, dx


def _windows(side: int, k: int, before: int, out: int, d: int) -> list[tuple[int, int]]:
    """Give, along one axis, what each kernel position of an offset uses of the overlap of the image with itself.

    The overlap is the ``y`` in ``[y0, y1)`` for which ``y`` and ``y + d`` are in the image; bounds count from ``y0``.
    """
    y0, y1 = max(0, -d), min(side, side - d)
    positions = range(max(0, -d), k - max(0, d))
    length = max(y1 - y0, 0)
    return [(min(max(a - before - y0, 0), length), min(max(a - before + out - y0, 0), length)) for a in positions]


def _border(windows: list[tuple[int, int]], length: int) -> list[int]:
    """List the places of the overlap that some window leaves out."""
    head, tail = max(lo for lo, _ in windows), min(hi for _, hi in windows)
    return [*range(head), *range(tail, length)]


def _borders_fit(shape: _Geometry) -> bool:
    """Whether every overlap has an inner part that all windows share."""
    for axis in range(2):
        side, k = shape.X.shape[2 + axis], shape.kernel[axis]
        for d in range(-k + 1, k):
            windows = _windows(side, k, shape.before[axis], shape.out[axis], d)
            if max(lo for lo, _ in windows) >= min(hi for _, hi in windows):
                return False
    return True


def shifted_moment(shape: _Geometry, groups: int, bias: bool) -> torch.Tensor:
    """Sum the outer products of the rows by one product for each offset between kernel positions; see `conv_moment`."""
    X, (kh, kw) = shape.X, shape.kernel
    batch, channels = X.shape[:2]
    inner = channels // groups
    size = inner * kh * kw
    blocks = X.new_zeros(groups, inner, kh, kw, inner, kh, kw)
    # With zeros after every row and image, a shift of the flat images is a shift of the image.
    padded = functional.pad(X, (0, kw - 1, 0, kh - 1))
    flat = _by_group(padded, groups).flatten(2).contiguous()  # (groups, inner, length)
    per_image = _by_group(X, groups)
    for dy, dx in _offsets(shape.kernel):
        shift = dy * padded.shape[3] + dx
        start, stop = max(0, -shift), flat.shape[2] - max(0, shift)
        whole = flat[:, :, start:stop] @ flat[:, :, start + shift : stop + shift].mT
        S = _subtract_borders(whole, per_image, shape, dy, dx)  # (groups, a_y, a_x, inner, inner)
        y = torch.arange(kh - dy, device=X.device)[:, None]
        x = torch.arange(max(0, -dx), kw - max(0, dx), device=X.device)[None, :]
        # Indexed dimensions come first: (a_y, a_x, groups, inner, inner).
        blocks[:, :, y, x, :, y + dy, x + dx] = S.permute(1, 2, 0, 3, 4)
        blocks[:, :, y + dy, x + dx, :, y, x] = S.permute(1, 2, 0, 4, 3)
    square = blocks.reshape(groups, size, size)
    return _with_bias(square, _window_sums(shape).reshape(groups, size), batch * prod(shape.out)) if bias else square


def _by_group(X: torch.Tensor, groups: int) -> torch.Tensor:
    """View images as ``(groups, inner, batch, height, width)``."""
    batch, channels, height, width = X.shape
    return X.reshape(batch, groups, channels // groups, height, width).permute(1, 2, 0, 3, 4)


def _subtract_borders(whole: torch.Tensor, images: torch.Tensor, shape: _Geometry, dy: int, dx: int) -> torch.Tensor:
    """Turn the product over the whole overlap into that over each kernel position's window."""
    height, width = images.shape[3:]
    y0, x0 = 0, max(0, -dx)  # dy >= 0
    left = images[:, :, :, y0 : height - dy, x0 : width - max(0, dx)]
    right = images[:, :, :, y0 + dy : height, x0 + dx : width - max(0, -dx)]
    windows_y = _windows(height, shape.kernel[0], shape.before[0], shape.out[0], dy)
    windows_x = _windows(width, shape.kernel[1], shape.before[1], shape.out[1], dx)
    rows, columns = _border(windows_y, left.shape[3]), _border(windows_x, left.shape[4])
    S = whole[:, None, None].expand(-1, len(windows_y), len(windows_x), -1, -1)
    out_y, out_x = _left_out(windows_y, rows, images), _left_out(windows_x, columns, images)
    if rows:
        strips = _products(left[:, :, :, rows].movedim(3, 1), right[:, :, :, rows].movedim(3, 1))
        S = S - torch.einsum("ar,grij->gaij", out_y, strips)[:, :, None]
    if columns:
        strips = _products(left[..., columns].movedim(4, 1), right[..., columns].movedim(4, 1))
        S = S - torch.einsum("bc,gcij->gbij", out_x, strips)[:, None]
    if rows and columns:
        corner = [part[:, :, :, rows][..., columns].permute(0, 3, 4, 1, 2) for part in (left, right)]
        products = corner[0] @ corner[1].mT  # (groups, rows, columns, inner, inner)
        S = S + torch.einsum("ar,bc,grcij->gabij", out_y, out_x, products)
    return S


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply strips ``(groups, strips, inner, ...)`` over everything after the channels."""
    return left.flatten(3) @ right.flatten(3).mT


def _left_out(windows: list[tuple[int, int]], border: list[int], like: torch.Tensor) -> torch.Tensor:
    """Give 1 where a window leaves a place of the border out, ``(windows, places)``."""
    marks = [[float(not lo <= place < hi) for place in border] for lo, hi in windows]
    return torch.tensor(marks, dtype=like.dtype, device=like.device)


def _window_sums(shape: _Geometry) -> torch.Tensor:
    """Sum the image over the window of each kernel position, ``(in, kernel height, kernel width)``."""
    (kh, kw), (top, left), (oh, ow) = shape.kernel, shape.before, shape.out
    image = shape.X.sum(0)
    height, width = image.shape[1:]
    padded = functional.pad(image, (left, ow + kw - 1 - width - left, top, oh + kh - 1 - height - top))
    return padded.unfold(1, oh, 1).unfold(2, ow, 1).sum((-1, -2))
