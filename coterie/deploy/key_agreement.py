"""Secrets that two nodes share although the server carries their public keys: X25519 and HKDF."""

from __future__ import annotations

from typing import Any

from coterie.deploy.wire import WireError


def derived(secret: bytes, use: bytes) -> bytes:
    """Return 32 bytes made of a secret for one use."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, use).derive(secret)


def private_key(secret: bytes) -> Any:
    """Return the private key that 32 secret bytes are."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public_bytes(key: Any) -> bytes:
    """Return the public half of a private key."""
    return bytes(key.public_key().public_bytes_raw())


def agreed(key: Any, other: str) -> bytes:
    """Return the secret that this private key shares with a public one, given in hex."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return bytes(key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other))))
    except (ValueError, TypeError):
        raise WireError("message rejected: a public key that is none") from None
