from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from fedapps.tasks.compressed import DAMAGED, SUFFIXES, find_compressed, open_compressed

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_found_and_read_with_any_ending(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"data.npz{suffix}").write_bytes(COMPRESS[suffix](b"content"))
    found = find_compressed([tmp_path / "other" / "data.npz", tmp_path / "data.npz"])
    assert found == tmp_path / f"data.npz{suffix}"
    with open_compressed(found) as file:
        assert file.read() == b"content"


def test_the_first_place_wins_and_an_absent_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a.gz").touch()
    assert find_compressed([tmp_path / "a", tmp_path / "b"]) == tmp_path / "a.gz"
    assert find_compressed([tmp_path / "c"]) is None


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("damage", ["cut short", "not compressed"])
def test_a_damaged_file_raises_what_is_listed(tmp_path: Path, suffix: str, damage: str) -> None:
    whole = COMPRESS[suffix](bytes(range(256)) * 50)
    path = tmp_path / f"data{suffix}"
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else b"plain text")
    with pytest.raises(DAMAGED), open_compressed(path) as file:
        file.read()
