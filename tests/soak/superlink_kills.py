"""Kill the processes of a federation with TLS and keys, resume from the caller's copy, and compare with a run nobody killed.

One SuperLink with a database and two SuperNodes with keys. In the middle of a round, at a random moment, SIGKILL goes to

* ``app``: the server app's process;
* ``link``: the SuperLink with all that it started;
* ``node``: one SuperNode with all that it started;
* ``all``: all of these at once.

What was killed is started again at once, as a service manager does, and again until it is taken: a node with a key is refused
until its earlier self is given up. The command that follows the run has nothing but status and log; a run that it reports as
failed is resumed from its copy until it completes. Model, rows, journal, personal models and replicas must be bitwise those of
a run in process.

Usage: ``python tests/soak/superlink_kills.py [--seed 0] [--rounds 4] [--methods fedpm,hiso] [--kinds app,link,node,all]``
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch and BLAS are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fedapps_stores import replica_round
from simulation import runs
from simulation.deployment import kill, start_again

from fedapps.errors import LaunchError
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import load_arrays
from fedapps.simulation.flower_environment import flower_program
from fedapps.simulation.processes import CONNECTION, Service, SuperLink, SuperNode
from fedapps.simulation.start import Start, start

HELPERS = Path(__file__).parents[1] / "helpers"
CONFIG = {
    **runs.SITES, "task-options": 'sizes = "9,8"', "client-test-fraction": 0.3, "client-validation-fraction": 0.2,
    "client-evaluation": "last", "on-failure": "fail-fast", "round-timeout": 90.0,
}  # fmt: skip
OWN = {"hiso": {"weighting": "uniform", "local-steps": 1, "hiso.fingerprint-every": 2, "evaluate-every": 0}}
DROPPED = ("seconds", "payload-down", "payload-up", "wire-down", "wire-up")


class SecureSuperLink(SuperLink):
    """One with TLS, keys of nodes, and a database."""

    def __init__(self, secrets: Path, **options: Any) -> None:
        super().__init__(simulation=False, **options)
        self._secrets = secrets
        self._arguments = [
            "--ssl-ca-certfile", f"{secrets}/ca.crt", "--ssl-certfile", f"{secrets}/server.pem",
            "--ssl-keyfile", f"{secrets}/server.key", "--enable-supernode-auth", "--database", f"{secrets}/state.db",
        ]  # fmt: skip

    def _prepare(self) -> None:
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n'
            f'root-certificates = "{self._secrets}/ca.crt"\n'
        )


def write_secrets(folder: Path, num_nodes: int) -> None:
    """An authority, a certificate for loopback, and a key for each node."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, is_ca: bool) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .sign(authority, hashes.SHA256())
        )

    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "ca.crt").write_bytes(certificate("authority", authority, True).public_bytes(pem))
    (folder / "server.pem").write_bytes(certificate("server", server, False).public_bytes(pem))
    (folder / "server.key").write_bytes(server.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    for node in range(num_nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        openssh = serialization.PrivateFormat.OpenSSH
        (folder / f"node-{node}").write_bytes(key.private_bytes(pem, openssh, plain))
        (folder / f"node-{node}").chmod(0o600)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"node-{node}.pub").write_bytes(public)


@contextlib.contextmanager
def federation(folder: Path) -> Iterator[tuple[SecureSuperLink, list[SuperNode]]]:
    """A SuperLink and two SuperNodes with a key and a state folder each."""
    write_secrets(folder, 2)
    shared: dict[str, Any] = {
        "python_path": [HELPERS],
        "environment": {"OMP_NUM_THREADS": "1", "FEDAPPS_RUNS": str(folder / "server")},
    }
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(SecureSuperLink(folder, log_path=folder / "superlink.log", **shared))
        nodes = []
        for i in range(2):
            register = [flower_program("flwr"), "supernode", "register", f"{folder}/node-{i}.pub", CONNECTION]
            subprocess.run(register, env=link.environment, check=True, capture_output=True)
            config = {
                "partition-id": i, "num-partitions": 2, "state-dir": str(folder / f"state-{i}"), "common-data": True,
                "allow-tasks": "fedapps_testing:Sites",
            }  # fmt: skip
            node = SuperNode(link.address, config, log_path=folder / f"node-{i}.log", **shared)
            place = node._arguments.index("--insecure")
            node._arguments[place : place + 1] = [
                "--root-certificates", f"{folder}/ca.crt", "--auth-supernode-private-key", f"{folder}/node-{i}",
            ]  # fmt: skip
            nodes.append(stack.enter_context(node))
        yield link, nodes


def keep_up(service: Service, over: threading.Event, starts: list[str]) -> None:
    """Start a killed service whenever it has ended; one that is refused may end long after its start."""
    while not over.wait(1.0):
        if service.ended:
            starts.append(service.log_path.stem)
            with contextlib.suppress(LaunchError):
                start_again(service)


def chain(method: str, kind: str, rounds: int, folder: Path, random_: random.Random) -> str:
    """Run with one kill, resume to the end, compare; gives one line."""
    config = {**CONFIG, **OWN.get(method, {}), "method": method, "num-server-rounds": rounds}
    straight = runs.short_run(folder / "straight", config, 2)
    killed_at, pause, notes = random_.randint(1, rounds - 1), random_.uniform(0.0, 8.0), list[str]()
    with federation(folder) as (link, nodes), contextlib.ExitStack() as stack:
        os.environ["FLWR_HOME"] = str(link.home)
        threads: list[threading.Thread] = []
        over, starts = threading.Event(), list[str]()

        def do_kill() -> None:
            time.sleep(pause)
            if kind == "app":
                kill(link, "flwr-serverapp")
                return
            services = {"link": [link], "node": nodes[:1], "all": [link, *nodes]}[kind]
            for service in services:
                kill(service)
            for service in services:
                threads.append(threading.Thread(target=keep_up, args=(service, over, starts)))
                threads[-1].start()

        def on_row(row: dict[str, Any]) -> None:
            if row["phase"] == "train" and row["round"] == killed_at and not threads:
                threads.append(threading.Thread(target=do_kill))
                threads[0].start()

        begun, given, attempts = time.monotonic(), config, 0
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(over.set)
        while True:
            attempts += 1
            try:
                ended = start(given, Start(superlink=CONNECTION), folder / "runs", on_row)
            except LaunchError as error:
                status, reason = "lost", str(error)
            else:
                status, reason = str(ended.status), ended.reason
            if threads:
                threads[0].join()
            if status == "completed":
                break
            notes.append(f"{status} ({' '.join(reason.split())[:90]})")
            if attempts > 4:
                raise SystemExit(f"{method}, {kind}, {folder}: {'; '.join(notes)}")
            [here] = (folder / "runs").iterdir()
            given = {**RunFolder.open(here).read_settings(), "run-dir": str(here), "resume": True}
        seconds = time.monotonic() - begun
        notes += [f"{name} started {number} times" for name, number in Counter(starts).items()]
    [here] = map(RunFolder, (folder / "runs").iterdir())
    different = [name for name, (was, now) in compared(straight.folder, here, folder).items() if was != now]
    if different:
        raise SystemExit(f"{method}, {kind}, {folder}: {', '.join(different)} differ from the run that was not killed")
    return (
        f"{method}, {kind} killed {pause:.1f} s into round {killed_at + 1}: {attempts - 1} resume(s), {seconds:.0f} s; "
        f"{'; '.join(notes)}: all bitwise equal"
    )


def compared(straight: RunFolder, here: RunFolder, folder: Path) -> dict[str, tuple[Any, Any]]:
    """What must be equal, of the run in process and of the copy."""
    both = (straight, here)
    pairs = {name: tuple((each.path / name).read_bytes() for each in both) for name in ("model.safetensors",)}
    pairs["rows"] = tuple(
        [
            {k: v for k, v in row.items() if k not in DROPPED}
            for row in each.read_metrics()
            if row["phase"] != "start-up"
        ]
        for each in both
    )
    pairs["clients' rows"] = tuple([row for row in each.read_clients() if "node" not in row] for each in both)
    if straight.journal_path.exists():
        pairs["journal"] = tuple(each.journal_path.read_bytes() for each in both)
        total = here.load_checkpoint().server_round
        # It follows the journal to its end, or to the round before, which is all that it needs to go on.
        for i in (0, 1):
            pairs[f"replica {i}"] = (True, replica_round(here.path, folder / f"state-{i}") in (total - 1, total))
    for i, state in runs.client_states(straight.path).items():
        last = here.load_checkpoint().last_folded[i]
        [kept] = (folder / f"state-{i}").glob(f"*/client-{i}/round-{last}.safetensors")
        pairs[f"state of client {i}"] = tuple(
            {name: value.tobytes() for name, value in each.items()} for each in (state, load_arrays(kept))
        )
    return pairs  # type: ignore[return-value]


def main() -> None:
    """Kill every kind of process in runs of every method that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedpm,fedclup,hiso")
    parser.add_argument("--kinds", default="app,link,node,all")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # As on two machines: where the command's folder lies is nothing to the server app.
    RunFolder.followed = lambda self: contextlib.nullcontext()  # type: ignore[method-assign]
    root = Path(tempfile.mkdtemp(prefix="fedapps-superlink-kills-"))
    for method in options.methods.split(","):
        for kind in options.kinds.split(","):
            folder = root / f"{method}-{kind}"
            folder.mkdir()
            random_ = random.Random(f"{options.seed} {method} {kind}")
            print(chain(method, kind, options.rounds, folder, random_), flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
