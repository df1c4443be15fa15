"""The in-process engine: Flower's `Grid` without Ray, for tests, debugging and quick studies.

Messages are the same as under Flower's engines and make the same round trip through bytes. Clients run one after another,
or in worker *processes*: never in threads, since torch's generator is global.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger

from flwr.app import Context, Error, Message, MessageType, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from typing_extensions import override

from fedapps.errors import FedAppsError
from fedapps.methods import load_object, resolve_settings
from fedapps.simulation.worker_pool import kill_pool, worker_pool
from fedapps.strategies.exchange import GridWrapper, exchange
from fedapps.tasks.from_settings import load_task_of

logger = getLogger("flwr")

FIRST_NODE = 1000
"""Node ids are FIRST_NODE + N - 1 - partition: their order is not the partitions' order, as under Flower."""

CLIENT_RAISED = 2
WORKER_DIED = 0
"""Flower's error codes."""


def run_client(client_app: str, message: bytes, context: bytes) -> tuple[bytes, bytes]:
    """Run a ClientApp on one message.

    Args:
        client_app: ``module:attribute`` of the app.
        message: The message, serialised.
        context: The node's context, serialised.

    Returns:
        The reply and the context after it, serialised; an exception of the app becomes an error reply with its traceback.
    """
    incoming = message_from_proto(ProtoMessage.FromString(message))
    node = context_from_proto(ProtoContext.FromString(context))
    TaskIdentity.run_id = incoming.metadata.run_id
    TaskIdentity.node_id = node.node_id
    app: ClientApp = load_object(client_app, what="client app")
    try:
        reply = app(incoming, node)
    except Exception:
        reply = Message(Error(CLIENT_RAISED, traceback.format_exc()), reply_to=incoming)
    return (
        message_to_proto(reply).SerializeToString(deterministic=True),
        context_to_proto(node).SerializeToString(deterministic=True),
    )


def _import(client_app: str, run_config: UserConfig) -> None:
    """Import what a client needs; what is wrong with it, its first reply says."""
    with suppress(FedAppsError):
        load_object(client_app, what="client app")
        load_task_of(resolve_settings(run_config))


@dataclass
class _Task:
    message: Message
    future: Future[tuple[bytes, bytes]] | None = None
    asked: bool = False  # whether somebody has looked for the reply


class InProcessGrid(Grid):
    """A grid whose nodes are in this process, or in worker processes of it.

    Args:
        num_clients: Number of nodes; node of partition ``i`` has ``partition-id = i``.
        run_config: Run config that the nodes see.
        client_app: ``module:attribute`` of the ClientApp.
        workers: Worker processes; 0 runs clients in this process, when their reply is pulled. Only a client in a worker
            process can be given up: it is ended when the next messages go out, or the run is over.
    """

    def __init__(
        self,
        num_clients: int,
        run_config: UserConfig,
        *,
        client_app: str = "fedapps.client_apps:app",
        workers: int = 0,
    ) -> None:
        self._client_app = client_app
        self._run_config = run_config
        self._tasks: dict[str, _Task] = {}
        self._workers = min(workers, num_clients)
        self._pool = self._started() if workers else None
        self._run = Run.create_empty(run_id=1)
        self._contexts = {
            FIRST_NODE + num_clients - 1 - partition: Context(
                run_id=self._run.run_id,
                node_id=FIRST_NODE + num_clients - 1 - partition,
                node_config={
                    "partition-id": partition,
                    "num-partitions": num_clients,
                    "trust-server": True,
                    "common-data": True,
                },
                state=RecordDict(),
                run_config=run_config,
            )
            for partition in range(num_clients)
        }

    def _started(self) -> ProcessPoolExecutor:
        """Start the workers: what they import first is no part of a round's time."""
        pool = worker_pool(self._workers)
        wait([pool.submit(_import, self._client_app, self._run_config) for _ in range(self._workers)])
        return pool

    @property
    def partitions(self) -> dict[int, int]:
        """Node id -> partition id."""
        return {node_id: int(c.node_config["partition-id"]) for node_id, c in self._contexts.items()}

    def close(self) -> list[int]:
        """Stop the worker processes; a client that is still busy is ended.

        Returns:
            Partitions of the clients that were busy.
        """
        busy = self._give_up(list(self._tasks))
        if self._pool is not None and not busy:
            self._pool.shutdown(cancel_futures=True)
        return busy

    def _give_up(self, message_ids: Iterable[str]) -> list[int]:
        """Forget messages; clients that are busy with them are ended, and their processes with them."""
        tasks = [self._tasks.pop(message_id) for message_id in message_ids]
        late = [t for t in tasks if t.future is not None and not t.future.cancel() and not t.future.done()]
        busy = sorted({self.partitions[task.message.metadata.dst_node_id] for task in late})
        if busy and self._pool is not None:
            logger.warning("still busy when nobody waited any more, and ended: client %s", ", ".join(map(str, busy)))
            kill_pool(self._pool)
        return busy

    @override
    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    @override
    def run(self) -> Run:
        return self._run

    @override
    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    @override
    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    @override
    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node_id) for node_id in self._contexts]

    @override
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; worker processes start on them at once. Replies that were looked for and did not come are given up."""
        if self._give_up([message_id for message_id, task in self._tasks.items() if task.asked]):
            self._pool = self._started()
        ids = []
        for message in messages:
            message_id = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = message_id
            task = _Task(message)
            if self._pool is not None:
                task.future = self._pool.submit(run_client, *self._call(message))
            self._tasks[message_id] = task
            ids.append(message_id)
        return ids

    def _call(self, message: Message) -> tuple[str, bytes, bytes]:
        context = self._contexts[message.metadata.dst_node_id]
        return (
            self._client_app,
            message_to_proto(message).SerializeToString(deterministic=True),
            context_to_proto(context).SerializeToString(deterministic=True),
        )

    @override
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Give the replies that are there; without workers one client is run for each message asked for."""
        replies = []
        for message_id in message_ids:
            task = self._tasks.get(message_id)
            if task is not None and (task.future is None or task.future.done()):
                del self._tasks[message_id]
                replies.append(self._answer(task))
            elif task is not None:
                task.asked = True
        return replies

    def _answer(self, task: _Task) -> Message:
        try:
            if task.future is None:
                reply, context = run_client(*self._call(task.message))
            else:
                reply, context = task.future.result()
        except BrokenProcessPool as error:
            return Message(Error(WORKER_DIED, f"a worker process died: {error}"), reply_to=task.message)
        finally:
            # In this process the client's identity was set; messages of the server carry the server's again.
            set_server_identity(self._run.run_id)
        node = context_from_proto(ProtoContext.FromString(context))
        self._contexts[node.node_id] = node
        return message_from_proto(ProtoMessage.FromString(reply))

    @override
    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return list(exchange(self, list(messages), timeout if timeout is not None else float("inf")))


def set_server_identity(run_id: int) -> None:
    """Let this process create messages as the server of a run.

    Args:
        run_id: Flower's id of the run.
    """
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = 1
    TaskIdentity.task_id = 0


Fault = Callable[[Message], Message | None]
"""What to do with a client's reply: change it, replace it by an error, or lose it (None)."""


class FaultyGrid(GridWrapper):
    """An in-process grid that injects faults into train replies.

    Args:
        inner: The grid that does the work.
        faults: ``(round, partition)`` -> fault.
        late: Partitions whose replies come only when nothing else is out.
    """

    def __init__(
        self,
        inner: InProcessGrid,
        faults: Mapping[tuple[int, int], Fault] | None = None,
        late: Sequence[int] = (),
    ) -> None:
        super().__init__(inner)
        self._partitions = inner.partitions
        self._faults = dict(faults or {})
        self._late = set(late)
        self._out: dict[str, Message] = {}

    @override
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and remember which are out."""
        messages = list(messages)
        ids = list(self.inner.push_messages(messages))
        self._out |= dict(zip(ids, messages, strict=True))
        return ids

    @override
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive replies, late ones last, faulty ones changed or lost."""
        wanted = list(message_ids)
        prompt = [i for i, sent in self._out.items() if self._partitions[sent.metadata.dst_node_id] not in self._late]
        if prompt:
            wanted = [message_id for message_id in wanted if message_id in prompt]
        replies = []
        for reply in self.inner.pull_messages(wanted):
            sent = self._out.pop(reply.metadata.reply_to_message_id)
            round_and_partition = (int(sent.metadata.group_id or 0), self._partitions[sent.metadata.dst_node_id])
            fault = self._faults.get(round_and_partition) if sent.metadata.message_type == MessageType.TRAIN else None
            changed = fault(reply) if fault else reply
            if changed is not None:
                replies.append(changed)
        return replies


def run_inprocess(
    run_config: UserConfig,
    num_clients: int,
    *,
    workers: int = 0,
    faults: Mapping[tuple[int, int], Fault] | None = None,
    late: Sequence[int] = (),
) -> list[int]:
    """Run the ServerApp on an in-process grid.

    Args:
        run_config: Flat kebab-case keys.
        num_clients: Number of clients.
        workers: Worker processes; 0 runs clients in this process.
        faults: ``(round, partition)`` -> fault to inject.
        late: Partitions whose replies come last.

    Returns:
        Partitions of the clients that were still busy at the end, and were ended.

    Raises:
        FedAppsError: The run failed.
    """
    from fedapps.server_apps import app as server_app

    inner = InProcessGrid(num_clients, run_config, workers=workers)
    grid: Grid = FaultyGrid(inner, faults, late) if faults or late else inner
    set_server_identity(inner.run.run_id)
    context = Context(run_id=inner.run.run_id, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
    try:
        server_app(grid, context)
    finally:
        busy = inner.close()
    return busy
