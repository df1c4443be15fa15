"""Short rows that share a line."""

from __future__ import annotations

import pytest
import torch

from fedapps.tasks.language.encoding import PADDING
from fedapps.tasks.language.packing import fill_lines, pack


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([9, 3, 5, 4], [(0, 0), (2, 0), (1, 0), (1, 5)]),
        ([2, 9, 4, 3], [(1, 7), (0, 0), (1, 0), (1, 4)]),
        ([4, 4], [(0, 0), (1, 0)]),
        ([], []),
    ],
)
def test_long_rows_come_first_and_each_goes_where_there_is_room(
    sizes: list[int], places: list[tuple[int, int]]
) -> None:
    assert fill_lines(sizes) == places


@pytest.mark.parametrize("ids", [[[5, 6], [7, 8]], [[5, 6, PADDING], [7, 8, 9]], [[5, PADDING]]])
def test_nothing_is_packed_where_nothing_is_saved(ids: list[list[int]]) -> None:
    assert pack(torch.tensor(ids)) is None


def test_rows_lie_end_to_end_and_see_only_themselves() -> None:
    ids = torch.tensor([[PADDING, 11, 12], [21, 22, 23], [PADDING, PADDING, 31]])
    packed = pack(ids)
    assert packed is not None
    assert packed.ids.tolist() == [[21, 22, 23], [11, 12, 31]]
    assert packed.positions.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert packed.attends[0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert packed.attends[1].tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    back = packed.unpack(packed.ids[:, :, None], ids.shape)[:, :, 0]
    assert back.tolist() == [[0, 11, 12], [21, 22, 23], [0, 0, 31]]


def test_a_place_without_a_token_looks_at_its_like_only() -> None:
    packed = pack(torch.tensor([[1, 2, 3, 4], [5, PADDING, PADDING, PADDING], [6, PADDING, PADDING, PADDING]]))
    assert packed is not None
    assert packed.ids[1].tolist() == [5, 6, 0, 0]
    assert packed.attends[1, 2:].tolist() == [[False, False, True, False], [False, False, True, True]]
