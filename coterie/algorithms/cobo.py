"""CoBo: every pair of clients decides whether to collaborate by whether their gradients agree."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.errors import NobodyAnswered
from coterie.federation.client import Client
from coterie.federation.federation import Federation
from coterie.federation.ledger import PEERS
from coterie.federation.replies import Replies
from coterie.federation.state import State
from coterie.theory.cluster_quality import cluster_quality, linked_groups
from coterie.theory.collaboration import (
    all_pairs,
    both_ends,
    degrees,
    midpoints,
    mixed,
    pulled,
    weight_quality,
)
from coterie.theory.simplex import onto_simplex

SAMPLING = ("constant", "time", "mixed", "all")
PAIR_ELEMENTS = 1 << 28  # midpoints that are sent out in one call
USUAL_LR, USUAL_RHO = 0.05, 1.0


@dataclass(frozen=True)
class CoBo(Algorithm):
    """Collaborative learning via bilevel optimization (Hashemi, He, Jaggi: CoBo, 2024).

    min_X sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2,   w_ij in argmax_w w <grad f_i(z), grad f_j(z)>

    pairs {i, j}, with probability p_t:  z = (x_i + x_j)/2,  w_ij = w_ji <- clip(w_ij + gamma <g_i(z), g_j(z)>, 0, 1)
    everybody:  x_i <- x_i - lr (g_i(x_i) + rho sum_k w_ik (x_i - x_k))

    p_t: "constant" rate/n, "time" t^-power, "mixed" constant for `switch` rounds and then time, "all" 1.
    domain="simplex" projects the rows of W, the own weight included, on the simplex instead of the box.
    Deviations: the guard, rho_t = min(rho, guard/(lr max degree)), without which lr rho n < 2 is needed until W is cut
    (guard=0: as printed); pairs are unordered (symmetric=False: ordered, as the printed loop).
    """

    lr: float | None = setting(
        None,
        "step size; None: 0.5/L where the model knows its curvature L, else 0.05",
        above=0,
        tune=(0.01, 0.03, 0.1, 0.3),
    )
    rho: float | None = setting(
        None, "pull between collaborators; None: 1, or less where that is unstable", low=0, tune=(0.1, 1.0)
    )
    gamma: float = setting(0.01, "step size of the weights", low=0, tune=(0.01, 0.1))
    domain: str = setting("box", "where weights live", options=("box", "simplex"))
    sampling: str = setting("constant", "how often a pair is looked at", options=SAMPLING)
    rate: float = setting(1.0, "constant sampling: probability times clients", above=0)
    power: float = setting(1.0, "time sampling: probability t^-power", low=0)
    switch: int = setting(80, "mixed sampling: rounds before it goes with time", low=0)
    symmetric: bool = setting(True, "w_ij = w_ji, from one look at the pair")
    guard: float = setting(0.5, "largest lr rho degree; 0: no guard", low=0, high=1)
    implicit: bool = setting(False, "backward Euler for the pull: stable for every rho")
    cosine: bool = setting(False, "cosine of the gradients instead of their product")
    margin: float = setting(0.0, "kappa in <g, h> - kappa |g| |h|", low=-1, high=1)
    momentum: float = setting(
        0.0, "memory of the step direction; 0.9 in the authors' code", low=0, high=0.999
    )
    participation: float = setting(1.0, "share of the clients asked per round", above=0, high=1)
    patience: int = setting(10, "rounds that the last model of an absent client pulls the others", low=0)

    def start(self, fed: Federation) -> State:
        lr, rho = self._steps(fed)
        n = fed.n
        weights = 1 - torch.eye(n, dtype=torch.float64, device=fed.device)
        if self.domain == "simplex":
            weights = weights / (n - 1) if n > 1 else torch.ones_like(weights)
        models = fed.initial_model().repeat(n, 1)
        seen = torch.zeros(n, dtype=torch.long, device=fed.device)
        memory = {"momentum": torch.zeros_like(models)} if self.momentum else {}
        return State(models=models, weights=weights, seen=seen, joined=0, lr=lr, rho=rho, **memory)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = self.present(fed, t)
        own = {"x": s.models if ids is None else s.models[ids]}
        fed.expect(self.slope, own, to=ids)
        weights = self.refreshed(fed, s, t, ids)
        r = fed.map(self.slope, each=own, to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model moves")
        return self.moved(fed, s, t, weights, r)

    def present(self, fed: Federation, t: int) -> Tensor | None:
        """Who is asked in round t; None means everybody."""
        return fed.sample(t, self.participation)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def agree(self, client: Client, z: Tensor) -> Tensor:
        return client.grad(z)

    def refreshed(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> Tensor:
        """W after a look at the pairs of this round."""
        weights, touched = s.weights, []
        for i, j in self.pairs(fed, t, ids):
            i, j, agreement = self.agreements(fed, s.models, i, j)
            if len(i) == 0:
                continue
            if self.symmetric:
                i, j, agreement = torch.cat([i, j]), torch.cat([j, i]), torch.cat([agreement, agreement])
            stepped = weights[i, j] + self.gamma * agreement
            weights = weights.index_put((i, j), stepped if self.domain == "simplex" else stepped.clamp(0, 1))
            touched.append(i)
        if self.domain == "box" or not touched:
            return weights
        changed = torch.zeros(fed.n, 1, dtype=torch.bool, device=fed.device)
        return torch.where(changed.index_fill(0, torch.cat(touched), True), onto_simplex(weights), s.weights)

    def pairs(self, fed: Federation, t: int, ids: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Both ends of the pairs of round t, in pieces whose midpoints fit in memory."""
        i, j = all_pairs(fed.n, ordered=not self.symmetric)
        chance = self.chance(fed.n, t)
        if chance < 1:
            drawn = (fed.uniform("pairs", t, len(i)) < chance).nonzero().squeeze(-1)
            i, j = i.index_select(0, drawn), j.index_select(0, drawn)
        if ids is not None:
            here = torch.zeros(fed.n, dtype=torch.bool)
            here[ids.cpu()] = True
            both = here[i] & here[j]
            i, j = i[both], j[both]
        size = max(1, PAIR_ELEMENTS // (2 * fed.d))
        return [(a, b) for a, b in zip(i.split(size), j.split(size), strict=True) if len(a)]

    def chance(self, n: int, t: int) -> float:
        """p_t, the probability that a pair is looked at in round t = 1, 2, ..."""
        timed = self.sampling == "time" or (self.sampling == "mixed" and t > self.switch)
        return 1.0 if self.sampling == "all" else min(1.0, t**-self.power if timed else self.rate / n)

    def agreements(
        self, fed: Federation, models: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """<g_i(z), g_j(z)> of the pairs both ends of which answered, all ends asked in one call."""
        asked = torch.cat([i, j])
        ends = asked.to(fed.device, non_blocking=True)
        i, j = ends.chunk(2)
        r = fed.map(self.agree, each={"z": midpoints(models, ends)}, to=asked, link=PEERS)
        if len(r) == len(ends):
            first, second = r.values.chunk(2)
        elif len(r) == 0:
            return i[:0], j[:0], torch.zeros(0, dtype=torch.float64, device=fed.device)
        else:
            pairs, one, other = both_ends(ends, r.ids, fed.n)
            i, j, first, second = i[pairs], j[pairs], r.values[one], r.values[other]
        product = torch.linalg.vecdot(first, second).double()
        if self.cosine or self.margin:
            size = (
                torch.linalg.vector_norm(first, dim=-1) * torch.linalg.vector_norm(second, dim=-1)
            ).double()
            product = product - self.margin * size
            product = product / size.clamp(min=torch.finfo(first.dtype).tiny) if self.cosine else product
        return i, j, product

    def moved(self, fed: Federation, s: State, t: int, weights: Tensor, r: Replies) -> State:
        """The step of everybody who answered, from the models as they were."""
        n, everyone = fed.n, r.ids is fed.everyone
        seen = torch.full_like(s.seen, t) if everyone else s.seen.index_fill(0, r.ids, t)
        joined = n if everyone or s.joined == n else int((seen > 0).sum())
        links, slopes, memory = weights, r.values, {}
        if self.momentum:
            fresh = torch.where(s.seen[r.ids] > 0, 1 - self.momentum, 1.0).unsqueeze(-1).to(slopes.dtype)
            slopes = torch.lerp(s.momentum[r.ids], slopes, fresh)
            memory = {"momentum": s.momentum.index_copy(0, r.ids, slopes)}
        if not everyone:
            near = (seen > 0) & (seen >= t - self.patience)
            links = weights * near * (seen == t).unsqueeze(1)
        degree = degrees(links)
        pull = self.pull(s, degree)
        if not everyone:
            slopes = torch.zeros_like(s.models).index_copy_(0, r.ids, slopes)
        if self.implicit:
            models = mixed(torch.linalg.inv(pulled(links, degree, -pull)), s.models - s.lr * slopes)
        else:
            models = mixed(pulled(links, degree, pull), s.models, slopes, s.lr)
        if joined < n:
            models = _with_newcomers(models, weights, seen > 0)
        return s.replace(models=models, weights=weights, seen=seen, joined=joined, **memory)

    def pull(self, s: State, degree: Tensor) -> Tensor | float:
        """lr rho_t: lr rho, or less where the guard says so."""
        if self.implicit or self.guard == 0:
            return s.lr * s.rho
        return (self.guard / degree.max()).clamp(max=s.lr * s.rho)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def handout(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        simplex = self.domain == "simplex"
        linked = s.weights > (0.5 / max(1, fed.n - 1) if simplex else 0.5)
        found = cluster_quality(linked_groups(linked), fed.clusters)
        return {
            "weights": s.weights,
            "degree": degrees(s.weights),
            **weight_quality(s.weights, fed.clusters, simplex),
            **found,
        }

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"curvature": (0, 1), "agree": (d, d), "slope": (d, d)}

    def curvature(self, client: Client) -> Tensor:
        return client.smoothness()

    def _steps(self, fed: Federation) -> tuple[float, float]:
        """Step size and pull: as given, or by the stability rule lr (L + rho lambda_max(Lap W)) < 2."""
        guarded = self.implicit or self.guard > 0
        largest = 0.0
        if hasattr(fed.model, "hessian") and (self.lr is None or not guarded):
            r = fed.map(self.curvature)
            largest = float(r.values.max()) if len(r) else 0.0
        lr = self.lr or (0.5 / largest if largest > 0 else USUAL_LR)
        spread = fed.n if self.domain == "box" else fed.n / max(1, fed.n - 1)
        safe = max(0.0, 1 / lr - largest) / spread
        rho = (USUAL_RHO if guarded else min(USUAL_RHO, safe)) if self.rho is None else self.rho
        if not guarded and lr * (largest + rho * spread) >= 2:
            warnings.warn(
                f"cobo: lr (L + rho {spread:.4g}) = {lr * (largest + rho * spread):.3g} with lr = {lr:.3g}, "
                f"rho = {rho:.3g}: from 2 on the step diverges while all clients are linked. Keep the guard "
                f"(guard = 0.5), use implicit = true, or a rho below {max(0.0, 2 / lr - largest) / spread:.3g}.",
                stacklevel=2,
            )
        return lr, rho


def _with_newcomers(models: Tensor, weights: Tensor, joined: Tensor) -> Tensor:
    """Who has not been there yet is to start from its collaborators, weighted by W."""
    links = weights * joined
    total = links.sum(-1, keepdim=True)
    start = mixed(links / total.clamp(min=1e-300), models)
    return torch.where(joined.unsqueeze(-1) | (total == 0), models, start)
