"""What a trained hierarchical model knows about its variances and its clients, and how surely."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.crossed_cells import cell_sums, layout
from coterie.algorithms.crossed_modes import ridge
from coterie.algorithms.marginal_uncertainty import marginal_posterior, marginal_tests, marginal_variances
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.covariance_doubt import covariance_intervals, covariance_of, general_effects
from coterie.theory.crossed import Crossed
from coterie.theory.crossed_posterior import CrossedPosterior
from coterie.theory.mixed_likelihood import Likelihood
from coterie.theory.uncertainty import (
    Effects,
    boundary_chance,
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


def variances(
    method: Hierarchical, fed: Federation, s: State, level: float
) -> dict[str, tuple[float, float, float]]:
    """Return estimate, lower and upper end of each variance by name.

    By profile likelihood for least squares; for other losses, and with several grouping columns, from the second
    derivative in the logarithm.
    """
    if "client_groups" in s:
        return _crossed_variances(method, fed, s, level)
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
        return _crossed_tests(method, fed, s)
    _check(s)
    if "psi" in s:
        return marginal_tests(method, fed, s)
    return difference_tests(*_likelihood(method, fed, s, *_sums(method, fed, s), restricted=False))


def _crossed_variances(
    method: Hierarchical, fed: Federation, s: State, level: float
) -> dict[str, tuple[float, float, float]]:
    """Return `variances` with several grouping columns; a variance of zero has no upper end."""
    from scipy.stats import norm

    reach, first = float(norm.ppf(0.5 + level / 2)), 0 if fed.model.has_statistics else 1
    names, values = method.variance_names(fed, s)[first:], s.variances[first:]
    doubt = _crossed_doubt(s, first).diagonal().clamp(min=0)
    known = doubt > 0
    factor = (reach * doubt.sqrt()).exp()
    lower, upper = values / factor, torch.where(known, values * factor, torch.inf)
    rows = zip(values.tolist(), lower.tolist(), upper.tolist(), strict=True)
    return dict(zip(names, rows, strict=True))


def _crossed_tests(method: Hierarchical, fed: Federation, s: State) -> dict[str, float]:
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
