"""How sure a generalised linear mixed model is of its variances: psi, the entries of the root of the covariance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from coterie.theory.deviance_search import slope_of
from coterie.theory.hierarchical import settle
from coterie.theory.marginal import Structure
from coterie.theory.uncertainty import Effects, client_effects
from coterie.theory.variance_components import Sums

_STEP = 1e-3  # of differences, as a share of psi
_LEAST = 1e-9  # share of the largest information below which nothing is known


def psi_cover(information: Tensor, count: int) -> Tensor:
    """Return the covariance of psi, the last numbers of a point, from the information about all of them.

    Parameters
    ----------
    information
        Second derivative of -log likelihood in (w, psi).
    count
        Length of psi over all clusters.

    Returns
    -------
    Tensor
        [count, count].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.psi_doubt import psi_cover
    >>> psi_cover(torch.diag(torch.tensor([4.0, 16.0])), 1).tolist()
    [[0.0625]]
    """
    values, vectors = torch.linalg.eigh(information.double())
    cover: Tensor = vectors @ torch.diag(1 / values.clamp(min=_LEAST * float(values[-1]))) @ vectors.mT
    return cover[-count:, -count:]


def psi_intervals(
    structure: Structure, psi: Tensor, cover: Tensor, level: float, *, full: bool
) -> dict[str, tuple[float, float, float]]:
    """Return variances, and correlations of correlated effects, with intervals by the delta method.

    Variances in their logarithm, correlations in the inverse hyperbolic tangent.

    Parameters
    ----------
    structure
        Which coordinates vary.
    psi
        [levels, p], a row for each cluster that has variances of its own.
    cover
        Covariance of psi, flat.
    level
        Coverage, such as 0.9.
    full
        Whether effects are correlated.

    Returns
    -------
    dict of tuple
        Estimate, lower and upper end by name.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal import Structure
    >>> from coterie.theory.psi_doubt import psi_intervals
    >>> one = torch.ones(1, 1).double()
    >>> found = psi_intervals(Structure.of(torch.tensor([0])), one, 0.01 * one, 0.9, full=False)
    >>> [round(value, 2) for value in found["client 0"]]
    [1.0, 0.72, 1.39]
    """
    from scipy.stats import norm

    named = _named(structure, len(psi), full=full)
    reach, found = float(norm.ppf(0.5 + level / 2)), {}
    for name, value_at in named.items():
        middle, slope = float(value_at(psi.flatten())), slope_of(value_at, psi.flatten())
        width = reach * float((slope @ cover @ slope).clamp(min=0).sqrt())
        turn = math.tanh if "correlation" in name else math.exp
        if math.isfinite(middle) and math.isfinite(width):
            found[name] = (turn(middle), turn(middle - width), turn(min(middle + width, 700.0)))
        else:
            found[name] = (0.0, 0.0, math.inf)
    return found


def _named(structure: Structure, levels: int, *, full: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, by name, functions of flat psi: logarithms of variances, correlations as inverse hyperbolic tangents."""

    def covariance(psi: Tensor, j: int) -> Tensor:
        root = structure.factor(psi.view(levels, -1))[j][structure.at]
        return root @ root.mT

    def variance(psi: Tensor, j: int, k: int) -> Tensor:
        return covariance(psi, j)[k, k].log()

    def correlation(psi: Tensor, j: int, k: int, m: int) -> Tensor:
        found = covariance(psi, j)
        return (found[k, m] / (found[k, k] * found[m, m]).sqrt()).clamp(-1 + 1e-9, 1 - 1e-9).atanh()

    first = (
        range(structure.q) if full else [structure.parameter.tolist().index(p) for p in range(structure.p)]
    )
    named: dict[str, Callable[[Tensor], Tensor]] = {}
    for j in range(levels):
        before = f"cluster {j}: " if levels > 1 else ""
        for number, k in enumerate(first):
            named[f"{before}client {number}"] = partial(variance, j=j, k=k)
        for k in first if full else ():
            for m in range(k):
                named[f"{before}correlation {m}, {k}"] = partial(correlation, j=j, k=k, m=m)
    return named


def psi_effects(
    structure: Structure, psi: Tensor, cover: Tensor, sums: Sums, centre: Tensor, sure: Tensor
) -> Effects:
    """Return clients' models with their uncertainty, that of psi included to first order (Kass and Steffey 1989).

    Parameters
    ----------
    structure
        Which coordinates vary.
    psi
        [levels, p].
    cover
        Covariance of psi, flat.
    sums
        The clients' quadratic models at their modes, with noise 1.
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
    >>> from coterie.theory.marginal import Structure
    >>> from coterie.theory.psi_doubt import psi_effects
    >>> from coterie.theory.variance_components import Sums
    >>> one, none = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    >>> sums = Sums(one.unsqueeze(0), 2 * one, none, none, torch.tensor([0]), 1)
    >>> found = psi_effects(Structure.of(torch.tensor([0])), one, 0 * one, sums, none, 1e9 * one.unsqueeze(0))
    >>> found.estimate.item(), round(found.error.item(), 3)
    (1.0, 0.707)
    """

    def spread(psi: Tensor) -> Tensor:
        root = structure.factor(psi)
        return (root @ root.mT)[sums.clusters if len(psi) > 1 else torch.zeros_like(sums.clusters)]

    nothing = torch.zeros(0, 0, dtype=psi.dtype)
    found = client_effects(sums.xx, sums.xy, centre, spread(psi), sure, nothing, nothing)
    slopes, size = [], float(psi.abs().max().clamp(min=1e-6))
    for k in range(psi.numel()):
        move = torch.zeros(psi.numel(), dtype=psi.dtype, device=psi.device)
        move[k] = _STEP * size
        ends = [
            settle(sums.xx, sums.xy, centre, spread(psi + sign * move.view_as(psi))) for sign in (1.0, -1.0)
        ]
        slopes.append((ends[0] - ends[1]) / (2 * _STEP * size))
    along = torch.stack(slopes, -1)
    return replace(found, covariance=found.covariance + along @ cover @ along.mT)
