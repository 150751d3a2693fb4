"""Secret noise: Gaussian and uniform numbers that only the holder of a key can repeat.

The seed of a run is known to the server, so the noise that protects clients must not come from it. Numbers are a
function of a secret and of what they are used for: a call that is repeated gets the same noise, another call fresh one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import extras
from coterie._core.errors import CoterieError


def fingerprint(*values: Any) -> str:
    """Return a hash of texts, numbers and tensors, for the use of a random number."""
    made = hashlib.sha256()
    for value in values:
        content = value.detach().cpu().contiguous().numpy().tobytes() if isinstance(value, Tensor) else None
        made.update(repr(value).encode() if content is None else content)
        made.update(b"|")
    return made.hexdigest()


class Noise:
    """Random numbers from a secret key (ChaCha20 under a key that HMAC-SHA256 makes of secret and use).

    Parameters
    ----------
    secret
        At least 16 bytes; a new one by default.

    Examples
    --------
    >>> from coterie.engine.noise import Noise
    >>> noise = Noise(b"sixteen bytes or more")
    >>> noise.normal("round 1", 3).equal(noise.normal("round 1", 3))
    True
    >>> noise.normal("round 1", 3).equal(noise.normal("round 2", 3))
    False
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        if len(self.secret) < 16:
            raise CoterieError("the key of secret noise has fewer than 16 bytes; make a new one")

    def uniform(self, use: str, count: int) -> Tensor:
        """Return numbers in (0, 1), [count]."""
        bits = self._bits(use, count) >> np.uint64(11)
        return torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)

    def normal(self, use: str, shape: int | Sequence[int]) -> Tensor:
        """Return standard normal numbers of a shape."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        drawn: Tensor = torch.special.ndtri(self.uniform(use, int(np.prod(sizes))))
        return drawn.view(sizes)

    def _bits(self, use: str, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        extras.require("privacy", "differential privacy", "cryptography")
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.hmac import HMAC

        mac = HMAC(self.secret, SHA256())
        mac.update(use.encode())
        cipher = Cipher(algorithms.ChaCha20(mac.finalize(), bytes(16)), None).encryptor()
        return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8")
