"""Who took part in a run: rows, clusters and targets of every client, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core import files
from coterie.engine.federation import Federation

ROSTER = "clients.json"


@dataclass(frozen=True)
class RunRoster:
    """The clients of a run.

    Attributes
    ----------
    names : list of str
        Names of the clients.
    rows : dict of str to list of int
        Numbers of rows by split.
    clusters, cluster_names
        Known clusters, where there are any.
    targets : dict or None
        Targets of the training rows: {"classes": names, "shares": [n][C]} or {"mean": [n], "sd": [n]}; None where the
        rows are not visible to the server.
    """

    names: list[str]
    rows: dict[str, list[int]]
    clusters: list[int] | None = None
    cluster_names: list[str] | None = None
    targets: dict[str, Any] | None = None

    @classmethod
    def of(cls, fed: Federation) -> RunRoster:
        """Return the roster of a federation."""
        return cls(
            fed.names,
            {split: size.tolist() for split, size in fed.rows.items()},
            None if fed.clusters is None else fed.clusters.tolist(),
            fed.cluster_names,
            _targets(fed),
        )

    def save(self, folder: Path) -> None:
        """Write the roster into a run folder."""
        files.write_json(folder / ROSTER, vars(self))

    @classmethod
    def load(cls, folder: Path) -> RunRoster | None:
        """Return the roster of a run folder, or None for a run of a version that wrote none."""
        return cls(**files.read_json(folder / ROSTER)) if (folder / ROSTER).exists() else None


def _targets(fed: Federation) -> dict[str, Any] | None:
    if not fed.runtime.capabilities.rows_visible:
        return None
    rows = fed.runtime.rows("train")
    owner = torch.repeat_interleave(torch.arange(fed.n, device=rows.size.device), rows.size)
    if fed.model.task == "regression":
        return _moments(fed, rows.y.double(), owner, rows.size)
    if fed.model.task == "survival":
        happened = torch.zeros(fed.n, dtype=torch.float64, device=owner.device).index_add_(
            0, owner, (rows.y > 0).double()
        )
        share = (happened / rows.size.clamp(min=1)).tolist()
        return {"classes": ["censored", "event"], "shares": [[round(1 - s, 4), round(s, 4)] for s in share]}
    count = int(rows.y.max()) + 1
    names = [str(k) for k in range(max(2, count))]
    if fed.table is not None:
        names = list(fed.table.preprocessor.spec.classes)
    cell = owner * len(names) + rows.y.long()
    counts = torch.bincount(cell, minlength=fed.n * len(names)).view(fed.n, -1).double()
    for k, client in enumerate(fed.names):
        if fed.table is not None and fed.table.preprocessor.reverses(client):
            counts[k] = counts[k].flip(0)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return {"classes": names, "shares": [[round(v, 4) for v in row] for row in shares.tolist()]}


def _moments(fed: Federation, y: Tensor, owner: Tensor, size: Tensor) -> dict[str, Any]:
    if fed.table is not None:
        y = fed.table.preprocessor.decode(y)
    count = size.double().clamp(min=1)
    mean = torch.zeros(fed.n, dtype=y.dtype, device=y.device).index_add_(0, owner, y) / count
    spread = torch.zeros_like(mean).index_add_(0, owner, (y - mean[owner]).square()) / count
    return {"mean": mean.tolist(), "sd": spread.sqrt().tolist()}
