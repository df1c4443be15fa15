"""Flower's services as child processes: started on free loopback ports, ended without trace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import override

from fedapps.errors import LaunchError, explain
from fedapps.settings import Scalar
from fedapps.simulation import reaper
from fedapps.simulation.flower_environment import flower_environment, flower_program, log_tail

LOOPBACK = "127.0.0.1"
CONNECTION = "fedapps"  # The name under which a SuperLink is written to its own Flower config.

_READY_POLL_SECONDS = 0.1
_PORT_ATTEMPTS = 3
# Ray puts sockets of about 70 characters below this folder; a socket's path may have 107.
_LONGEST_TEMPORARY_FOLDER = 20


def free_ports(count: int) -> list[int]:
    """Return distinct loopback ports that nobody listens on at the moment.

    Args:
        count: How many.

    Returns:
        The port numbers.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


class Service:
    """A Flower service as a child process with its own ``FLWR_HOME`` and temporary folder.

    As a context manager it is ready inside the block, and after it no process of it is left:
    neither after an exception nor when this process is killed.

    Args:
        program: The command, for example ``"flower-supernode"``.
        arguments: Its arguments besides host and port.
        python_path: Folders from which apps are imported, before ``PYTHONPATH``.
        environment: Further variables.
        log_path: Where its output goes; by default into the temporary folder.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        python_path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self._program = program
        self._arguments = list(arguments)
        self._environment = flower_environment(python_path, environment)
        self._log_path = log_path
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[str] | None = None
        self._sessions: set[int] = set()
        self._attempts = 0
        self.port = 0

    @property
    def address(self) -> str:
        """Host and port it listens on."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def folder(self) -> Path:
        """Its temporary folder, removed when it stops."""
        if self._folder is None:
            raise LaunchError(self._program, expected="a service that was started", got="none", do="call `start` first")
        return self._folder

    @property
    def home(self) -> Path:
        """Its ``FLWR_HOME``, which lasts as long as the service."""
        return self.folder / "home"

    @property
    def log_path(self) -> Path:
        """The file that its output goes to."""
        return self._log_path or self.folder / f"{self._program}.log"

    @property
    def environment(self) -> dict[str, str]:
        """The variables it runs with; Flower's commands reach it with the same."""
        return self._environment | {"FLWR_HOME": str(self.home), "RAY_TMPDIR": str(self.folder)}

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions of its processes, that of the service itself included."""
        return frozenset(self._sessions)

    def start(self) -> None:
        """Start it without waiting; `wait_until_ready` and `stop` must follow."""
        self._folder = Path(tempfile.mkdtemp(prefix="fedapps-", dir=_short_temporary_folder()))
        self.home.mkdir()
        self._spawn()

    def wait_until_ready(self, seconds: float = 90.0) -> None:
        """Wait until it answers on its port.

        Args:
            seconds: The longest wait.

        Raises:
            LaunchError: It ended, or is not ready in time.
        """
        deadline = time.monotonic() + seconds
        while not self._listens():
            if self.ended and not self._port_was_taken():
                self.check()
            elif self.ended:
                self._end_processes()
                self._spawn()
            elif time.monotonic() > deadline:
                raise self._error(f"still not listening on {self.address} after {seconds:.0f} s")
            time.sleep(_READY_POLL_SECONDS)
        self._remember_sessions()

    @property
    def ended(self) -> bool:
        """Whether the service's process has ended."""
        return self._process is None or self._process.poll() is not None

    def check(self) -> None:
        """Raise if the service has ended.

        Raises:
            LaunchError: It has; the message ends with the last lines of its log.
        """
        if self._process is not None and self.ended:
            raise self._error(f"exit code {self._process.returncode}")

    def stop(self) -> None:
        """End all of its processes and remove its temporary folder; harmless when repeated."""
        self._end_processes()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Start the service and wait until it is ready."""
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the service."""
        self.stop()

    def _prepare(self) -> None:
        """Write what the service needs now that its port is known."""

    def _spawn(self) -> None:
        self._attempts += 1
        [self.port] = free_ports(1)
        self._prepare()
        command = [flower_program(self._program), *self._arguments]
        command += ["--host", LOOPBACK, "--port", str(self.port)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._sessions = {self._process.pid}
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", reaper.__file__, str(self._process.pid), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def _remember_sessions(self) -> None:
        """Note the helpers' sessions: they cannot be found once the service itself is gone."""
        self._sessions = reaper.sessions_of(self._sessions)
        self._tell_guard("".join(f"{session}\n" for session in sorted(self._sessions)))

    def _end_processes(self) -> None:
        process, guard = self._process, self._guard
        if process is None:
            return
        left = reaper.end_sessions(process.pid, self._sessions)
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
        self._process = None
        if guard is not None and not left:
            self._tell_guard("done\n")
        if guard is not None and guard.stdin is not None:
            with suppress(BrokenPipeError):
                guard.stdin.close()
            guard.wait()

    def _tell_guard(self, text: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(BrokenPipeError):
                self._guard.stdin.write(text)
                self._guard.stdin.flush()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((LOOPBACK, self.port)) != 0:
                return False
        # Another service may have taken the port first and answer in this one's place.
        return not self.ended and not _is_foreign(self._process, self.port)

    def _port_was_taken(self) -> bool:
        taken = "address already in use" in log_tail(self.log_path).lower()
        return taken and self._attempts < _PORT_ATTEMPTS

    def _error(self, got: str) -> LaunchError:
        tail = log_tail(self.log_path) if self._folder is not None else ""
        message = explain(
            self._program,
            expected=f"a service that runs on {self.address}",
            got=got,
            do=f"see {self.log_path}" if self._log_path else "its last output follows",
        )
        return LaunchError(f"{message}\n{tail}".rstrip())


class SuperLink(Service):
    """A SuperLink on a free loopback port, without TLS.

    Its own Flower configuration names it `CONNECTION`.

    Args:
        simulation: Whether it simulates the clients; else SuperNodes connect to it.
        python_path: Folders from which apps are imported, before ``PYTHONPATH``.
        environment: Further variables for it and all that it starts.
        log_path: Where its output goes.
    """

    def __init__(
        self,
        *,
        simulation: bool,
        python_path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        super().__init__(
            "flower-superlink",
            ["--insecure", *(["--simulation"] if simulation else [])],
            python_path=python_path,
            environment=environment,
            log_path=log_path,
        )

    @override
    def _prepare(self) -> None:
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "{self.address}"\ninsecure = true\n',
            encoding="utf-8",
        )


class SuperNode(Service):
    """A SuperNode on a free loopback port, connected to a SuperLink without TLS.

    Args:
        superlink: Address of the SuperLink.
        node_config: The node's configuration, for example ``{"partition-id": 0}``.
        python_path: Folders from which apps are imported, before ``PYTHONPATH``.
        environment: Further variables for it and all that it starts.
        log_path: Where its output goes.
    """

    def __init__(
        self,
        superlink: str,
        node_config: Mapping[str, Scalar],
        *,
        python_path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        pairs = " ".join(f"{key}={_quoted(key, value)}" for key, value in node_config.items())
        super().__init__(
            "flower-supernode",
            ["--insecure", "--superlink", superlink, "--node-config", pairs],
            python_path=python_path,
            environment=environment,
            log_path=log_path,
        )


def _quoted(key: str, value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    if "'" in value or "\n" in value:
        raise LaunchError(
            f"node-config '{key}'",
            expected="text without apostrophes and line ends",
            got=repr(value),
            do="Flower's command line cannot carry them; choose another value",
        )
    return f"'{value}'"


def _short_temporary_folder() -> str:
    usual = tempfile.gettempdir()
    if len(usual) > _LONGEST_TEMPORARY_FOLDER and os.access("/tmp", os.W_OK):
        return "/tmp"
    return usual


def _is_foreign(process: subprocess.Popen[bytes] | None, port: int) -> bool:
    """Whether it can be shown that another process listens on the port."""
    listeners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == "0A" and columns[1].endswith(f":{port:04X}"):
                    listeners.add(f"socket:[{columns[9]}]")
    if not listeners or process is None:
        return False
    own = set()
    for entry in Path(f"/proc/{process.pid}/fd").glob("*"):
        with suppress(OSError):
            own.add(os.readlink(entry))
    return not listeners & own
