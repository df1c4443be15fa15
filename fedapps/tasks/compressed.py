"""Data files that may be compressed: finding them by name, opening them, and what a damaged one raises."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

SUFFIXES = ("", ".gz", ".xz", ".bz2")
"""Endings of the files that can be read; the last three mean compression."""

DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""What reading a damaged or absent file raises."""


def open_compressed(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed as its ending says."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    return cast(IO[bytes], openers.get(path.suffix, open)(path, "rb"))


def find_compressed(places: Iterable[Path]) -> Path | None:
    """Find the first file that is there, plain or compressed, if any; ``places`` are without the ending of a compression."""
    candidates = (place.with_name(place.name + suffix) for place in places for suffix in SUFFIXES)
    return next((candidate for candidate in candidates if candidate.is_file()), None)
