"""Sums of metrics over the rows of one split, and their values row by row, for a stack of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import broadcast
from coterie.models.metrics.metric import Metric

if TYPE_CHECKING:
    from coterie.data.rows import Rows
    from coterie.models.base import Model


BY_ROW = Metric("row-loss", sums=lambda rows: rows.row_loss)


def client_sums(
    model: Model, w: Tensor, rows: Rows, at: Tensor | None, metrics: Sequence[Metric]
) -> dict[str, Tensor]:
    """Return the sums [..., k] of each metric by its name, and the number of rows [..., 1] as "rows".

    A client without rows in this split has zeros.
    """
    lead = w.shape[:-1]
    size = (rows.size if at is None else rows.size[at]).expand(lead)
    result: dict[str, Tensor] = {}
    for place, batch in rows.full(at) if rows.largest > 0 else ():
        part = w if place is None else broadcast.index(w, place)
        for name, value in model.measure(part, batch.x, batch.y, batch.weight, metrics).items():
            if place is None:
                result[name] = value
                continue
            if name not in result:
                result[name] = value.new_zeros(*lead, value.shape[-1])
            result[name][place] = value
    if not result:
        for metric in metrics:
            nothing = metric.no_rows(model.task, model.outputs or 1, w.dtype).to(w.device)
            result[metric.name] = nothing.expand(*lead, -1).clone()
    result["rows"] = size.unsqueeze(-1).to(w.dtype)
    return result


def row_losses(model: Model, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the loss of every row by several models w [..., m, d], [..., m, B], for rows with these weights."""
    return model.measure_each(w, x, y, weight, [BY_ROW])[BY_ROW.name]


def row_values(model: Model, w: Tensor, rows: Rows, metrics: Sequence[Metric]) -> dict[str, Tensor]:
    """Return each metric of every row, [rows], client after client; the metrics are means over rows (`is_mean`)."""
    single = [replace(metric, sums=metric.by_row) for metric in metrics]
    found = {metric.name: torch.full((len(rows.y),), torch.nan, dtype=torch.float64) for metric in metrics}
    for place, batch in rows.full(None) if rows.largest > 0 else ():
        part = w if place is None else broadcast.index(w, place)
        start = rows.start if place is None else rows.start[place]
        position = (start.unsqueeze(-1) + torch.arange(batch.weight.shape[-1], device=start.device)).cpu()
        real = (batch.weight > 0).cpu()
        for name, value in model.measure(part, batch.x, batch.y, batch.weight, single).items():
            found[name][position[real]] = value.cpu().double()[real]
    return found


def row_scores(model: Model, w: Tensor, rows: Rows) -> Tensor:
    """Return the scores of every row, [rows, outputs], client after client, each by its client's model w [n, d]."""
    itself = Metric("row-scores", sums=lambda rows: rows.scores)
    found = torch.zeros(len(rows.y), int(model.outputs or 1), dtype=torch.float64)
    for place, batch in rows.full(None) if rows.largest > 0 else ():
        part = w if place is None else broadcast.index(w, place)
        start = rows.start if place is None else rows.start[place]
        position = (start.unsqueeze(-1) + torch.arange(batch.weight.shape[-1], device=start.device)).cpu()
        real = (batch.weight > 0).cpu()
        value = model.measure(part, batch.x, batch.y, batch.weight, [itself])[itself.name]
        found[position[real]] = value.cpu().double()[real]
    return found
