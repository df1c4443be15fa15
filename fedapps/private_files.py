"""Files that nobody but their owner can read, whatever the umask: what clients keep of their data and models."""

from __future__ import annotations

import os
from pathlib import Path

OWNER_ONLY = 0o600
"""Mode of a private file."""


def private_folder(root: Path, *names: str) -> Path:
    """Make a folder that only its owner can open.

    Args:
        root: A folder; made private where it is missing, left as it is where it is somebody's choice.
        *names: Folders below it, each in the one before; those that are there become private.

    Returns:
        The last folder.
    """
    for parent in (*reversed(root.parents), root):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    folder = root
    for name in names:
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    return folder


def private_opener(path: str, flags: int) -> int:
    """Open a file for its owner only if it is made: the ``opener`` of `open`."""
    return os.open(path, flags, OWNER_ONLY)
