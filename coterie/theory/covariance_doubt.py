"""How sure a linear mixed model is of correlated effects, of variances that clusters have, and of several noises."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from coterie.theory.deviance_search import information_of, slope_of
from coterie.theory.hierarchical import settle
from coterie.theory.mixed_likelihood import Likelihood
from coterie.theory.uncertainty import Effects, client_effects
from coterie.theory.variance_components import Sums

_STEP = 1e-3  # of differences, in logarithms of variances
_MOST_NOISES = 40  # noise variances whose uncertainty is worth its evaluations


def general_effects(model: Likelihood, point: Tensor, sums: Sums, centre: Tensor, sure: Tensor) -> Effects:
    """Return `client_effects` of any likelihood: correlated effects, variances of clusters, several noise variances.

    The uncertainty of variances moves a client's model by its derivative in each number of the point, taken by
    differences; with more than 40 noise variances these count as known.

    Parameters
    ----------
    model
        The likelihood.
    point
        Its best point.
    sums
        Sums of the clients.
    centre
        Centre of each client's cluster, [n, d].
    sure
        Inverse covariance of the centre given all rows, [n, d, d].

    Returns
    -------
    Effects
        Means, covariances, shrinkage.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.covariance_doubt import general_effects
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> ys = [torch.randn(1, generator=draw) + torch.randn(9, generator=draw) for _ in range(25)]
    >>> sums = Sums.of([torch.ones(9, 1)] * 25, ys, torch.zeros(25, dtype=torch.long)).double()
    >>> model = Likelihood(sums, pattern("same", 1), full=True)
    >>> point, _ = model.fit(model.start())
    >>> none = torch.zeros(25, 1).double()
    >>> found = general_effects(model, point, sums, none, 1e9 + none.unsqueeze(-1))
    >>> round(found.error.mean().item(), 2)  # near 1 / sqrt(9 + 1)
    0.31
    """

    def parts(point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigma, within, _ = model.unpack(point)
        return (
            sums.xx / (sigma.unsqueeze(-1) if sigma.dim() else sigma),
            sums.xy / sigma,
            within[sums.clusters],
        )

    a, b, spread = parts(point)
    nothing = torch.zeros(0, 0, dtype=a.dtype)
    found = client_effects(a, b, centre, spread, sure, nothing, model.groups)
    known = range(model.noises) if model.noises > _MOST_NOISES else range(0)
    free = [k for k in model.free(point) if k not in known]
    cover, slopes = covariance_of(model, point, free), []
    for k in free:
        move = torch.zeros_like(point)
        move[k] = _STEP
        ends = []
        for there in (point + move, point - move):
            a, b, spread = parts(there)
            ends.append(settle(a, b, centre, spread))
        slopes.append((ends[0] - ends[1]) / (2 * _STEP))
    if not slopes:
        return found
    along = torch.stack(slopes, -1)
    return replace(found, covariance=found.covariance + along @ cover @ along.mT)


def covariance_of(model: Likelihood, point: Tensor, free: list[int]) -> Tensor:
    """Return the covariance of some numbers of the best point: the inverse of the observed information.

    Parameters
    ----------
    model
        The likelihood.
    point
        Its best point.
    free
        Which numbers.

    Returns
    -------
    Tensor
        [free, free].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.covariance_doubt import covariance_of
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> draw = torch.Generator().manual_seed(0)
    >>> ys = [torch.randn(1, generator=draw) + torch.randn(100, generator=draw) for _ in range(25)]
    >>> sums = Sums.of([torch.ones(100, 1)] * 25, ys, torch.zeros(25, dtype=torch.long))
    >>> model = Likelihood(sums, pattern("same", 1))
    >>> round(covariance_of(model, model.fit(model.start())[0], [0, 1])[1, 1].item(), 2)
    0.08
    """
    places = torch.tensor(free, dtype=torch.long)
    curved = information_of(model.deviance, point, free)[places[:, None], places]
    values, vectors = torch.linalg.eigh(curved)
    least = 1e-4 if not model.full else 1e-9 * float(values.abs().max()) if len(values) else 1.0
    cover: Tensor = vectors @ torch.diag(1 / values.clamp(min=least)) @ vectors.mT
    return cover


def covariance_intervals(
    model: Likelihood, point: Tensor, level: float
) -> dict[str, tuple[float, float, float]]:
    """Return variances and correlations of correlated effects with intervals, and the other variances.

    By the delta method from the observed information: variances in their logarithm, correlations in the inverse
    hyperbolic tangent.

    Parameters
    ----------
    model
        The likelihood, with `full`.
    point
        Its best point.
    level
        Coverage, such as 0.9.

    Returns
    -------
    dict of tuple
        Estimate, lower and upper end by name.

    Examples
    --------
    >>> import torch
    >>> from coterie.data import generate
    >>> from coterie.theory.mixed_likelihood import Likelihood
    >>> from coterie.theory.covariance_doubt import covariance_intervals
    >>> from coterie.theory.variance_components import Sums, pattern
    >>> data = generate.hierarchical_linear(clusters=1, clients=40, features=2, rows=9)
    >>> model = Likelihood(Sums.of(data.xs, data.ys, data.clusters), pattern("each", 2), full=True)
    >>> list(covariance_intervals(model, model.fit(model.start())[0], 0.9))
    ['noise', 'client 0', 'client 1', 'correlation 0, 1']
    """
    from scipy.stats import norm

    reach, free, at = float(norm.ppf(0.5 + level / 2)), model.free(point), model.structure.at.tolist()
    cover = covariance_of(model, point, free)
    several = model.levels > 1

    def transformed(point: Tensor) -> tuple[list[str], Tensor]:
        sigma, within, between = model.unpack(point)
        names = ["noise"] if model.noises == 1 else [f"noise {k}" for k in range(model.noises)]
        values = [sigma.log()] if model.noises == 1 else list(point[: model.noises] + model.scale[0].log())
        for j in range(model.levels):
            before = f"cluster {j}: " if several else ""
            for k, row in enumerate(at):
                names.append(f"{before}client {k}")
                values.append(within[j, row, row].log())
            for k, row in enumerate(at):
                for m, column in enumerate(at[:k]):
                    names.append(f"{before}correlation {m}, {k}")
                    both = (within[j, row, row] * within[j, column, column]).sqrt()
                    values.append((within[j, row, column] / both).clamp(-1 + 1e-9, 1 - 1e-9).atanh())
        if model.sums.k > 1:
            first = [int((model.groups == g).nonzero()[0]) for g in range(model.variances)]
            names += [f"cluster {p}" for p in range(model.variances)]
            values += list(between[first].log())
        return names, torch.stack(values)

    def entry(k: int, point: Tensor) -> Tensor:
        return transformed(point)[1][k]

    names, middle = transformed(point)
    slopes = torch.stack([slope_of(partial(entry, k), point)[free] for k in range(len(names))])
    error = (slopes @ cover * slopes).sum(-1).clamp(min=0).sqrt()
    found = {}
    for name, value, width in zip(names, middle.tolist(), (reach * error).tolist(), strict=True):
        turn = math.tanh if "correlation" in name else math.exp
        if not math.isfinite(value):
            found[name] = (0.0, 0.0, math.inf)
        else:
            found[name] = (turn(value), turn(value - width), turn(min(value + width, 700.0)))
    return found
