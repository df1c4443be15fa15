"""The process of a resident worker; `fedapps.client_apps.resident` says what it is for, and starts it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import Error as ProtoError
from typing_extensions import override

from fedapps.client_apps.resident import (
    ERROR,
    LOG,
    REPLY,
    WorkerError,
    address,
    end_greeting,
    greeting,
)
from fedapps.private_files import private_opener

logger = logging.getLogger("flwr")

App = Callable[[Message, Context], Message]

LOCK_SECONDS = 3.0
"""How long a worker waits for the one before it, which may be leaving."""

_PAUSE = 0.02


def run(folder: str, mine: dict[str, Any], idle_seconds: float, owner: int) -> None:
    """Be a node's worker until the next run, until nobody asks any more, or until the owner is gone.

    Args:
        folder: The worker's folder.
        mine: What `fedapps.client_apps.resident.identity` gave.
        idle_seconds: How long it waits for a message.
        owner: Process id of the parent of the client that started it.
    """
    from fedapps.client_apps.app import app

    with _the_only_one(Path(folder)) as alone:
        if alone:
            serve(Path(folder), mine, app, idle_seconds=idle_seconds, watch=Watch(owner))


def serve(folder: Path, mine: dict[str, Any], app: App, *, idle_seconds: float, watch: Watch) -> None:
    """Answer one client after another.

    Args:
        folder: The worker's folder, whose lock is held.
        mine: What a client must have in common with this process.
        app: The ClientApp.
        idle_seconds: How long to wait for a client.
        watch: Ends this process when the client that it computes for is gone.
    """
    secret = secrets.token_bytes(32)
    with open(folder / "secret", "wb", opener=private_opener) as file:
        file.write(secret)
    with address(folder) as path, socket.socket(socket.AF_UNIX) as listening:
        Path(path).unlink(missing_ok=True)  # of a worker that was killed
        listening.bind(path)
        listening.listen()
        listening.settimeout(idle_seconds)
        logger.info("resident worker %d: run %d of node folder %s", os.getpid(), mine["run"], folder.name)
        try:
            while True:
                end, _ = listening.accept()
                try:
                    if not _serve_client(end, secret, mine, app, watch):
                        return
                except (OSError, EOFError, ValueError, AuthenticationError, ProtoError, WorkerError) as error:
                    logger.warning("a client was not served: %s: %s", type(error).__name__, error)
        except TimeoutError:
            logger.info("resident worker %d: idle for %g s", os.getpid(), idle_seconds)
        finally:
            Path(path).unlink(missing_ok=True)


def _serve_client(end: socket.socket, secret: bytes, mine: dict[str, Any], app: App, watch: Watch) -> bool:
    """Greet a client and answer its message; False if it is another run's, which needs another worker."""
    with greeting(end) as connection:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        theirs = json.loads(connection.recv_bytes())
        other = [key for key, value in mine.items() if theirs.get(key) != value]
        connection.send_bytes(f"that of another {other[0]} leaves".encode() if other else b"")
        if other:
            return False
        end_greeting(connection)
        message = message_from_proto(ProtoMessage.FromString(connection.recv_bytes()))
        context = context_from_proto(ProtoContext.FromString(connection.recv_bytes()))
        with watch.client(connection), _log_to(connection):
            parts = _answer(app, message, context)
        for part in parts:
            connection.send_bytes(part)
    return True


def _answer(app: App, message: Message, context: Context) -> tuple[bytes, bytes, bytes]:
    """Run the ClientApp; an error of it becomes its name and text."""
    TaskIdentity.run_id, TaskIdentity.node_id = context.run_id, context.node_id
    context.node_config["resident-worker"] = False  # This is it.
    try:
        reply = app(message, context)
    except Exception as error:
        kind = type(error)
        told = {
            "module": kind.__module__,
            "name": kind.__qualname__,
            "text": str(error),
            "trace": traceback.format_exc(),
        }
        return ERROR, json.dumps(told).encode(), b""
    return REPLY, message_to_proto(reply).SerializeToString(), context_to_proto(context).SerializeToString()


class Watch:
    """Ends this process, whatever it is at, when another one is gone for which it runs.

    Args:
        owner: Process id of the one that it must not outlive.
    """

    def __init__(self, owner: int) -> None:
        self._poll = select.epoll()
        try:
            self._poll.register(os.pidfd_open(owner), select.EPOLLIN)
        except ProcessLookupError:
            os._exit(0)
        threading.Thread(target=self._end_with_them, name="watch", daemon=True).start()

    @contextmanager
    def client(self, connection: Connection) -> Iterator[None]:
        """Do so also when a client leaves before it has its answer, as when Flower stops the run."""
        self._poll.register(connection.fileno(), select.EPOLLRDHUP)
        try:
            yield
        finally:
            self._poll.unregister(connection.fileno())

    def _end_with_them(self) -> None:
        self._poll.poll()
        os._exit(1)


@contextmanager
def _the_only_one(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; False where another worker holds it."""
    with open(folder / "lock", "w", opener=private_opener) as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        held = False
        while not held and time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
                break
            time.sleep(_PAUSE)
        yield held


@contextmanager
def _log_to(connection: Connection) -> Iterator[None]:
    """Send the lines of the log to the client, too, whose log is the node's."""
    handler = _Sender(connection)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Sender(logging.Handler):
    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    @override
    def emit(self, record: logging.LogRecord) -> None:
        line = json.dumps({"level": record.levelno, "text": self.format(record)}).encode()
        with suppress(OSError):  # The client is gone, and this process will be.
            self._connection.send_bytes(LOG)
            self._connection.send_bytes(line)
