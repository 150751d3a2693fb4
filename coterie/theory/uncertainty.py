"""How sure a hierarchical model is: intervals for variances and effects, tests whether clients or clusters differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.theory.deviance_search import information_of
from coterie.theory.hierarchical import lift, scaled, settle, times
from coterie.theory.mixed_likelihood import Likelihood
from coterie.theory.variance_components import Components, Sums

SURE = 0.2  # standard error of a logarithm below which its likelihood is as good as quadratic
_PROFILE_STEPS = 25
_PROFILE_CLOSE = 2e-3  # of the root of the deviance, in standard deviations


@dataclass(frozen=True)
class Effects:
    """Models of the clients with their uncertainty.

    Parameters
    ----------
    estimate
        Posterior means, [n, d].
    covariance
        Posterior covariances, [n, d, d].
    shrinkage
        Share of each coefficient that comes from the centre rather than from the client's rows, [n, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.uncertainty import Effects
    >>> found = Effects(torch.tensor([[3.0]]), torch.tensor([[[0.25]]]), torch.tensor([[0.25]]))
    >>> (found.estimate - 2 * found.error).item(), (found.estimate + 2 * found.error).item()
    (2.0, 4.0)
    """

    estimate: Tensor
    covariance: Tensor
    shrinkage: Tensor

    @property
    def error(self) -> Tensor:
        """Posterior standard deviations, [n, d]."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()

    def row_error(self, client: int, x: Tensor) -> Tensor:
        """Return standard deviations of the scores of a client's rows x [rows, d], noise left out."""
        x = x.to(self.covariance)
        return ((x @ self.covariance[client]) * x).sum(-1).clamp(min=0).sqrt()


def client_effects(
    a: Tensor, b: Tensor, centre: Tensor, spread: Tensor, sure: Tensor, doubt: Tensor, groups: Tensor
) -> Effects:
    """Return the clients' models with conditional variances, those of the centres, and those of the variances.

    The first two are exact for least squares; the last is the first-order term of Kass and Steffey (1989).

    Parameters
    ----------
    a
        A of the clients' losses 1/2 t'At - b't, noise divided out, [n, d, d].
    b
        b of these losses, [n, d].
    centre
        Centre of each client's cluster, [n, d].
    spread
        Variances [n, d] or covariances [n, d, d] of clients around it.
    sure
        Inverse covariance of the centre given all rows, [n, d, d].
    doubt
        Covariance of the estimated logarithms of the variances, [p, p].
    groups
        Which of them each coordinate has, [d]; -1 where clients do not differ.

    Returns
    -------
    Effects
        Means, standard deviations, shrinkage.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.uncertainty import client_effects
    >>> one, none = torch.ones(1, 1, 1).double(), torch.zeros(1, 1).double()
    >>> found = client_effects(one, 2 + none, none, 1 + none, 1e9 * one, none, torch.tensor([0]))
    >>> found.estimate.item(), round(found.error.item(), 3), found.shrinkage.item()
    (1.0, 0.707, 0.5)
    """
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand(a.shape)
    pulled = torch.linalg.solve(identity + scaled(spread, a), identity)
    inside = pulled @ scaled(spread, identity)
    values, vectors = torch.linalg.eigh(sure)
    floor = 1e-10 * values[..., -1:].clamp(min=1e-300)
    above = vectors @ torch.diag_embed(1 / values.clamp(min=floor)) @ vectors.mT
    covariance = inside + pulled @ above @ pulled.mT
    left = b - times(a, centre)
    _, push = lift(a, left, spread)
    slopes = []
    for group in range(len(doubt)):
        mask = (groups == group).to(a.dtype)
        both = spread if spread.dim() == 2 else spread.diagonal(dim1=-2, dim2=-1)
        slopes.append(times(pulled, mask * both * push))
    if slopes:
        along = torch.stack(slopes, -1)
        covariance = covariance + along @ doubt @ along.mT
    estimate = settle(a, b, centre, spread)
    return Effects(estimate, covariance, pulled.diagonal(dim1=-2, dim2=-1).clamp(0, 1))


def doubt_of_variances(model: Likelihood, point: Tensor) -> Tensor:
    """Return the covariance of the logarithms of the clients' variances at the best point.

    Parameters
    ----------
    model
        The likelihood.
    point
        Its best point.

    Returns
    -------
    Tensor
        The inverse of the observed information, [p, p]; zero for variances that are estimated as zero.

    Examples
    --------
    Of a variance seen through n clients with many rows, the logarithm has a variance of about 2 / n.

    >>> import torch
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.uncertainty import doubt_of_variances
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> ys = [torch.randn(1, generator=draw) + torch.randn(100, generator=draw) for _ in range(25)]
    >>> sums = Sums.of([torch.ones(100, 1)] * 25, ys, torch.zeros(25, dtype=torch.long))
    >>> model = Likelihood(sums, pattern("same", 1))
    >>> point, _ = model.fit(model.start())
    >>> round(doubt_of_variances(model, point).item(), 2)
    0.08
    """
    free = [
        k
        for k in range(len(point))
        if bool(point[k] > -15) and not (k < model.noises and model.noise is not None)
    ]
    places = torch.tensor(free)
    curved = information_of(model.deviance, point, free)[places[:, None], places]
    values, vectors = torch.linalg.eigh(curved)
    cover = vectors @ torch.diag(1 / values.clamp(min=1e-4)) @ vectors.mT
    inside = range(model.noises, model.noises + model.variances)
    doubt = torch.zeros(model.variances, model.variances, dtype=point.dtype)
    for i, one in enumerate(inside):
        for j, other in enumerate(inside):
            if one in free and other in free:
                doubt[i, j] = cover[free.index(one), free.index(other)]
    return doubt


class _Profiled(Protocol):
    """A likelihood as a function of several numbers, of which some can be kept as they are."""

    def deviance(self, point: Tensor) -> Tensor:
        """Return -2 log likelihood."""

    def fit(
        self, start: Tensor, fixed: dict[int, float] | None = None, *, tolerance: float = 1e-13
    ) -> tuple[Tensor, float]:
        """Return the best point and the deviance there; some numbers are kept as given."""

    def free(self, point: Tensor) -> list[int]:
        """Return which numbers are estimated and not at an end of their range."""


def profile_interval(
    model: _Profiled, point: Tensor, best: float, at: int, level: float
) -> tuple[float, float]:
    """Return the profile-likelihood interval of one number of the likelihood.

    Parameters
    ----------
    model
        The likelihood.
    point
        Its best point.
    best
        The deviance there.
    at
        Which number.
    level
        Coverage, such as 0.9.

    Returns
    -------
    tuple of float
        Ends on the scale of `point`; minus infinity where a variance may be zero, infinity where nothing bounds it.

    Examples
    --------
    >>> import math, torch
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.uncertainty import profile_interval
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(1)
    >>> ys = [torch.randn(4, generator=draw).double() for _ in range(25)]
    >>> sums = Sums.of([torch.ones(4, 1).double()] * 25, ys, torch.zeros(25, dtype=torch.long))
    >>> model = Likelihood(sums, pattern("same", 1))
    >>> low, high = profile_interval(model, *model.fit(model.start()), 1, 0.9)
    >>> low == -math.inf and high < 2
    True
    """
    here, error, trial = max(float(point[at]), -18.0), _profile_error(model, point, at), point

    def profiled(there: float) -> float:
        nonlocal trial
        trial, deviance = model.fit(trial, {at: there}, tolerance=1e-10)
        return deviance

    return profile_ends(profiled, best, here, error, level)


def profile_ends(
    profiled: Callable[[float], float], best: float, here: float, error: float, level: float
) -> tuple[float, float]:
    """Return where a profile deviance says that the logarithm of a variance has its ends.

    Parameters
    ----------
    profiled
        Smallest deviance with the number kept at a value.
    best
        Smallest deviance of all.
    here
        Value at which it is reached, or where a variance is as good as zero.
    error
        Standard error by which the ends are guessed.
    level
        Coverage, such as 0.9.

    Returns
    -------
    tuple of float
        Lower end, minus infinity where nothing bounds it; upper end, infinity likewise.

    Examples
    --------
    >>> from coterie.theory.uncertainty import profile_ends
    >>> low, high = profile_ends(lambda value: (value / 2) ** 2, 0.0, 0.0, 1.0, 0.9)
    >>> round(low, 2), round(high, 2)
    (-3.29, 3.29)
    """
    from scipy.stats import norm

    aim = float(norm.ppf(0.5 + level / 2))
    low, high = (_profile_end(profiled, best, here, aim, sign * error) for sign in (-1.0, 1.0))
    return low, high


def _profile_error(model: _Profiled, point: Tensor, at: int) -> float:
    """Return the standard error of a number, by which an end of its profile interval is guessed."""
    free = model.free(point)
    if at not in free:
        return 1.0
    places = torch.tensor(free)
    cover = torch.linalg.pinv(
        information_of(model.deviance, point, free)[places[:, None], places], hermitian=True
    )
    return float(cover.diagonal()[free.index(at)].clamp(1e-6, 4.0).sqrt())


def _profile_end(
    profiled: Callable[[float], float], best: float, here: float, aim: float, error: float
) -> float:
    """Return where the root of the profile deviance is `aim` on one side: false position, as it is nearly linear."""
    inside, outside, there = here, math.inf if error > 0 else -math.inf, here + aim * error
    for _ in range(_PROFILE_STEPS):
        if not -19.0 < there < 20.0:
            there = math.copysign(19.0, there)
        root = math.sqrt(max(profiled(there) - best, 0.0))
        if abs(root - aim) < _PROFILE_CLOSE:
            return there
        if root < aim:
            if abs(there) >= 19.0:
                return math.copysign(math.inf, error)
            inside = there
        else:
            outside = there
        guess = here + (there - here) * min(max(aim / max(root, 1e-3), 0.2), 3.0)
        between = min(inside, outside) < guess < max(inside, outside)
        there = guess if between else 0.5 * (inside + outside)
    return there


def boundary_chance(statistic: float, variances: int) -> float:
    """Return the p-value of a likelihood ratio when all of several variances are zero.

    Zero is at the boundary, where each is estimated as zero half of the time: the distribution is a mixture of
    chi-squares with binomial weights (Self and Liang 1987; exact for one variance, an approximation for more).

    Parameters
    ----------
    statistic
        Deviance without the variances minus deviance with them.
    variances
        How many.

    Returns
    -------
    float
        The p-value.

    Examples
    --------
    >>> from coterie.theory.uncertainty import boundary_chance
    >>> round(boundary_chance(2.7055, 1), 3), boundary_chance(0.0, 1)
    (0.05, 1.0)
    """
    from scipy.stats import chi2

    if statistic <= 0:
        return 1.0
    weights = [math.comb(variances, k) / 2**variances for k in range(variances + 1)]
    return float(sum(weight * chi2.sf(statistic, k) for k, weight in enumerate(weights) if k > 0))


def difference_tests(model: Likelihood, point: Tensor, best: float) -> dict[str, float]:
    """Return p-values of "clients differ" and, with several clusters, "clusters differ", by likelihood ratio.

    Parameters
    ----------
    model
        The likelihood, not restricted.
    point
        Its best point.
    best
        The deviance there.

    Returns
    -------
    dict of float
        p-values by name.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.uncertainty import difference_tests
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> def chance(spread):
    ...     draw = torch.Generator().manual_seed(0)
    ...     ys = [spread * torch.randn(1, generator=draw) + torch.randn(4, generator=draw) for _ in range(25)]
    ...     sums = Sums.of([torch.ones(4, 1)] * 25, ys, torch.zeros(25, dtype=torch.long))
    ...     model = Likelihood(sums, pattern("same", 1))
    ...     return difference_tests(model, *model.fit(model.start()))["clients differ"]
    >>> chance(2.0) < 0.001, chance(0.0) > 0.05
    (True, True)
    """
    first, last = model.noises, len(point) - model.variances
    parts = {"clients differ": range(first, last)}
    if model.sums.k > 1:
        parts["clusters differ"] = range(last, len(point))
    found = {}
    for name, places in parts.items():
        nothing = 0.0 if model.full and name == "clients differ" else -torch.inf
        without = model.fit(point.clamp(min=-15.0), {k: nothing for k in places})[1]
        found[name] = boundary_chance(without - best, len(places))
    return found


def least_squares_doubt(
    sums: Sums, groups: Tensor, near: Components, **settings: Any
) -> tuple[Likelihood, Tensor, float]:
    """Return the likelihood of least squares with its best point and deviance, searched near known variances.

    Parameters
    ----------
    sums
        Sums of the clients.
    groups
        Which variance each coordinate has, from `pattern`.
    near
        Variances from which the search starts.
    **settings
        Further settings of `Likelihood`: per_cluster, full, noise_groups, restricted.

    Returns
    -------
    tuple of Likelihood, Tensor and float
        The likelihood, its best point and the deviance there.

    Examples
    --------
    >>> from coterie.data import generate
    >>> from coterie.theory.mixed_likelihood import maximum_likelihood
    >>> from coterie.theory.uncertainty import least_squares_doubt
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> data = generate.hierarchical_linear(clusters=5, clients=5, features=2, rows=9)
    >>> sums = Sums.of(data.xs, data.ys, data.clusters)
    >>> near = maximum_likelihood(sums, "same")
    >>> model, point, best = least_squares_doubt(sums, pattern("same", 2), near)
    >>> abs(model.components(point).noise / near.noise - 1) < 0.01
    True
    """
    model = Likelihood(sums, groups, **settings)
    return model, *model.fit(model.start(near), tolerance=1e-11)
