"""Unknown clusters of a hierarchical model: a finite mixture with random effects, fitted from the clients' sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coterie._core.errors import SettingError
from coterie.algorithms.effect_groups import effect_groups
from coterie.algorithms.quadratics import digits
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.theory.mixture import best_mixture, certainties, mixture

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
    """Fit the mixture to the clients' quadratic models, and move each client towards its expected centre."""
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
    return s.replace(
        x=found.shares.to(fed.dtype) @ middle,
        centres=middle,
        within=spread.expand(k, -1),
        between=torch.zeros_like(spread),
        noise=level,
        groups=groups,
        shares=found.shares,
        membership=membership,
        certainty=certainties(sums, found).to(fed.dtype),
        done=(closed or still or t >= MIXTURE_ROUNDS) and len(replies) == len(placed) == fed.n,
    )
