"""The wire format: a JSON header and one raw buffer of tensors. No code travels.

A message with large tensors is in parts, each large tensor a part of its own, so that models are copied seldom and a
broadcast is encoded once. The parts one after the other are the bytes of the message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError
from coterie._core.printable import printable

VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_BYTES = 1 << 34
MOST_HEADER_BYTES = 1 << 26
MOST_DEPTH, MOST_ITEMS = 16, 1 << 21  # of a header
MOST_TENSORS, MOST_AXES = 1024, 8
LARGE = 1 << 20  # bytes from which a tensor is a part of its own

Content = bytes | tuple[bytes, ...]  # a message, whole or in parts


class WireError(CoterieError):
    """A message that no node or server of this version sends."""


def encode(header: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """Return header and tensors as bytes.

    Parameters
    ----------
    header : dict
        JSON values.
    tensors : dict of str to Tensor
        Tensors of the types in `DTYPES`.

    Examples
    --------
    >>> import torch
    >>> header, tensors = decode(encode({"round": 3}, {"x": torch.ones(2)}))
    >>> header["round"], tensors["x"].tolist()
    (3, [1.0, 1.0])
    """
    return b"".join([_head(header, tensors), *map(_buffer, tensors.values())])


def encode_parts(
    header: dict[str, Any], tensors: dict[str, Tensor], encoded: dict[int, bytes] | None = None
) -> Content:
    """Return header and tensors as bytes, in parts if there are large tensors.

    Parameters
    ----------
    header, tensors
        The message.
    encoded
        Large tensors that were encoded before, by their `id`; those of this message are added. Messages that are made
        with the same dictionary share what they have in common.

    Examples
    --------
    >>> import torch
    >>> message = encode_parts({"round": 3}, {"x": torch.ones(1 << 18)})
    >>> len(message), b"".join(message) == encode({"round": 3}, {"x": torch.ones(1 << 18)})
    (2, True)
    """
    encoded = {} if encoded is None else encoded
    parts: list[list[Any]] = [[_head(header, tensors)]]
    for value in tensors.values():
        if value.nbytes < LARGE:
            parts[-1].append(_buffer(value))
            continue
        if id(value) not in encoded:
            encoded[id(value)] = bytes(_buffer(value))
        parts += [[encoded[id(value)]], []]
    joined = [part[0] if len(part) == 1 else b"".join(part) for part in parts if part]
    return joined[0] if len(joined) == 1 else tuple(joined)


def size(message: Content) -> int:
    """Return how many bytes a message has."""
    return len(message) if isinstance(message, bytes) else sum(map(len, message))


def _head(header: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    schema = [[name, NAMES[value.dtype], list(value.shape)] for name, value in tensors.items()]
    text = json.dumps({"version": VERSION, "header": header, "tensors": schema}).encode()
    return struct.pack("<Q", len(text)) + text


def _buffer(value: Tensor) -> memoryview:
    plain = value.detach().cpu().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data


def decode(message: Content) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a message; raise `WireError` for anything that is not one.

    The bytes may come from a stranger, so depth, counts and sizes are bounded, and no other error leaves this function.
    """
    parts = iter((message,) if isinstance(message, bytes) else message)
    first = next(parts, b"")
    try:
        (length,) = struct.unpack_from("<Q", first)
        if length > MOST_HEADER_BYTES:
            raise WireError(f"message rejected: a header of {length} bytes")
        note = json.loads(first[8 : 8 + length].decode("utf-8"), parse_constant=_no_constant)
        version, header, schema = note["version"], note["header"], note["tensors"]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError, OverflowError) as problem:
        reason = printable(f"{type(problem).__name__}: {problem}", 100)
        raise WireError(f"message rejected: unreadable header ({reason})") from None
    if version != VERSION:
        raise WireError(f"message rejected: wire version {printable(version, 30)}, expected {VERSION}")
    if not isinstance(header, dict):
        raise WireError("message rejected: the header is not a JSON object")
    _require_small(header)
    return header, _tensors(first, parts, 8 + length, schema)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _require_small(header: dict[str, Any]) -> None:
    """Raise `WireError` if a header is deep, long, or holds text that cannot be written to a file."""
    waiting: list[tuple[Any, int]] = [(header, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MOST_DEPTH or count > MOST_ITEMS:
            raise WireError("message rejected: its header is too deep or too long")
        if isinstance(value, dict):
            waiting += [(part, depth + 1) for item in value.items() for part in item]
        elif isinstance(value, list):
            waiting += [(part, depth + 1) for part in value]
        elif isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise WireError("message rejected: text that is not Unicode") from None
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            raise WireError("message rejected: a number of more than 64 bits")


def _tensors(part: bytes, parts: Iterator[bytes], at: int, schema: Any) -> dict[str, Tensor]:
    """Return the tensors that begin `at` a place of the first part and go on in the others; none lies across two."""
    tensors: dict[str, Tensor] = {}
    try:
        if len(schema) > MOST_TENSORS:
            raise WireError(f"message rejected: {len(schema)} tensors")
        for name, dtype_name, shape in schema:
            if not isinstance(name, str) or len(name) > 200 or name in tensors or len(shape) > MOST_AXES:
                raise WireError("message rejected: malformed list of tensors")
            dtype, count = DTYPES[dtype_name], 1
            for length in shape:
                if not isinstance(length, int) or not 0 <= length <= MOST_BYTES:
                    raise WireError("message rejected: a tensor of an invalid shape")
                count *= length
            size = count * dtype.itemsize
            if size and at == len(part):
                part, at = next(parts, b""), 0
            if size > MOST_BYTES or at + size > len(part):
                raise WireError(f"message rejected: tensor {printable(repr(name), 80)} is truncated")
            buffer = bytearray(memoryview(part)[at : at + size])
            flat = torch.frombuffer(buffer, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
            at += size
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as problem:
        reason = printable(f"{type(problem).__name__}: {problem}", 100)
        raise WireError(f"message rejected: unreadable list of tensors ({reason})") from None
    left, rest = len(part) - at, sum(map(len, parts))
    if left or rest:
        raise WireError(f"message rejected: {left + rest} trailing bytes")
    return tensors
