"""A SuperLink and SuperNodes on loopback, as a test helper."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedapps.simulation.flower_environment import flower_program
from fedapps.simulation.processes import CONNECTION, LOOPBACK, Service, SuperLink, SuperNode
from fedapps.simulation.reaper import members, sessions_of


@dataclass(frozen=True)
class Deployment:
    """What `run_on_superlink` needs to reach it, and the services themselves."""

    connection: str
    environment: dict[str, str]
    superlink: SuperLink
    nodes: list[SuperNode]
    another_node: Callable[[int, Path], SuperNode]
    """Makes one more node of a partition, with the state folder of the first one, and its own log; enter it to start it."""


@contextmanager
def loopback_deployment(
    num_nodes: int,
    folder: Path,
    *,
    python_path: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    rules: Mapping[str, str] | None = None,
    own: Sequence[Mapping[str, str | bool]] = (),
) -> Iterator[Deployment]:
    """One SuperLink and nodes with partition ids 0, 1, ... and a state folder each, which allow what `rules` add.

    The nodes have the same files, unless `own` says what each has of its own in its configuration.

    Logs and states are written to `folder`; all processes end with the block.
    """
    shared = {"python_path": python_path, "environment": {"OMP_NUM_THREADS": "1"} | dict(environment or {})}
    with ExitStack() as stack:
        superlink = stack.enter_context(SuperLink(simulation=False, log_path=folder / "superlink.log", **shared))

        def node_of(partition: int, log_path: Path) -> SuperNode:
            config = {
                "partition-id": partition,
                "num-partitions": num_nodes,
                "state-dir": str(folder / f"state-{partition}"),
                "common-data": not own,
                **(rules or {}),
                **(own[partition] if own else {}),
            }
            return SuperNode(superlink.address, config, log_path=log_path, **shared)

        nodes = []
        for partition in range(num_nodes):
            node = node_of(partition, folder / f"node-{partition}.log")
            stack.callback(node.stop)
            node.start()
            nodes.append(node)
        for node in nodes:
            node.wait_until_ready()
        yield Deployment(CONNECTION, {"FLWR_HOME": str(superlink.home)}, superlink, nodes, node_of)


def kill(service: Service, program: str = "") -> None:
    """SIGKILL the processes of a service that run a program, or all of them, as where a machine loses its power."""
    service._sessions = sessions_of(service.sessions)
    for pid in members(service.sessions):
        with suppress(OSError):
            if program in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
    if not program:
        service._process.wait()


def start_again(service: Service) -> None:
    """Start a service that was killed with the command that it was started with, and wait until it is ready."""
    command = [flower_program(service._program), *service._arguments, "--host", LOOPBACK, "--port", str(service.port)]
    with service.log_path.open("ab") as log:
        service._process = subprocess.Popen(
            command, env=service.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    service._sessions.add(service._process.pid)
    service.wait_until_ready()
