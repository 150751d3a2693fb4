"""A federation of texts: every client's documents as rows of tokens for a language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coterie.data.rows import Rows
from coterie.data.texts import read_texts
from coterie.data.tokens import rows_of, tokenised
from coterie.errors import SettingError
from coterie.federation.build import encode_clusters
from coterie.federation.federation import Federation
from coterie.models.base import Model
from coterie.runtime.shard import Shard

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
    **more: Any,
) -> Federation:
    """Documents by client, split as wholes into train, validation and test, and packed into rows of tokens."""
    if not hasattr(model, "tokenizer"):
        raise SettingError("texts need a language model: model=coterie.models.causal_lm(...)")
    texts = read_texts(source, client, text)
    found = tokenised(texts, model.tokenizer, cache)
    splits = rows_of(found, model.separator, context, split, seed, tokens)  # type: ignore[attr-defined]
    train = splits["train"]
    model = model.fit_to(train.x, train.y)
    place = torch.device("cpu" if device is None else device)
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
    return Federation(
        Shard(splits, model, seed, dtype, codes, None, loop),
        model=model,
        names=texts.names,
        rows={name: rows.size for name, rows in splits.items()},
        clusters=codes,
        cluster_names=cluster_names,
        seed=seed,
        dtype=dtype,
        device=place,
        texts=where,
        **more,
    )


def _as(rows: Rows, dtype: torch.dtype) -> Rows:
    return Rows(rows.x, rows.y.to(dtype), rows.start, rows.size)
