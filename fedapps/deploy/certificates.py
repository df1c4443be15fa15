"""Certificates for TLS, and the key pairs by which a SuperLink knows its SuperNodes.

A federation is its own certificate authority: its certificate goes to every machine, its key to none. Certificates follow
RFC 5280 with every extension that Python's strict verification (the default from 3.13 on) asks for; keys are ECDSA: P-384
for nodes, in the OpenSSH format that Flower reads, and P-256 for TLS.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names that every server certificate has besides: the SuperLink's own ServerApps reach it by them."""

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
"""Days that certificates are valid: 825 is the most that some TLS libraries take of a server's."""

CLOCK_SLACK = timedelta(hours=1)
"""Certificates are valid from so long ago: the clocks of machines differ."""


@dataclass(frozen=True)
class Authority:
    """A certificate authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_authority(name: str) -> Authority:
    """Make a certificate authority that signs servers' certificates only.

    Args:
        name: What its certificate calls it.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, subject, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def sign_server(
    authority: Authority,
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    *,
    start: datetime | None = None,
    days: int = SERVER_DAYS,
) -> x509.Certificate:
    """Sign a certificate for a SuperLink.

    Args:
        authority: Who signs.
        key: The server's key.
        hosts: DNS names and IP addresses by which it is reached, those of `LOOPBACK_NAMES` besides.
        start: From when it is valid; default an hour ago.
        days: For how long.

    Returns:
        The certificate; the first host is its common name, all are subject alternative names of the right kind.
    """
    names = list(dict.fromkeys([*hosts, *LOOPBACK_NAMES]))
    own_name = hosts[0][:64]  # The bound of a common name; nobody verifies by it.
    builder = (
        _builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, own_name)]),
            authority.certificate.subject,
            key.public_key(),
            days,
            start,
        )
        .add_extension(x509.SubjectAlternativeName([general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    return builder.sign(authority.key, hashes.SHA256())


def general_name(host: str) -> x509.GeneralName:
    """Give the kind of name that a verifier looks for: an address for what is one, a DNS name for all else."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def names_of(certificate: x509.Certificate) -> list[str]:
    """List the hosts that a server certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def new_server_key() -> ec.EllipticCurvePrivateKey:
    """Make a server's key."""
    return ec.generate_private_key(ec.SECP256R1())


def new_node_key() -> tuple[bytes, bytes]:
    """Make a SuperNode's key pair: the private and the public one, both in the OpenSSH format."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def pem_of(what: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    """Write a certificate or a key of TLS as PEM."""
    if isinstance(what, x509.Certificate):
        return what.public_bytes(Encoding.PEM)
    return what.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, start: datetime | None = None
) -> x509.CertificateBuilder:
    start = start or datetime.now(UTC) - CLOCK_SLACK
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
