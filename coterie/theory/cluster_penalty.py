"""The penalty that draws models to the centres of known clusters, and those to a common centre, in its two forms.

Lyu, Hanzely, Kolar, "Personalized Federated Learning with Multiple Known Clusters" (2022). Shapes: models
[n, d], numbers per client [n, 1], numbers per cluster [k, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.theory.groups import group_sum

Number = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class Penalty:
    """The penalty sum_i gamma_i/2 [(1 - alpha_j) |t_i - m_j|^2 + alpha_j |t_i - m|^2], j the cluster of client i.

    m_j is the mean of cluster j with weights gamma_i, m the mean of all with weights alpha_j gamma_i. alpha = 1
    draws all models to one centre (a single cluster), alpha = 0 leaves the clusters independent.

    Parameters
    ----------
    clusters
        Cluster of each client, int64 [n].
    gamma
        Strength of the penalty for each client, [n, 1].
    alpha
        Share of each cluster's penalty that goes to the common centre, [k, 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_penalty import Penalty
    >>> penalty = Penalty.of([0, 0, 1], gamma=1.0, alpha=0.5)
    >>> penalty.value(torch.tensor([[0.0], [2.0], [4.0]], dtype=torch.float64)).item()
    2.5
    """

    clusters: Tensor
    gamma: Tensor
    alpha: Tensor

    @classmethod
    def of(
        cls,
        clusters: Tensor | Sequence[int],
        gamma: Number,
        *,
        alpha: Number | None = None,
        lambda_: Number | None = None,
    ) -> Penalty:
        """Return a checked penalty.

        Parameters
        ----------
        clusters
            Cluster of each client, 0..k-1.
        gamma
            Strength of the penalty: one number, or one per client.
        alpha
            Share that goes to the common centre: one number, or one per cluster.
        lambda_
            In place of alpha, the strength between clusters in the multi-task form.

        Returns
        -------
        Penalty
            The penalty.

        Raises
        ------
        SettingError
            If a number is out of range, or not exactly one of `alpha` and `lambda_` is given.
        """
        clusters = check_clusters(clusters)
        k = int(clusters.max()) + 1
        strength = column("gamma", gamma, len(clusters), clusters.device)
        if bool((strength <= 0).any()) or not bool(torch.isfinite(strength).all()):
            raise SettingError(
                f"gamma = {_shown(gamma)}; the strength of the penalty must be above 0 and finite"
            )
        if (alpha is None) == (lambda_ is None):
            raise SettingError(
                "give either alpha (share of the penalty that goes to the common centre) or lambda_"
            )
        if alpha is None:
            share = alpha_from_lambda(
                column("lambda_", lambda_, k, clusters.device), group_sum(strength, clusters, k)
            )
        else:
            share = column("alpha", alpha, k, clusters.device)
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise SettingError(f"alpha = {_shown(alpha)}; it must lie between 0 and 1")
        return cls(clusters, strength, share)

    @property
    def weights(self) -> Tensor:
        """G_j, the sum of gamma_i over cluster j, [k, 1]."""
        return group_sum(self.gamma, self.clusters, len(self.alpha))

    @property
    def lambda_(self) -> Tensor:
        """Strength between each cluster's centre and the common one in the multi-task form; inf where alpha = 1."""
        return lambda_from_alpha(self.alpha, self.weights)

    def means(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cluster means m_j [k, d] and the common mean m [d] (zero where no cluster is tied to it)."""
        total = self.weights
        inside = group_sum(self.gamma * models, self.clusters, len(self.alpha)) / total
        share = self.alpha * total
        return inside, (share * inside).sum(0) / share.sum().clamp(min=torch.finfo(share.dtype).tiny)

    def value(self, models: Tensor) -> Tensor:
        """Return the penalty of models [n, d]."""
        inside, common = self.means(models)
        share = self.alpha[self.clusters]
        apart = (models - inside[self.clusters]).square().sum(-1, keepdim=True)
        away = (models - common).square().sum(-1, keepdim=True)
        return (0.5 * self.gamma * ((1 - share) * apart + share * away)).sum()

    def grad(self, models: Tensor) -> Tensor:
        """Return the gradient [n, d] at models [n, d]; the derivatives of the means cancel."""
        inside, common = self.means(models)
        share = self.alpha[self.clusters]
        return self.gamma * ((1 - share) * (models - inside[self.clusters]) + share * (models - common))


def alpha_from_lambda(lambda_: Tensor, weights: Tensor) -> Tensor:
    """Return alpha_j = lambda_j / (lambda_j + G_j), with which the two forms have the same minimiser.

    Parameters
    ----------
    lambda_
        Strengths between clusters in the multi-task form, [k, 1].
    weights
        G_j, [k, 1].

    Returns
    -------
    Tensor
        alpha, [k, 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_penalty import alpha_from_lambda
    >>> alpha_from_lambda(torch.tensor([1.0, torch.inf]), torch.tensor([3.0, 3.0])).tolist()
    [0.25, 1.0]
    """
    if bool((lambda_ < 0).any()) or bool(lambda_.isnan().any()):
        raise SettingError(f"lambda_ = {_shown(lambda_)}; the strength between clusters must not be negative")
    return torch.where(lambda_.isinf(), 1.0, lambda_ / (lambda_ + weights))


def lambda_from_alpha(alpha: Tensor, weights: Tensor) -> Tensor:
    """Return lambda_j = alpha_j G_j / (1 - alpha_j), infinite for alpha_j = 1.

    Parameters
    ----------
    alpha
        Shares that go to the common centre, [k, 1].
    weights
        G_j, [k, 1].

    Returns
    -------
    Tensor
        lambda, [k, 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.cluster_penalty import lambda_from_alpha
    >>> lambda_from_alpha(torch.tensor([0.25, 1.0]), torch.tensor([3.0, 3.0])).tolist()
    [1.0, inf]
    """
    return torch.where(
        alpha < 1, alpha * weights / (1 - alpha).clamp(min=torch.finfo(alpha.dtype).tiny), torch.inf
    )


def check_clusters(clusters: Tensor | Sequence[int]) -> Tensor:
    """Return clusters 0..k-1 as int64 [n], or raise a SettingError if one has no clients."""
    found = torch.as_tensor(clusters)
    if found.dim() != 1 or len(found) == 0 or found.is_floating_point():
        raise SettingError("clusters must hold one whole number per client")
    if int(found.min()) < 0:
        raise SettingError(f"client {int(found.argmin())} has no cluster; number the clusters 0, 1, 2, ...")
    count = torch.bincount(found)
    if bool((count == 0).any()):
        raise SettingError(
            f"cluster {int((count == 0).nonzero()[0])} has no clients; number them without gaps"
        )
    return found.long()


def column(name: str, value: Any, length: int, device: torch.device) -> Tensor:
    """Return one number, or one for each, as float64 [length, 1]."""
    found = torch.as_tensor(value, dtype=torch.float64, device=device).reshape(-1, 1)
    if len(found) not in (1, length):
        raise SettingError(f"{name} has {len(found)} numbers; give one, or one for each of {length}")
    return found.expand(length, 1)


def _shown(value: Any) -> Any:
    return value.flatten().tolist() if isinstance(value, Tensor) else value
