"""The way to a SuperLink: every fault is named with its cure, and a sound one has none."""

from __future__ import annotations

import http.server
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from fedapps.deploy.certificates import Authority, make_authority, new_server_key, pem_of, sign_server
from fedapps.deploy.folder import DeployError
from fedapps.deploy.link import check_link, check_private, check_server_certificate
from fedapps.simulation.connection import Connection
from fedapps.simulation.processes import free_ports

KEY = new_server_key()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("test")


class Health(http.server.BaseHTTPRequestHandler):
    """Answers as a SuperLink does, with a clock that may be wrong."""

    ahead = 0.0

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(datetime.now(UTC) + timedelta(seconds=self.ahead), usegmt=True)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def superlink(
    folder: Path, authority: Authority | None, *, start: datetime | None = None, days: int = 100, ahead: float = 0.0
) -> Iterator[Connection]:
    """A server with a certificate of the authority, or without TLS; the connection to it trusts the authority."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Clock", (Health,), {"ahead": ahead}))
    ca = folder / "ca.crt"
    if authority is not None:
        ca.write_bytes(pem_of(authority.certificate))
        certificate = sign_server(authority, KEY, ["superlink.example.org"], start=start, days=days)
        (folder / "server.pem").write_bytes(pem_of(certificate) + pem_of(KEY))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Connection("test", f"localhost:{server.server_port}", ca, insecure=False)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def faults(connection: Connection) -> list[str]:
    return [str(finding) for finding in check_link(connection) if isinstance(finding, DeployError)]


def test_a_sound_superlink_has_no_fault(tmp_path: Path, authority: Authority) -> None:
    with superlink(tmp_path, authority) as connection:
        findings = list(check_link(connection))
    assert all(isinstance(finding, str) for finding in findings), findings
    text = "\n".join(map(str, findings))
    for part in ("ca.crt: valid until", "certificate of localhost", "reached, TLSv1", "clock: "):
        assert part in text


@pytest.mark.parametrize(
    ("shift", "days", "message"),
    [
        (
            -3,
            2,
            r"certificate of localhost:\d+: expected a valid certificate, got one that has expired on 20.*deploy renew",
        ),
        (2, 5, r"expected the time here to be after .* from which it is valid.*set the clock"),
        (-3, 12, r"expected a certificate for the next 30 days, got one that expires on .*deploy renew"),
    ],
)
def test_dates_of_a_certificate(tmp_path: Path, authority: Authority, shift: int, days: int, message: str) -> None:
    start = datetime.now(UTC) + timedelta(days=shift)
    with superlink(tmp_path, authority, start=start, days=days) as connection:
        [fault] = faults(connection)
    assert re.search(message, fault)


def test_a_certificate_of_another_authority(tmp_path: Path, authority: Authority) -> None:
    with superlink(tmp_path, authority) as connection:
        assert connection.root_certificates is not None
        # Of the same name, but with another key.
        connection.root_certificates.write_bytes(pem_of(make_authority("test").certificate))
        [fault] = faults(connection)
    assert "expected one signed by the authority in ca.crt, got one of another authority" in fault


def test_a_certificate_for_other_names(authority: Authority) -> None:
    certificate = sign_server(authority, KEY, ["superlink.example.org"])
    [valid, fault] = check_server_certificate(certificate, "10.0.0.7", authority.certificate, "10.0.0.7:8443")
    assert isinstance(valid, str)
    assert "expected a certificate for 10.0.0.7, got one for superlink.example.org, localhost" in str(fault)
    assert "fedapps deploy renew DIR --host 10.0.0.7" in str(fault)


@pytest.mark.parametrize("ahead", [-3.0, 10.0, 290.0])
def test_a_clock_that_flower_takes(tmp_path: Path, authority: Authority, ahead: float) -> None:
    """The server's clock is the one that is shifted here: 3 s ahead of it, or behind it by less than 300 s."""
    with superlink(tmp_path, authority, ahead=ahead) as connection:
        assert faults(connection) == []


@pytest.mark.parametrize(
    ("ahead", "message"), [(-60.0, r"got (59|60|61) s ahead of"), (400.0, r"got (399|400) s behind")]
)
def test_a_clock_by_which_flower_refuses_a_node(
    tmp_path: Path, authority: Authority, ahead: float, message: str
) -> None:
    with superlink(tmp_path, authority, ahead=ahead) as connection:
        [fault] = faults(connection)
    assert re.search(
        rf"clock of this machine: expected at most 5 s ahead .* 300 s behind.*{message}.*timedatectl", fault
    )


def test_no_tls_where_it_is_expected(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "ca.crt").write_bytes(pem_of(authority.certificate))
    with superlink(tmp_path, None) as connection:
        [fault] = faults(connection)
    assert "expected TLS, got SSLError" in fault
    assert "not --insecure" in fault


def test_nobody_there(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "ca.crt").write_bytes(pem_of(authority.certificate))
    [port] = free_ports(1)
    [fault] = faults(Connection("test", f"127.0.0.1:{port}", tmp_path / "ca.crt", insecure=False))
    assert "got nothing that listens there; start the SuperLink" in fault
    [fault] = faults(Connection("test", "superlink.invalid:8443", tmp_path / "ca.crt", insecure=False))
    assert "no machine of this name" in fault
    with pytest.raises(DeployError, match=r"expected host:port, got 'superlink'"):
        faults(Connection("test", "superlink", tmp_path / "ca.crt", insecure=False))


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nrubbish"])
def test_an_authority_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca.crt").write_bytes(content)
    [fault] = faults(Connection("test", "localhost:1", tmp_path / "ca.crt", insecure=False))
    assert "ca.crt: expected a certificate" in fault
    assert "copy it again" in fault


def test_another_machine_without_tls(tmp_path: Path) -> None:
    found = faults(Connection("test", "superlink.invalid:8443", None, insecure=True))
    assert "expected TLS, since the SuperLink is another machine, got insecure = true" in found[0]


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    [missing] = check_private(path)
    assert "no such file" in str(missing)
    path.touch(mode=0o600)
    assert list(check_private(path)) == []
    path.chmod(0o640)
    [fault] = check_private(path)
    assert f"got mode 640; chmod 600 {path}" in str(fault)
