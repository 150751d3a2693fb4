"""Standard errors of the coefficients of linear models, kept in the run folder for the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import files
from coterie.models.glm import Glm
from coterie.models.predictor import LinearPredictor
from coterie.models.survival import Cox
from coterie.train.exported_model import ExportedModel

if TYPE_CHECKING:
    from coterie.train.run import Run

FILE = "standard_errors.safetensors"
MOST_WORK = 2e9  # clients times d cubed, beyond which the clients' own errors are left out
MOST_COLUMNS = 400


def contrasts(one: ExportedModel) -> Tensor:
    """Return the matrix [d, d] that turns parameters into what rows can determine.

    The levels of a category add up to one, so that only differences between their coefficients matter: each becomes
    the difference from the mean of its column. The same holds for the classes of a softmax model.

    Parameters
    ----------
    one
        A linear model and the encoding of its table.

    Returns
    -------
    Tensor
        The identity but for such coefficients.
    """
    d = len(one.weights)
    place = replace(one, weights=torch.arange(d, dtype=torch.float64)).linear().linear.weight.long()
    matrix = torch.eye(d, dtype=torch.float64)
    if one.preprocessor is not None:
        width = len(one.preprocessor.feature_names)
        at = width - sum(choice.width for choice in one.preprocessor.choices)
        for choice in one.preprocessor.choices:
            size = choice.width
            for row in place[:, at : at + size]:
                matrix[row] -= torch.eye(d, dtype=torch.float64)[row].mean(0)
            at += size
    if one.task == "multiclass":
        matrix[place] = matrix[place] - matrix[place].mean(0)
    return matrix


def standard_errors(model: Glm, x: Tensor, y: Tensor, weights: Tensor, of: Tensor | None = None) -> Tensor:
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
    of
        Linear functions of the parameters, [k, d], such as `contrasts`; the parameters themselves if not given.

    Returns
    -------
    Tensor
        [d] or [k]; NaN where these rows do not determine the parameter.
    """
    count = len(y)
    if count == 0:
        return torch.full((model.d if of is None else len(of),), torch.nan, dtype=torch.float64)
    if isinstance(model, Cox):
        return _errors_of(_stratum_information(model, x, y, weights), of)
    x, y, weights = x.double(), y.double() if y.is_floating_point() else y, weights.double()
    weight = torch.full((count,), 1.0 / count, dtype=weights.dtype)
    information = count * model.hessian(weights, x, y, weight)
    scale = 1.0
    if model.task == "regression":
        residual = model.scores(weights, x).squeeze(-1) - y
        scale = float(residual.square().sum()) / (count - model.d) if count > model.d else torch.nan
    return _errors_of(information, of, scale)


def _stratum_information(model: Cox, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the information of the rows of one client, which are one stratum, [d, d]."""
    size = max(1, len(y))
    weight = torch.full((len(y),), 1.0 / size, dtype=torch.float64)
    return size / model.scale * model.hessian(weights.double(), x.double(), y.double(), weight)


def _errors_of(information: Tensor, of: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return standard errors from the Fisher information."""
    inverse, failed = torch.linalg.inv_ex(information)
    variance = scale * (inverse.diagonal() if of is None else ((of @ inverse) * of).sum(-1))
    return torch.where((variance > 0) & (failed == 0), variance, torch.nan).sqrt()


def save_errors(run: Run, folder: Path) -> None:
    """Write the errors of the common model over all rows and of every client's over its own, for linear models.

    Models of counts and amounts have none, and neither have models that weigh classes, whose information is not that
    of a likelihood.
    """
    fed, model = run.fed, run.fed.model
    visible = not fed.models_stay and fed.runtime.capabilities.rows_visible
    if not isinstance(model, Glm) or model.basis is not None or not visible or fed.d > MOST_COLUMNS:
        return
    preprocessor = None if fed.table is None else fed.table.preprocessor
    one = ExportedModel.of(model, run.common(), None, preprocessor)
    if model.class_weights is not None or not isinstance(one.module(), LinearPredictor):
        return
    of = contrasts(one)
    rows = fed.runtime.rows("train").to("cpu")
    if isinstance(model, Cox):
        strata = [_stratum_information(model, *rows.of(k), run.common()) for k in range(fed.n)]
        errors = {"common": _errors_of(torch.stack(strata).sum(0), of)}
    else:
        errors = {"common": standard_errors(model, rows.x, rows.y, run.common(), of)}
    if fed.n * fed.d**3 <= MOST_WORK:
        own = [standard_errors(model, *rows.of(k), run.personal[k], of) for k in range(fed.n)]
        errors["personal"] = torch.stack(own)
    files.write_tensors(folder / "models" / FILE, errors)


def load_errors(folder: Path) -> dict[str, Tensor]:
    """Return what `save_errors` wrote; empty if it wrote nothing."""
    path = folder / "models" / FILE
    return files.read_tensors(path)[0] if path.exists() else {}
