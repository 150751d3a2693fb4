"""The wire format: a JSON header and one raw buffer of tensors. No code travels."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError

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
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    schema = [[name, NAMES[value.dtype], list(value.shape)] for name, value in plain.items()]
    text = json.dumps({"version": VERSION, "header": header, "tensors": schema}).encode()
    buffers = [bytes(value.view(-1).view(torch.uint8).numpy().data) for value in plain.values()]
    return b"".join([struct.pack("<Q", len(text)), text, *buffers])


def decode(message: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a message; raise `WireError` if it is malformed."""
    try:
        (length,) = struct.unpack_from("<Q", message)
        note = json.loads(message[8 : 8 + length])
        version, header, schema = note["version"], note["header"], note["tensors"]
    except (struct.error, ValueError, KeyError, TypeError) as problem:
        raise WireError(f"message rejected: unreadable header ({problem})") from None
    if version != VERSION:
        raise WireError(f"message rejected: wire version {version}, expected {VERSION}")
    if not isinstance(header, dict):
        raise WireError("message rejected: the header is not a JSON object")
    return header, _tensors(message, 8 + length, schema)


def _tensors(message: bytes, at: int, schema: Any) -> dict[str, Tensor]:
    tensors = {}
    try:
        for name, dtype_name, shape in schema:
            dtype, count = DTYPES[dtype_name], 1
            for length in shape:
                if not isinstance(length, int) or length < 0:
                    raise WireError(f"message rejected: tensor {name!r} has the invalid shape {shape}")
                count *= length
            size = count * dtype.itemsize
            if size > MOST_BYTES or at + size > len(message):
                raise WireError(f"message rejected: tensor {name!r} is truncated")
            buffer = bytearray(message[at : at + size])
            flat = torch.frombuffer(buffer, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(shape)
            at += size
    except (KeyError, ValueError, TypeError) as problem:
        raise WireError(f"message rejected: unreadable list of tensors ({problem})") from None
    if at != len(message):
        raise WireError(f"message rejected: {len(message) - at} trailing bytes")
    return tensors
