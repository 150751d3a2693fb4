"""Unknown clusters of a hierarchical model: a finite mixture with random effects, fitted from the clients' sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.effect_groups import effect_groups
from coterie.algorithms.marginal_effects import SETTLED, WORSE, of_all, unpacked
from coterie.algorithms.quadratics import digits
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.hierarchical import pulled_share
from coterie.theory.marginal import Marginal
from coterie.theory.mixture import best_mixture, certainties, mixture
from coterie.theory.mixture_newton import MixturePoint, mixture_step
from coterie.theory.variance_components import Components

if TYPE_CHECKING:
    from coterie.algorithms.hierarchical import Hierarchical

CHOSEN_ROUNDS = 2  # in which the number of clusters is chosen; later ones start from the memberships before
MIXTURE_ROUNDS = 8  # of a loss that is not quadratic, each with new quadratic models


def check_mixture(method: Hierarchical, fed: Federation) -> None:
    """Raise `SettingError` for what mixtures cannot do."""
    usual = {"covariance": "diagonal", "variances": "shared", "noise": "one"}
    wrong = [
        f"{name} = {getattr(method, name)!r}"
        for name, value in usual.items()
        if getattr(method, name) != value
    ]
    wrong += ["tails = 't'"] if method.tails == "t" else []
    wrong += [f"choose = {method.choose!r}"] if method.choose not in ("auto", "ml") else []
    if wrong:
        raise SettingError(f"hierarchical: {wrong[0]} is not offered with grouping = 'mixture'")
    if not method.newton(fed):
        raise SettingError(
            "hierarchical: grouping = 'mixture' needs a linear model with at most 256 parameters, which sends second "
            "derivatives; use grouping = 'found'"
        )


def mixture_round(method: Hierarchical, fed: Federation, s: State, t: int) -> State:
    """Fit the mixture to the clients' quadratic models, and move each client towards its expected centre.

    For classes and counts rounds of marginal likelihoods follow.
    """
    if "psi" in s:
        return _marginal_round(method, fed, s)
    replies = fed.map(method.curve, link=method.link)
    if not len(replies):
        return s
    sums, closed = method.sums(fed, replies), fed.model.has_statistics
    groups = s.groups if "groups" in s else effect_groups(method, fed, sums)
    noise = None if closed else 1.0
    if t > CHOSEN_ROUNDS and "membership" in s:
        known = s.membership[replies.ids]
        found = mixture(sums, groups, known.shape[-1], noise=noise, start=known)
    elif method.clusters_count:
        found = mixture(sums, groups, min(method.clusters_count, len(replies)), noise=noise, seed=fed.seed)
    else:
        found = best_mixture(sums, groups, noise=noise, seed=fed.seed)
    k, share = len(found.shares), found.membership.to(fed.dtype)
    unknown = found.shares.to(fed.dtype).expand(fed.n, -1)
    membership = unknown.index_copy(0, replies.ids, share)
    middle, spread = found.centres.to(fed.dtype), digits(found.spread).to(fed.dtype)
    each = {"centre": membership @ middle, "spread": spread.expand(fed.n, -1)}
    level = float(digits(torch.tensor(found.noise, dtype=torch.float64)))
    placed = fed.map(method.place, each=each, noise=level, link=method.link)
    still = "membership" in s and s.membership.shape == membership.shape
    still = still and bool((s.membership - membership).abs().max() < 1e-6)
    settled = closed or still or t >= MIXTURE_ROUNDS
    s = s.replace(
        x=found.shares.to(fed.dtype) @ middle,
        centres=middle,
        within=spread.expand(k, -1),
        between=torch.zeros_like(spread),
        noise=level,
        groups=groups,
        shares=found.shares,
        membership=membership,
        shrinkage=of_all(fed, replies, pulled_share(sums.xx / level, found.spread.expand_as(sums.xy))),
        certainty=certainties(sums, found).to(fed.dtype),
        done=settled and len(replies) == len(placed) == fed.n,
    )
    if settled and method.integrates(fed, groups):
        within = s.within.double()
        begin = method.first_point(fed, s, Components(1.0, within, torch.zeros_like(within[0])), sums)
        return s.replace(**begin, done=False)
    return s


def _marginal_round(method: Hierarchical, fed: Federation, s: State) -> State:
    """Ask clients for their marginal likelihoods in every cluster, and take a Newton step of the mixture."""
    structure, psi = method.structure(s.groups), s.psi[0]
    here = MixturePoint(s.shares.double(), s.centres.double(), psi)
    answers = [
        fed.map(method.contribute, each=_sent(fed, centre, psi), groups=s.groups, link=method.link)
        for centre in s.centres.unbind(0)
    ]
    ids = [set(one.ids.tolist()) for one in answers]
    known = torch.tensor(sorted(set.intersection(*ids)), dtype=torch.long, device=fed.device)
    if not len(known):
        return s
    found = []
    for one in answers:
        part, at = unpacked(one, structure), torch.searchsorted(one.ids, known)
        found.append(Marginal(part.value[at], part.gradient[at], part.hessian[at]))
    step = mixture_step(here, found, torch.maximum(s.largest, psi.abs()))
    whole = len(known) == fed.n
    if whole and step.value < s.height - WORSE and "base_psi" in s:
        base = MixturePoint(s.base_shares, s.base_centres, s.base_psi)
        return _moved(method, fed, s, base.towards(here, 0.25))
    settled = whole and step.gain < SETTLED * (1 + abs(step.value) * 1e-3)
    unknown = here.shares.to(fed.dtype).expand(fed.n, -1)
    s = s.replace(
        base_shares=here.shares,
        base_centres=here.centres,
        base_psi=psi,
        height=step.value if whole else s.height,
        membership=unknown.index_copy(0, known, step.membership.to(fed.dtype)),
        certainty=step.certainty.to(fed.dtype),
        done=settled,
    )
    return _moved(method, fed, s, here if settled else step.target)


def _moved(method: Hierarchical, fed: Federation, s: State, point: MixturePoint) -> State:
    """Move the server to a point, and clients to their modes around their expected centres."""
    root = method.structure(s.groups).factor(point.psi)
    spread = (root @ root.mT).diagonal().to(fed.dtype)
    s = s.replace(
        x=(point.shares @ point.centres).to(fed.dtype),
        centres=point.centres.to(fed.dtype),
        shares=point.shares,
        psi=point.psi.unsqueeze(0),
        within=spread.expand(len(point.shares), -1),
    )
    each = _sent(fed, s.membership @ s.centres, point.psi)
    fed.map(method.follow, each=each, groups=s.groups, link=method.link)
    return s


def _sent(fed: Federation, centre: Tensor, psi: Tensor) -> dict[str, Tensor]:
    return {"centre": centre.expand(fed.n, -1), "psi": psi.expand(fed.n, -1)}
