"""Who collaborates with whom: weights between clients, learned from whether their gradients agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.finding import MOST_SUMS, together
from coterie.algorithms.head_sums import HeadSums, sends_heads
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS
from coterie.engine.state import State
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.theory.cluster_quality import linked_groups
from coterie.theory.collaboration import all_pairs, both_ends, midpoints
from coterie.theory.consensus import alignment, group_medians, running_size
from coterie.theory.pair_tests import bar, closeness, evidence, halves, link_distances, shared_noise, spread
from coterie.theory.pooled_sums import ENOUGH
from coterie.theory.simplex import onto_simplex
from coterie.theory.sketch import project
from coterie.theory.sparse_links import (
    best_pulls,
    candidates,
    link_degrees,
    merge,
    neighbourhood_means,
)

SAMPLING = ("auto", "constant", "time", "mixed", "all")
TESTS = ("auto", "common", "midpoint")
PAIR_ELEMENTS = 1 << 28  # numbers of the midpoints sent in one call
COMMON_GAMMA, MIDPOINT_GAMMA = 0.25, 0.05
GLARING = 10.0  # times the bar: halves that differ so much are themselves cut in the same round
LOOKS = 100  # sampling = auto: a pair of up to so many clients is looked at in every round
DENSE = 300  # clients up to which every pair has a weight
LOOK_EVERY = ((20, 1), (100, 5), (float("inf"), 50))  # up to which round the common test is made how often
SEARCH_ROUNDS = (1, 2, 4, 8, 16)  # in which candidate neighbours of many clients are looked for again
HEAVIEST_NOISE = 4.0  # times the median noise of a row: what of it counts where pulls are chosen
SKETCH = 16  # numbers of a gradient by which they are found


@dataclass(frozen=True)
class LearnedLinks(HeadSums):
    """An algorithm whose server learns weights W between clients: `first_links`, then `learn` in every round.

    State: models [n, d], lr, rho, curvature, size, and W, either dense (weights [n, n]) or sparse (links [2, m],
    weights [m]). Three ways to learn:

    - `at_midpoints`, as printed:  pairs {i, j} are drawn; each is asked at z = (x_i + x_j)/2
    - `at_common_points`:  everybody is asked at the median model of those it is linked to; the clearest cut counts
    - `among_candidates`, for many clients:  as before, one point for all, and links to near neighbours alone
    """

    name = ""
    gamma: float | None = setting(
        None, "step size of the weights; None: 0.25 for the common point, else 0.05", low=0
    )
    test: str = setting("auto", "where gradients are compared", options=TESTS)
    domain: str = setting("box", "set of allowed weights", options=("box", "simplex"))
    start_links: str = setting(
        "auto",
        "links to begin with: all, or those in clusters that are found first; auto: found for linear models",
        options=("auto", "all", "found"),
    )
    sampling: str = setting(
        "auto", "how the probability of drawing a pair changes with rounds", options=SAMPLING
    )
    rate: float = setting(1.0, "constant sampling: a pair is drawn with probability rate/n", above=0)
    power: float = setting(1.0, "time sampling: a pair is drawn with probability t^-power", low=0)
    switch: int = setting(80, "mixed sampling: rounds of constant before time sampling", low=0)
    symmetric: bool = setting(True, "one draw of a pair updates both w_ij and w_ji")
    scale: str = setting(
        "mean", "unit of products at midpoints: their mean size, or none", options=("mean", "raw")
    )
    cosine: bool = setting(False, "use the cosine of two gradients instead of their inner product")
    margin: float = setting(
        0.0, "cosine from which two gradients agree: kappa in <g, h> - kappa |g| |h|", low=-1, high=1
    )
    own: str = setting(
        "norm",
        "product of a client with itself on the simplex: its squared gradient without noise, or zero",
        options=("norm", "zero"),
    )
    neighbours: int = setting(20, "candidates of each client if there are more than 300", low=1)
    reveals: ClassVar[Reveals] = HeadSums.reveals | {
        "probe": "gradient",
        "place": "personal",
        "agree": "gradient",
        "agree_with_noise": "gradient",
    }

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

    def first_links(self, fed: Federation, rho: float, curvature: float) -> dict[str, Any]:
        """Return what the state has of W to begin with; `final` if it was found from all rows of everybody."""
        if self.sparse(fed):
            links = torch.zeros(2, 0, dtype=torch.long, device=fed.device)
            return {"links": links, "weights": torch.zeros(0, dtype=fed.dtype, device=fed.device)}
        weights, final = self._found(fed, rho, curvature)
        if self.domain == "simplex":
            weights = weights / (fed.n - 1) if fed.n > 1 else torch.ones_like(weights)
        if final or not self.common_point:
            return {"weights": weights} | ({"final": True} if final else {})
        none = torch.zeros(fed.n, dtype=torch.float64, device=fed.device)
        return {"weights": weights, "spread": none, "looks": none}

    def _found(self, fed: Federation, rho: float, curvature: float) -> tuple[Tensor, bool]:
        """Return links inside clusters that sums over rows or fits tell apart, or all; and whether they are final."""
        weights = 1 - torch.eye(fed.n, dtype=fed.dtype, device=fed.device)
        if self.start_links == "auto" and self.common_point and sends_heads(fed.model):
            labels = self.groups_by_heads(fed)
            return (weights if labels is None else weights * together(labels)), False
        if self.start_links != "found" and not (
            self.start_links == "auto" and self.common_point and fits_tell(fed)
        ):
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

    def learn(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        """Return the state with the weights of round t, for the clients `ids` that are here; None: all."""
        if self.sparse(fed):
            return self.among_candidates(fed, s, t, ids)
        if not self.common_point:
            return self.at_midpoints(fed, s, t, ids)
        looks = any(t <= last and t % every == 0 for last, every in LOOK_EVERY)
        return self.at_common_points(fed, s, ids) if looks and "final" not in s else s

    def at_common_points(self, fed: Federation, s: State, ids: Tensor | None) -> State:
        """w_ij <- clip(w_ij +- gamma, 0, 1) for pairs that are linked, perhaps through others.

        How much members of a group differ is the mean over the looks since it was last cut. One look in which they
        seem to differ must not loosen the pull: their models then fit their own rows, and look different ever after.
        """
        weights, mean, looks = s.weights.clone(), s.spread.clone(), s.looks.clone()
        groups = linked_groups(weights > 0).to(fed.device)
        company = torch.bincount(groups)[groups] > 1
        asked = company.nonzero().squeeze(-1) if ids is None else ids[company[ids]]
        if len(asked) == 0:
            return s
        r = fed.map(self.probe, each={"z": _some(group_medians(s.models, groups), asked)}, to=asked)
        if len(r) == 0:
            return s
        waiting = [(groups[r.ids] == group).nonzero().squeeze(-1) for group in groups[r.ids].unique()]
        while waiting:
            here = waiting.pop()
            members = r.ids[here]
            told = [_some(r[name], here) for name in ("grad", "noise", "dimensions")]
            told.insert(2, fed.sizes[members])
            half, times = halves(*told)
            pairs = (members.unsqueeze(1), members)
            after = weights[pairs] - self.pace * max(1.0, times)  # a clear cut is made at once
            looks[members] = 1 if times > 1 else looks[members] + 1
            for part in (half == 0, half == 1):
                count, who = int(part.sum()), members[part]
                if count < 2:
                    continue
                inside = part.nonzero().squeeze(-1)
                mean[who] += (spread(*(_some(one, inside) for one in told[:3])) - mean[who]) / looks[who]
                close = closeness(float(mean[who].mean()), count, float(told[3][part].median()))
                most = min(1.0, s.curvature * close / max(1e-12, s.rho * count))
                both = part.unsqueeze(1) & part
                after = torch.where(both, (weights[pairs] + self.pace).clamp(max=most), after)
            weights[pairs] = after.clamp(0, 1)
            if times > GLARING:
                waiting += [here[half == 0], here[half == 1]]
        return s.replace(weights=weights.fill_diagonal_(0.0), spread=mean, looks=looks)

    def among_candidates(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        """Do what `at_common_points` does for the links of a sparse W; all share one point."""
        if tells_by_fits(fed):
            return self.among_fits(fed, s, t, ids)
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

    def among_fits(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        """Link clients to the nearest whose own fits differ from theirs by no more than chance; W is then final.

        Gradients of linear models at one point for all are noise for clients whose optima are far from it. Of these
        links those stay whose two neighbourhoods have nearly the same mean: two clusters that are near each other
        have some clients between them, and a few such links would join both. Links pull no more than is best where what
        they would move fits by is more than chance explains: among clients that are all different nobody is near.
        """
        if t not in SEARCH_ROUNDS or (t > 1 and ids is None):
            return s
        r = fed.map(self.place, to=ids)
        if len(r) == 0:
            return s
        near = candidates(project(r["fit"], SKETCH, fed.seed), self.neighbours)
        noise = torch.zeros(fed.n, dtype=fed.dtype, device=fed.device).index_copy_(0, r.ids, r["noise"][:, 0])
        fits = torch.zeros_like(s.models).index_copy_(0, r.ids, r["fit"])
        links, _ = merge(s.links[:, :0], s.weights[:0], r.ids[near], fed.n)
        (i, j), rows = links, fed.sizes[:, 0]
        chance = shared_noise(noise[i], rows[i], noise[j], rows[j])
        alike = evidence(link_distances(fits, links), chance, bar(fed.d)) > 0
        links, chance = links[:, alike], chance[alike]
        around = neighbourhood_means(fits, links)
        alike = link_distances(around, links) <= chance
        links = links[:, alike]
        per_row = noise * rows
        usual = HEAVIEST_NOISE * per_row[r.ids].median()  # nobody is excused by claiming to know nothing
        pulls = best_pulls(fits, per_row.clamp(max=usual) / rows, links, s.rho / s.curvature, fed.d / 2)
        new, old = (one[0] * fed.n + one[1] for one in (links, s.links))
        stay = ~torch.isin(old, new)
        whole, order = torch.cat([s.links[:, stay], links], 1), torch.cat([old[stay], new]).argsort()
        before, degree = (self._degrees(some, fed.n)[whole].amax(0) for some in (s.links, whole))
        kept, count = s.weights[stay], int(stay.sum())
        kept = torch.where(kept < 1, kept * (before / degree)[:count].to(kept), kept)
        weights = (s.curvature * pulls / (s.rho * degree[count:])).clamp(max=1)
        return s.replace(links=whole[:, order], weights=torch.cat([kept, weights.to(kept)])[order])

    @staticmethod
    def _degrees(links: Tensor, n: int) -> Tensor:
        """Return how many links each client has, [n], at least 1."""
        ones = torch.ones(links.shape[1], dtype=torch.float64, device=links.device)
        return link_degrees(links, ones, n).clamp(min=1)

    def place(self, client: Client) -> dict[str, Tensor]:
        """Return the client's own fit and the expected squared distance of it from that of its distribution.

        The variance is phi tr(H^-1)/n with H the curvature, phi the residual variance of least squares and 1 for other
        models. A client with no more rows than parameters knows nothing of its noise: it is 0, and it stays alone.
        """
        fit = client.solve(client.initial_model(), tol=1e-6)
        rows, d = client.size.to(fit.dtype), fit.shape[-1]
        spare = (rows - d).clamp(min=1)
        phi = 2 * client.loss(fit) * rows / spare if isinstance(client.model, Linear) else 1.0
        curves = client.hessian(fit)
        small = 1e-6 * curves.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=1e-30)
        curves = curves + torch.diag_embed(small.expand(*small.shape[:-1], d))
        trace = torch.linalg.inv(curves).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        return {"fit": fit, "noise": torch.where(rows > d, phi * trace / rows, 0.0)}

    def probe(self, client: Client, z: Tensor) -> dict[str, Tensor]:
        grad, noise, dimensions = client.grad_with_noise(z)
        return {"grad": grad, "noise": noise, "dimensions": dimensions}

    def at_midpoints(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        """w_ij <- w_ij + gamma <g_i(z), g_j(z)>/m, projected, for the pairs of round t; m is the state's size."""
        weights, size = s.weights, s.size
        touched = []
        for drawn in self.pairs(fed, t, ids):
            i, j, product, own = self.agreements(fed, s.models, *drawn)
            if self.scale == "mean" and len(product):
                size = running_size(size, product)
                product, own = product / size, None if own is None else own / size
            if self.symmetric:
                i, j, product = torch.cat([i, j]), torch.cat([j, i]), product.repeat(2)
            stepped = weights[i, j] + self.pace * product.to(weights.dtype)
            weights = weights.index_put((i, j), stepped if self.domain == "simplex" else stepped.clamp(0, 1))
            if own is not None:
                own = (own.flatten() if self.symmetric else own[0]).to(weights.dtype)
                looks = torch.bincount(i, minlength=fed.n).clamp(min=1)
                mean = torch.zeros_like(weights[0]).index_add_(0, i, own) / looks
                weights = weights + torch.diag(self.pace * mean)
            touched.append(i)
        if self.domain == "simplex" and touched:
            changed = torch.zeros(fed.n, 1, dtype=torch.bool, device=fed.device)
            weights = torch.where(
                changed.index_fill(0, torch.cat(touched), True), onto_simplex(weights), s.weights
            )
        return s.replace(weights=weights, size=size)

    def agreements(
        self, fed: Federation, models: Tensor, i: Tensor, j: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return pairs whose two ends answered, <g_i(z), g_j(z)> at z = (x_i + x_j)/2, and |g_i|^2, |g_j|^2 [2, P].

        The squared lengths, without their noise, are None unless a client may withdraw.
        """
        asked = torch.cat([i, j])
        ends = asked.to(fed.device, non_blocking=True)
        i, j = ends.chunk(2)
        phase = self.agree_with_noise if self.withdraws else self.agree
        r = fed.map(phase, each={"z": midpoints(models, ends)}, to=asked, link=PEERS)
        if len(r) == 0:
            return i[:0], j[:0], torch.zeros(0, dtype=torch.float64, device=fed.device), None
        values = r.values
        if len(r) == len(ends):
            first, second = values.chunk(2)
        else:
            pairs, one, other = both_ends(ends, r.ids, fed.n)
            i, j, first, second = i[pairs], j[pairs], values[one], values[other]
        own = None
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

    def link_traffic(self, d: int) -> dict[str, tuple[int, int]]:
        """Return the floats down and up of the phases by which links are learned."""
        looks = {"probe": (d, d + 2), "place": (0, d + 1), "agree": (d, d), "agree_with_noise": (d, d + 1)}
        return looks | self.finding_traffic(d) | self.head_traffic(d)


def _some(values: Tensor, which: Tensor) -> Tensor:
    """Return values [n, ...] at these places, in ascending order; all of them are not copied."""
    return values if len(which) == len(values) else values[which]


def fits_tell(fed: Federation) -> bool:
    """Return True if clients fit models of their own quickly: one optimum, which gradient steps reach."""
    return isinstance(fed.model, Glm) and fed.model.closed_form and not fed.model.whole_clients


def tells_by_fits(fed: Federation) -> bool:
    """Return True if most clients have rows enough for a fit of their own, and the model has a closed form."""
    return fits_tell(fed) and fed.d <= MOST_SUMS and float(fed.sizes.median()) >= ENOUGH * fed.d
