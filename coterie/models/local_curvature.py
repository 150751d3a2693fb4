"""How little a convex loss can curve near a point, which certificates rest on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.models.glm import Glm, Logistic, Softmax


def least_hessian(model: Glm, w: Tensor, radius: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return a matrix below the Hessian of `loss` at every point within a radius of w, [..., d, d].

    A row's scores move by at most delta = |x| radius. Then the curvature s' of the logistic loss is at least
    s'(|z| + delta), and that of softmax at least exp(-sqrt(2) delta) times what it is at w: along a change u of the
    scores its third derivative is a third cumulant, at most the range of u times the variance. That of least squares
    does not change. `radius` is [..., 1].
    """
    delta = radius * torch.linalg.vector_norm(x, dim=-1)
    if isinstance(model, Logistic):
        z = model.scores(w, x).squeeze(-1).abs()
        # s'(z) = e^-z / (1 + e^-z)^2, so the ratio has no digits that cancel
        left = torch.exp(-delta) * ((1 + torch.exp(-z)) / (1 + torch.exp(-z - delta))).square()
    elif isinstance(model, Softmax):
        left = torch.exp(-math.sqrt(2) * delta)
    else:
        left = torch.ones_like(delta)
    return model.hessian(w, x, y, weight * left)
