"""From a table with a client column to a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from coterie import models
from coterie.data import bundled, tables
from coterie.data.preprocess import Preprocessor, local_statistics
from coterie.data.split import split_rows
from coterie.models.base import Model

if TYPE_CHECKING:
    from coterie.federation.federation import Federation

SPLIT = (0.6, 0.2, 0.2)


@dataclass(frozen=True)
class Table:
    """Where a federation's rows came from and how they were encoded."""

    options: dict[str, Any]
    preprocessor: Preprocessor
    warnings: list[str] = field(default_factory=list)

    @property
    def target_scale(self) -> float:
        """Units of the target per unit of the model's output (1 for classes)."""
        return self.preprocessor.target_scale


def load_table(
    source: Any,
    client: str,
    target: str,
    cluster: str | None = None,
    model: Model | None = None,
    task: str | None = None,
    drop: Sequence[str] = (),
    split: Sequence[float] = SPLIT,
    seed: int = 0,
    device: str | None = None,
    loop: bool = False,
    dropout: float = 0.0,
    l2: float | None = None,
) -> Federation:
    """A federation with one client per value of the client column.

    Each client's rows are split by the hash into train, validation and test; encoding and standardisation
    are fitted on training rows. Without a `model` it is linear, logistic or softmax regression, by the kind of
    target: with an intercept, or with `l2` ridge on all its weights and none, which is strongly convex.
    """
    from coterie.federation.build import encode_clusters, from_rows

    source = bundled.resolve(source)
    frame = tables.read(source)
    name = str(source) if isinstance(source, str | Path) else "the table"
    spec = tables.check(frame, client, target, cluster=cluster, drop=drop, task=task, source=name)
    frame, names, counts = tables.by_client(frame, client)
    sizes = torch.tensor(counts)
    fractions = (float(split[0]), float(split[1]), float(split[2]))
    training = split_rows(sizes, fractions, seed).train.order
    preprocessor = Preprocessor.from_statistics(spec, local_statistics(frame[training.numpy()], spec))
    clusters, cluster_names = None, None
    if cluster is not None:
        first_rows = (sizes.cumsum(0) - sizes).numpy()
        clusters, cluster_names = encode_clusters(frame[cluster][first_rows].to_list())
    options = {
        "source": bundled.recorded(source) if isinstance(source, str | Path) else "",
        "client": client,
        "target": target,
        "cluster": cluster,
        "task": task,
        "drop": list(drop),
        "split": list(fractions),
    }
    return from_rows(
        preprocessor.encode(frame),
        preprocessor.encode_target(frame),
        sizes,
        model=default_model(spec.task, l2) if model is None else model,
        names=names,
        clusters=clusters,
        cluster_names=cluster_names,
        split=fractions,
        seed=seed,
        dtype=torch.float64,
        device=device,
        loop=loop,
        dropout=dropout,
        table=Table(options, preprocessor, spec.warnings),
    )


def default_model(task: str, l2: float | None = None) -> Model:
    """The model for a table: linear in the features, with an intercept and a touch of ridge unless told."""
    make = {"regression": models.linear, "binary": models.logistic, "multiclass": models.softmax}[task]
    return make(l2=1e-3, intercept=True) if l2 is None else make(l2=l2)
