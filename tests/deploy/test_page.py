"""``docs/deploy.md``: its commands are run as they stand there, on loopback, and what a federation refuses is refused."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedapps.deploy.certificates import Authority, pem_of, sign_server
from fedapps.deploy.folder import read_certificate, read_tls_key
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.processes import free_ports

from .terminal import Terminal, own_ports, terminal

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
INIT, SERVER, LAPTOP, DATA, NODES, CHECK, CHECK_NODE, FEDPM, FEDCLUP = re.findall(
    r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL
)
OPTIONS = "--task table --set task-options='label = \"diagnosis\"'"
ANOTHER_VERSION = "import fedapps\nfedapps.__version__ = '0.0.9'\n"

pytestmark = pytest.mark.engine


def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    """Only the ports are other ones. Between checks and runs nodes come that runs refuse; at the end the certificate ends."""
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    study, ports = tmp_path / "study", free_ports(5)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    with terminal(tmp_path, environment) as shell:
        shell.run(INIT.replace("8443", str(ports[0])))
        own_ports(study, ["hospital-a", "hospital-b"], ports[1:])
        for commands in (SERVER, LAPTOP, DATA, NODES):
            shell.run(commands)
        rows = {name: rows_of(study / "nodes" / name / "data" / "tumours.csv") for name in ("hospital-a", "hospital-b")}
        assert rows == {"hospital-a": 200, "hospital-b": 369}
        out = shell.run(CHECK)
        for name, n in rows.items():
            assert f"ok       {name}: examples {n}, features [30], classes ['benign', 'malignant']" in out
        assert "ok       hospital-a: examples 200, features [30]" in shell.run(CHECK_NODE)

        start_nodes_that_do_not_fit(shell, study, ports[3:])
        for method, commands in (("fedpm", FEDPM), ("fedclup", FEDCLUP)):
            shell.run(commands)
            [path] = (tmp_path / "runs").glob(f"*-{method}-table-0")
            check_run(RunFolder.open(path), rows)
        for name in rows:
            assert list((study / "nodes" / name / "state").rglob("round-2.safetensors")), name

        out = shell.run(f"fedapps deploy check study {OPTIONS}", code=1)
        for line in (
            r"hospital-c: .*expected fedapps .* as on the server, got fedapps 0\.0\.9; install the same version on every",
            r"hospital-d: .*mean radius",
            r"hospital-e, key \w+: expected a key that the SuperLink knows, got one that is not registered; register it",
        ):
            assert re.search(rf"^problem  {line}", out, flags=re.MULTILINE), out
        out = shell.run(f"fedapps deploy check --folder study/nodes/hospital-e {OPTIONS}", code=1)
        assert "got one that is not registered; register it" in out
        assert re.search(r"^problem  data of hospital-e: .*tumours\.csv.*expected", out, flags=re.MULTILINE)

        expire(study)
        shell.run("superlink=$(jobs -p | head -1); kill $superlink; wait $superlink || true")
        shell.run(SERVER + "until fedapps deploy check study | grep expired; do sleep 1; done")
        for command in ("fedapps deploy check study", f"fedapps run --superlink study {OPTIONS}"):
            assert re.search(r"one that has expired on .*fedapps deploy renew", shell.run(command, code=1))


def rows_of(path: Path) -> int:
    with path.open(newline="") as file:
        return sum(1 for _ in csv.DictReader(file))


def start_nodes_that_do_not_fit(shell: Terminal, study: Path, ports: Sequence[int]) -> None:
    """One with another version, one that lacks a column, and one with an empty file that is neither registered nor started."""
    shell.run("fedapps deploy add study --node hospital-c --node hospital-d && study/user/register.sh || true", code=0)
    shell.run("fedapps deploy add study --node hospital-e")
    own_ports(study, ["hospital-c", "hospital-d"], ports)
    with (study / "nodes" / "hospital-a" / "data" / "tumours.csv").open(newline="") as file:
        table = list(csv.reader(file))
    for name, content in (("hospital-c", table), ("hospital-d", [row[1:] for row in table]), ("hospital-e", [])):
        with (study / "nodes" / name / "data" / "tumours.csv").open("w", newline="") as file:
            csv.writer(file).writerows(content)
        with (study / "nodes" / name / "node.toml").open("a") as file:
            file.write("task-options = 'file = \"tumours.csv\"'\n")
    other = study / "other-version"
    other.mkdir()
    (other / "sitecustomize.py").write_text(ANOTHER_VERSION)
    shell.run(
        f'PYTHONPATH="{other}:$PYTHONPATH" study/nodes/hospital-c/start.sh &\nstudy/nodes/hospital-d/start.sh &\n'
    )
    shell.run('until [ "$(fedapps deploy check study | grep -c online,)" = 4 ]; do sleep 1; done')


def check_run(folder: RunFolder, rows: dict[str, int]) -> None:
    """The hospitals trained, each on its own file, and the others were refused by name."""
    summary = folder.read_summary()
    assert summary is not None
    assert summary["status"] == "completed"
    assert folder.read_model()["weights"].shape == (31,)
    clients: list[dict[str, Any]] = [json.loads(line) for line in folder.clients_path.read_text().splitlines()]
    nodes = {row["node"]: row["examples"] for row in clients if "node" in row}
    assert nodes == rows
    log = (folder.path / "flower.log").read_text()
    assert re.search(r"node \d+ \(hospital-c\): expected fedapps .*got fedapps 0\.0\.9", log)
    assert re.search(r"node \d+ \(hospital-d\), .*mean radius", log)


def expire(study: Path) -> None:
    """Put a certificate that has ended in the place of the server's."""
    authority = Authority(
        read_certificate(study / "authority" / "ca.crt"), read_tls_key(study / "authority" / "ca.key")
    )
    start = datetime.now(UTC) - timedelta(days=3)
    certificate = sign_server(
        authority, read_tls_key(study / "server" / "server.key"), ["localhost"], start=start, days=2
    )
    (study / "server" / "server.crt").write_bytes(pem_of(certificate))
