"""Finite mixtures of hierarchical linear models: unknown clusters with random effects inside, from sums over rows.

Client i belongs to cluster k with probability pi_k; then t_i ~ N(w_k, S) and y_i = X_i t_i + N(0, sigma^2). EM over
memberships gives pi and w, and each of its steps maximises the likelihood itself over sigma^2 and S (ECME: Liu and
Rubin 1994), which plain EM approaches slowly. The number of clusters is the one with the largest evidence, by Schwarz's
approximation over clients, which is consistent for mixtures (Keribin 2000).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coterie.theory.deviance_search import lowest
from coterie.theory.hierarchical import lift, pseudo_solve, scaled, settle
from coterie.theory.mixed_likelihood import HIGHEST, LOWEST, Likelihood
from coterie.theory.threshold_starts import seed_weights
from coterie.theory.variance_components import Sums

MOST_CLUSTERS = 8
_STARTS = 4  # draws of K-means++ from which EM begins
_SHORT, _LONG = 8, 200  # steps of EM from each start, and from the best of them
_INNER = 4  # steps of the search for variances in one step of EM
_SETTLED = 1e-7  # relative gain of log likelihood that ends EM
_INDIFFERENT = 5e-4  # a variance that raises the log likelihood by less than this is called zero


@dataclass(frozen=True)
class FittedMixture:
    """A mixture that was fitted.

    Parameters
    ----------
    shares
        pi, [K].
    centres
        w, [K, d].
    noise
        sigma^2.
    spread
        S, variances inside clusters, [d].
    membership
        Probability that each client belongs to each cluster, [n, K].
    likelihood
        Log likelihood.
    numbers
        How many numbers were estimated.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture import FittedMixture
    >>> one = torch.ones(1)
    >>> round(FittedMixture(one, one[None], 1.0, one, torch.ones(20, 1), likelihood=-30.0, numbers=2).evidence, 3)
    -32.996
    """

    shares: Tensor
    centres: Tensor
    noise: float
    spread: Tensor
    membership: Tensor
    likelihood: float
    numbers: int

    @property
    def evidence(self) -> float:
        """Log evidence by Schwarz's approximation, with clients as the units."""
        return self.likelihood - 0.5 * self.numbers * math.log(len(self.membership))

    @property
    def centre(self) -> Tensor:
        """Expected centre of each client, [n, d]; its model is as if its cluster had this one."""
        return self.membership @ self.centres

    def models(self, sums: Sums) -> Tensor:
        """Return the posterior means of the clients' parameters, [n, d]."""
        return settle(sums.xx / self.noise, sums.xy / self.noise, self.centre, self.spread)


def client_likelihoods(sums: Sums, centres: Tensor, noise: Tensor, spread: Tensor) -> Tensor:
    """Return the log likelihood of each client's rows in each cluster, its own parameters integrated out.

    Parameters
    ----------
    sums
        Sums of the clients.
    centres
        w, [K, d].
    noise
        sigma^2.
    spread
        S, [d].

    Returns
    -------
    Tensor
        [n, K], differentiable.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture import client_likelihoods
    >>> from coterie.theory.variance_components import Sums
    >>> sums = Sums.of([torch.ones(1, 1)], [torch.tensor([3.0])], torch.tensor([0]))  # y ~ N(w, 1 + 3)
    >>> found = client_likelihoods(sums, torch.tensor([[1.0]]), torch.tensor(1.0), torch.tensor([3.0]))
    >>> round(found.item() - torch.distributions.Normal(1.0, 2.0).log_prob(torch.tensor(3.0)).item(), 6)
    0.0
    """
    a, b, q = sums.xx / noise, sums.xy / noise, sums.yy / noise
    each = spread.expand(b.shape)
    h, g = lift(a, b, each)
    identity = torch.eye(b.shape[-1], dtype=a.dtype, device=a.device)
    volume = torch.linalg.slogdet(identity + scaled(each, a))[1].unsqueeze(-1)
    own = (
        q - (b * each * g).sum(-1, keepdim=True) + sums.rows * (noise.log() + math.log(2 * math.pi)) + volume
    )
    bent = torch.einsum("kd,nde,ke->nk", centres, h, centres)
    found: Tensor = -0.5 * (own + bent - 2 * g @ centres.mT)
    return found


def mixture(
    sums: Sums,
    groups: Tensor,
    k: int,
    *,
    noise: float | None = None,
    seed: int = 0,
    start: Tensor | None = None,
) -> FittedMixture:
    """Fit a mixture of k clusters by maximum likelihood.

    Parameters
    ----------
    sums
        Sums of the clients; their clusters are not looked at.
    groups
        Which variance each coordinate has inside clusters, [d], from `pattern`.
    k
        Number of clusters.
    noise
        sigma^2 if it is known.
    seed
        Seed of the starts.
    start
        Memberships from which EM starts instead, [n, k].

    Returns
    -------
    FittedMixture
        The best of several starts.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture import mixture
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> means = torch.tensor([-4.0, 4.0]).repeat(10) + torch.randn(20, generator=draw)
    >>> ys = [mean + torch.randn(5, generator=draw) for mean in means]
    >>> sums = Sums.of([torch.ones(5, 1)] * 20, ys, torch.zeros(20, dtype=torch.long))
    >>> found = mixture(sums, pattern("same", 1), 2)
    >>> sorted(round(value) for value in found.centres.flatten().tolist()), round(found.spread.item(), 1)
    ([-3, 4], 0.8)
    """
    fit = _Fit(sums, groups, noise)
    if start is not None:
        return fit.run(start.double(), _LONG)
    alone = fit.run(torch.ones(len(sums.rows), 1, dtype=torch.float64), _LONG)
    if k == 1:
        return alone
    points = alone.models(fit.sums)
    h, _ = lift(fit.sums.xx / alone.noise, fit.sums.xy / alone.noise, alone.spread.expand(points.shape))
    values, vectors = torch.linalg.eigh(h.mean(0))
    points = points @ (vectors * values.clamp(min=0).sqrt())  # distances in units of what rows can tell apart
    starts = []
    for draw in range(_STARTS):
        weights = seed_weights(points, k, lloyd=10, tries=1, seed=seed + draw)
        nearest = torch.cdist(weights @ points, points).argmin(0)
        starts.append(fit.run(torch.nn.functional.one_hot(nearest, k).double(), _SHORT))
    best = max(starts, key=lambda one: one.likelihood)
    return fit.run(best.membership, _LONG, best)


def best_mixture(
    sums: Sums, groups: Tensor, *, noise: float | None = None, most: int = MOST_CLUSTERS, seed: int = 0
) -> FittedMixture:
    """Fit mixtures of 1, 2, ... clusters, and return the one with the largest evidence.

    Parameters
    ----------
    sums
        Sums of the clients.
    groups
        Which variance each coordinate has inside clusters, [d], from `pattern`.
    noise
        sigma^2 if it is known.
    most
        Largest number of clusters; two steps without gain end the search before.
    seed
        Seed of the starts.

    Returns
    -------
    FittedMixture
        The best one.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture import best_mixture
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> means = torch.tensor([-4.0, 4.0]).repeat(10) + torch.randn(20, generator=draw)
    >>> ys = [mean + torch.randn(5, generator=draw) for mean in means]
    >>> sums = Sums.of([torch.ones(5, 1)] * 20, ys, torch.zeros(20, dtype=torch.long))
    >>> len(best_mixture(sums, pattern("same", 1)).shares)
    2
    """
    tried: list[FittedMixture] = []
    for k in range(1, min(most, len(sums.rows) // 2) + 1):
        tried.append(mixture(sums, groups, k, noise=noise, seed=seed))
        best = max(tried, key=lambda one: one.evidence)
        if k - len(best.shares) >= 2:
            break
    return max(tried, key=lambda one: one.evidence) if tried else mixture(sums, groups, 1, noise=noise)


class _Fit:
    """EM from given memberships."""

    def __init__(self, sums: Sums, groups: Tensor, noise: float | None) -> None:
        sums = sums.double()
        together = torch.zeros_like(sums.clusters)
        self.sums = Sums(sums.xx, sums.xy, sums.yy, sums.rows, together, 1)
        self.groups, self.noise = groups.to(together.device), noise
        self.scale = Likelihood(self.sums, groups, noise=noise).scale

    def unpack(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Return sigma^2 and S [d] from logarithms in units of their scale."""
        sizes = logs.exp() * self.scale
        noise = sizes[0] if self.noise is None else torch.full_like(sizes[0], self.noise)
        return noise, torch.where(self.groups >= 0, sizes[1:][self.groups.clamp(min=0)], 0.0)

    def run(self, membership: Tensor, steps: int, start: FittedMixture | None = None) -> FittedMixture:
        """Return the mixture after some steps, or fewer if the likelihood has settled."""
        logs = torch.zeros(len(self.scale), dtype=torch.float64)
        if start is not None:
            first = [int((self.groups == g).nonzero()[0]) for g in range(len(self.scale) - 1)]
            sizes = torch.cat([torch.tensor([start.noise]).double(), start.spread[first]])
            logs = (sizes / self.scale).log().clamp(LOWEST, HIGHEST)
        bounds = [(LOWEST, HIGHEST)] * len(logs)
        fixed: dict[int, float] = {} if self.noise is None else {0: 0.0}
        value = -math.inf
        for _ in range(steps):
            shares = membership.mean(0)
            centres = self._centres(membership, logs)
            lost = partial(self._lost, centres, shares)
            logs, height = lowest(lost, logs, fixed, bounds, steps=_INNER)
            membership = self._each(centres, shares, logs).softmax(1)
            before, value = value, -height
            if value - before < _SETTLED * (1 + abs(value)):
                break
        logs, value = self._without(centres, shares, logs, value)
        noise, spread = self.unpack(logs)
        k, d = centres.shape
        numbers = k - 1 + k * d + len(logs) - len(fixed)
        return FittedMixture(shares, centres, float(noise), spread, membership, value, numbers)

    def _each(self, centres: Tensor, shares: Tensor, logs: Tensor) -> Tensor:
        """Return log pi_k + log likelihood of each client in cluster k, [n, K]."""
        return shares.clamp(min=1e-300).log() + client_likelihoods(self.sums, centres, *self.unpack(logs))

    def _lost(self, centres: Tensor, shares: Tensor, logs: Tensor) -> Tensor:
        """Return minus the log likelihood."""
        return -self._each(centres, shares, logs).logsumexp(1).sum()

    def _centres(self, membership: Tensor, logs: Tensor) -> Tensor:
        noise, spread = self.unpack(logs)
        h, g = lift(self.sums.xx / noise, self.sums.xy / noise, spread.expand(self.sums.xy.shape))
        return pseudo_solve(torch.einsum("nk,nde->kde", membership, h), membership.mT @ g)

    def _without(self, centres: Tensor, shares: Tensor, logs: Tensor, value: float) -> tuple[Tensor, float]:
        """Return the variances, those that do not matter set to zero, and the log likelihood."""
        for at in range(1, len(logs)):
            trial = logs.clone()
            trial[at] = -torch.inf
            there = -float(self._lost(centres, shares, trial))
            if there > value - _INDIFFERENT:
                logs, value = trial, there
        return logs, value


def certainties(sums: Sums, found: FittedMixture) -> Tensor:
    """Return the inverse covariance of each centre given all rows and memberships, [K, d, d].

    Parameters
    ----------
    sums
        Sums of the clients.
    found
        The mixture.

    Returns
    -------
    Tensor
        [K, d, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture import FittedMixture, certainties
    >>> from coterie.theory.variance_components import Sums
    >>> one = torch.ones(1).double()
    >>> sums = Sums.of([torch.ones(3, 1).double()] * 2, [torch.zeros(3).double()] * 2, torch.zeros(2).long())
    >>> certainties(sums, FittedMixture(one, one[None], 1.0, 0 * one, torch.ones(2, 1).double(), 0.0, 2)).item()
    6.0
    """
    sums = sums.double()
    a, b = sums.xx / found.noise, sums.xy / found.noise
    h, _ = lift(a, b, found.spread.expand(b.shape))
    return torch.einsum("nk,nde->kde", found.membership, h)
