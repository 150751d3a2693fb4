"""Identities in a federation: a certificate authority, the server's certificate, a key pair per node.

Private files are readable by their owner only (0600, folders 0700) from the moment they exist.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core import systems
from coterie._core.errors import SettingError
from coterie._core.systems import private_folder as private_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.x509 import Certificate

VALID_DAYS = 825  # about two years
WARN_DAYS = 30
CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
CERTIFICATE = "node.crt"


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; raise `SettingError` if it exists."""
    private_folder(path.parent)
    try:
        descriptor = systems.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
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
    if systems.others_can_read(path):
        raise SettingError(f"{path} is readable by other users of this machine. Fix it: chmod 600 {path}")


def make_authority(folder: Path, name: str, days: float = VALID_DAYS) -> None:
    """Create a certificate authority: ca.crt, which everybody gets, and ca.key, which nobody gets."""
    key = _new_key()
    write_private(folder / CA_KEY, _private_pem(key))
    subject = _subject(f"{name} certificate authority")
    certificate = _certificate(subject, subject, key.public_key(), key, days, authority=True)
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
    certificate = _certificate(
        _subject(hosts[0]), issuer.subject, key.public_key(), signer, days, hosts=hosts
    )
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


def make_request(folder: Path, name: str, new: bool = True) -> Path:
    """Create a node's key, which never leaves the folder, and a request for a certificate; return the request's path.

    Parameters
    ----------
    folder, name
        The node's folder and its name.
    new
        Make a key; False uses the one that is there.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    if new:
        make_node_key(folder, name)
    key, _ = load_node_key(folder / "node.key")
    request = x509.CertificateSigningRequestBuilder().subject_name(_subject(name)).sign(key, hashes.SHA256())
    path = folder / f"{name}.csr"
    path.write_bytes(request.public_bytes(serialization.Encoding.PEM))
    return path


def read_request(path: Path) -> tuple[str, Any]:
    """Return the name and the public key in a request; raise `SettingError` unless its maker has the private key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        (name,) = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = request.public_key()
    except (OSError, ValueError, TypeError) as problem:
        raise SettingError(f"{path} is not a request that `coterie federate join` made ({problem})") from None
    if not request.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
        raise SettingError(f"{path} is not signed by the key that it names")
    return str(name.value), key


def certify(authority: Path, key: Any, name: str, folder: Path, days: float = VALID_DAYS) -> None:
    """Write node.pub and node.crt, signed by the authority, for a node's public key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    issuer = x509.load_pem_x509_certificate((authority / CA_CERTIFICATE).read_bytes())
    require_private(authority / CA_KEY)
    signer = load_pem_private_key((authority / CA_KEY).read_bytes(), None)
    certificate = _certificate(_subject(name), issuer.subject, key, signer, days, client=True)
    private_folder(folder)
    public = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public + f" {name}\n".encode())
    (folder / CERTIFICATE).write_bytes(_certificate_pem(certificate))


def tls_context(authority: Path, key: Path) -> ssl.SSLContext:
    """Return how a node connects: it trusts the federation's authority alone, and shows its certificate."""
    from cryptography.hazmat.primitives import serialization

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.read_text(encoding="ascii"))
    certificate = key.with_name(CERTIFICATE)
    if certificate.exists():
        private, _ = load_node_key(key)
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with tempfile.TemporaryDirectory(dir=key.parent) as place:  # the key is gone at once
            write_private(Path(place, "key.pem"), pem)
            context.load_cert_chain(certificate, Path(place, "key.pem"))
    return context


def days_left(certificate: Path) -> float:
    """Return for how many more days a certificate is valid; negative if it has expired."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as problem:
        raise SettingError(f"{certificate} is not a certificate ({problem})") from None
    return (found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def require_valid(certificate: Path, authority: Path) -> None:
    """Raise `SettingError` if a node's certificate has expired or is of another authority than that of the federation.

    The server refuses such a certificate, too, but closes the connection without saying why.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    if not certificate.exists():  # the server says so where it needs one
        return
    remedy = f"Renew it: coterie federate join {certificate.parent} --renew"
    if days_left(certificate) < 0:
        raise SettingError(f"{certificate} has expired. {remedy}")
    try:
        issuer = x509.load_pem_x509_certificate(authority.read_bytes())
        x509.load_pem_x509_certificate(certificate.read_bytes()).verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        raise SettingError(
            f"{certificate} was not issued by the authority of {authority}: they are of two federations. {remedy}"
        ) from None


def expiry_warning(certificate: Path, remedy: str) -> str | None:
    """Return a warning if a certificate expires within a month, or None."""
    days = days_left(certificate)
    if days > WARN_DAYS:
        return None
    when = "has expired" if days < 0 else f"expires in {days:.0f} days"
    return f"{certificate} {when}. {remedy}"


def fingerprint(certificate: Path) -> str:
    """Return the SHA-256 of a certificate, to be compared over the telephone or by the gate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    return found.fingerprint(hashes.SHA256()).hex()


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


def same_key(path: Path, key: Any) -> bool:
    """Return True if a node.pub file holds this public key."""
    from cryptography.hazmat.primitives import serialization

    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return path.exists() and public_bytes(path) == pem


def hosts_of(certificate: Path) -> list[str]:
    """Return the host names and addresses in a server's certificate."""
    from cryptography import x509

    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


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
    key: EllipticCurvePublicKey,
    signer: Any,
    days: float,
    authority: bool = False,
    hosts: Sequence[str] = (),
    client: bool = False,
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    start = min(now, now + datetime.timedelta(days=days)) - datetime.timedelta(hours=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
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
    if client:
        node = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(node, critical=False)
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
