"""What a trained hierarchical model knows about its variances and its clients, and how surely."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.crossed_uncertainty import crossed_tests, crossed_variances
from coterie.algorithms.marginal_uncertainty import marginal_posterior, marginal_tests, marginal_variances
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.covariance_doubt import covariance_intervals, covariance_of, general_effects
from coterie.theory.mixed_likelihood import Likelihood
from coterie.theory.uncertainty import (
    Effects,
    client_effects,
    difference_tests,
    doubt_of_variances,
    least_squares_doubt,
    profile_interval,
)
from coterie.theory.variance_components import Components, Sums

if TYPE_CHECKING:
    from coterie.algorithms.hierarchical import Hierarchical


def posterior(method: Hierarchical, fed: Federation, s: State) -> tuple[Tensor, Effects]:
    """Return the ids of clients that answered, and their models with uncertainty."""
    ids, sums = _sums(method, fed, s)
    found = Components(s.noise, s.within.double(), s.between.double())
    centre = s.centres.double()[sums.clusters]
    if "psi" in s:
        return ids, marginal_posterior(method, s, sums)
    groups = s.groups.long()
    model, point, _ = _likelihood(method, fed, s, ids, sums, restricted=method.choice(fed) == "reml")
    if not _plain(method):
        sure = s.certainty.double()[sums.clusters]
        return ids, general_effects(model, point, sums, centre, sure)
    doubt = doubt_of_variances(model, point)
    sure, spread = s.certainty.double()[sums.clusters], found.within[sums.clusters]
    return ids, client_effects(sums.xx / s.noise, sums.xy / s.noise, centre, spread, sure, doubt, groups)


def variances(
    method: Hierarchical, fed: Federation, s: State, level: float
) -> dict[str, tuple[float, float, float]]:
    """Return estimate, lower and upper end of each variance by name.

    By profile likelihood; several noises and correlated effects from the second derivative.
    """
    if "client_groups" in s:
        return crossed_variances(method, fed, s, level)
    _check(s)
    if "psi" in s:
        return marginal_variances(method, fed, s, level)
    ids, sums = _sums(method, fed, s)
    restricted = method.choice(fed) == "reml"
    model, point, best = _likelihood(method, fed, s, ids, sums, restricted=restricted)
    if model.full:
        return covariance_intervals(model, point, level)
    scales = torch.cat([model.scale[:1].repeat(model.noises), model.scale[1:].repeat(model.levels + 1)])
    found, noises = {}, _noise_ends(model, point, level) if model.noises > 1 else []
    for k, name in enumerate(model.names):
        if k >= len(point) - model.variances and sums.k == 1:
            continue
        if model.noises > 1 and k < model.noises:
            ends = noises[k]
        else:
            ends = profile_interval(model, point, best, k, level)
        low, middle, high = (
            float(scales[k] * torch.tensor(v).exp()) for v in (ends[0], float(point[k]), ends[1])
        )
        found[name] = (middle, low, high)
    return found


def _noise_ends(model: Likelihood, point: Tensor, level: float) -> list[tuple[float, float]]:
    """Return the ends of the logarithms of several noise variances, from the second derivative."""
    from scipy.stats import norm

    reach, places = float(norm.ppf(0.5 + level / 2)), list(range(model.noises))
    width = reach * covariance_of(model, point, places).diagonal().sqrt()
    return list(zip((point[places] - width).tolist(), (point[places] + width).tolist(), strict=True))


def tests(method: Hierarchical, fed: Federation, s: State) -> dict[str, float]:
    """Return p-values of likelihood-ratio tests whether clients and clusters, or levels of grouping columns, differ."""
    if "client_groups" in s:
        return crossed_tests(method, fed, s)
    _check(s)
    if "psi" in s:
        return marginal_tests(method, fed, s)
    return difference_tests(*_likelihood(method, fed, s, *_sums(method, fed, s), restricted=False))


def _sums(method: Hierarchical, fed: Federation, s: State) -> tuple[Tensor, Sums]:
    _check(s)
    replies = fed.map(method.curve, link=method.link)
    return replies.ids, method.sums(fed, replies)


def _check(s: State) -> None:
    """Raise `SettingError` if nothing is known about uncertainty."""
    if "membership" in s:
        raise SettingError(
            "hierarchical: intervals and tests are not offered with grouping = 'mixture'; its probabilities "
            "of clusters are in the run's record (membership)"
        )
    if "certainty" not in s:
        raise SettingError("hierarchical: uncertainty is known for the Newton solver")


def _plain(method: Hierarchical) -> bool:
    """Return True if variances are those of default settings: independent effects, shared by clusters, one noise."""
    return (method.covariance, method.variances, method.noise) == ("diagonal", "shared", "one")


def _likelihood(
    method: Hierarchical, fed: Federation, s: State, ids: Tensor, sums: Sums, *, restricted: bool
) -> tuple[Likelihood, Tensor, float]:
    """Return the likelihood of least squares with its best point and deviance; strangers say nothing about it."""
    if "trust" in s:
        trust = s.trust[ids].double()
        strange = bool(((trust == 0) | (trust == 1)).all())
        sums = sums.kept(trust > 0) if strange else replace(sums, trust=trust)
    settings = {"per_cluster": method.variances == "cluster", "full": method.covariance == "full"}
    noises = {"cluster": sums.clusters, "client": torch.arange(len(ids))}.get(method.noise)
    near = Components(s.noise, s.within.double(), s.between.double())
    groups = s.groups.long()
    return least_squares_doubt(sums, groups, near, noise_groups=noises, restricted=restricted, **settings)
