"""Rows of unequal length laid end to end, so that hardly a place is computed for padding.

Rows of film reviews have 13 tokens on average, and the longest of 16 about 30: padded to that, more than half of a forward
pass would be for nothing. Here several short rows share a line as long as the longest row; a mask keeps them apart, and
each counts its positions from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedapps.tasks.language.encoding import PADDING


@dataclass(frozen=True)
class Packed:
    """Rows in lines.

    Attributes:
        ids: Token ids, ``(lines, longest)``, 0 where there is none.
        positions: Places within the rows, ``(lines, longest)``.
        attends: Whether a place may look at another one: at those of its own row up to itself, ``(lines, longest,
            longest)``. Places without a token look at each other, so that none looks at nothing.
        source: Row and column of each token in the padded array, two of ``(tokens,)``.
        place: Line and column of each token here, two of ``(tokens,)``.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    attends: torch.Tensor
    source: tuple[torch.Tensor, torch.Tensor]
    place: tuple[torch.Tensor, torch.Tensor]

    def unpack(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Bring what was computed for each place, ``(lines, longest, width)``, back to ``(n, length, width)``, 0 at padding."""
        return values.new_zeros(*shape, values.shape[-1]).index_put(self.source, values[self.place])


def fill_lines(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Find line and first column for each row: longest first, each in the first line that has room (first fit, decreasing).

    ``sizes`` are the tokens of each row; the largest is the length of a line.
    """
    room = max(sizes, default=0)
    filled: list[int] = []
    places = [(0, 0)] * len(sizes)
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        line = next((line for line, used in enumerate(filled) if used + sizes[row] <= room), len(filled))
        if line == len(filled):
            filled.append(0)
        places[row] = line, filled[line]
        filled[line] += sizes[row]
    return places


def pack(ids: torch.Tensor) -> Packed | None:
    """Lay padded rows ``(n, length)`` end to end, in fewer lines; None if that saves none."""
    mask = ids != PADDING
    sizes = mask.sum(dim=1).tolist()
    places = fill_lines(sizes)
    lines = max((line for line, _ in places), default=0) + 1
    if lines >= len(sizes):
        return None
    rows, columns = mask.nonzero(as_tuple=True)
    within = (mask.cumsum(dim=1) - 1)[mask]
    line, start = torch.tensor(places, device=ids.device).unbind(dim=1)
    place = line[rows], start[rows] + within
    empty = ids.new_zeros(lines, max(sizes))
    owner = (empty - 1).index_put(place, rows)
    earlier = torch.ones(max(sizes), max(sizes), dtype=torch.bool, device=ids.device).tril()
    return Packed(
        ids=empty.index_put(place, ids[mask]),
        positions=empty.index_put(place, within),
        attends=(owner[:, :, None] == owner[:, None, :]) & earlier,
        source=(rows, columns),
        place=place,
    )
