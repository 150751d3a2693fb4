"""CoBo: two clients collaborate if their gradients agree."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.theory.cluster_quality import cluster_quality, linked_groups
from coterie.theory.collaboration import all_pairs, both_ends, degrees, midpoints, weight_quality
from coterie.theory.consensus import alignment, consensus_step, recent_links, start_newcomers
from coterie.theory.simplex import onto_simplex

SAMPLING = ("constant", "time", "mixed", "all")
PAIR_ELEMENTS = 1 << 28  # numbers of the midpoints sent in one call
USUAL_LR, USUAL_RHO = 0.05, 1.0


@dataclass(frozen=True)
class CoBo(Algorithm):
    """Collaborative learning via bilevel optimization (Hashemi, He, Jaggi: CoBo, 2024).

    min_X sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2,   w_ij in argmax_w w <grad f_i(z), grad f_j(z)>

    pairs {i, j}, with probability p_t:  z = (x_i + x_j)/2,  w_ij = w_ji <- clip(w_ij + gamma <g_i(z), g_j(z)>, 0, 1)
    every client:  x_i <- x_i - lr (g_i(x_i) + rho sum_k w_ik (x_i - x_k))

    p_t is rate/n for sampling = "constant", t^-power for "time", constant for `switch` rounds and then by time for
    "mixed", and 1 for "all". domain = "simplex" projects the rows of W, diagonal included, on the simplex instead of
    the box. Deviations: rho_t = min(rho, guard/(lr max degree)), without which lr rho n < 2 is needed until W is cut
    (guard = 0: as printed); pairs are unordered (symmetric = False: ordered, as in the printed loop).

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (0.0, 0.0, 4.0, 4.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.CoBo(gamma=0.1, sampling="all"), rounds=50)
    >>> run.state.weights.round(decimals=2).tolist()
    [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    """

    lr: float | None = setting(
        None,
        "step size; None: 0.5/L if the model knows its curvature L, else 0.05",
        above=0,
        tune=(0.01, 0.03, 0.1, 0.3),
    )
    rho: float | None = setting(
        None,
        "strength of the pull between collaborators; None: 1, or less if that is unstable",
        low=0,
        tune=(0.1, 1.0),
    )
    gamma: float = setting(0.01, "step size of the weights", low=0, tune=(0.01, 0.1))
    domain: str = setting("box", "set of allowed weights", options=("box", "simplex"))
    sampling: str = setting(
        "constant", "how the probability of drawing a pair changes with rounds", options=SAMPLING
    )
    rate: float = setting(1.0, "constant sampling: a pair is drawn with probability rate/n", above=0)
    power: float = setting(1.0, "time sampling: a pair is drawn with probability t^-power", low=0)
    switch: int = setting(80, "mixed sampling: rounds of constant before time sampling", low=0)
    symmetric: bool = setting(True, "one draw of a pair updates both w_ij and w_ji")
    guard: float = setting(0.5, "bound on lr rho times the largest degree; 0: no bound", low=0, high=1)
    implicit: bool = setting(False, "backward Euler for the pull, which is stable for every rho")
    cosine: bool = setting(False, "use the cosine of two gradients instead of their inner product")
    margin: float = setting(
        0.0, "cosine from which two gradients agree: kappa in <g, h> - kappa |g| |h|", low=-1, high=1
    )
    momentum: float = setting(0.0, "momentum of the gradients; 0.9 in the authors' code", low=0, high=0.999)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    patience: int = setting(10, "rounds for which the last model of an absent client pulls the others", low=0)
    reveals: ClassVar[Reveals] = {"curvature": "aggregate", "agree": "gradient", "slope": "personal"}

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
        weights = self.refreshed(fed, s, t, ids)
        r = fed.map(self.slope, each={"x": s.models if ids is None else s.models[ids]}, to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model moves")
        return self.stepped(fed, s, t, weights, r)

    def present(self, fed: Federation, t: int) -> Tensor | None:
        """Return the clients asked in round t; None means all."""
        return fed.sample(t, self.participation)

    def refreshed(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> Tensor:
        """Return W after w_ij <- w_ij + gamma <g_i(z), g_j(z)>, projected, for the pairs drawn in round t."""
        weights: Tensor = s.weights
        changed = torch.zeros(fed.n, 1, dtype=torch.bool, device=fed.device)
        for drawn in self.pairs(fed, t, ids):
            i, j, agreement = self.agreements(fed, s.models, *drawn)
            if self.symmetric:
                i, j, agreement = torch.cat([i, j]), torch.cat([j, i]), torch.cat([agreement, agreement])
            stepped = weights[i, j] + self.gamma * agreement
            weights = weights.index_put((i, j), stepped if self.domain == "simplex" else stepped.clamp(0, 1))
            changed = changed.index_fill(0, i, True)
        return torch.where(changed, onto_simplex(weights), s.weights) if self.domain == "simplex" else weights

    def agreements(
        self, fed: Federation, models: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return <g_i(z), g_j(z)> at z = (x_i + x_j)/2 for the pairs whose two ends answered."""
        asked = torch.cat([i, j])
        ends = asked.to(fed.device, non_blocking=True)
        i, j = ends.chunk(2)
        r = fed.map(self.agree, each={"z": midpoints(models, ends)}, to=asked, link=PEERS)
        if len(r) == 0:
            return i[:0], j[:0], torch.zeros(0, dtype=torch.float64, device=fed.device)
        if len(r) == len(ends):
            first, second = r.values.chunk(2)
        else:
            pairs, one, other = both_ends(ends, r.ids, fed.n)
            i, j, first, second = i[pairs], j[pairs], r.values[one], r.values[other]
        return i, j, alignment(first, second, self.margin, self.cosine)

    def agree(self, client: Client, z: Tensor) -> Tensor:
        return client.grad(z)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def stepped(self, fed: Federation, s: State, t: int, weights: Tensor, r: Replies) -> State:
        """Return the state after x_i <- x_i - lr (g_i(x_i) + rho_t sum_k w_ik (x_i - x_k)) of all who answered."""
        everyone = r.ids is fed.everyone
        seen = torch.full_like(s.seen, t) if everyone else s.seen.index_fill(0, r.ids, t)
        joined = fed.n if everyone or s.joined == fed.n else int((seen > 0).sum())
        grads, links, memory = r.values, weights, {}
        if self.momentum:
            fresh = torch.where(s.seen[r.ids] > 0, 1 - self.momentum, 1.0).unsqueeze(-1).to(grads.dtype)
            grads = torch.lerp(s.momentum[r.ids], grads, fresh)
            memory = {"momentum": s.momentum.index_copy(0, r.ids, grads)}
        if not everyone:
            links = recent_links(weights, seen, t, self.patience)
            grads = torch.zeros_like(s.models).index_copy_(0, r.ids, grads)
        degree = degrees(links)
        models = consensus_step(s.models, grads, links, degree, s.lr, self.prox(s, degree), self.implicit)
        if joined < fed.n:
            models = start_newcomers(models, weights, seen > 0)
        return s.replace(models=models, weights=weights, seen=seen, joined=joined, **memory)

    def prox(self, s: State, degree: Tensor) -> Tensor | float:
        """Return lr rho_t, which the guard keeps at or below guard / max degree."""
        full: float = s.lr * s.rho
        if self.implicit or self.guard == 0:
            return full
        return (self.guard / degree.max()).clamp(max=full)

    def pairs(self, fed: Federation, t: int, ids: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Draw the pairs of round t; return their two ends, in pieces whose midpoints fit in memory."""
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
        """Return p_t, the probability that a pair is drawn in round t = 1, 2, ..."""
        timed = self.sampling == "time" or (self.sampling == "mixed" and t > self.switch)
        return 1.0 if self.sampling == "all" else min(1.0, t**-self.power if timed else self.rate / n)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
        """Return lr and rho as given, or by the stability rule lr (L + rho lambda_max(Lap W)) < 2."""
        guarded = self.implicit or self.guard > 0
        largest = 0.0
        if fed.model.has_hessian and (self.lr is None or not guarded):
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
