"""What the advisor's survey computes of a client's rows: sums, residual profiles and predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.engine.client import Client
from coterie.models.base import Model
from coterie.models.glm import Glm
from coterie.models.heads import features, head_of
from coterie.theory import held_out
from coterie.theory.held_out import Profile


def require_head(model: Model) -> Glm:
    """Return the linear model that is surveyed: the model itself, or the last layer of a network."""
    head = head_of(model)
    if head is None:
        raise SettingError("the survey needs a linear model, or a network whose last layer is nn.Linear")
    return head


def row_features(client: Client, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the inputs of the surveyed model in float64."""
    if require_head(client.model) is client.model:
        return inputs.double()
    pretrained = client.keep.pretrained
    return features(
        client.model, pretrained.reshape(-1, pretrained.shape[-1])[0], inputs, weight.dim()
    ).double()


def row_profile(features: Tensor, residual: Tensor, rows: Tensor) -> Profile:
    """Return the residual profile of a client, with its classes joined if there are several."""
    if features.dim() == residual.dim() + 1 and residual.dim() == rows.dim():
        return held_out.profile(features, residual, rows)
    found = held_out.profile(features, residual, rows.unsqueeze(-2))
    return Profile(*(part.flatten(-2) for part in (found.k, found.square, found.count)))


def prediction(model: Model, mine: Tensor, theirs: Tensor, x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Sum |X(a - b)|^2, or (Xa)'(Xb), over the rows, [..., 1]."""
    real = (weight > 0).to(mine.dtype).unsqueeze(-1)
    a, b = (model.scores(w, x) * real for w in (mine, theirs))
    value = (a - b).square() if kind == "gap" else a * b
    return value.sum((-1, -2)).unsqueeze(-1)


def facts(profiles: Tensor) -> Tensor:
    """Return for both kinds of profile the sum and number of eigenvalues and the squared residuals, [..., 6]."""
    k, square, count = profiles[..., [0, 3], :], profiles[..., [1, 4], :], profiles[..., [2, 5], :]
    return torch.cat([(count * k).sum(-1), (count * (k > 0)).sum(-1), (count * square).sum(-1)], -1)


def gram_of(_: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of zz' over the client's rows z = (x, y)."""
    z = torch.cat([inputs, targets.unsqueeze(-1).to(inputs)], -1).double() * (weight > 0).unsqueeze(-1)
    return z.mT @ z


def unpacked(sums: Tensor, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack X'X [..., d, d], X'y [..., d] and y'y [..., 1] from what `moments` stores."""
    matrix = sums.new_zeros(*sums.shape[:-1], d, d)
    row, column = torch.triu_indices(d, d, device=sums.device)
    matrix[..., row, column] = matrix[..., column, row] = sums[..., : -d - 1]
    return matrix, sums[..., -d - 1 : -1], sums[..., -1:]


def blurred(blur: Tensor, matrix: Tensor, side: Tensor) -> Tensor:
    """Return the variance of noise in X'e along the eigenvectors of X'X, [..., d].

    `blur` [..., 1] is the variance of the noise in a diagonal entry, and half of it that of the others. With noise E in
    X'X and n in X'y, squared residuals e'X (X'X)^-1 X'e at any centre have |n - E w|^2 too much in the metric of
    (X'X)^-1, to second order, where w is the client's own fit.
    """
    k, basis = torch.linalg.eigh(matrix)
    alive = k > 1e-10 * k[..., -1:].clamp_min(torch.finfo(k.dtype).tiny)
    along = (basis.mT @ side.unsqueeze(-1)).squeeze(-1)
    own = torch.where(alive, along / torch.where(alive, k, 1.0), 0.0)
    found: Tensor = blur / 2 * (1 + own.square().sum(-1, keepdim=True) + own.square())
    return found
