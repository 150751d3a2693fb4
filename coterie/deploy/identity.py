"""Who a node is, for the other nodes: what it says is signed with the key of its certificate.

The server carries messages between nodes. Signatures keep it from putting words, or keys, into their mouths.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core.errors import SettingError
from coterie.deploy import keys
from coterie.deploy.wire import WireError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

LONGEST = 10_000  # characters of a certificate


@dataclass(frozen=True)
class Identity:
    """A node's own key and certificate, and the authority by which it knows the others.

    Parameters
    ----------
    key
        The node's private key.
    certificate, authority
        The node's certificate and that of the federation's authority, as PEM.
    members
        SHA-256 of the certificates of other nodes that the owner has compared with theirs, by name; a name that is
        listed needs this certificate, whoever signed another.
    """

    key: Any
    certificate: str
    authority: str
    members: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, members: Mapping[str, str] | None = None) -> Identity | None:
        """Return the identity in a node's folder; None where it has no certificate."""
        if not (folder / keys.CERTIFICATE).exists() or not (folder / keys.CA_CERTIFICATE).exists():
            return None
        private, _ = keys.load_node_key(folder / "node.key")
        certificate, authority = (
            (folder / name).read_text(encoding="ascii") for name in (keys.CERTIFICATE, keys.CA_CERTIFICATE)
        )
        return cls(private, certificate, authority, dict(members or {}))

    @property
    def name(self) -> str:
        """Name in the node's certificate."""
        return _name(_certificate(self.certificate))

    def sign(self, content: bytes) -> dict[str, str]:
        """Return a signature of some content, with the certificate to check it by."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        signature = self.key.sign(content, ec.ECDSA(hashes.SHA256()))
        return {"certificate": self.certificate, "signature": signature.hex()}

    def require(self, name: str, content: bytes, signed: Any) -> None:
        """Raise `WireError` unless the node `name` of this federation signed the content.

        Parameters
        ----------
        name
            Name of the other node.
        content
            What it is said to have signed.
        signed
            What its `sign` returned, as it was relayed.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        def refused(why: str) -> WireError:
            return WireError(f"message rejected: what {name} is said to have sent {why}")

        if not isinstance(signed, Mapping) or not all(
            isinstance(signed.get(part), str) and len(signed[part]) <= LONGEST
            for part in ("certificate", "signature")
        ):
            raise refused("is not signed")
        try:
            certificate = _certificate(signed["certificate"])
            certificate.verify_directly_issued_by(_certificate(self.authority))
            public = certificate.public_key()
            if not isinstance(public, ec.EllipticCurvePublicKey):
                raise ValueError("not an elliptic-curve key")
            signature = bytes.fromhex(signed["signature"])
            public.verify(signature, content, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError, TypeError, SettingError):
            raise refused("is not signed by a node of this federation") from None
        if _name(certificate) != name or not _is_node(certificate):
            raise refused("is signed by somebody else")
        now = datetime.datetime.now(datetime.UTC)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise refused("is signed with an expired certificate")
        if name in self.members and certificate.fingerprint(hashes.SHA256()).hex() != self.members[name]:
            raise refused("is signed with another certificate than the owner of this node has compared")


def _certificate(pem: str) -> Certificate:
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem.encode())


def _name(certificate: Certificate) -> str:
    from cryptography.x509.oid import NameOID

    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def _is_node(certificate: Certificate) -> bool:
    """Return True for the certificate of a node, not of the server or of an authority."""
    from cryptography import x509

    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH in usage
