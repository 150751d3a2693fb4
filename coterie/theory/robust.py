"""Hierarchical linear models with heavy tails: a client in other units keeps its own fit and moves nobody else.

All rows of a client have a t-distribution with nu degrees of freedom (Pinheiro, Liu, Wu 2001): its covariance X S X' +
sigma^2 I is divided by a weight a_i, a priori Gamma(nu/2, nu/2). Normal tails are nu = infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.theory.hierarchical import centres, lift, scaled, times
from coterie.theory.mixed_likelihood import Likelihood
from coterie.theory.variance_components import Components, Sums

MOST_STEPS = 30
SUSPICIOUS = 1e-4  # chance, over all clients, of distances at which the tails are looked at
GIANT = 2000.0  # times the information per row of the median client: features are 45 times as large
STRANGE = 0.05  # weight below which a client is a stranger rather than in the tails
_DEGREES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0, 200.0)


@dataclass(frozen=True)
class Robust:
    """Variances under heavy tails, and how far each client is trusted.

    Parameters
    ----------
    components
        The variances.
    trust
        Expected weights a_i, [n, 1]; near 0 for a client that does not fit, about 1 for the others.
    nu
        Degrees of freedom.
    deviance
        -2 log likelihood.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.robust import Robust
    >>> from coterie.theory.variance_components import Components
    >>> variances = Components(noise=1.0, within=torch.ones(1, 1), between=torch.zeros(1))
    >>> found = Robust(variances, trust=torch.tensor([[1.1], [0.9], [0.0]]), nu=2.0, deviance=31.4)
    >>> (found.trust < 0.05).squeeze(-1).tolist()  # strangers
    [False, False, True]
    """

    components: Components
    trust: Tensor
    nu: float
    deviance: float


def distances(sums: Sums, found: Components) -> Tensor:
    """Return the squared distance of each client's rows from what its centre predicts, in their own units, [n].

    Under normal tails it has as many degrees of freedom as the client has rows.

    Parameters
    ----------
    sums
        Sums of the clients.
    found
        The variances.

    Returns
    -------
    Tensor
        [n].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.robust import distances
    >>> from coterie.theory.variance_components import Components, Sums
    >>> rows = [torch.ones(1, 1)] * 3
    >>> sums = Sums.of(rows, [torch.tensor([v]) for v in (0.0, 0.0, 6.0)], torch.zeros(3, dtype=torch.long))
    >>> distances(sums, Components(1.0, torch.ones(1, 1), torch.zeros(1))).tolist()
    [2.0, 2.0, 8.0]
    """
    sigma = found.noise_of()
    a = sums.xx / (sigma.unsqueeze(-1) if isinstance(sigma, Tensor) else sigma)
    b, q = sums.xy / sigma, (sums.yy / sigma).squeeze(-1)
    spread = found.within[sums.clusters]
    h, g = sums.trusted(*lift(a, b, spread))
    middle, _ = centres(h, g, sums.clusters, found.between.expand(found.within.shape[:2]))
    w = middle[sums.clusters]
    left = b - times(a, w)
    alone = q - 2 * (b * w).sum(-1) + (w * times(a, w)).sum(-1)
    _, lifted = lift(a, left, spread)
    return alone - (left * scaled(spread, lifted.unsqueeze(-1)).squeeze(-1)).sum(-1)


def looks_heavy(sums: Sums, found: Components) -> bool:
    """Return True if some client is further away than normal tails make likely.

    Parameters
    ----------
    sums
        Sums of the clients.
    found
        The variances.

    Returns
    -------
    bool
        Whether the largest of `distances` has a chance below 1 in 10,000, over all clients.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.robust import looks_heavy
    >>> from coterie.theory.variance_components import Components, Sums
    >>> variances = Components(1.0, torch.ones(1, 1), torch.zeros(1))
    >>> def heavy(*values):
    ...     ys = [torch.tensor([value]) for value in values]
    ...     return looks_heavy(Sums.of([torch.ones(1, 1)] * 3, ys, torch.zeros(3, dtype=torch.long)), variances)
    >>> heavy(0.0, 0.0, 6.0), heavy(0.0, 0.0, 60.0)
    (False, True)
    """
    from scipy.stats import chi2

    rows = sums.rows.squeeze(-1).clamp(min=1)
    apart = distances(sums, found).clamp(min=0)
    (apart,) = sums.trusted(apart)
    chance = chi2.sf(apart.numpy(), rows.numpy())
    return bool(chance.min() * len(rows) < SUSPICIOUS)  # clients without rows have distance 0


def on_another_scale(information: Tensor, rows: Tensor) -> Tensor:
    """Return which clients have rows that say far more than those of the others, as features in other units do.

    Such a client would decide the centre of a model of classes or counts alone, wherever its coefficients are
    (leverage: Cantoni and Ronchetti 2001 bound it likewise). None is where there are fewer than four clients, or where
    more than a quarter are.

    Parameters
    ----------
    information
        Diagonals of the second derivatives of the clients' losses at one point, [n, d].
    rows
        Their numbers of rows, [n, 1].

    Returns
    -------
    Tensor
        bool [n, 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.robust import on_another_scale
    >>> squares = torch.tensor([[10.0, 5.0], [12.0, 5.0], [1e7, 5.0], [8.0, 5.0]])
    >>> on_another_scale(squares, torch.full((4, 1), 20.0)).flatten().tolist()
    [False, False, True, False]
    """
    each = torch.where(information > 0, information / rows.clamp(min=1), torch.nan)
    usual = each.nanmedian(0).values.nan_to_num(nan=torch.inf)
    odd = (each > GIANT * usual).any(-1, keepdim=True)
    few = 0 < int(odd.sum()) <= len(odd) // 4
    return odd if few else torch.zeros_like(odd)


def heavy_tails(sums: Sums, groups: Tensor, start: Components, *, restricted: bool = False) -> Robust:
    """Fit the model with t-distributed clients by EM, the degrees of freedom by likelihood.

    Parameters
    ----------
    sums
        Sums of the clients.
    groups
        Which variance each coordinate has, from `pattern`.
    start
        Variances under normal tails.
    restricted
        Whether variances maximise the restricted likelihood.

    Returns
    -------
    Robust
        Variances, weights and degrees of freedom.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixed_likelihood import maximum_likelihood
    >>> from coterie.theory.robust import heavy_tails
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> ys = [torch.randn(1, generator=draw) + torch.randn(8, generator=draw) for _ in range(12)]
    >>> ys[3] = 1000 * ys[3]
    >>> sums = Sums.of([torch.ones(8, 1)] * 12, ys, torch.zeros(12, dtype=torch.long))
    >>> found = heavy_tails(sums, pattern("same", 1), maximum_likelihood(sums, "same"))
    >>> found.components.noise < 3 and found.trust[3].item() < 1e-4
    True
    """
    sums = sums.double()
    rows = sums.rows.squeeze(-1)
    nu, found, best, trust = 4.0, start, math.inf, torch.ones_like(sums.rows)
    for _ in range(MOST_STEPS):
        apart = distances(replace(sums, trust=trust), found).clamp(min=0)
        trust = ((nu + rows) / (nu + apart)).unsqueeze(-1)
        model = Likelihood(replace(sums, trust=trust), groups, restricted=restricted)
        point, _ = model.fit(model.start(found), steps=8)  # EM only asks for a better point
        found = model.components(point)
        apart = distances(replace(sums, trust=trust), found).clamp(min=0)
        inside = model.deviance(point) - (trust.squeeze(-1) * apart).sum()  # log determinants
        scores = {one: float(inside) + _tails(apart, rows, one) for one in _DEGREES}
        nu = min(scores, key=lambda one: scores[one])
        settled, best = best - scores[nu] < 1e-6 * (1 + abs(scores[nu])), min(best, scores[nu])
        if settled:
            break
    found = model.components(model.without(point, float(model.deviance(point))))
    return Robust(found, trust, nu, best)


def without_strangers(sums: Sums, groups: Tensor, start: Components, *, restricted: bool = False) -> Robust:
    """Fit heavy tails, and where a few clients explain them, the normal model without those.

    Clients with a weight below 0.05 get weight 0 and say nothing about variances; if the others then fit normal tails,
    each of them counts fully.

    Parameters
    ----------
    sums
        Sums of the clients.
    groups
        Which variance each coordinate has, from `pattern`.
    start
        Variances under normal tails.
    restricted
        Whether variances maximise the restricted likelihood.

    Returns
    -------
    Robust
        Variances, weights and degrees of freedom (infinite if the others are normal).

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixed_likelihood import maximum_likelihood
    >>> from coterie.theory.robust import without_strangers
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> ys = [torch.randn(1, generator=draw) + torch.randn(8, generator=draw) for _ in range(12)]
    >>> ys[3] = 1000 * ys[3]
    >>> sums = Sums.of([torch.ones(8, 1)] * 12, ys, torch.zeros(12, dtype=torch.long))
    >>> found = without_strangers(sums, pattern("same", 1), maximum_likelihood(sums, "same"))
    >>> found.nu, (found.trust == 0).nonzero()[:, 0].tolist()
    (inf, [3])
    """
    found = heavy_tails(sums, groups, start, restricted=restricted)
    strange = found.trust < STRANGE
    trust, kept = torch.where(strange, 0.0, 1.0).double(), sums.kept(~strange)
    model = Likelihood(kept, groups, restricted=restricted)
    point, value = model.fit(model.start(found.components))
    normal = model.components(model.without(point, value))
    if bool(strange.any()) and not looks_heavy(kept, normal):
        return Robust(normal, trust, math.inf, found.deviance)
    return found


def _tails(apart: Tensor, rows: Tensor, nu: float) -> float:
    """Return -2 log density of t beyond the normal's log determinants and constants."""
    half = 0.5 * (nu + rows)
    constant = torch.lgamma(half) - math.lgamma(0.5 * nu) - 0.5 * rows * math.log(0.5 * nu)
    return float(-2 * (constant - half * torch.log1p(apart / nu)).sum())
