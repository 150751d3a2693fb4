"""Secure aggregation: nodes add masks to their answers that cancel in the sum, and nowhere else.

The protocol is SecAgg+ (Bonawitz et al., CCS 2017; Bell et al., CCS 2020). Every node agrees on a secret with each of
its neighbours in a sparse graph; of two neighbours one adds and the other subtracts a stream made of it. A further
stream of its own protects a node whose answer comes late. Seeds are shared among the neighbours (Shamir), so that a
sum survives nodes that vanish. Primitives are those of `cryptography` (X25519, HKDF, ChaCha20, AES-GCM) and of
`pycryptodome` (Shamir); numbers are added modulo 2^64.

Flower's own SecAgg+ is tied to its strategies and their messages, which Coterie does not use.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.deploy.key_agreement import agreed, derived, private_key, public_bytes
from coterie.deploy.wire import WireError

LEAST = 3  # nodes whose answers may be summed; with two, each would know the other's
MAGNITUDE = 20  # values are below 2^20 in size
SEED = 16  # bytes of a seed, which is what one Shamir share holds
BLOCK = 1 << 15  # numbers of a stream made at once
ZEROS = bytes(8 * BLOCK)

Whole = np.ndarray[Any, np.dtype[np.uint64]]
MOST_TRIES = 5000  # choices of shares that are tried to find those that fit together
Roster = Mapping[
    str, Mapping[str, Any]
]  # by node: "channel" and "masks", public keys; "selves", hashes; in hex


def degree(nodes: int) -> int:
    """Return how many neighbours a node has: all others in small federations, else twice log2 of their number.

    Examples
    --------
    >>> from coterie.deploy.secure_aggregation import degree
    >>> degree(4), degree(20), degree(200)
    (3, 10, 16)
    """
    return min(nodes - 1, 2 * max(4, math.ceil(math.log2(nodes))))


def threshold(holders: int) -> int:
    """Return how many of the holders of shares are needed: more than two thirds, but never all of them.

    Being more than half, it keeps a server from learning both seeds of a node by telling its holders different things.

    Examples
    --------
    >>> from coterie.deploy.secure_aggregation import threshold
    >>> threshold(3), threshold(4), threshold(11)
    (2, 3, 8)
    """
    return min(holders - 1, 2 * holders // 3 + 1)


def enough(nodes: int) -> int:
    """Return how many nodes must be left in a sum: two thirds of those that prepared for it, and at least three.

    Examples
    --------
    >>> from coterie.deploy.secure_aggregation import enough
    >>> enough(3), enough(4), enough(20)
    (3, 3, 14)
    """
    return max(LEAST, math.ceil(2 * nodes / 3))


def digest(*parts: Any) -> bytes:
    """Return a hash of JSON values, the same on server and nodes."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).digest()


def neighbours(roster: Roster) -> dict[str, list[str]]:
    """Return the neighbours of every node: the nearest on a circle whose order the nodes' keys decide."""
    salt = digest(roster).hex()
    circle = sorted(roster, key=lambda name: digest(salt, name))
    n, half = len(circle), degree(len(circle))
    found = {}
    for k, name in enumerate(circle):
        ahead = [circle[(k + step) % n] for step in range(1, half // 2 + 1)]
        behind = [circle[(k - step) % n] for step in range(1, half // 2 + 1)]
        across = [circle[(k + n // 2) % n]] if half % 2 and n % 2 == 0 else []
        found[name] = sorted({*ahead, *behind, *across} - {name})
    return found


def fraction_bits(weight: float) -> int:
    """Return how many bits after the point a sum with this total weight has.

    Sums of values below 2^20 then stay below 2^62. A mean over k nodes is off by at most k 2^-(bits + 1) / weight.

    Examples
    --------
    >>> from coterie.deploy.secure_aggregation import fraction_bits
    >>> fraction_bits(1000)
    32
    """
    bits = 62 - MAGNITUDE - max(0, math.ceil(math.log2(max(1.0, weight))))
    if bits < 8:
        raise WireError(f"a total weight of {weight:g} leaves no room for a secure sum")
    return bits


def encode(values: Tensor, bits: int, weight: float) -> Tensor:
    """Return numbers as whole multiples of 2^-bits, int64; `weight` is that of the answers in them."""
    low, high = torch.aminmax(values) if len(values) else (torch.zeros(()), torch.zeros(()))
    if not max(-float(low), float(high)) <= 2**MAGNITUDE * max(1.0, weight):  # NaN is not either
        raise WireError(f"an answer is not below 2^{MAGNITUDE} in size, so it cannot be added securely")
    return (values * 2.0**bits).round_().to(torch.int64)


def decode(total: Tensor, bits: int) -> Tensor:
    """Return the numbers of a sum that `encode` made whole, float64."""
    return total.double() * 2.0**-bits


def stream(seed: bytes, context: bytes, length: int) -> Whole:
    """Return `length` pseudorandom 64-bit numbers: ChaCha20 under a key made of a seed and its use."""
    total = np.zeros(length, dtype=np.uint64)
    _add_stream(total, seed, context, np.add)
    return total


def _add_stream(total: Whole, seed: bytes, context: bytes, change: np.ufunc) -> None:
    """Add a stream to whole numbers, or subtract it, in blocks that stay in the processor's cache."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key = _derived(seed, b"mask" + context)
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    block = np.empty(min(BLOCK, len(total)), dtype="<u8")
    for first in range(0, len(total), BLOCK):
        part = total[first : first + BLOCK]
        numbers = block[: len(part)]
        cipher.update_into(memoryview(ZEROS)[: numbers.nbytes], numbers.view(np.uint8).data)
        change(part, numbers, out=part)


class Party:
    """A node's secrets for some sums.

    Every slot is for one sum. A slot masks one answer, and then reveals one kind of share of every neighbour.

    Parameters
    ----------
    name
        Name of the node.
    slots
        Number of sums.
    """

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, slots
        self._channel = secrets.token_bytes(32)
        self._masks = [secrets.token_bytes(SEED) for _ in range(slots)]
        self._selves = [secrets.token_bytes(SEED) for _ in range(slots)]
        self._roster: dict[str, Any] = {}
        self._epoch = b""
        self._near: list[str] = []
        self._held: dict[str, list[tuple[int, bytes, bytes]]] = {}
        self._masked: set[int] = set()
        self._revealed: set[int] = set()

    @property
    def nodes(self) -> int:
        """Number of nodes that prepared for these sums."""
        return len(self._roster)

    def public(self) -> dict[str, Any]:
        """Return the public keys of this node: one for messages between nodes, one for the masks of each slot.

        Hashes of its own seeds are with them, so that a wrong share of one is noticed.
        """
        return {
            "channel": public_bytes(private_key(self._channel)).hex(),
            "masks": [public_bytes(_mask_key(seed)).hex() for seed in self._masks],
            "selves": [_self_commitment(seed) for seed in self._selves],
        }

    def shares(self, roster: Roster) -> dict[str, str]:
        """Take the keys of all nodes; return encrypted shares of this node's seeds, by the node they are for."""
        from Crypto.Protocol.SecretSharing import Shamir

        if self._roster:
            raise WireError("message rejected: these keys have their nodes already")
        if len(roster) < LEAST or roster.get(self.name) != self.public():
            raise WireError(f"message rejected: a secure sum needs {LEAST} nodes and this node's own keys")
        if any(len(keys[part]) != self.slots for keys in roster.values() for part in ("masks", "selves")):
            raise WireError("message rejected: nodes disagree on the number of sums")
        self._roster, self._epoch = {name: dict(keys) for name, keys in roster.items()}, digest(roster)
        self._near = neighbours(roster)[self.name]
        holders = sorted([self.name, *self._near])
        least = threshold(len(holders))
        pieces: dict[str, list[bytes]] = {holder: [] for holder in holders}
        for mask, own in zip(self._masks, self._selves, strict=True):
            for holder, one, other in zip(
                holders,
                Shamir.split(least, len(holders), mask, False),
                Shamir.split(least, len(holders), own, False),
                strict=True,
            ):
                pieces[holder].append(one[1] + other[1])
        self._held[self.name] = _unpacked(b"".join(pieces.pop(self.name)), holders.index(self.name) + 1)
        return {holder: self._sealed(holder, b"".join(parts)).hex() for holder, parts in pieces.items()}

    def receive(self, sealed: Mapping[str, str]) -> None:
        """Take the encrypted shares of the neighbours."""
        graph = neighbours(self._roster)
        for owner, text in sealed.items():
            if owner not in self._near or owner in self._held:
                raise WireError("message rejected: shares of a node that is no neighbour, or twice")
            place = sorted([owner, *graph[owner]]).index(self.name) + 1
            self._held[owner] = _unpacked(self._opened(owner, bytes.fromhex(text)), place)

    def masked(self, slot: int, values: Tensor, context: bytes) -> Tensor:
        """Return whole numbers [m] with all masks of a slot added, which can be done once.

        Only nodes that were told the same `context` have masks that cancel.
        """
        if not self._roster or not 0 <= slot < self.slots or slot in self._masked:
            raise WireError("message rejected: the keys for this sum were used, or never agreed")
        self._masked.add(slot)
        total = values.numpy().astype(np.int64).view(np.uint64).copy()
        use = self._epoch + slot.to_bytes(4, "big") + context
        _add_stream(total, self._selves[slot], use, np.add)
        secret = _mask_key(self._masks[slot])
        for other in self._near:
            pair = agreed(secret, self._roster[other]["masks"][slot])
            _add_stream(total, pair, use, np.add if self.name < other else np.subtract)
        return torch.from_numpy(total.view(np.int64))

    def reveal(self, slot: int, survivors: Sequence[str]) -> dict[str, list[Any]]:
        """Return one share of every neighbour: of its own mask if it survived, of its pairwise masks if not.

        This can be done once for a slot, so that nobody learns both.
        """
        alive = set(survivors)
        if slot not in self._masked or slot in self._revealed:
            raise WireError("message rejected: this sum was unmasked already, or never masked")
        least = enough(len(self._roster))
        if len(alive) < least or not alive <= set(self._roster) or self.name not in alive:
            raise WireError(f"message rejected: fewer than {least} nodes are in the sum")
        self._revealed.add(slot)
        found: dict[str, list[Any]] = {}
        for owner, shares in self._held.items():
            index, mask, own = shares[slot]
            found[owner] = [index, (own if owner in alive else mask).hex()]
        return found

    def _sealed(self, other: str, content: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(12)
        return nonce + AESGCM(self._line(other)).encrypt(nonce, content, f"{self.name}>{other}".encode())

    def _opened(self, other: str, content: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            return AESGCM(self._line(other)).decrypt(
                content[:12], content[12:], f"{other}>{self.name}".encode()
            )
        except InvalidTag:
            raise WireError(f"message rejected: shares of {other} were changed on the way") from None

    def _line(self, other: str) -> bytes:
        return _derived(
            agreed(private_key(self._channel), self._roster[other]["channel"]), b"line" + self._epoch
        )


def unmask(
    roster: Roster,
    slot: int,
    masked: Mapping[str, Tensor],
    revealed: Mapping[str, Mapping[str, Sequence[Any]]],
    context: bytes,
) -> Tensor:
    """Return the sum of what the nodes in `masked` added, on the server.

    Parameters
    ----------
    roster
        Public keys of all nodes that prepared for this sum.
    slot
        Number of the sum.
    masked
        What arrived, [m] each.
    revealed
        What `Party.reveal` returned, by node.
    context
        As in `Party.masked`.

    Raises
    ------
    WireError
        Too few nodes answered to remove the masks.
    """
    graph = neighbours(roster)
    total = np.zeros(len(next(iter(masked.values()))), dtype=np.uint64)
    for values in masked.values():
        np.add(total, values.numpy().view(np.uint64), out=total)
    use = digest(roster) + slot.to_bytes(4, "big") + context
    for name in roster:
        near = [other for other in graph[name] if other in masked]
        if name not in masked and not near:
            continue
        if name in masked:
            commitment = roster[name]["selves"][slot]
            seed = _combined(name, graph[name], revealed, commitment, _self_commitment)
            _add_stream(total, seed, use, np.subtract)
            continue
        seed = _combined(name, graph[name], revealed, roster[name]["masks"][slot], _mask_commitment)
        secret = _mask_key(seed)
        for other in near:
            pair = agreed(secret, roster[other]["masks"][slot])
            _add_stream(total, pair, use, np.subtract if other < name else np.add)
    return torch.from_numpy(total.view(np.int64))


def _combined(
    name: str,
    near: Sequence[str],
    revealed: Mapping[str, Mapping[str, Sequence[Any]]],
    commitment: str,
    committed: Callable[[bytes], str],
) -> bytes:
    """Return the seed of a node that it committed itself to, whatever wrong shares some of its holders reveal."""
    from Crypto.Protocol.SecretSharing import Shamir

    least = threshold(len(near) + 1)
    shares = [
        (int(told[name][0]), bytes.fromhex(told[name][1])) for told in revealed.values() if name in told
    ]
    if len(shares) < least:
        raise WireError(f"{len(shares)} nodes hold shares of {name}, and {least} are needed")
    for some in itertools.islice(itertools.combinations(shares, least), MOST_TRIES):
        with contextlib.suppress(ValueError):
            seed = bytes(Shamir.combine(list(some), False))
            if committed(seed) == commitment:
                return seed
    raise WireError(f"the shares of {name} do not fit together")


def _self_commitment(seed: bytes) -> str:
    return digest(seed.hex()).hex()


def _mask_commitment(seed: bytes) -> str:
    return public_bytes(_mask_key(seed)).hex()


def _unpacked(content: bytes, index: int) -> list[tuple[int, bytes, bytes]]:
    pairs = [content[k : k + 2 * SEED] for k in range(0, len(content), 2 * SEED)]
    return [(index, pair[:SEED], pair[SEED:]) for pair in pairs]


def _derived(secret: bytes, use: bytes) -> bytes:
    return derived(secret, b"coterie secure aggregation " + use)


def _mask_key(seed: bytes) -> Any:
    return private_key(_derived(seed, b"key"))
