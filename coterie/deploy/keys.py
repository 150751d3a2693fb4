"""Identities in a federation: a certificate authority, the server's certificate, a key pair per node.

Private files are readable by their owner only (0600, folders 0700) from the moment they exist.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core.errors import SettingError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

VALID_DAYS = 825  # about two years
CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"


def private_folder(path: Path) -> Path:
    """Create a folder, and those above it, that only its owner can read; return it."""
    if not path.exists():
        private_folder(path.parent)
        path.mkdir(mode=0o700)
    return path


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; raise `SettingError` if it exists."""
    private_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SettingError(
            f"{path} exists already, and a key is never overwritten. Remove it first."
        ) from None
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def require_private(path: Path) -> None:
    """Raise `SettingError` if a secret is missing or readable by other users."""
    if not path.exists():
        raise SettingError(f"{path} does not exist; `coterie federate init` makes it")
    if path.stat().st_mode & 0o077:
        raise SettingError(f"{path} is readable by other users of this machine. Fix it: chmod 600 {path}")


def make_authority(folder: Path, name: str, days: float = VALID_DAYS) -> None:
    """Create a certificate authority: ca.crt, which everybody gets, and ca.key, which nobody gets."""
    key = _new_key()
    write_private(folder / CA_KEY, _private_pem(key))
    subject = _subject(f"{name} certificate authority")
    certificate = _certificate(subject, subject, key, key, days, authority=True)
    (folder / CA_CERTIFICATE).write_bytes(_certificate_pem(certificate))


def make_server_certificate(
    authority: Path, folder: Path, hosts: Sequence[str], days: float = VALID_DAYS
) -> None:
    """Create server.key and server.crt, signed by the authority.

    Parameters
    ----------
    authority
        Folder with ca.crt and ca.key.
    folder
        Where to write.
    hosts
        Host names and addresses of the server.
    days
        How long the certificate is valid.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    issuer = x509.load_pem_x509_certificate((authority / CA_CERTIFICATE).read_bytes())
    signer = load_pem_private_key((authority / CA_KEY).read_bytes(), None)
    key = _new_key()
    certificate = _certificate(_subject(hosts[0]), issuer.subject, key, signer, days, hosts=hosts)
    write_private(folder / "server.key", _private_pem(key))
    (folder / "server.crt").write_bytes(_certificate_pem(certificate))


def make_node_key(folder: Path, name: str) -> None:
    """Create node.key, which stays with the node, and node.pub, by which the server knows it."""
    from cryptography.hazmat.primitives import serialization

    key = _new_key()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_private(folder / "node.key", secret)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public + f" {name}\n".encode())


def load_node_key(path: Path) -> tuple[Any, Any]:
    """Return the private and the public key of a node."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    require_private(path)
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm):
        raise SettingError(f"{path} is not a private key that `coterie federate init` made") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingError(
            f"{path} is not an elliptic-curve key; use the one that `coterie federate init` made"
        )
    return key, key.public_key()


def public_bytes(path: Path) -> bytes:
    """Return a node's public key as PEM, the form that Flower uses."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        raise SettingError(f"{path} is not a public key that `coterie federate init` made") from None
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _certificate(
    subject: Any,
    issuer: Any,
    key: EllipticCurvePrivateKey,
    signer: Any,
    days: float,
    authority: bool = False,
    hosts: Sequence[str] = (),
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    start = min(now, now + datetime.timedelta(days=days)) - datetime.timedelta(hours=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(_usage(authority), critical=True)
    )
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
        )
        server = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(server, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _usage(authority: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate_pem(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)
