"""Standard errors of the coefficients of linear models, kept in the run folder for the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import files
from coterie.models.glm import Glm

if TYPE_CHECKING:
    from coterie.train.run import Run

FILE = "standard_errors.safetensors"
MOST_WORK = 2e9  # clients times d cubed, beyond which the clients' own errors are left out
MOST_COLUMNS = 400


def standard_errors(model: Glm, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return standard errors of parameters by the curvature of the loss over some rows.

    The inverse of the Fisher information, which is the Hessian of the summed loss. For least squares it is multiplied
    by the residual variance with n - d degrees of freedom.

    Parameters
    ----------
    model
        A linear, logistic or softmax model.
    x, y
        Rows as the engine stores them, [n, ...] and [n].
    weights
        The parameters, [d].

    Returns
    -------
    Tensor
        [d]; NaN where these rows do not determine the parameter.
    """
    count = len(y)
    if count == 0:
        return torch.full_like(weights, torch.nan)
    weight = torch.full((count,), 1.0 / count, dtype=weights.dtype)
    information = count * model.hessian(weights, x, y, weight)
    scale = 1.0
    if model.task == "regression":
        residual = model.scores(weights, x).squeeze(-1) - y
        scale = float(residual.square().sum()) / (count - model.d) if count > model.d else torch.nan
    inverse, failed = torch.linalg.inv_ex(information)
    variance = scale * inverse.diagonal()
    return torch.where((variance > 0) & (failed == 0), variance, torch.nan).sqrt()


def save_errors(run: Run, folder: Path) -> None:
    """Write the errors of the common model over all rows and of every client's over its own, for linear models."""
    fed, model = run.fed, run.fed.model
    visible = not fed.models_stay and fed.runtime.capabilities.rows_visible
    if not isinstance(model, Glm) or not visible or fed.d > MOST_COLUMNS:
        return
    rows = fed.runtime.rows("train").to("cpu")
    errors = {"common": standard_errors(model, rows.x, rows.y, run.common())}
    if fed.n * fed.d**3 <= MOST_WORK:
        own = [standard_errors(model, *rows.of(k), run.personal[k]) for k in range(fed.n)]
        errors["personal"] = torch.stack(own)
    files.write_tensors(folder / "models" / FILE, errors)


def load_errors(folder: Path) -> dict[str, Tensor]:
    """Return what `save_errors` wrote; empty if it wrote nothing."""
    path = folder / "models" / FILE
    return files.read_tensors(path)[0] if path.exists() else {}
