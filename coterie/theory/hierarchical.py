"""Personal models in known clusters: the objective in its two forms, and exact estimators for least squares.

Lyu, Hanzely, Kolar, "Personalized Federated Learning with Multiple Known Clusters" (2022). Shapes: models
[n, d], numbers per client [n, 1], numbers per cluster [k, 1]; a client's loss is 1/2 t'At - b't + const.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import SettingError

Number = float | Sequence[float] | Tensor


@dataclass(frozen=True)
class Penalty:
    """sum_i gamma_i/2 [(1 - alpha_j) |t_i - m_j|^2 + alpha_j |t_i - m|^2], j the cluster of client i.

    m_j is the mean of cluster j with weights gamma_i, m the mean of all with weights alpha_j gamma_i.
    alpha = 1 pulls to one centre (a single cluster), alpha = 0 leaves the clusters independent.
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
        """From `gamma` (one number, or one per client) and either `alpha` or `lambda_` (one, or one per cluster)."""
        clusters = check_clusters(clusters)
        k = int(clusters.max()) + 1
        pull = column("gamma", gamma, len(clusters), clusters.device)
        if bool((pull <= 0).any()) or not bool(torch.isfinite(pull).all()):
            raise SettingError(
                f"gamma = {_shown(gamma)}; the pull to the cluster's centre must be above 0 and finite"
            )
        if (alpha is None) == (lambda_ is None):
            raise SettingError(
                "give either alpha (share of the pull that goes to the common centre) or lambda_"
            )
        if alpha is None:
            share = alpha_from_lambda(
                column("lambda_", lambda_, k, clusters.device), group_sum(pull, clusters, k)
            )
        else:
            share = column("alpha", alpha, k, clusters.device)
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise SettingError(f"alpha = {_shown(alpha)}; it must lie between 0 and 1")
        return cls(clusters, pull, share)

    @property
    def weights(self) -> Tensor:
        """G_j, the sum of gamma_i over cluster j, [k, 1]."""
        return group_sum(self.gamma, self.clusters, len(self.alpha))

    @property
    def lambda_(self) -> Tensor:
        """The pull of each cluster's centre to the common one in the multi-task form; infinite where alpha = 1."""
        return lambda_from_alpha(self.alpha, self.weights)

    def means(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Cluster means m_j [k, d] and the common mean m [d] (zero where no cluster is tied to it)."""
        total = self.weights
        inside = group_sum(self.gamma * models, self.clusters, len(self.alpha)) / total
        share = self.alpha * total
        return inside, (share * inside).sum(0) / share.sum().clamp(min=torch.finfo(share.dtype).tiny)

    def value(self, models: Tensor) -> Tensor:
        """The penalty, []."""
        inside, common = self.means(models)
        share = self.alpha[self.clusters]
        apart = (models - inside[self.clusters]).square().sum(-1, keepdim=True)
        away = (models - common).square().sum(-1, keepdim=True)
        return (0.5 * self.gamma * ((1 - share) * apart + share * away)).sum()

    def grad(self, models: Tensor) -> Tensor:
        """Its gradient [n, d]; the means may be treated as constants, their derivatives cancel."""
        inside, common = self.means(models)
        share = self.alpha[self.clusters]
        return self.gamma * ((1 - share) * (models - inside[self.clusters]) + share * (models - common))


def alpha_from_lambda(lambda_: Tensor, weights: Tensor) -> Tensor:
    """alpha_j = lambda_j / (lambda_j + G_j): the two forms then have the same minimiser."""
    if bool((lambda_ < 0).any()) or bool(lambda_.isnan().any()):
        raise SettingError(f"lambda_ = {_shown(lambda_)}; the pull between clusters must not be negative")
    return torch.where(lambda_.isinf(), 1.0, lambda_ / (lambda_ + weights))


def lambda_from_alpha(alpha: Tensor, weights: Tensor) -> Tensor:
    """lambda_j = alpha_j G_j / (1 - alpha_j), infinite for alpha_j = 1."""
    return torch.where(
        alpha < 1, alpha * weights / (1 - alpha).clamp(min=torch.finfo(alpha.dtype).tiny), torch.inf
    )


@dataclass(frozen=True)
class Hierarchy:
    """Models [n, d], cluster centres w_j [k, d] and the common centre [d] of the multi-task form."""

    models: Tensor
    centres: Tensor
    common: Tensor


def lift(a: Tensor, b: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise over t: 1/2 t'At - b't + |t - w|^2 / (2 spread) = 1/2 w'Hw - g'w + const. Returns H, g.

    `spread` [..., 1] or [..., d] (one per coordinate) is the inverse of the pull; 0 ties t to w, infinity
    (for all coordinates) unties it, so that nothing is said about w.
    """
    tied = spread.isfinite().all(-1, keepdim=True)
    spread = torch.where(tied, spread, 0.0).expand(b.shape)
    identity = torch.eye(b.shape[-1], dtype=a.dtype, device=a.device)
    both = torch.linalg.solve(identity + a * spread.unsqueeze(-2), torch.cat([a, b.unsqueeze(-1)], -1))
    both = both * tied.unsqueeze(-1)
    h = both[..., :-1]
    return 0.5 * (h + h.mT), both[..., -1]


def settle(a: Tensor, b: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """The t of `lift` for a given w: (I + spread A)^-1 (spread b + w), or A^+ b where nothing ties it to w."""
    tied = spread.isfinite().all(-1, keepdim=True)
    finite = torch.where(tied, spread, 0.0).expand(b.shape)
    identity = torch.eye(b.shape[-1], dtype=a.dtype, device=a.device)
    t = torch.linalg.solve(identity + finite.unsqueeze(-1) * a, (finite * b + centre).unsqueeze(-1)).squeeze(
        -1
    )
    return t if bool(tied.all()) else torch.where(tied, t, pseudo_solve(a, b))


def centres(h: Tensor, g: Tensor, clusters: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Cluster centres [k, d] and common centre [d] from what the clients' `lift` says; `between` = 1 / lambda_j."""
    k = len(between)
    h, g = group_sum(h, clusters, k), group_sum(g, clusters, k)
    above, right = lift(h, g, between)
    common = pseudo_solve(above.sum(0), right.sum(0))
    return settle(h, g, common, between), common


def certainty(h: Tensor, clusters: Tensor, between: Tensor) -> Tensor:
    """Inverse covariances [k, d, d] of the cluster centres given all rows, from the H of the clients' `lift`.

    The clients of a cluster tell of its centre, and the other clusters as far as the common centre ties it to them.
    """
    h = group_sum(h, clusters, len(between))
    nothing = torch.zeros_like(h[..., 0])
    about_common, _ = lift(h, nothing, between)
    from_others, _ = lift(about_common.sum(0) - about_common, nothing, between)
    return h + from_others


def minimise(a: Tensor, b: Tensor, clusters: Tensor, within: Tensor, between: Tensor) -> Hierarchy:
    """The minimiser for losses 1/2 t'At - b't, by block elimination: n + k + 1 systems of size d.

    `within` = 1 / gamma_i [n, 1 or d] and `between` = 1 / lambda_j [k, 1 or d] are the variances of the
    hierarchical linear model when A = X'X / sigma^2 and b = X'y / sigma^2. Where the minimiser is not
    unique the centres have the smallest norm.
    """
    middle, common = centres(*lift(a, b, within), clusters, between)
    return Hierarchy(settle(a, b, middle[clusters], within), middle, common)


def minimiser(a: Tensor, b: Tensor, penalty: Penalty) -> Hierarchy:
    """`minimise` for a penalty in the form of regularised averages."""
    return minimise(a, b, penalty.clusters, 1 / penalty.gamma, 1 / penalty.lambda_)


def local_least_squares(a: Tensor, b: Tensor) -> Tensor:
    """Every client alone, A^+ b (which is X^+ y), [n, d]."""
    return pseudo_solve(a, b)


def single_least_squares(a: Tensor, b: Tensor) -> Tensor:
    """One model for all, (sum A)^+ sum b, [d]."""
    return pseudo_solve(a.sum(0), b.sum(0))


def one_centre(a: Tensor, b: Tensor, pull: float) -> Tensor:
    """Personal models pulled to one common centre, [n, d]: the single-cluster closed form."""
    if not 0 < pull < math.inf:
        raise SettingError(f"pull = {pull}; the pull to the common centre must be above 0 and finite")
    values, vectors = torch.linalg.eigh(a)
    return _one_centre(values, vectors, times(vectors.mT, b), pull)


def _one_centre(values: Tensor, vectors: Tensor, right: Tensor, pull: float) -> Tensor:
    """The same from A = V diag(values) V' and V'b, so that many pulls share one decomposition."""
    kept = values.clamp(min=0.0) + pull
    stretched = vectors * (pull * (1 - pull / kept)).unsqueeze(-2)
    h = stretched.transpose(0, 1).flatten(1) @ vectors.transpose(0, 1).flatten(1).T
    centre = pseudo_solve(h, times(vectors, pull * right / kept).sum(0))
    return times(vectors, (right + pull * times(vectors.mT, centre)) / kept)


def cross_validated_pull(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    folds: int = 5,
    seed: int = 0,
    range_: tuple[float, float] = (1e-3, 1e3),
) -> float:
    """The pull of `one_centre` with the least squared error on held-out rows, `folds` parts of every client's rows."""
    sums = [fold_sums(x, y, folds, seed + i) for i, (x, y) in enumerate(zip(xs, ys, strict=True))]
    a, b = (torch.stack(part, 1) for part in zip(*sums, strict=True))  # [folds, n, ...]
    values, vectors = torch.linalg.eigh(a.sum(0) - a)
    right = times(vectors.mT, b.sum(0) - b)

    def error(log_pull: float) -> float:
        total = 0.0
        for fold in range(folds):
            t = _one_centre(values[fold], vectors[fold], right[fold], math.exp(log_pull))
            total += float((t * (times(a[fold], t) - 2 * b[fold])).sum())
        return total

    return math.exp(_golden_section(error, math.log(range_[0]), math.log(range_[1]), 0.01))


def _golden_section(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """The minimiser of a function that falls and then rises, to within `width`."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return 0.5 * (low + high)


def fold_sums(x: Tensor, y: Tensor, folds: int, seed: int) -> tuple[Tensor, Tensor]:
    """X'X and X'y of each part of the rows, dealt out at random, [folds, d, d] and [folds, d]."""
    from coterie.federation.randomness import key, permutation

    part = torch.empty(len(y), dtype=torch.long)
    part[permutation(key(seed, "folds"), len(y))] = torch.arange(len(y)) % folds
    inside = torch.nn.functional.one_hot(part, folds).to(x.dtype).t().unsqueeze(-1)  # [folds, rows, 1]
    masked = x * inside
    return masked.mT @ x, (masked * y.unsqueeze(-1)).sum(1)


def scalar_blue(local: Tensor, precision: Tensor, clusters: Tensor, within: Tensor, between: float) -> Tensor:
    """Best linear unbiased estimators when X'X is a multiple beta_i of the identity, [n, d].

    `local` are the least-squares fits [n, d], `precision` = beta_i / sigma_i^2 [n, 1], `within` = s_j^2
    [k, 1], `between` = s0^2. Each estimator weighs its own fit against the others', itself left out.
    """
    k = len(within)
    weight = 1 / (1 / precision + within[clusters])
    total, summed = group_sum(weight, clusters, k), group_sum(weight * local, clusters, k)
    use = total / (1 + between * total)
    mean = summed / total
    mine, own_use = weight, use[clusters]
    others, others_sum = total[clusters] - mine, summed[clusters] - mine * local
    outside = use.sum() - own_use
    outside_sum = (use * mean).sum(0) - own_use * mean[clusters]
    trust = outside / (1 + between * outside)  # Q
    outside_mean = outside_sum / outside.where(outside > 0, 1.0)
    known = others + trust
    prior = (others_sum + trust * outside_mean) / known.where(known > 0, 1.0)
    pull = known / (1 + within[clusters] * known)  # B
    return (precision * local + pull * prior) / (precision + pull)


def james_stein(y: Tensor, noise: float = 1.0, within: float = 1.0, positive: bool = True) -> Tensor:
    """BLUE of one cluster in the point model y_i = t_i + noise, the others' mean shrunk to zero, [..., n, d].

    `noise` and `within` are variances; the shrinkage 1 - (d-2) v / |mean|^2, v the variance of that mean,
    lowers the risk for every centre when d >= 3.
    """
    n, d = y.shape[-2:]
    if d < 3 or n < 2:
        raise SettingError(
            f"y is {n} clients by {d} coordinates; James-Stein needs 2 clients and 3 coordinates"
        )
    mean = (y.sum(-2, keepdim=True) - y) / (n - 1)
    variance = (noise + within) / (n - 1)
    shrink = 1 - (d - 2) * variance / mean.square().sum(-1, keepdim=True)
    if positive:
        shrink = shrink.clamp(min=0.0)
    pull = 1 / (variance + within)
    return (y / noise + pull * shrink * mean) / (1 / noise + pull)


def group_sum(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of rows [n, ...] by group, [count, ...]."""
    return values.new_zeros((count, *values.shape[1:])).index_add_(0, groups, values)


def pseudo_solve(a: Tensor, b: Tensor) -> Tensor:
    """A^+ b for symmetric A >= 0."""
    values, vectors = torch.linalg.eigh(a)
    top = values[..., -1:].clamp(min=torch.finfo(values.dtype).tiny)
    inverse = torch.where(values > 10 * a.shape[-1] * torch.finfo(values.dtype).eps * top, 1 / values, 0.0)
    return times(vectors, inverse * times(vectors.mT, b))


def times(a: Tensor, v: Tensor) -> Tensor:
    """A v over stacks."""
    return (a @ v.unsqueeze(-1)).squeeze(-1)


def check_clusters(clusters: Tensor | Sequence[int]) -> Tensor:
    """Clusters 0..k-1 of the clients, int64 [n], every one with a client; an error otherwise."""
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
    """One number, or one for each, as [length, 1] in float64."""
    found = torch.as_tensor(value, dtype=torch.float64, device=device).reshape(-1, 1)
    if len(found) not in (1, length):
        raise SettingError(f"{name} has {len(found)} numbers; give one, or one for each of {length}")
    return found.expand(length, 1)


def _shown(value: Any) -> Any:
    return value.flatten().tolist() if isinstance(value, Tensor) else value
