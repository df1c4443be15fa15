"""The client store: what a client keeps over rounds.

Flower rebuilds a client for every message, and its `context.state` is lost with a SuperNode. Persistent state is kept in
files instead, by experiment and partition. A reply may be lost, late or refused after the client has moved on; so two
versions are kept, each tagged with its round, and the client starts from the version of its last *folded* reply.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from logging import getLogger
from pathlib import Path

import numpy as np

from fedapps.errors import CheckpointError, MessageError
from fedapps.private_files import OWNER_ONLY, private_folder
from fedapps.results.storage import load_arrays, save_arrays, sync_file

logger = getLogger("flwr")

_VERSION = re.compile(r"round-(\d+)\.safetensors")


class ClientStore:
    """The persistent state of one client.

    Args:
        root: The state folder.
        experiment: Identity of the experiment, kept over a resume.
        partition: Partition id of the client.

    Raises:
        MessageError: The identity is no name of a folder.
    """

    def __init__(self, root: Path, experiment: str, partition: int) -> None:
        name = re.sub(r"[^\w.-]+", "-", experiment) or "experiment"
        if not name.strip(".") or len(name.encode()) > 255:  # "." and ".." are folders that are there
            raise MessageError(
                f"client {partition}, entry 'experiment'",
                expected="a name that a folder can have",
                got=repr(experiment[:300]),
                do="the server names an experiment by method, task, seed and a random part",
            )
        self._root = root
        self.folder = root / name / f"client-{partition}"

    def rounds(self) -> list[int]:
        """List the rounds of which a version is kept, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_VERSION.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def load(self, last_folded: int) -> dict[str, np.ndarray] | None:
        """Load the version of the last folded reply, and drop later ones.

        Args:
            last_folded: Round of the client's last reply that the server folded; 0 if there is none.

        Returns:
            Name -> array; None if there is no folded reply yet, or its version is lost (which is logged).
        """
        for later in self.rounds():
            if later > last_folded:
                self._path(later).unlink(missing_ok=True)
        if last_folded == 0:
            return None
        path = self._path(last_folded)
        try:
            return load_arrays(path)
        except (OSError, CheckpointError) as error:
            logger.error("client store %s: the state of round %d is lost (%s)", self.folder, last_folded, error)
            return None

    def save(self, server_round: int, state: Mapping[str, np.ndarray], *, last_folded: int) -> None:
        """Save the state that this round leaves; it takes effect once the server has folded the reply.

        Args:
            server_round: The round.
            state: Name -> array.
            last_folded: Round of the version that the client started from; it is kept.
        """
        self.private_folder(self.folder.name)
        handle, aside = tempfile.mkstemp(dir=self.folder, prefix="aside-")
        os.close(handle)
        try:
            save_arrays(Path(aside), state)
            os.chmod(aside, OWNER_ONLY)
            sync_file(Path(aside))
            os.replace(aside, self._path(server_round))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        for old in self.rounds():
            if old not in (server_round, last_folded):
                self._path(old).unlink(missing_ok=True)

    def private_folder(self, name: str) -> Path:
        """Make a folder of the experiment that only its owner can open.

        Args:
            name: Its name, beside those of the clients' stores.

        Returns:
            The folder.
        """
        return private_folder(self._root, self.folder.parent.name, name)

    def _path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round}.safetensors"
