"""From texts to rows of tokens: tokenised once and cached, split by document, packed to the context length."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import systems
from coterie._core.errors import DataError, SettingError
from coterie.data.rows import Rows
from coterie.data.split import split_rows
from coterie.data.texts import Texts

CACHE = "COTERIE_CACHE"


@dataclass(frozen=True)
class Tokens:
    """Token ids of all documents, one document after the other.

    Parameters
    ----------
    names
        Names of the clients.
    ids
        Token ids of all documents, int32.
    lengths
        Length of each document, one tensor per client.
    """

    names: list[str]
    ids: Tensor
    lengths: list[Tensor]

    def counts(self) -> Tensor:
        """Return the number of tokens of each client."""
        return torch.stack([length.sum() for length in self.lengths])


def tokenised(texts: Texts, tokenizer: Any, cache: str | Path | None = None) -> Tokens:
    """Tokenise texts, or load the result if the same texts met the same tokenizer before.

    Parameters
    ----------
    texts
        Documents by client.
    tokenizer
        A Hugging Face tokenizer.
    cache
        Folder of the cache, by default $COTERIE_CACHE or ~/.cache/coterie. Its files are safetensors, named by a
        hash of the texts and the tokenizer.

    Returns
    -------
    Tokens
        Token ids by client.
    """
    folder = Path(cache or os.environ.get(CACHE) or Path.home() / ".cache" / "coterie") / "tokens"
    path = folder / f"{_key(texts, tokenizer)}.safetensors"
    flat = [document for documents in texts.documents for document in documents]
    found = _load(path, len(flat))
    if found is None:
        lists = tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = torch.tensor([len(one) for one in lists])
        ids = torch.from_numpy(np.fromiter((token for one in lists for token in one), np.int32))
        found = ids, lengths
        _save(path, *found)
    ids, lengths = found
    return Tokens(texts.names, ids, list(lengths.split([len(one) for one in texts.documents])))


def rows_of(
    tokens: Tokens,
    separator: int,
    context: int,
    split: tuple[float, float, float],
    seed: int = 0,
    most: int | None = None,
    ids: Tensor | None = None,
) -> dict[str, Rows]:
    """Pack tokens into rows of context + 1 for training, validation and test, each document in one of them.

    The documents of a client in a split follow each other, each ended by `separator`, and are cut into rows that
    share a token with the next, so that every token but the first is predicted once. The target of a row is how
    many of its tokens are predicted.

    Parameters
    ----------
    tokens
        Token ids by client.
    separator
        Token that ends a document.
    context
        Tokens that are predicted per row.
    split
        Shares of the documents for train, validation and test.
    seed
        Seed of the split.
    most
        Use only this many tokens of each client, from its first documents.
    ids
        Index of each client in the federation, if these are not all of its clients.

    Returns
    -------
    dict of Rows
        Rows under "train", "validation" and "test".

    Raises
    ------
    DataError
        If the training documents of a client hold no token.
    """
    if context < 1:
        raise SettingError(f"context={context}; it must be at least 1")
    stream, lengths = _cut(tokens, most)
    parts = split_rows(torch.tensor([len(one) for one in lengths]), split, seed, ids)
    pieces = stream.split(torch.cat(lengths).tolist())
    found = {}
    for name, part in (("train", parts.train), ("validation", parts.validation), ("test", parts.test)):
        packed = [
            _pack([pieces[k] for k in part.rows(client).tolist()], separator, context)
            for client in range(len(lengths))
        ]
        size = torch.tensor([len(x) for x, _ in packed])
        x, y = torch.cat([x for x, _ in packed]), torch.cat([y for _, y in packed])
        found[name] = Rows(x, y, size.cumsum(0) - size, size)
    for client, size in zip(tokens.names, found["train"].size.tolist(), strict=True):
        if size == 0:
            raise DataError(
                f"client {client!r}: its training documents hold no token; give it more or longer texts"
            )
    return found


def _pack(documents: Sequence[Tensor], separator: int, context: int) -> tuple[Tensor, Tensor]:
    """Return rows [rows, context + 1] of the documents one after the other, and how many tokens of each count."""
    end = torch.tensor([separator], dtype=torch.int32)
    stream = torch.cat([part for document in documents for part in (document, end)]) if documents else end
    rows = -(-(len(stream) - 1) // context)
    padded = torch.full((rows * context + 1,), separator, dtype=torch.int32)
    padded[: len(stream)] = stream[: len(padded)]
    x = padded.unfold(0, context + 1, context) if rows else padded.new_zeros(0, context + 1)
    y = (len(stream) - 1 - context * torch.arange(rows)).clamp(max=context)
    return x.contiguous(), y.float()


def _cut(tokens: Tokens, most: int | None) -> tuple[Tensor, list[Tensor]]:
    """Return the first documents of each client, `most` tokens in all; the last one may be cut short."""
    if most is None:
        return tokens.ids, tokens.lengths
    if most < 2:
        raise SettingError(f"tokens={most}; use at least 2 of each client")
    kept, lengths = [], []
    for own, length in zip(tokens.ids.split(tokens.counts().tolist()), tokens.lengths, strict=True):
        before = length.cumsum(0) - length
        shorter = torch.minimum(length, (most - before).clamp(min=0))[before < most]
        lengths.append(shorter)
        kept.append(own[: int(shorter.sum())])
    return torch.cat(kept), lengths


def _key(texts: Texts, tokenizer: Any) -> str:
    """Return a hash of everything that decides the tokens."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(
        (backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode()
    )
    for documents in texts.documents:
        for document in documents:
            raw = document.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def _load(path: Path, documents: int) -> tuple[Tensor, Tensor] | None:
    """Return the cached tokens, or None if they are missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
        ids, lengths = found["ids"], found["lengths"]
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    fits = ids.dtype == torch.int32 and len(lengths) == documents and int(lengths.sum()) == len(ids)
    return (ids, lengths) if fits else None


def _save(path: Path, ids: Tensor, lengths: Tensor) -> None:
    """Cache tokens; a folder that cannot be written to is no error."""
    from safetensors.torch import save_file

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
        save_file({"ids": ids, "lengths": lengths}, partial)
        systems.replace(partial, path)
