"""Read texts into the parts of a federation: every client's documents as rows of tokens for a language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coterie._core.devices import find_device
from coterie._core.errors import SettingError
from coterie.data.rows import Rows
from coterie.data.texts import read_texts
from coterie.data.tokens import rows_of, tokenised
from coterie.engine.build import Parts, encode_clusters
from coterie.engine.local_runtime import LocalRuntime
from coterie.models.base import Model
from coterie.models.causal_lm import CausalLM

SPLIT = (0.8, 0.1, 0.1)


def from_texts(
    source: Any,
    model: Model,
    client: str | None = None,
    text: str | None = None,
    *,
    context: int = 512,
    tokens: int | None = None,
    split: tuple[float, float, float] = SPLIT,
    seed: int = 0,
    clusters: Sequence[Any] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    loop: bool = False,
    cache: str | Path | None = None,
) -> Parts:
    """Split the documents of every client into train, validation and test, and pack them into rows of tokens.

    Parameters
    ----------
    source
        A folder, a table or a dict of texts, as for `coterie.data.texts.read_texts`.
    model
        A language model, `coterie.models.causal_lm(...)`.
    client
        Name of the client column of a table.
    text
        Name of the text column of a table.
    context
        Tokens that are predicted per row.
    tokens
        Use only this many tokens of each client.
    split
        Shares of the documents for train, validation and test.
    seed
        Seed of every draw.
    clusters
        Known cluster of each client.
    dtype
        Type of the parameters, by default float32.
    device
        Where to compute, by default the CPU.
    loop
        Compute clients one by one instead of stacked.
    cache
        Folder of the cache of tokens.

    Returns
    -------
    Parts
        Arguments of `Federation`.
    """
    if not isinstance(model, CausalLM):
        raise SettingError("texts need a language model: model=coterie.models.causal_lm(...)")
    texts = read_texts(source, client, text)
    found = tokenised(texts, model.tokenizer, cache)
    splits = rows_of(found, model.separator, context, split, seed, tokens)
    train = splits["train"]
    fitted = model.fit_to(train.x, train.y)
    place = find_device(device)
    dtype = dtype or torch.float32
    splits = {name: _as(rows, dtype).to(place) for name, rows in splits.items()}
    where: dict[str, Any] | None = None
    if isinstance(source, str | Path) and clusters is None:
        columns = {
            name: column for name, column in (("client", client), ("text", text)) if column is not None
        }
        where = {"source": str(Path(source).resolve()), "context": context, "split": list(split), **columns}
        where |= {"device": place.type} | ({} if tokens is None else {"tokens": tokens})
    codes, cluster_names = encode_clusters(clusters)
    codes = None if codes is None else codes.to(place)
    return Parts(
        runtime=LocalRuntime(splits, fitted, seed, dtype, codes, None, loop),
        model=fitted,
        names=texts.names,
        rows={name: rows.size for name, rows in splits.items()},
        clusters=codes,
        cluster_names=cluster_names,
        seed=seed,
        dtype=dtype,
        device=place,
        texts=where,
    )


def _as(rows: Rows, dtype: torch.dtype) -> Rows:
    return Rows(rows.x, rows.y.to(dtype), rows.start, rows.size)
