"""Per-client scores of a stack of models on the rows of one split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.models.shared import picked

if TYPE_CHECKING:
    from coterie.data.rows import Rows
    from coterie.models.base import Model

HIGHER_IS_BETTER = {"accuracy": True, "loss": False, "perplexity": False, "rmse": False}
MAIN = {"regression": "rmse", "language": "perplexity"}


def main_metric(task: str) -> str:
    """The metric a comparison reports for a task."""
    return MAIN.get(task, "accuracy")


def metrics(model: Model, w: Tensor, rows: Rows, at: Tensor | None) -> dict[str, Tensor]:
    """Mean row loss (without regulariser), the main metric and the number of rows, each [..., 1].

    A client without rows in this split has zeros; its `rows` tells.
    """
    lead = w.shape[:-1]
    size = (rows.size if at is None else rows.size[at]).expand(lead)
    main = main_metric(model.task)
    result = {name: torch.zeros(*lead, 1, dtype=w.dtype, device=w.device) for name in ("loss", main)}
    result["rows"] = size.unsqueeze(-1).to(w.dtype)
    if rows.largest == 0:
        return result
    for place, batch in rows.full(at):
        part = w if place is None else picked(w, place)
        for name, value in model.measure(part, batch.x, batch.y, batch.weight).items():
            if place is None:
                result[name] = value
            else:
                result[name][place] = value
    return result


def from_scores(task: str, scores: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Loss and main metric [..., 1] of rows with these scores, under weights that sum to one."""
    row_loss, row_score = row_values(task, scores, y)
    main = (row_score * weight).sum(-1, keepdim=True)
    return {
        "loss": (row_loss * weight).sum(-1, keepdim=True),
        main_metric(task): main.sqrt() if task == "regression" else main,
    }


def row_values(task: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and score of every row: squared error for regression, log-loss and correctness for classes."""
    if task == "regression":
        error = scores.squeeze(-1) - y
        return 0.5 * error * error, error * error
    if task == "binary":
        z = scores.squeeze(-1)
        return torch.nn.functional.softplus(z) - z * y, ((z > 0) == (y > 0.5)).to(scores.dtype)
    chosen = scores.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(scores, -1) - chosen, (scores.argmax(-1) == y).to(scores.dtype)
