"""The way to a SuperLink: name, port, certificate, clock.

Every function yields what it found: a sentence where all is well, a `DeployError` with its cure where something is not.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

from fedapps.deploy.certificates import names_of
from fedapps.deploy.folder import DeployError, read_certificate
from fedapps.simulation.connection import Connection

Finding = str | DeployError

PATIENCE = 10.0
"""Seconds to wait for a SuperLink."""

SOON = timedelta(days=30)
"""A certificate that ends sooner is a problem already."""

_RENEW = "renew it with `fedapps deploy renew`, copy server.crt to the SuperLink's machine and restart the SuperLink"


def check_link(connection: Connection) -> Iterator[Finding]:
    """Check that a SuperLink can be reached, is who it should be, and has the same time.

    Args:
        connection: How it is reached.

    Yields:
        Findings; after one without which the next cannot be looked for, no more.
    """
    host, port = _split(connection.address)
    authority = None
    if connection.root_certificates is not None and not connection.insecure:
        try:
            authority = read_certificate(connection.root_certificates)
        except DeployError as error:
            yield error
            return
        yield from check_dates(authority, str(connection.root_certificates), "make a new federation")
    if connection.insecure and host not in ("localhost", "127.0.0.1", "::1"):
        yield DeployError(
            f"connection '{connection.name}'",
            expected="TLS, since the SuperLink is another machine",
            got="insecure = true",
            do="set up certificates with `fedapps deploy init`",
        )
    http_connection = _http(host, port, insecure=connection.insecure)
    try:
        try:
            http_connection.connect()
        except (OSError, ValueError) as error:
            yield _unreachable(connection.address, error)
            return
        if isinstance(http_connection.sock, ssl.SSLSocket):
            peer = x509.load_der_x509_certificate(http_connection.sock.getpeercert(binary_form=True) or b"")
            faults = [*check_server_certificate(peer, host, authority, connection.address)]
            yield from faults
            if not any(isinstance(fault, DeployError) for fault in faults):
                yield from _shake_hands(host, port, connection)
        else:
            yield f"{connection.address}: reached, without TLS"
        yield from _clock(http_connection, connection.address)
    finally:
        http_connection.close()


def check_server_certificate(
    certificate: x509.Certificate, host: str, authority: x509.Certificate | None, where: str
) -> Iterator[Finding]:
    """Check dates, names and signature of a server's certificate.

    Args:
        certificate: The certificate.
        host: The name by which the server is reached.
        authority: Who must have signed it; None where the system's authorities may.
        where: What findings call the place.
    """
    names = names_of(certificate)
    yield from check_dates(certificate, f"certificate of {where}", _RENEW)
    if host not in names:
        yield DeployError(
            f"certificate of {where}",
            expected=f"a certificate for {host}",
            got=f"one for {', '.join(names) or 'no host'}",
            do=f"use one of its names as the address, or `fedapps deploy renew DIR --host {host}` with all others",
        )
    if authority is not None:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            yield DeployError(
                f"certificate of {where}",
                expected="one signed by the authority in ca.crt",
                got="one of another authority",
                do="copy ca.crt from the folder of the federation that this SuperLink belongs to; if it is the right one,"
                " somebody else answers at this address",
            )


def check_dates(certificate: x509.Certificate, where: str, cure: str) -> Iterator[Finding]:
    """Check that a certificate is valid now, and for a while.

    Args:
        certificate: The certificate.
        where: What findings call it.
        cure: What to do once it has ended.
    """
    now, start, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        yield DeployError(
            where,
            expected=f"the time here to be after {start:%Y-%m-%d %H:%M} UTC, from which it is valid",
            got=f"{now:%Y-%m-%d %H:%M} UTC",
            do="set the clock of this machine; if it is right, that of the machine that made the certificate was wrong: "
            + cure,
        )
    elif now > end:
        yield DeployError(
            where, expected="a valid certificate", got=f"one that has expired on {end:%Y-%m-%d %H:%M} UTC", do=cure
        )
    elif now > end - SOON:
        yield DeployError(
            where,
            expected=f"a certificate for the next {SOON.days} days",
            got=f"one that expires on {end:%Y-%m-%d %H:%M} UTC",
            do=cure,
        )
    else:
        yield f"{where}: valid until {end:%Y-%m-%d}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise DeployError("address of the SuperLink", expected="host:port", got=repr(address), do="correct it")
    return host.strip("[]"), int(port)


def _http(host: str, port: int, *, insecure: bool) -> http.client.HTTPConnection:
    if insecure:
        return http.client.HTTPConnection(host, port, timeout=PATIENCE)
    # Nothing is believed of this connection: it is opened to look at the certificate, also at a wrong one.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=context)


def _shake_hands(host: str, port: int, connection: Connection) -> Iterator[Finding]:
    """Verify as Flower does; what was looked at one by one before is right by now."""
    authority = str(connection.root_certificates) if connection.root_certificates else None
    context = ssl.create_default_context(cafile=authority)
    try:
        with (
            socket.create_connection((host, port), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            yield f"{connection.address}: reached, {secure.version()}, the certificate is for it"
    except OSError as error:
        yield DeployError(
            f"certificate of {connection.address}", expected="one that TLS accepts", got=str(error), do=_RENEW
        )


def _unreachable(address: str, error: OSError | ValueError) -> DeployError:
    do = "check the address, that the SuperLink runs, and that no firewall is between"
    got = f"{type(error).__name__}: {error}"
    match error:
        case ssl.SSLError():
            return DeployError(
                address, expected="TLS", got=got, do="start the SuperLink with its certificate, not --insecure"
            )
        case socket.gaierror():
            got, do = "no machine of this name", "correct the name, or have it entered in the DNS or /etc/hosts"
        case ConnectionRefusedError():
            got, do = "nothing that listens there", "start the SuperLink, and check its port"
        case TimeoutError():
            got = f"no answer within {PATIENCE:.0f} s"
    return DeployError(address, expected="a SuperLink", got=got, do=do)


def _clock(connection: http.client.HTTPConnection, where: str) -> Iterator[Finding]:
    """Compare the clocks, by the time that the server writes into its answer, which has whole seconds.

    Flower takes what a SuperNode has signed from `SYSTEM_TIME_TOLERANCE` seconds in the future to `TIMESTAMP_TOLERANCE` in
    the past: so much may its clock be ahead of the SuperLink's, or behind.
    """
    try:
        began = datetime.now(UTC)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        server = parsedate_to_datetime(answer.headers["Date"])
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        yield DeployError(
            where,
            expected="the answer of a SuperLink",
            got=f"{type(error).__name__}: {error}",
            do="check what listens there",
        )
        return
    now = datetime.now(UTC)
    # The server's time was between its whole second and the next one, and ours between the two looks.
    ahead = (began + (now - began) / 2 - server).total_seconds() - 0.5
    word = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    if -TIMESTAMP_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE:
        yield f"clock: {word}, to about a second"
    else:
        yield DeployError(
            "clock of this machine",
            expected=f"at most {SYSTEM_TIME_TOLERANCE} s ahead of the SuperLink's and {TIMESTAMP_TOLERANCE} s behind, else"
            " Flower refuses a node",
            got=word,
            do="set the clocks of both machines by NTP (timedatectl set-ntp true)",
        )


def check_private(path: Path) -> Iterator[Finding]:
    """Check that a secret is its owner's only."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        yield DeployError(
            str(path), expected="a key", got="no such file", do="copy it again from the folder of the federation"
        )
        return
    if mode & 0o077:
        yield DeployError(
            str(path), expected="a key that only its owner can read", got=f"mode {mode:o}", do=f"chmod 600 {path}"
        )
