"""What a trained generalised linear mixed model knows about its variances and its clients, and how surely."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.algorithms.marginal_effects import WORSE, between_sums, unpacked, weighted
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.marginal_newton import ModelPoint, newton_step
from coterie.theory.psi_doubt import psi_cover, psi_effects, psi_intervals
from coterie.theory.uncertainty import (
    SURE,
    Effects,
    boundary_chance,
    least_squares_doubt,
    profile_ends,
    profile_interval,
)
from coterie.theory.variance_components import Components, Sums

if TYPE_CHECKING:
    from coterie.algorithms.hierarchical import Hierarchical

_MOST_STEPS = 40
_NEGLIGIBLE = 1e-2  # share of psi's scale that is as good as zero
_WIDEST = 2.0  # standard error of a logarithm by which the ends of an interval are guessed at most
_SETTLED = 1e-6  # change of log likelihood that ends a search under a null hypothesis


def marginal_posterior(method: Hierarchical, s: State, sums: Sums) -> Effects:
    """Return the clients' models with uncertainty."""
    structure, cover = method.structure(s.groups), psi_cover(s.information, s.psi.numel())
    centre, sure = s.centres.double()[sums.clusters], s.certainty.double()[sums.clusters]
    return psi_effects(structure, s.psi, cover, sums, centre, sure)


def marginal_variances(
    method: Hierarchical, fed: Federation, s: State, level: float
) -> dict[str, tuple[float, float, float]]:
    """Return estimate, lower and upper end of each variance by name.

    By profile likelihood where the standard error of the logarithm is `SURE` or more, and for clusters (of their
    centres); else, and for correlated effects, from the second derivative.
    """
    structure, cover = method.structure(s.groups), psi_cover(s.information, s.psi.numel())
    full = method.covariance == "full"
    found = psi_intervals(structure, s.psi, cover, level, full=full)
    if not full:
        found |= _profiled(method, fed, s, cover, level, list(found))
    if len(s.centres) == 1:
        return found
    clusters, d = method.clusters(fed), structure.d
    replies = fed.map(method.contribute, each=method.sent(s, clusters), groups=s.groups, link=method.link)
    sums = between_sums(_point(s), weighted(unpacked(replies, structure), s, replies), clusters[replies.ids])
    near = Components(1.0, s.between.double().expand(1, d), torch.zeros(d, dtype=torch.float64))
    restricted = method.choice(fed) == "reml"
    model, point, best = least_squares_doubt(sums, s.groups.long(), near, noise=1.0, restricted=restricted)
    for k in range(model.variances):
        ends = profile_interval(model, point, best, 1 + k, level)
        values = torch.tensor([float(point[1 + k]), *ends], dtype=torch.float64).exp() * model.scale[1 + k]
        middle, low, high = values.tolist()
        found[f"cluster {k}"] = (middle, low, high)
    return found


def _profiled(
    method: Hierarchical, fed: Federation, s: State, cover: Tensor, level: float, names: list[str]
) -> dict[str, tuple[float, float, float]]:
    """Return profile intervals of the clients' variances, the squares of psi, that are not known well."""
    errors = 2 * cover.diagonal().clamp(min=0).sqrt() / s.psi.flatten().abs().clamp(min=1e-300)
    found, restricted = {}, method.choice(fed) == "reml"
    places = [k for k in range(len(names)) if not float(errors[k]) < SURE]
    best = -2 * _highest(method, fed, s, s, restricted=restricted) if places else 0.0
    for k in places:
        size = float(s.psi.flatten()[k].abs())
        held = torch.zeros_like(s.psi, dtype=torch.bool)
        held.view(-1)[k] = True

        def profiled(value: float, held: Tensor = held) -> float:
            psi = torch.where(held, math.exp(value / 2), s.psi)
            return -2 * _highest(method, fed, s, s.replace(psi=psi), restricted=restricted, held=held)

        least = _NEGLIGIBLE * float(s.largest[k % s.psi.shape[1]])
        logs = profile_ends(
            profiled, best, 2 * math.log(max(size, least)), min(float(errors[k]), _WIDEST), level
        )
        found[names[k]] = (size**2, math.exp(logs[0]), math.exp(logs[1]))
    fed.map(method.follow, each=method.sent(s, method.clusters(fed)), groups=s.groups, link=method.link)
    return found


def marginal_tests(method: Hierarchical, fed: Federation, s: State) -> dict[str, float]:
    """Return p-values of "clients differ" and, with several clusters, "clusters differ", by likelihood ratio."""
    best = _highest(method, fed, s, s) if method.choice(fed) == "reml" else s.height
    nulls = {"clients differ": (s.replace(psi=torch.zeros_like(s.psi)), s.psi.numel())}
    if len(s.centres) > 1:
        same = s.replace(between=torch.zeros_like(s.between), centres=s.x.expand_as(s.centres))
        nulls["clusters differ"] = (same, int(s.groups.max()) + 1)
    found = {
        name: boundary_chance(2 * (best - _highest(method, fed, s, null)), count)
        for name, (null, count) in nulls.items()
    }
    fed.map(method.follow, each=method.sent(s, method.clusters(fed)), groups=s.groups, link=method.link)
    return found


def _highest(
    method: Hierarchical,
    fed: Federation,
    s: State,
    null: State,
    *,
    restricted: bool = False,
    held: Tensor | None = None,
) -> float:
    """Return the largest log likelihood where variances that are zero in `null`, and psi that are held, stay so."""
    structure, clusters = method.structure(s.groups), method.clusters(fed)
    free_psi, free_between = bool(null.psi.any()), len(s.centres) > 1 and bool(null.between.any())
    point, base, highest = _point(null), _point(null), -torch.inf
    for _ in range(_MOST_STEPS):
        here = null.replace(centres=point.centres.to(fed.dtype), psi=point.psi)
        sent = method.sent(here, clusters)
        replies = fed.map(method.contribute, each=sent, groups=s.groups, link=method.link)
        found, mine = weighted(unpacked(replies, structure), s, replies), clusters[replies.ids]
        largest = torch.maximum(s.largest, point.psi.abs().amax(0))
        step = newton_step(point, found, mine, structure, largest, restricted=restricted, held=held)
        if step.value < highest - WORSE:
            point = base.towards(point, 0.25)
            continue
        settled, highest, base = step.value - highest < _SETTLED, max(highest, step.value), point
        if settled:
            break
        target = step.target
        if free_between:
            target = method.with_between(point, found, mine, step, s, restricted=restricted)
        psi = target.psi if free_psi else torch.zeros_like(target.psi)
        point = ModelPoint(target.common, target.centres, psi, target.between)
    return highest


def _point(s: State) -> ModelPoint:
    return ModelPoint(s.x.double(), s.centres.double(), s.psi, s.between.double())
