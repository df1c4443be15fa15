"""Certificates are for the names that were given and no others, and keys are those that Flower takes."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from fedapps.deploy.certificates import (
    Authority,
    make_authority,
    names_of,
    new_node_key,
    new_server_key,
    pem_of,
    sign_server,
)

HOSTS = ["superlink.example.org", "10.0.0.5", "fd00::5"]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("test")


def verify(authority: Authority, certificate: x509.Certificate, name: x509.DNSName | x509.IPAddress) -> None:
    """Verify as the Web's rules have it, by a verifier that did not make the certificate."""
    PolicyBuilder().store(Store([authority.certificate])).build_server_verifier(name).verify(certificate, [])


def test_a_certificate_is_for_its_names_and_no_other(authority: Authority) -> None:
    certificate = sign_server(authority, new_server_key(), HOSTS)
    assert names_of(certificate) == ["superlink.example.org", "localhost", "10.0.0.5", "fd00::5", "127.0.0.1", "::1"]
    for name in ("superlink.example.org", "localhost"):
        verify(authority, certificate, x509.DNSName(name))
    for address in ("10.0.0.5", "fd00::5", "127.0.0.1"):
        verify(authority, certificate, x509.IPAddress(ip_address(address)))
    with pytest.raises(VerificationError):
        verify(authority, certificate, x509.DNSName("other.example.org"))
    with pytest.raises(VerificationError):
        verify(make_authority("test"), certificate, x509.DNSName("localhost"))


def test_a_certificate_is_valid_from_its_start_for_its_days(authority: Authority) -> None:
    start = datetime(2020, 1, 1, tzinfo=UTC)
    certificate = sign_server(authority, new_server_key(), HOSTS, start=start, days=2)
    assert (certificate.not_valid_before_utc, certificate.not_valid_after_utc) == (start, start + timedelta(days=2))
    with pytest.raises(VerificationError):
        verify(authority, certificate, x509.DNSName("localhost"))
    assert sign_server(authority, new_server_key(), HOSTS).not_valid_before_utc < datetime.now(UTC)


def test_a_node_key_is_one_that_flower_takes(tmp_path: Path) -> None:
    private, public = new_node_key()
    key = load_ssh_private_key(private, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    shown = load_ssh_public_key(public)
    assert isinstance(shown, ec.EllipticCurvePublicKey)
    assert uses_nist_ec_curve(shown)
    path = tmp_path / "node.pub"
    path.write_bytes(public)
    assert try_load_public_key(path) == public_key_to_bytes(key.public_key())
    assert new_node_key() != (private, public)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_strict_client_shakes_hands_with_the_server(authority: Authority, tmp_path: Path, host: str) -> None:
    """A TLS handshake on loopback, with what Python 3.13 verifies by default."""
    key = new_server_key()
    for name, what in (("ca", authority.certificate), ("crt", sign_server(authority, key, HOSTS)), ("key", key)):
        (tmp_path / name).write_bytes(pem_of(what))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with server.wrap_socket(listener.accept()[0], server_side=True) as connection:
                connection.sendall(b"hello")

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=10) as plain,
            client.wrap_socket(plain, server_hostname=host) as secure,
        ):
            assert secure.recv(5) == b"hello"
        thread.join()
