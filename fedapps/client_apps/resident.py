"""A resident worker: a process that stays beside a SuperNode, with model, tokenizer, data and replica loaded.

Flower starts a process for every message. With ``resident-worker=true`` in the node's configuration that process loads nothing:
it hands the message on over a Unix socket, and gives back what the worker answers. The worker
(`fedapps.client_apps.resident_worker`) runs the same ClientApp, so every method and task works with the same bits, and the
node's rules are checked there.

==========  ==============================================================================================
file        in ``workers/<Flower's id of the node>`` of the state folder, mode 0700
==========  ==============================================================================================
``lock``    held by the worker as long as it lives, so that there is one
``secret``  32 bytes that both ends prove to know, new with every worker
``socket``  where it listens
``log``     what it writes; the lines about a message go to the node's log, too
==========  ==============================================================================================

A worker belongs to one run: with the next one, another version or another node's configuration it leaves, and a new one reads
code and data again. It also leaves when it was idle for ``resident-idle-minutes``, and at once when the process that starts the
node's clients, or the client that it computes for, is gone. Whatever happens to it, a message is answered whole: where there is
no whole answer of a worker, the client computes by itself from the state in its files, as without one.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import flwr
from flwr.app import Context, Message
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from google.protobuf.message import Error as ProtoError

import fedapps
from fedapps.client_apps.rules import NodeRules
from fedapps.errors import FedAppsError, SettingsError
from fedapps.private_files import private_folder, private_opener

logger = getLogger("flwr")

LOG, REPLY, ERROR = b"log", b"reply", b"error"
"""What a worker sends before each part of its answer: lines of the log, then a reply or an error."""

GREETING_SECONDS = 20.0
"""How long either end waits for the other's part of the greeting."""

START_SECONDS = 120.0
"""How long a client waits for a worker that it has started."""

MOST_STARTS = 3
"""How often it starts one: a worker that another one forestalled ends at once."""

LARGEST_LOG = 2**20
"""Bytes from which a new worker begins a new log; the old one is kept beside it."""

_PAUSE = 0.02
_CREDENTIALS = struct.Struct("3i")

_MAIN = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given.pop('path');"
    " from fedapps.client_apps.resident_worker import run; run(**given)"
)
_started: list[subprocess.Popen[bytes]] = []
"""Workers that this process started: kept, since nobody waits for their end."""


class WorkerError(FedAppsError):
    """The resident worker cannot be used."""


def in_resident_worker(message: Message, context: Context, app: Callable[[Message, Context], Message]) -> Message:
    """Let the node's resident worker answer, where the node's configuration asks for one: a mod of the ClientApp.

    Args:
        message: What the server sent.
        context: Flower's context of the node.
        app: The rest of the ClientApp.

    Returns:
        The reply.

    Raises:
        Exception: What the handler raised, with the same name and text, so that the server hears the same.
    """
    if "resident-worker" not in context.node_config:
        return app(message, context)
    try:
        rules = NodeRules.of_node(context)
    except SettingsError:  # which the handler tells
        return app(message, context)
    if not rules.resident_worker:
        return app(message, context)
    try:
        answer = ask(rules, message, context)
    except (OSError, EOFError, ValueError, AuthenticationError, ProtoError, WorkerError) as error:
        logger.warning("resident worker: %s: %s; this message is computed without it", type(error).__name__, error)
        return app(message, context)
    if isinstance(answer, Exception):
        raise answer
    return answer


def ask(rules: NodeRules, message: Message, context: Context) -> Message | Exception:
    """Ask the node's worker; start it if there is none, or none of this run.

    Args:
        rules: The node's rules.
        message: What the server sent.
        context: Flower's context of the node; given the state that the worker leaves.

    Returns:
        The reply, or what the handler raised there.

    Raises:
        WorkerError: It cannot be started, is another user's, or does not speak this protocol.
        AuthenticationError: It does not know the secret.
        OSError, EOFError: It is gone.
    """
    if not hasattr(socket, "SO_PEERCRED") or not hasattr(os, "pidfd_open"):
        raise WorkerError("this machine", expected="Linux", got=sys.platform, do="leave resident-worker out")
    folder = private_folder(rules.state_folder, "workers", f"node-{context.node_id}")
    with _greeted_worker(folder, identity(context), rules.resident_idle_minutes) as connection:
        connection.send_bytes(message_to_proto(message).SerializeToString())
        connection.send_bytes(context_to_proto(context).SerializeToString())
        while (kind := connection.recv_bytes()) == LOG:
            told = json.loads(connection.recv_bytes())
            logger.log(told["level"], "%s", told["text"])
        if kind not in (REPLY, ERROR):
            raise WorkerError("resident worker", expected="a reply", got=repr(kind[:20]))
        body, state = connection.recv_bytes(), connection.recv_bytes()
        if kind == ERROR:
            return _error_like(json.loads(body))
        reply = message_from_proto(ProtoMessage.FromString(body))
        context.state = context_from_proto(ProtoContext.FromString(state)).state
        return reply


def identity(context: Context) -> dict[str, Any]:
    """Say what worker and client must have in common.

    Args:
        context: Flower's context of the node.

    Returns:
        Versions, where this package lies, the run, and the node's configuration.
    """
    return {
        "versions": [fedapps.__version__, flwr.__version__, sys.version],
        "package": str(Path(fedapps.__file__).parent),
        "run": context.run_id,
        "node-config": dict(context.node_config),
    }


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """Give a path of a worker's socket; a socket's may have 107 bytes, however long its folder's is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/socket"
    finally:
        os.close(handle)


def greeting(end: socket.socket) -> Connection:
    """Begin a conversation: refuse another user's process, and wait for no answer longer than `GREETING_SECONDS`.

    Args:
        end: This end's socket, which the connection takes over.

    Returns:
        The connection.

    Raises:
        WorkerError: The other end is another user's.
    """
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        end.close()
        raise WorkerError("resident worker", expected=f"a process of user {os.geteuid()}", got=f"one of user {user}")
    _limit(end, GREETING_SECONDS)
    return Connection(end.detach())


def end_greeting(connection: Connection) -> None:
    """Wait for the other end from now on as long as it takes: it may compute for hours."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        _limit(end, 0)


def _limit(end: socket.socket, seconds: float) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


@contextmanager
def _greeted_worker(folder: Path, mine: dict[str, Any], idle_minutes: float) -> Iterator[Connection]:
    """Find the worker of this run, or start it."""
    deadline, starts = time.monotonic() + START_SECONDS, 0
    while (connection := _greet(folder, mine)) is None:
        if not starts or _started[-1].poll() is not None:
            if starts == MOST_STARTS:
                raise WorkerError("resident worker", expected="one that starts", got=f"none; see {folder / 'log'}")
            _started.append(_start(folder, mine, idle_minutes))
            starts += 1
        if time.monotonic() > deadline:
            raise WorkerError("resident worker", expected=f"one in {START_SECONDS:.0f} s", got="none")
        time.sleep(_PAUSE)
    with connection:
        yield connection


def _greet(folder: Path, mine: dict[str, Any]) -> Connection | None:
    """Connect to the worker that is there; None if there is none, or it leaves."""
    with address(folder) as path:
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            end.close()
            return None
    connection = greeting(end)
    try:
        # Whoever listens has written it before; it may be gone again.
        secret = (folder / "secret").read_bytes()
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        connection.send_bytes(json.dumps(mine).encode())
        refusal = connection.recv_bytes().decode()
        if not refusal:
            end_greeting(connection)
            return connection
        logger.info("resident worker: %s; a new one starts", refusal)
    except (EOFError, ConnectionError, FileNotFoundError):
        pass
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def _start(folder: Path, mine: dict[str, Any], idle_minutes: float) -> subprocess.Popen[bytes]:
    """Start a worker that outlives this process, but not the one that starts the node's clients."""
    log = folder / "log"
    with suppress(FileNotFoundError):
        if log.stat().st_size > LARGEST_LOG:
            log.replace(folder / "log.old")
    given = {
        "path": sys.path,
        "folder": str(folder),
        "mine": mine,
        "idle_seconds": idle_minutes * 60,
        "owner": os.getppid(),
    }
    reading, writing = os.pipe()
    with open(reading, "rb") as first, open(writing, "wb") as pipe, open(log, "ab", opener=private_opener) as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN], stdin=first, stdout=output, stderr=output, start_new_session=True
        )
        first.close()
        with suppress(BrokenPipeError):  # Its end is noticed by who waits for it.
            pipe.write(json.dumps(given).encode())
            pipe.flush()
    return process


def _error_like(told: dict[str, str]) -> Exception:
    """Make an error of the name and the text of the worker's: Flower tells the server no more of it.

    Its class may be of a module that this process has not imported, and may not be made from a text alone.
    """
    name = told["name"].rpartition(".")[2]
    content = {"__module__": told["module"], "__qualname__": told["name"], "__str__": lambda _: told["text"]}
    error: Exception = type(name, (Exception,), content)()
    error.add_note(f"in the resident worker:\n{told['trace']}")
    return error
