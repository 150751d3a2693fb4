"""A sharper certificate for gradient descent on FLIX: two numbers of each client on its curvature near the iterate."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.models.glm import Glm
from coterie.models.local_curvature import least_hessian

SIGHT = 10.0  # clients are asked once the plain certificate is within so many times the target
MOST_NUMBERS = 2**25  # of all clients' second derivatives
ROUNDING = 1e-12  # of the largest eigenvalue


def worth_asking(fed: Federation, gap: float, target: float) -> bool:
    """Return True if the plain certificate is near the target and second derivatives are small enough to form."""
    return target < gap <= SIGHT * target and fed.n * fed.d**2 <= MOST_NUMBERS


def curvature_near(
    client: Client, mixed: Tensor, g: Tensor, radius: float, alpha: Tensor | float
) -> dict[str, Tensor]:
    """Return min v'Mv over g'v = 1 and over |v| = 1, where M is below alpha^2 times the client's second derivatives.

    M holds within `radius` of the shared model, so within alpha times it of the mixture.
    """
    model = cast(Glm, client.model)
    reach = torch.as_tensor(alpha).to(mixed) * radius * torch.ones_like(mixed[..., :1])

    def least(at: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        w, near = at[..., :-1].double(), at[..., -1:].double()
        return least_hessian(model, w, near, inputs.double(), targets, weight.double())

    values, vectors = torch.linalg.eigh(client.over_rows(least, torch.cat([mixed, reach], -1)))
    values = (values - ROUNDING * values[..., -1:]).clamp_min(0.0)
    parts = (vectors.mT @ g.double().unsqueeze(-1)).squeeze(-1).square()
    inverse = torch.where(parts > 0, parts / values, 0.0).sum(-1, keepdim=True)
    scale = torch.as_tensor(alpha).to(values) ** 2
    return {"along": scale / inverse, "least": scale * values[..., :1]}
