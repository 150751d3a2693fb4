"""Who collaborates with whom: weights between clients, learned from whether their gradients agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.finding import together
from coterie.algorithms.head_sums import sends_heads
from coterie.algorithms.many_links import ManyLinks, fits_tell
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS
from coterie.engine.state import State
from coterie.theory.cluster_quality import linked_groups
from coterie.theory.collaboration import all_pairs, both_ends, midpoints
from coterie.theory.consensus import alignment, group_medians, running_size
from coterie.theory.pair_tests import (
    closeness,
    halves,
    spread,
)
from coterie.theory.simplex import onto_simplex

SAMPLING = ("auto", "constant", "time", "mixed", "all")
TESTS = ("auto", "common", "midpoint")
PAIR_ELEMENTS = 1 << 28  # numbers of the midpoints sent in one call
COMMON_GAMMA, MIDPOINT_GAMMA = 0.25, 0.05
GLARING = 10.0  # times the bar: halves that differ so much are themselves cut in the same round
LOOKS = 100  # sampling = auto: a pair of up to so many clients is looked at in every round
DENSE = 300  # clients up to which every pair has a weight
LOOK_EVERY = ((20, 1), (100, 5), (float("inf"), 50))  # up to which round the common test is made how often


@dataclass(frozen=True)
class LearnedLinks(ManyLinks):
    """An algorithm whose server learns weights W between clients: `first_links`, then `learn` in every round.

    State: models [n, d], lr, rho, curvature, size, and W, either dense (weights [n, n]) or sparse (links [2, m],
    weights [m]). Three ways to learn:

    - `at_midpoints`, as printed:  pairs {i, j} are drawn; each is asked at z = (x_i + x_j)/2
    - `at_common_points`:  everybody is asked at the median model of those it is linked to; the clearest cut counts
    - `among_candidates`, for many clients:  as before, one point for all, and links to near neighbours alone
      (`coterie.algorithms.many_links`)
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
    reveals: ClassVar[Reveals] = ManyLinks.reveals | {
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
            judged = torch.zeros(fed.n, dtype=torch.bool, device=fed.device)
            weights = torch.zeros(0, dtype=fed.dtype, device=fed.device)
            return {"links": links, "weights": weights, "judged": judged}
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
            return self.among_candidates(fed, s, t, ids, self.pace)
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
