"""PDL-TC: every client clusters the others around itself; there is no server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.errors import NobodyAnswered
from coterie.federation.client import Client
from coterie.federation.federation import Federation
from coterie.federation.ledger import INSIDE
from coterie.federation.replies import Replies
from coterie.federation.state import State
from coterie.theory.cluster_quality import cluster_quality, linked_groups
from coterie.theory.sketch import PARTS, clustered_part
from coterie.theory.threshold import Rule, make_rule, threshold_cluster

PEERS = "client-client"
OWN_RULES = ("auto", "size", "theory", "fixed")


@dataclass(frozen=True)
class PdlTc(Algorithm):
    """Threshold clustering by every client around itself (Threshold-Clustering of Similar Clients, 2022).

    at="own", as printed:  m_i <- momentum g_i(x_i) + (1 - momentum) m_i, sent to everybody;
        v_i = Threshold-Clustering({m_j}, started at m_i),   x_i <- x_i - lr v_i
    at="common":  i sends x_i to all and gets g_j(x_i) back;  v_i = Threshold-Clustering({g_j(x_i)}_j, started at
        g_i(x_i)),   m_i <- momentum v_i + (1 - momentum) m_i,   x_i <- x_i - lr m_i

    At own points gradients vanish at the clients' optima and clusters merge there; at common points not, for n
    gradients per client and round. Deviation: with at="common" the momentum is that of v_i, which equals the centre of
    the momentums of all pairs while balls are stable and needs n d numbers instead of n n d.
    """

    lr: float = setting(0.1, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    momentum: float = setting(0.5, "weight of the new gradient", above=0, high=1)
    clusters: int = setting(
        2, "how many clusters there may be; a ball aims at 1/clusters of the clients", low=1
    )
    at: str = setting("common", "where gradients are compared", options=("common", "own"))
    passes: int = setting(8, "passes of threshold clustering per round", low=1)
    rule: str = setting("auto", "threshold rule", options=OWN_RULES)
    share: float = setting(0.0, "fraction of the clients in a cluster; 0: 1/clusters", low=0, high=1)
    tau: float = setting(0.0, "radius (rule fixed) or distance of clusters (rule theory)", low=0)
    rho: float = setting(0.0, "spread of a cluster (rule theory)", low=0)
    cluster_on: str = setting("all", "part of the vector that is clustered", options=PARTS)
    width: int = setting(256, "length of the random projection", low=1)

    def start(self, fed: Federation) -> State:
        x = fed.initial_model().repeat(fed.n, 1)
        groups = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        return State(models=x, groups=groups, neighbours=torch.zeros(fed.n, device=fed.device))

    def round(self, fed: Federation, s: State, t: int) -> State:
        def part(points: Tensor) -> Tensor:
            return clustered_part(points, self.cluster_on, fed.model, self.width, fed.seed)

        if self.at == "own":
            r = fed.map(self.train, each={"x": s.models}, link=INSIDE)
            v, links = around_each(r, part, self._rule, self.passes)
            to_all = torch.empty(len(r) * (len(r) - 1), fed.d, dtype=fed.dtype, device="meta")
            fed.exchange("momentums", PEERS, up=to_all)
            return moved(fed, s, r.ids, s.models[r.ids] - self.lr * v, links)
        r = fed.map(self.own_slope, each={"x": s.models}, link=INSIDE)
        v, links = at_each(fed, self.slope, s.models, r, part, self._rule, self.passes)
        step = fed.map(self.smooth, each={"v": v}, to=r.ids, link=INSIDE)
        if len(step) == 0:
            raise NobodyAnswered("no client was there to take its step")
        answered = torch.isin(r.ids, step.ids)
        return moved(fed, s, step.ids, s.models[step.ids] - self.lr * step.values, links[answered], r.ids)

    def begin(self, client: Client) -> None:
        client.keep.momentum = torch.zeros_like(client.initial_model())
        client.keep.seen = torch.zeros_like(client.size)

    def train(self, client: Client, x: Tensor) -> Tensor:
        return self.smooth(client, client.grad(x))

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def own_slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def smooth(self, client: Client, v: Tensor) -> Tensor:
        weight = torch.where(client.keep.seen > 0, self.momentum, 1.0)
        m = weight * v + (1 - weight) * client.keep.momentum
        client.keep.momentum, client.keep.seen = m, torch.ones_like(client.size)
        return m

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def handout(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return {**cluster_quality(s.groups, fed.clusters), "neighbours": s.neighbours}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (0, 0), "smooth": (0, 0), "own_slope": (0, 0), "slope": (d, d)}

    def _rule(self, points: int) -> Rule:
        return make_rule(self.rule, self.clusters, points, share=self.share, tau=self.tau, rho=self.rho)


Part = Callable[[Tensor], Tensor]
RuleFor = Callable[[int], Rule]


def around_each(r: Replies, part: Part, rule: RuleFor, passes: int) -> tuple[Tensor, Tensor]:
    """Directions v_i and links (who is in whose ball) when everybody clusters the same points around its own."""
    if len(r) == 0:
        raise NobodyAnswered("no client answered, so there is nothing to cluster")
    own = torch.eye(len(r), dtype=torch.float64, device=r.values.device)
    found = threshold_cluster(part(r.values), start_weights=own, rule=rule(len(r)), rounds=passes)
    return found.weights.to(r.values) @ r.values, found.balls


def at_each(
    fed: Federation,
    slope: Callable[..., Any],
    models: Tensor,
    own: Replies,
    part: Part,
    rule: RuleFor,
    passes: int,
) -> tuple[Tensor, Tensor]:
    """The same when the points of client i are everybody's gradients at x_i, one client after the other.

    `own` are the gradients of those that are here at their own models; links are [answered, n].
    """
    if len(own) == 0:
        raise NobodyAnswered("no client answered, so there is nothing to cluster")
    directions = torch.empty_like(own.values)
    links = torch.zeros(len(own), fed.n, dtype=torch.bool, device=own.ids.device)
    for row, i in enumerate(own.ids.tolist()):
        others = own.ids[own.ids != i]
        r = fed.map(slope, x=models[i], to=others, link=PEERS)
        points = torch.cat([own.values[row : row + 1], r.values]) if len(r) else own.values[row : row + 1]
        first = torch.zeros(1, len(points), dtype=torch.float64, device=points.device)
        first[0, 0] = 1.0
        found = threshold_cluster(part(points), start_weights=first, rule=rule(len(points)), rounds=passes)
        directions[row] = found.weights[0].to(points) @ points
        links[row, i] = True
        links[row, r.ids[found.balls[0, 1:]] if len(r) else r.ids] = True
    return directions, links


def moved(
    fed: Federation, s: State, ids: Tensor, models: Tensor, links: Tensor, columns: Tensor | None = None
) -> State:
    """The state with new models for `ids`, and the groups that take each other in (rows ids, all clients)."""
    whole = torch.zeros(fed.n, fed.n, dtype=torch.bool, device=fed.device)
    if columns is None:
        whole[ids.unsqueeze(1), ids] = links
    else:
        whole[ids] = links
    groups = linked_groups(whole).to(fed.device)
    groups = torch.where(torch.isin(fed.everyone, ids), groups, -1)
    neighbours = whole.sum(1).to(s.neighbours.dtype)
    return State(models=s.models.index_copy(0, ids, models), groups=groups, neighbours=neighbours)
