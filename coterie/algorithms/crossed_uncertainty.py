"""How sure a model with crossed or nested grouping columns is of its variances and effects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.algorithms.crossed_cells import cell_sums, layout
from coterie.algorithms.crossed_modes import ModeSearch, ridge
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.crossed import Crossed
from coterie.theory.crossed_posterior import CrossedPosterior
from coterie.theory.laplace import descend
from coterie.theory.uncertainty import SURE, boundary_chance, profile_ends, profile_interval

if TYPE_CHECKING:
    from coterie.algorithms.hierarchical import Hierarchical

_SMALL = -6.0  # logarithm of a variance near zero, from which a search still moves
_WIDEST = 2.0  # standard error by which the ends of an interval are guessed at most


def crossed_posterior(method: Hierarchical, fed: Federation, s: State) -> tuple[Tensor, CrossedPosterior]:
    """Return the ids of clients that answered, and their coefficients, the levels' effects, and their uncertainty."""
    at = layout(fed)
    assert at is not None
    replies = method.ask(fed, s, at)
    sums = cell_sums(replies, at)
    noise = None if fed.model.has_statistics else 1.0
    model = Crossed(sums, s.client_groups, at.names, noise=noise, ridge=ridge(fed, at, sums.rows))
    doubt = torch.zeros(len(s.variances), len(s.variances), dtype=torch.float64)
    doubt[-len(s.information) :, -len(s.information) :] = _crossed_doubt(
        s, len(s.variances) - len(s.information)
    )
    return replies.ids, CrossedPosterior(model, s.variances, doubt)


def _crossed_doubt(s: State, first: int) -> Tensor:
    """Return the covariance of the logarithms of variances from the `first` on; 0 where one is zero."""
    values = s.variances[first:]
    information = s.information[-len(values) :, -len(values) :]
    known = ((information.diagonal() > 0) & (values > 0)).nonzero().squeeze(-1)
    doubt = torch.zeros_like(information)
    doubt[known[:, None], known] = torch.linalg.pinv(information[known[:, None], known], hermitian=True)
    return doubt


def crossed_variances(
    method: Hierarchical, fed: Federation, s: State, level: float
) -> dict[str, tuple[float, float, float]]:
    """Return estimate, lower and upper end of each variance by name.

    By profile likelihood, or from the second derivative in the logarithm where its standard error is below `SURE`.
    """
    from scipy.stats import norm

    reach, first = float(norm.ppf(0.5 + level / 2)), 0 if fed.model.has_statistics else 1
    names, values = method.variance_names(fed, s)[first:], s.variances[first:]
    errors = _crossed_doubt(s, first).diagonal().clamp(min=0).sqrt()
    profiled, found = None, {}
    for k, (name, value, error) in enumerate(zip(names, values.tolist(), errors.tolist(), strict=True)):
        if 0 < error < SURE:
            found[name] = (value, value * math.exp(-reach * error), value * math.exp(reach * error))
            continue
        if profiled is None:
            profiled = _profiles(method, fed, s, level)
        found[name] = (value, *profiled(k + first, error))
    return found


Profiles = Callable[[int, float], tuple[float, float]]


def _profiles(method: Hierarchical, fed: Federation, s: State, level: float) -> Profiles:
    """Return a function of the place of a variance (0: the noise) and its standard error: the ends of its interval."""
    if not fed.model.has_statistics:
        return _laplace_profiles(method, fed, s, level)
    model, point, best = method.crossed_likelihood(fed, s, restricted=method.choose == "reml")

    def ends(place: int, error: float) -> tuple[float, float]:
        logs = profile_interval(model, point, best, place, level)
        low, high = (torch.tensor(logs, dtype=torch.float64).exp() * model.scale[place]).tolist()
        return low, high

    return ends


def _laplace_profiles(method: Hierarchical, fed: Federation, s: State, level: float) -> Profiles:
    """Return `_profiles` of classes and counts; all other numbers are at their best by Laplace's approximation."""
    at = layout(fed)
    assert at is not None
    search = ModeSearch(method, fed, s, at, s.client_groups)
    here = search.start(s.variances)
    assert search.first is not None
    scale = search.first.scale

    def ends(place: int, error: float) -> tuple[float, float]:
        own = place - 1
        others = torch.tensor([k for k in range(len(here)) if k != own], dtype=torch.long)
        nearest = here[others].clamp(min=_SMALL)

        def profiled(value: float) -> float:
            nonlocal nearest
            base = here.index_fill(0, torch.tensor(own), value)
            if not len(others):
                return search.deviance(base)
            nearest, height = descend(lambda some: search.deviance(base.index_copy(0, others, some)), nearest)
            return height

        start, width = max(float(here[own]), _SMALL), min(error or 1.0, _WIDEST)
        logs = profile_ends(profiled, float(s.deviance), start, width, level)
        search.deviance(here)  # clients and server are where they were
        low, high = (torch.tensor(logs, dtype=torch.float64).exp() * scale[place]).tolist()
        return low, high

    return ends


def crossed_tests(method: Hierarchical, fed: Federation, s: State) -> dict[str, float]:
    """Return the p-values of "clients differ" and "COLUMN differs"."""
    names = method.variance_names(fed, s)[1:]
    clients = list(range(int(s.client_groups.max()) + 1))
    parts = {"clients differ": clients}
    parts |= {f"{name} differs": [k] for k, name in enumerate(names) if k not in clients}
    if not fed.model.has_statistics:
        without, best = method.laplace_without(fed, s, parts), s.deviance
    else:
        model, point, best = method.crossed_likelihood(fed, s)
        start = point.clamp(min=-10.0)
        without = {
            name: model.fit(start, dict.fromkeys((1 + k for k in at), -torch.inf))[1]
            for name, at in parts.items()
        }
    return {name: boundary_chance(without[name] - best, len(at)) for name, at in parts.items()}
