"""The likelihood of the hierarchical linear model, from sums over rows, and the variances that maximise it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.theory.deviance_search import lowest, sharpened
from coterie.theory.elimination import eliminate
from coterie.theory.groups import group_sum
from coterie.theory.hierarchical import pseudo_solve, times
from coterie.theory.marginal import Structure
from coterie.theory.variance_components import Components, Sums, pattern, residual

_SMALLEST = 1e-9  # variances are sought down to this share of their scale
_INDIFFERENT = 1e-3  # a variance that lowers the deviance by less than this is called zero
_CLOSE = 1e-8  # relative; deviances that are only compared with each other are found to this
_NOISE_ROWS = 4.0  # rows of average noise that each of several noise variances is thought to have seen
_GIANT = 100.0  # times the median sum of squares of a feature, beyond which a client's units are other ones
LOWEST, HIGHEST = math.log(_SMALLEST) - 1, 25.0  # logarithms between which variances are sought


@dataclass(frozen=True)
class Likelihood:
    """-2 log likelihood of the sums as a function of one vector: noise, variances of clients, of cluster centres.

    Numbers are logarithms of variances in units of their scale; with `full` those of clients are entries of the
    triangular root of their covariance, in units of the root of their scale.

    Parameters
    ----------
    sums
        Sums of the clients.
    groups
        Which variance each coordinate has, [d], from `pattern`.
    per_cluster
        Whether each cluster has variances of its own.
    noise
        sigma^2 if it is known.
    restricted
        Whether the likelihood is the restricted one.
    full
        Whether effects of a client may be correlated.
    noise_groups
        Which noise variance each client has, [n], where there are several. They have a common prior worth four rows.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> data = generate.hierarchical_linear(clusters=5, clients=5, features=2, rows=9)
    >>> likelihood = Likelihood(Sums.of(data.xs, data.ys, data.clusters), pattern("each", 2))
    >>> likelihood.names
    ['noise', 'client 0', 'client 1', 'cluster 0', 'cluster 1']
    """

    sums: Sums
    groups: Tensor
    per_cluster: bool = False
    noise: float | None = None
    restricted: bool = False
    full: bool = False
    noise_groups: Tensor | None = None
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", self.sums.double())
        object.__setattr__(self, "groups", self.groups.to(self.sums.clusters.device))
        object.__setattr__(self, "scale", _scales(self.sums, self.groups, self.noise))

    @property
    def structure(self) -> Structure:
        """Which entries of the covariance's root may differ from zero."""
        return Structure.of(self.groups, full=self.full)

    @property
    def levels(self) -> int:
        """Number of sets of variances of clients."""
        return self.sums.k if self.per_cluster else 1

    @property
    def noises(self) -> int:
        """Number of noise variances."""
        return 1 if self.noise_groups is None else int(self.noise_groups.max()) + 1

    @property
    def variances(self) -> int:
        """Number of variances of one level."""
        return int(self.groups.max()) + 1

    @property
    def names(self) -> list[str]:
        """What each number is."""
        noise = ["noise"] if self.noises == 1 else [f"noise {k}" for k in range(self.noises)]
        inside = [f"client {p}" for p in range(self.structure.p)]
        if self.per_cluster:
            inside = [f"cluster {j}: {name}" for j in range(self.levels) for name in inside]
        return noise + inside + [f"cluster {p}" for p in range(self.variances)]

    def start(self, near: Components | None = None) -> Tensor:
        """Return where a search begins: at the scales, or near other variances."""
        first = torch.tensor([int((self.groups == group).nonzero()[0]) for group in range(self.variances)])
        if near is None:
            logs = torch.zeros(self.levels + 1, self.variances, dtype=torch.float64)
            noise = torch.zeros(self.noises, dtype=torch.float64)
        else:
            within = near.within if near.within.dim() == 2 else near.within.diagonal(dim1=-2, dim2=-1)
            known = torch.cat([within[: self.levels, first], near.between[None, first]])
            logs = (known / self.scale[1:]).log().clamp(min=-5.0, max=HIGHEST - 1)
            noise = (torch.full((self.noises,), near.noise).double() / self.scale[0]).log().clamp(-5.0, 20.0)
        inside = logs[:-1]
        if self.full:
            at = self.structure
            inside = torch.zeros(self.levels, at.p, dtype=torch.float64)
            inside[:, at.row == at.column] = (0.5 * logs[:-1]).exp()[:, self.groups[at.at]]
        return torch.cat([noise, inside.flatten(), logs[-1]])

    def unpack(self, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the noise [] or [n, 1], s_j^2 [k, d] or covariances [k, d, d], and s0^2 [d]."""
        k, d = self.sums.k, self.sums.xy.shape[-1]
        logs, inside, above = point.split([self.noises, self.levels * self.structure.p, self.variances])
        noise = logs.exp() * self.scale[0]
        if self.noise is not None:
            noise = torch.full_like(noise, self.noise)
        sigma = noise[0] if self.noise_groups is None else noise[self.noise_groups].unsqueeze(-1)
        varies, place = self.groups >= 0, self.groups.clamp(min=0)
        above = above if k > 1 else torch.full_like(above, -torch.inf)  # one cluster is the common centre

        def variances(logs: Tensor) -> Tensor:
            return torch.where(varies, (logs.exp() * self.scale[1:])[..., place], 0.0)

        inside = inside.view(self.levels, -1)
        if self.full:
            at = self.structure
            unit = self.scale[1:].sqrt()[self.groups[at.at[at.row]]]
            root = at.factor(inside * unit)
            return sigma, (root @ root.mT).expand(k, d, d), variances(above)
        return sigma, variances(inside).expand(k, d), variances(above)

    def deviance(self, point: Tensor) -> Tensor:
        """Return the deviance at a point, differentiable; with several noise variances, that of their prior too."""
        value = deviance(self.sums, *self.unpack(point), restricted=self.restricted)
        if self.noises > 1:
            logs = point[: self.noises]
            middle = logs.mean()
            value = value + _NOISE_ROWS * ((middle - logs).exp() + logs - middle - 1).sum()
        return value

    def fit(
        self,
        start: Tensor,
        fixed: dict[int, float] | None = None,
        steps: int = 15000,
        tolerance: float = 1e-13,
    ) -> tuple[Tensor, float]:
        """Return the point with the smallest deviance, and that; some numbers may be kept as they are given."""
        bounds = [(LOWEST, HIGHEST)] * len(start)
        if self.full:
            inside = range(self.noises, self.noises + self.levels * self.structure.p)
            bounds = [(-1e5, 1e5) if k in inside else bound for k, bound in enumerate(bounds)]
        return lowest(self.deviance, start, fixed, bounds, steps, tolerance)

    def free(self, point: Tensor) -> list[int]:
        """Return which numbers are estimated and not at an end of their range."""
        first = self.noises if self.noise is not None else 0
        inside = range(self.noises, self.noises + self.levels * self.structure.p) if self.full else range(0)
        last = len(point) - self.variances if self.sums.k == 1 else len(point)
        return [k for k in range(first, last) if k in inside or LOWEST + 3 < float(point[k]) < HIGHEST - 1]

    def sharpened(self, point: Tensor) -> Tensor:
        """Return the best point with its last digits right."""
        return sharpened(self.deviance, point, self.free(point))

    def without(self, point: Tensor, best: float) -> Tensor:
        """Return the point with variances set to zero that do not matter."""
        logs = [*range(self.noises, len(point))]
        if self.full:
            logs = logs[self.levels * self.structure.p :]
        for at in logs:
            trial = point.clone()
            trial[at] = -torch.inf
            if float(self.deviance(trial)) < best + _INDIFFERENT:
                point = trial
        return point

    def components(self, point: Tensor) -> Components:
        """Return the variances at a point."""
        sigma, within, between = self.unpack(point)
        noises = None if self.noise_groups is None else sigma
        return Components(float(sigma.log().mean().exp()), within.clone(), between.clone(), noises)


def maximum_likelihood(
    sums: Sums,
    effects: str | Tensor = "same",
    *,
    per_cluster: bool = False,
    noise: float | None = None,
    restricted: bool = False,
    near: Components | None = None,
    full: bool = False,
    noise_groups: Tensor | None = None,
    roughly: bool = False,
) -> Components:
    """Estimate variances by (restricted) maximum likelihood.

    Parameters
    ----------
    sums
        Sums of the clients.
    effects
        As in `pattern`, or what that returns.
    per_cluster
        Whether each cluster has a variance of its own.
    noise
        sigma^2 if it is known.
    restricted
        Whether to maximise the restricted likelihood.
    near
        Variances to start the search from.
    full
        Whether effects of a client may be correlated.
    noise_groups
        Which noise variance each client has, where there are several, [n].
    roughly
        Whether the first digits are enough, as for sums that are about to change.

    Returns
    -------
    Components
        The variances; one that does not matter is exactly zero.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.mixed_likelihood import maximum_likelihood
    >>> from coterie.theory.variance_components import Sums
    >>> data = generate.hierarchical_linear(clusters=20, clients=20, features=5, rows=20)
    >>> found = maximum_likelihood(Sums.of(data.xs, data.ys, data.clusters))
    >>> round(found.noise, 1), round(found.within[0, 0].item(), 1), round(found.between[0].item(), 1)
    (1.0, 0.9, 0.9)
    """
    groups = pattern(effects, sums.xy.shape[-1]) if isinstance(effects, str) else effects
    model = Likelihood(sums, groups, per_cluster, noise, restricted, full, noise_groups)
    start = model.start(near)
    if full and near is None:
        simple = Likelihood(sums, groups, per_cluster, noise, restricted, False, noise_groups)
        start = model.start(simple.components(simple.fit(simple.start())[0]))
    point, best = model.fit(start, tolerance=_CLOSE) if roughly else model.fit(start)
    return model.components(model.without(point if roughly else model.sharpened(point), best))


def best_effects(
    sums: Sums,
    candidates: dict[str, Tensor],
    *,
    noise: float | None = None,
    restricted: bool = False,
    near: Components | None = None,
) -> str:
    """Return the name of the effects with the smallest AIC, -2 log marginal likelihood + 2 variances.

    Parameters
    ----------
    sums
        Sums of the clients.
    candidates
        Groups of coordinates, as `pattern` returns them, by name; the first wins ties.
    noise
        sigma^2 if it is known.
    restricted
        Whether the likelihood is the restricted one.
    near
        Variances to start the searches from.

    Returns
    -------
    str
        A name.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import generate
    >>> from coterie.theory.mixed_likelihood import best_effects
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> data = generate.hierarchical_linear(clusters=5, clients=8, features=3, rows=9)
    >>> names = {name: pattern(name, 3) for name in ("intercept", "same", "each")}
    >>> best_effects(Sums.of(data.xs, data.ys, data.clusters), names)
    'same'
    """
    scores = {}
    for name, groups in candidates.items():
        model = Likelihood(sums, groups, noise=noise, restricted=restricted)
        found = model.fit(model.start(near), tolerance=_CLOSE)[1]
        scores[name] = found + 2 * (1 + (sums.k > 1)) * model.variances
    return min(scores, key=lambda name: scores[name])


def deviance(
    sums: Sums, noise: Tensor, within: Tensor, between: Tensor, *, restricted: bool = False
) -> Tensor:
    """Return -2 log likelihood, differentiable, with the common centre at its best.

    Parameters
    ----------
    sums
        Sums of the clients.
    noise
        sigma^2, or sigma_i^2 of each client [n, 1].
    within
        s_j^2, [k, d], or covariances [k, d, d].
    between
        s0^2, [d].
    restricted
        Whether to return the restricted likelihood.

    Returns
    -------
    Tensor
        The deviance, a scalar.

    Examples
    --------
    >>> import math, torch
    >>> from coterie.theory.mixed_likelihood import deviance
    >>> from coterie.theory.variance_components import Sums
    >>> sums = Sums.of([torch.ones(2, 1)], [torch.tensor([0.0, 2.0])], torch.tensor([0]))
    >>> none = torch.zeros(1)
    >>> round(deviance(sums, torch.tensor(1.0), none[None], none).item() - 2 * math.log(2 * math.pi), 3)
    2.0
    """
    a = sums.xx / (noise.unsqueeze(-1) if noise.dim() else noise)
    b, q = sums.xy / noise, sums.yy / noise
    total = (sums.rows * (noise.log() + math.log(2 * math.pi))).sum()
    spread = within[sums.clusters]
    for clusters in (sums.clusters, torch.zeros_like(torch.arange(len(within)))):
        logarithm, h, g, explained = eliminate(a, b, spread)
        total, q = total + logarithm.sum(), q - explained
        count = 1
        if clusters is sums.clusters:
            count = len(within)
            h, g, q = sums.trusted(h, g, q)
        a, b, q = (group_sum(part, clusters, count) for part in (h, g, q))
        spread = between.expand(count, -1)
    a, b = a.squeeze(0), b.squeeze(0)
    common = pseudo_solve(a.detach(), b.detach())
    total = total + q.sum() - 2 * b @ common + common @ times(a, common)
    return total + torch.logdet(a) if restricted else total


def _without_giants(information: Tensor, rows: Tensor) -> Tensor:
    """Return each client's sums of squares [n, d], at most 100 times as large per row as the median client's.

    A client whose features have other units would otherwise put the search where variances of the others are lost.
    """
    share = torch.where(rows > 0, rows, 1.0)
    known = torch.where(information > 0, information / share, torch.nan)
    most = _GIANT * known.nanmedian(0).values.nan_to_num(nan=torch.inf)
    return torch.minimum(information, most * share)


def _scales(sums: Sums, groups: Tensor, noise: float | None) -> Tensor:
    """Return sizes to begin with: of the noise, then of the variance of each group of coordinates."""
    count = float(sums.rows.sum()) or float(len(sums.rows))
    if noise is None:
        left = float(residual(sums.xx.sum(0), sums.xy.sum(0), sums.yy.sum(0)))
        noise = max(left / count, 1e-30)
    information = _without_giants(sums.xx.diagonal(dim1=-2, dim2=-1), sums.rows).sum(0) / count
    inside = groups[groups >= 0]
    size = information.new_zeros(int(groups.max()) + 1).index_add_(0, inside, information[groups >= 0])
    size = (size / torch.bincount(inside)).clamp(min=1e-12 * max(float(size.max()), 1e-300))
    return torch.cat([information.new_tensor([noise]), 0.5 * noise / size])
