"""CoBo: two clients collaborate if their gradients agree."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.finding import sends_sums, together
from coterie.algorithms.head_sums import HeadSums, sends_heads
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.theory.cluster_quality import cluster_quality, linked_groups
from coterie.theory.collaboration import all_pairs, both_ends, degrees, midpoints, weight_quality
from coterie.theory.consensus import (
    alignment,
    consensus_step,
    group_medians,
    recent_links,
    running_size,
    start_newcomers,
)
from coterie.theory.pair_tests import bar, closeness, evidence, halves, link_distances, shared_noise
from coterie.theory.pooled_tree import FOREIGN
from coterie.theory.simplex import onto_simplex
from coterie.theory.sketch import project
from coterie.theory.sparse_links import candidates, merge, observed_links, sparse_consensus

SAMPLING = ("auto", "constant", "time", "mixed", "all")
TESTS = ("auto", "common", "midpoint")
PRINTED: dict[str, Any] = {"test": "midpoint", "scale": "raw", "sampling": "constant"}
PAIR_ELEMENTS = 1 << 28  # numbers of the midpoints sent in one call
USUAL_LR, USUAL_RHO, STIFF_RHO = 0.05, 1.0, 10.0
COMMON_GAMMA, MIDPOINT_GAMMA, COMMON_STEPS = 0.25, 0.05, 5
GLARING = 10.0  # times the bar: halves that differ so much are themselves cut in the same round
LOOKS = 100  # sampling = auto: a pair of up to so many clients is looked at in every round
DENSE = 300  # clients up to which every pair has a weight
LOOK_EVERY = ((20, 1), (100, 5), (float("inf"), 50))  # up to which round the common test is made how often
SEARCH_ROUNDS = (1, 2, 4, 8, 16)  # in which candidate neighbours of many clients are looked for again
SKETCH = 16  # numbers of a gradient by which they are found
HEAVIEST = 4.0  # times the median number of rows: nobody weighs more in a mean


@dataclass(frozen=True)
class CoBo(HeadSums):
    """Collaborative learning via bilevel optimization (Hashemi, He, Jaggi: CoBo, 2024).

    min_X sum_i f_i(x_i) + rho/2 sum_{i<j} w_ij |x_i - x_j|^2,   w_ij in argmax_w w <grad f_i(z), grad f_j(z)>

    test = "midpoint", as printed:  pairs {i, j}, with probability p_t:  z = (x_i + x_j)/2,
        w_ij = w_ji <- clip(w_ij + gamma <g_i(z), g_j(z)>/m, 0, 1),   m the running mean of |<g_i, g_j>|
    test = "common":  z = the median model of clients that are linked, directly or through others;  with v_i the noise
        of g_i(z) that i's choice of rows brings,   w_ij = w_ji <- clip(w_ij + gamma e_ij, 0, 1),
        e_ij = 1 or -1: whether i and j are on one side of the clearest cut through {g_i(z)}, or v explains them all;
        w_ij is at most what makes the pull best for clients that differ as much as those of its side do;
        links to begin with are those inside clusters that sums over rows tell apart
    every client:  x_i <- x_i - lr (g_i(x_i) + (rho/s_i) sum_k w_ik (x_i - x_k)),   s_i its rows divided by the mean
        (weighting = "size", the default of "common") or 1

    "auto" is "common" for weights in a box and "midpoint" on the simplex. p_t is rate/n for sampling = "constant",
    t^-power for "time", constant for `switch` rounds and then by time for "mixed", 1 for "all", and min(1, 100/n) for
    "auto". domain = "simplex" projects the rows of W, diagonal included, on the simplex instead of the box. With more
    than 300 clients W is sparse: `neighbours` candidates of each client, from sketches of its gradient. Printed are
    test = "midpoint", scale = "raw", sampling = "constant", guard = 0, and symmetric = False (ordered pairs).

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(4, 1)] * 4
    >>> ys = [torch.tensor([-0.1, 0.1, -0.1, 0.1]) + target for target in (0.0, 0.0, 4.0, 4.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.CoBo(), rounds=10)
    >>> run.state.weights.round(decimals=2).tolist()
    [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    """

    lr: float | None = setting(
        None,
        "step size; None: 0.05, or 0.5/L if the model knows its curvature L and that is less",
        above=0,
        tune=(0.01, 0.03, 0.1, 0.3),
    )
    rho: float | None = setting(
        None,
        "strength of the pull between collaborators; None: 10 if implicit, else 1, or less if that is unstable",
        low=0,
        tune=(0.1, 1.0, 10.0),
    )
    gamma: float | None = setting(
        None, "step size of the weights; None: 0.25 for the common point, else 0.05", low=0
    )
    domain: str = setting("box", "set of allowed weights", options=("box", "simplex"))
    sampling: str = setting(
        "auto", "how the probability of drawing a pair changes with rounds", options=SAMPLING
    )
    rate: float = setting(1.0, "constant sampling: a pair is drawn with probability rate/n", above=0)
    power: float = setting(1.0, "time sampling: a pair is drawn with probability t^-power", low=0)
    switch: int = setting(80, "mixed sampling: rounds of constant before time sampling", low=0)
    symmetric: bool = setting(True, "one draw of a pair updates both w_ij and w_ji")
    guard: float = setting(0.5, "bound on lr rho times the largest degree; 0: no bound", low=0, high=1)
    implicit: bool | None = setting(
        None, "backward Euler for the pull, which is stable for every rho; None: if test = common"
    )
    cosine: bool = setting(False, "use the cosine of two gradients instead of their inner product")
    margin: float = setting(
        0.0, "cosine from which two gradients agree: kappa in <g, h> - kappa |g| |h|", low=-1, high=1
    )
    momentum: float = setting(0.0, "momentum of the gradients; 0.9 in the authors' code", low=0, high=0.999)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    patience: int = setting(10, "rounds for which the last model of an absent client pulls the others", low=0)
    test: str = setting("auto", "where gradients are compared", options=TESTS)
    scale: str = setting(
        "mean", "unit of products at midpoints: their mean size, or none", options=("mean", "raw")
    )
    steps: int | None = setting(None, "local steps per round; None: 5 if test = common, else 1", low=1)
    own: str = setting(
        "norm",
        "product of a client with itself on the simplex: its squared gradient without noise, or zero",
        options=("norm", "zero"),
    )
    neighbours: int = setting(20, "candidates of each client if there are more than 300", low=1)
    weighting: str = setting(
        "auto",
        "weight clients by their rows (size) or equally (uniform); auto: size if test = common",
        options=("auto", "size", "uniform"),
    )
    start_links: str = setting(
        "auto",
        "links to begin with: all, or those in clusters that are found first; auto: found where sums over rows do it",
        options=("auto", "all", "found"),
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    pulls: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = HeadSums.reveals | {
        "curvature": "aggregate",
        "probe": "gradient",
        "agree": "gradient",
        "agree_with_noise": "gradient",
        "slope": "personal",
        "descend": "personal",
    }

    def start(self, fed: Federation) -> State:
        lr, rho, curvature = self._steps(fed)
        n, models = fed.n, fed.initial_model().repeat(fed.n, 1)
        seen = torch.zeros(n, dtype=torch.long, device=fed.device)
        memory: dict[str, Any] = {"momentum": torch.zeros_like(models)} if self.momentum else {}
        if self.weighting == "size" or (self.weighting == "auto" and self.common_point):
            rows = fed.sizes.clamp(max=HEAVIEST * fed.sizes.median())
            if bool((rows != rows[0]).any()):
                memory["lightness"] = (rows.mean() / rows).to(fed.dtype)
        if self.sparse(fed):
            memory["links"] = torch.zeros(2, 0, dtype=torch.long, device=fed.device)
            weights = torch.zeros(0, dtype=fed.dtype, device=fed.device)
        else:
            weights, final = self.first_links(fed, rho, curvature)
            memory |= {"final": True} if final else {}
            if self.domain == "simplex":
                weights = weights / (n - 1) if n > 1 else torch.ones_like(weights)
        steps = {"lr": lr, "rho": rho, "curvature": curvature}
        return State(models=models, weights=weights, seen=seen, joined=0, size=0.0, **steps, **memory)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = self.present(fed, t)
        if self.sparse(fed):
            s = self.linked(fed, s, t, ids)
        elif self.common_point:
            if "final" not in s and any(t <= last and t % every == 0 for last, every in LOOK_EVERY):
                s = s.replace(weights=self.probed(fed, s, ids))
        else:
            weights, size = self.refreshed(fed, s, t, ids)
            s = s.replace(weights=weights, size=size)
        each = {"x": s.models if ids is None else s.models[ids]}
        r = (
            fed.map(self.slope, each=each, to=ids)
            if self.length == 1 and self.optimizer == "sgd"
            else fed.map(self.descend, each=each, lr=s.lr, to=ids)
        )
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model moves")
        return self.stepped(fed, s, t, r)

    def first_links(self, fed: Federation, rho: float, curvature: float) -> tuple[Tensor, bool]:
        """Return W to begin with, and whether it is final: found from all rows of everybody."""
        weights = 1 - torch.eye(fed.n, dtype=fed.dtype, device=fed.device)
        by_sums = self.start_links != "all" and self.common_point and sends_sums(fed)
        if self.start_links == "auto" and self.common_point and sends_heads(fed.model):
            labels = self.groups_by_heads(fed)
            return (weights if labels is None else weights * together(labels)), False
        if not by_sums and self.start_links != "found":
            return weights, False
        try:
            found = self.find_clusters(fed, None)
        except NobodyAnswered:
            return weights, False
        weights *= together(found.labels)
        if found.excess is None or bool((found.labels < 0).any()):
            return weights, False
        most = curvature / (rho * torch.bincount(found.labels) * found.excess).clamp(min=1e-12)
        return weights * most[found.labels].clamp(max=1).to(weights), True

    @property
    def common_point(self) -> bool:
        """Whether gradients are compared at a point that clients share."""
        return self.test == "common" or (self.test == "auto" and self.domain == "box")

    def sparse(self, fed: Federation) -> bool:
        """Return True if only `neighbours` candidates of each client have weights."""
        return self.common_point and self.domain == "box" and fed.n > DENSE

    @property
    def pace(self) -> float:
        """Return gamma."""
        if self.gamma is not None:
            return self.gamma
        return COMMON_GAMMA if self.common_point else MIDPOINT_GAMMA

    @property
    def stiff(self) -> bool:
        """Whether the pull is taken at the new models."""
        return self.common_point if self.implicit is None else self.implicit

    @property
    def length(self) -> int:
        """Return the number of local steps per round."""
        return self.steps or (COMMON_STEPS if self.common_point else 1)

    def present(self, fed: Federation, t: int) -> Tensor | None:
        """Return the clients asked in round t; None means all."""
        return fed.sample(t, self.participation)

    def probed(self, fed: Federation, s: State, ids: Tensor | None) -> Tensor:
        """Return W after w_ij <- clip(w_ij +- gamma, 0, 1) for pairs that are linked, perhaps through others."""
        weights: Tensor = s.weights.clone()
        groups = linked_groups(weights > 0).to(fed.device)
        company = torch.bincount(groups)[groups] > 1
        asked = company.nonzero().squeeze(-1) if ids is None else ids[company[ids]]
        if len(asked) == 0:
            return weights
        r = fed.map(self.probe, each={"z": group_medians(s.models, groups)[asked]}, to=asked)
        if len(r) == 0:
            return weights
        waiting = [(groups[r.ids] == group).nonzero().squeeze(-1) for group in groups[r.ids].unique()]
        while waiting:
            here = waiting.pop()
            members = r.ids[here]
            told = [r["grad"][here], r["noise"][here], fed.sizes[members], r["dimensions"][here]]
            half, times = halves(*told)
            pairs = (members.unsqueeze(1), members)
            after = weights[pairs] - self.pace * max(1.0, times)  # a clear cut is made at once
            for part in (half == 0, half == 1):
                pull = s.curvature * closeness(*(value[part] for value in told))
                most = min(1.0, pull / max(1e-12, s.rho * int(part.sum())))
                both = part.unsqueeze(1) & part
                after = torch.where(both, (weights[pairs] + self.pace).clamp(max=most), after)
            weights[pairs] = after.clamp(0, 1)
            if times > GLARING:
                waiting += [here[half == 0], here[half == 1]]
        return weights.fill_diagonal_(0.0)

    def linked(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        """Return the state after what `probed` does, for the links of a sparse W; all share one point."""
        r = fed.map(self.probe, z=s.models.mean(0), to=ids)
        if len(r) == 0:
            return s
        grads = torch.zeros_like(s.models).index_copy_(0, r.ids, r["grad"])
        noise = torch.zeros(fed.n, dtype=fed.dtype, device=fed.device).index_copy_(0, r.ids, r["noise"][:, 0])
        links, weights = s.links, s.weights
        if t in SEARCH_ROUNDS:
            near = candidates(project(r["grad"], SKETCH, fed.seed), self.neighbours)
            links, weights = merge(links, weights, r.ids[near], fed.n)
        (i, j), rows = links, fed.sizes[:, 0]
        alike_noise = shared_noise(noise[i], rows[i], noise[j], rows[j])
        gain = evidence(link_distances(grads, links), alike_noise, bar(float(r["dimensions"].median())))
        here = torch.zeros(fed.n, dtype=torch.bool, device=fed.device).index_fill_(0, r.ids, True)
        gain = torch.where(here[i] & here[j], gain, 0.0)
        weights = (weights + self.pace * gain).clamp(0, 1)
        alive = weights > 0
        return s.replace(links=links[:, alive], weights=weights[alive])

    def probe(self, client: Client, z: Tensor) -> dict[str, Tensor]:
        grad, noise, dimensions = client.grad_with_noise(z)
        return {"grad": grad, "noise": noise, "dimensions": dimensions}

    def refreshed(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> tuple[Tensor, float]:
        """Return W after w_ij <- w_ij + gamma <g_i(z), g_j(z)>/m, projected, for the pairs of round t; and m."""
        weights, size = s.weights, s.size
        changed = torch.zeros(fed.n, 1, dtype=torch.bool, device=fed.device)
        for drawn in self.pairs(fed, t, ids):
            i, j, product, own = self.agreements(fed, s.models, *drawn)
            if self.scale == "mean" and len(product):
                size = running_size(size, product)
                product, own = product / size, own / size
            if self.symmetric:
                i, j, product, own = torch.cat([i, j]), torch.cat([j, i]), product.repeat(2), own.flatten()
            else:
                own = own[0]
            product, own = product.to(weights.dtype), own.to(weights.dtype)
            stepped = weights[i, j] + self.pace * product
            weights = weights.index_put((i, j), stepped if self.domain == "simplex" else stepped.clamp(0, 1))
            if self.domain == "simplex" and self.own == "norm":
                looks = torch.bincount(i, minlength=fed.n).clamp(min=1)
                mean = torch.zeros_like(weights[0]).index_add_(0, i, own) / looks
                weights = weights + torch.diag(self.pace * mean)
            changed = changed.index_fill(0, i, True)
        if self.domain == "simplex":
            weights = torch.where(changed, onto_simplex(weights), s.weights)
        return weights, size

    def agreements(
        self, fed: Federation, models: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return pairs whose two ends answered, <g_i(z), g_j(z)> at z = (x_i + x_j)/2, and |g_i|^2, |g_j|^2 [2, P]."""
        asked = torch.cat([i, j])
        ends = asked.to(fed.device, non_blocking=True)
        i, j = ends.chunk(2)
        phase = self.agree_with_noise if self.withdraws else self.agree
        r = fed.map(phase, each={"z": midpoints(models, ends)}, to=asked, link=PEERS)
        if len(r) == 0:
            nothing = torch.zeros(0, dtype=torch.float64, device=fed.device)
            return i[:0], j[:0], nothing, nothing.expand(2, 0)
        values = r.values
        if len(r) == len(ends):
            first, second = values.chunk(2)
        else:
            pairs, one, other = both_ends(ends, r.ids, fed.n)
            i, j, first, second = i[pairs], j[pairs], values[one], values[other]
        own = torch.zeros(2, len(i), dtype=torch.float64, device=fed.device)
        if self.withdraws:
            own = torch.stack([part[:, :-1].square().sum(-1) - part[:, -1] for part in (first, second)])
            own, first, second = own.clamp(min=0).double(), first[:, :-1], second[:, :-1]
        return i, j, alignment(first, second, self.margin, self.cosine), own

    @property
    def withdraws(self) -> bool:
        """Whether a client's product with itself competes with its products with others."""
        return self.domain == "simplex" and self.own == "norm"

    def agree(self, client: Client, z: Tensor) -> Tensor:
        return client.grad(z)

    def agree_with_noise(self, client: Client, z: Tensor) -> Tensor:
        grad, noise, _ = client.grad_with_noise(z)
        return torch.cat([grad, noise], -1)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def descend(self, client: Client, x: Tensor, lr: float) -> Tensor:
        """Return the sum of the gradients along several local steps from x."""
        return (x - client.sgd(x, lr, self.length)) / lr

    def stepped(self, fed: Federation, s: State, t: int, r: Replies) -> State:
        """Return the state after x_i <- x_i - lr (g_i(x_i) + rho_t sum_k w_ik (x_i - x_k)) of all who answered."""
        everyone = r.ids is fed.everyone
        seen = torch.full_like(s.seen, t) if everyone else s.seen.index_fill(0, r.ids, t)
        joined = fed.n if everyone or s.joined == fed.n else int((seen > 0).sum())
        grads, memory = r.values, {}
        if self.momentum:
            first = (s.seen[r.ids] == 0).unsqueeze(-1).to(grads.dtype)
            grads = torch.lerp(s.momentum[r.ids], grads, first.clamp(min=1 - self.momentum))
            memory = {"momentum": s.momentum.index_copy(0, r.ids, grads)}
        if not everyone:
            grads = torch.zeros_like(s.models).index_copy_(0, r.ids, grads)
        models = self.pulled(s, t, s.models, grads, None if everyone else seen)
        if joined < fed.n and not self.sparse(fed):
            models = start_newcomers(models, s.weights, seen > 0)
        return s.replace(models=models, seen=seen, joined=joined, **memory)

    def pulled(self, s: State, t: int, models: Tensor, grads: Tensor, seen: Tensor | None) -> Tensor:
        """Return models after the step and the pull; `seen` is when each client answered, None if all are here."""
        if "links" in s:
            after = sparse_consensus(models - s.lr * grads, s.links, s.weights, s.lr * self.length * s.rho)
            return after if seen is None else torch.where((seen == t).unsqueeze(-1), after, models)
        links = s.weights if seen is None else recent_links(s.weights, seen, t, self.patience)
        links = links * s.lightness if "lightness" in s else links
        degree = degrees(links)
        return consensus_step(models, grads, links, degree, s.lr, self.prox(s, degree), self.stiff)

    def prox(self, s: State, degree: Tensor) -> Tensor | float:
        """Return lr rho_t of all local steps, which the guard keeps at or below guard / max degree."""
        full: float = s.lr * self.length * s.rho
        if self.stiff or self.guard == 0:
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
        rate = LOOKS if self.sampling == "auto" else self.rate
        return 1.0 if self.sampling == "all" else min(1.0, t**-self.power if timed else rate / n)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        if "links" in s:
            return observed_links(s.links, s.weights, fed.clusters, fed.n)
        simplex = self.domain == "simplex"
        level = 0.0 if self.common_point else 0.5 / max(1, fed.n - 1) if simplex else 0.5
        linked = s.weights > level
        return {
            "weights": s.weights,
            "degree": degrees(s.weights),
            **weight_quality(s.weights, fed.clusters, simplex),
            **cluster_quality(linked_groups(linked), fed.clusters),
        }

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        steps = {"slope": (d, d), "descend": (d + 1, d)}
        looks = {"probe": (d, d + 2), "agree": (d, d), "agree_with_noise": (d, d + 1)}
        return {"curvature": (0, 1), **steps, **looks, **self.finding_traffic(d), **self.head_traffic(d)}

    def curvature(self, client: Client) -> Tensor:
        return client.smoothness()

    def _steps(self, fed: Federation) -> tuple[float, float, float]:
        """Return lr and rho, as given or by the rule lr (L + rho lambda_max(Lap W)) < 2, and the usual curvature."""
        guarded = self.stiff or self.guard > 0
        largest, usual_curvature = 0.0, 1.0
        if fed.model.has_hessian and (self.lr is None or self.common_point or not guarded):
            r = fed.map(self.curvature)
            if len(r):
                middle = r.values.median()
                largest = float(r.values[r.values <= FOREIGN * middle].max()) if middle > 0 else 0.0
                usual_curvature = float(middle) / 2
        lr = self.lr or (min(USUAL_LR, 0.5 / largest) if largest > 0 else USUAL_LR)
        spread = fed.n if self.domain == "box" else fed.n / max(1, fed.n - 1)
        safe = max(0.0, 1 / lr - largest) / spread
        usual = STIFF_RHO if self.stiff else USUAL_RHO
        rho = (usual if guarded else min(usual, safe)) if self.rho is None else self.rho
        if not guarded and lr * (largest + rho * spread) >= 2:
            warnings.warn(
                f"cobo: lr (L + rho {spread:.4g}) = {lr * (largest + rho * spread):.3g} with lr = {lr:.3g}, "
                f"rho = {rho:.3g}: from 2 on the step diverges while all clients are linked. Keep the guard "
                f"(guard = 0.5), use implicit = true, or a rho below {max(0.0, 2 / lr - largest) / spread:.3g}.",
                stacklevel=2,
            )
        return lr, rho, usual_curvature
