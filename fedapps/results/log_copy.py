"""A run folder that lies on the server's machine, copied to the caller's through the log of the run.

A SuperLink gives its callers nothing of a run but status and log, and all that a server app prints is in the log. So the
server's side prints records between the lines of the log, and the caller's side takes them out again. A record is RFC 7464's:
the character RS (30), a JSON object on one line, LF. It may stand in the middle of a line of the log, since two threads write.

==================================  =========================================================================================
``key``, ``n``                      in every record: a random number drawn by the server app, and the record's place, from 0
``folder``, ``host``                record 0: where the run folder lies
``file``, ``at``, ``data``          bytes of a file, from this position on, deflated and in base 85; position 0 begins it anew
``file``, ``sha256``                the file is complete
``after``                           a resume went back to the end of this round; the rows that are left follow, then new ones
``left``                            the last record: files that were not sent (name -> bytes)
==================================  =========================================================================================

Record 0 is printed before any client is heard, and the key is told nobody else: what a client lets a server log is text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedapps.results.checkpoint import CURRENT
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import Row, fault
from fedapps.results.units import human_bytes

MOST_PART = 1_000_000
"""Bytes of a file in one record."""

BYTES_A_SECOND = 8_000_000
"""How fast records are printed: Flower uploads what is printed every 0.2 s and waits 3 s for it at the end of an app."""

ALWAYS = ("settings.toml", "environment.json", "metrics.jsonl", "summary.json")
"""Files that are sent whatever their size."""

ROWS = ("ledger.jsonl", "clients.jsonl", "journal.jsonl")
"""Files that grow by rows, sent with the rows of the metrics."""

GROWING = (*ROWS, "metrics.jsonl")
MODELS = ("model.safetensors", "best.safetensors", "initial.safetensors")

_START, _END = "\x1e", "\n"
_NAME = re.compile(rf"{'|'.join(map(re.escape, (*ALWAYS, *ROWS, *MODELS)))}|{CURRENT}/[a-z][a-z.]*")

_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, zlib.error, OSError)


def _print(text: str) -> None:
    sys.stdout.write(text)  # Flower puts a function of its own here, which takes every call for one piece of the log.


@dataclass(frozen=True)
class SentRunFolder(RunFolder):
    """A run folder on the server's machine, whose rows are printed as they come and whose files at the end.

    Args:
        path: Absolute path.
        most: Bytes of rows, models and checkpoint that may be sent.
        write: Prints a text at once.
    """

    most: float = 0.0
    write: Callable[[str], Any] = field(default=_print, repr=False)
    _sender: _Sender = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_sender", _Sender(self.path, self.most, self.write))

    @override
    def append_metrics(self, row: Row) -> None:
        super().append_metrics(row)
        self._sender.send_rows()

    @override
    def truncate_after(self, server_round: int) -> None:
        super().truncate_after(server_round)
        self._sender.record({"after": server_round})
        self._sender.send_rows()

    def send_start(self) -> None:
        """Say where the folder lies; before any client is heard."""
        self._sender.record({"folder": str(self.path), "host": socket.gethostname()})

    def send_rest(self) -> None:
        """Send the files that have not been sent, as far as they may be, smaller matters first."""
        self._sender.send_rows()
        checkpoint = sorted(self.path.glob(f"{CURRENT}/[a-z]*"), key=lambda path: path.name == "manifest.json")
        names = (*ALWAYS, *ROWS, *MODELS, *(f"{CURRENT}/{path.name}" for path in checkpoint))
        self._sender.send_files(names)


class _Sender:
    """Prints records; `most` bounds the bytes of all files but `ALWAYS`."""

    def __init__(self, folder: Path, most: float, write: Callable[[str], Any]) -> None:
        self._folder, self._room, self._write = folder, most, write
        self._key = secrets.token_hex(16)
        self._count = 0
        self._free_at = 0.0
        self._sent: dict[str, int] = {}
        self._checksums: dict[str, str] = {}
        self._left: set[str] = set()

    def record(self, entries: dict[str, Any]) -> None:
        text = json.dumps({"key": self._key, "n": self._count, **entries})
        self._count += 1
        time.sleep(max(0.0, self._free_at - time.monotonic()))
        self._write(f"{_START}{text}{_END}")
        self._free_at = time.monotonic() + len(text) / BYTES_A_SECOND

    def send_rows(self) -> None:
        """Send what is new in the files that grow; settings and environment before their first rows."""
        if not self._sent:
            self._send_whole("settings.toml")
            self._send_whole("environment.json")
        for name in GROWING:
            self._send_from(name, self._sent.get(name, 0))

    def send_files(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._send_whole(name)
        self.record({"left": {name: (self._folder / name).stat().st_size for name in sorted(self._left)}})

    def _send_whole(self, name: str) -> None:
        if not (self._folder / name).is_file():
            return
        with (self._folder / name).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        if self._checksums.get(name) == checksum:
            return
        self._send_from(name, self._sent.get(name, 0) if name in GROWING else 0)
        if name not in self._left:
            self._checksums[name] = checksum
            self.record({"file": name, "sha256": checksum})

    def _send_from(self, name: str, at: int) -> None:
        path = self._folder / name
        if name in self._left or not path.is_file():
            return
        size = path.stat().st_size - at
        if name not in ALWAYS and size > self._room:
            self._left.add(name)
            return
        self._room -= 0 if name in ALWAYS else size
        with path.open("rb") as file:
            file.seek(at)
            while (part := file.read(MOST_PART)) or at == 0:
                self.record({"file": name, "at": at, "data": base64.b85encode(zlib.compress(part, 1)).decode()})
                at += len(part)
                if not part:
                    break
        self._sent[name] = at


class FolderCopy:
    """The caller's side: takes the records out of a run's log.

    Args:
        folder: Where the copy is written.
        log_path: Where the rest of the log goes, added to the file.
        heading: Written before it.

    Attributes:
        after: The round after which a resume goes on, once it is told.
    """

    def __init__(self, folder: RunFolder, log_path: Path, heading: str = "") -> None:
        self._folder, self._log_path, self._heading = folder, log_path, heading
        self._earlier = log_path.stat().st_size if log_path.exists() else 0
        self._key: str | None = None
        self._next = 0
        self._place = ""
        self._left: dict[str, int] | None = None
        self._faults: list[str] = []
        self._offset, self._open, self._gap = 0, b"", False
        self.after: int | None = None

    @property
    def lacks_records(self) -> bool:
        """Whether records were left out on the way: to read the log once more may bring them."""
        return self._gap

    def restart(self) -> None:
        """Begin with the log anew; records that came already are skipped."""
        self._offset, self._open, self._gap = 0, b"", False
        with self._log_path.open("ab") as log:
            log.truncate(self._earlier)
            log.write(self._heading.encode())

    def look(self, stream: Path) -> None:
        """Read what is new.

        Args:
            stream: The whole log of the run, which grows.
        """
        if not stream.exists():
            return
        with stream.open("rb") as file:
            file.seek(self._offset)
            news = file.read()
        self._offset += len(news)
        before, *pieces = (self._open + news).split(_START.encode())
        text = [before]
        self._open = b""
        for place, piece in enumerate(pieces):
            line, end, rest = piece.partition(_END.encode())
            if not end and place == len(pieces) - 1:
                self._open = _START.encode() + piece
            elif end and self._take(line):
                text.append(rest)
            else:
                text.append(piece)
        with self._log_path.open("ab") as log:
            log.write(b"".join(text))

    def told(self) -> str:
        """Say what is not in the copy, and where it lies; empty if all is in it, or if the folder is one for both sides."""
        if self._key is None:
            return ""
        here = self._folder.path
        copy = f"; copy them with: rsync -a {self._place}/ {here}/"
        if self._left is None or self._faults:
            why = f" ({'; '.join(self._faults[:3])})" if self._faults else ""
            return f"not all of the run folder came through the log{why}; it lies in {self._place}{copy}"
        if self._left:
            names = ", ".join(f"{name} ({human_bytes(size)})" for name, size in self._left.items())
            return f"more than collect-mb allows, and left in {self._place}: {names}{copy}"
        return ""

    def _take(self, line: bytes) -> bool:
        """Take a record; False for what is none of this run's server."""
        try:
            record = json.loads(line)
            key, number = record["key"], record["n"]
        except (*_DAMAGED, RecursionError):
            return False
        if self._key is None and number == 0 and isinstance(key, str):
            self._key = key
        if key != self._key:
            return False
        self._gap |= number > self._next
        if number == self._next:
            self._next += 1
            try:
                self._apply(record)
            except _DAMAGED as error:
                self._faults.append(fault(error))
        return True

    def _apply(self, record: dict[str, Any]) -> None:
        if "folder" in record:
            self._place = f"{record['host']}:{record['folder']}"
        elif "after" in record:
            self.after = int(record["after"])
            self._folder.summary_path.unlink(missing_ok=True)
        elif "left" in record:
            self._left = {str(name): int(size) for name, size in record["left"].items()}
        elif not _NAME.fullmatch(record["file"]):
            raise ValueError(f"a file named {record['file']!r:.40}")
        elif "sha256" in record:
            self._finish(record["file"], record["sha256"])
        else:
            self._add(record["file"], int(record["at"]), record["data"])

    def _add(self, name: str, at: int, data: str) -> None:
        inflate = zlib.decompressobj()
        part = inflate.decompress(base64.b85decode(data), MOST_PART)
        if not inflate.eof:
            raise ValueError(f"{name}: a part of more than {MOST_PART} bytes, or a torn one")
        path = self._folder.path / name
        grows = name in GROWING
        target = path if grows and at else path.with_name(f".{path.name}.tmp")
        if at == 0:
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(part)
            if grows:
                target.replace(path)
        else:
            if target.stat().st_size != at:
                raise ValueError(f"{name}: byte {at} where {target.stat().st_size} was the next")
            with target.open("ab") as file:
                file.write(part)

    def _finish(self, name: str, checksum: str) -> None:
        path = self._folder.path / name
        target = path if name in GROWING else path.with_name(f".{path.name}.tmp")
        with target.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != checksum:
            raise ValueError(f"{name}: checksum {found[:16]} where the server's is {checksum[:16]}")
        if target != path:
            target.replace(path)
