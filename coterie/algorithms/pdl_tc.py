"""PDL-TC: every client clusters the others around itself, without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.head_sums import HeadSums
from coterie.algorithms.neighbours import (
    around_each,
    at_each,
    ball_of_members,
    ball_quality,
    in_groups,
    moved,
    strangers,
    theory_steps,
    weighted_by_rows,
)
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import INSIDE, PEERS
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.heads import last_layer
from coterie.theory.cluster_count import estimate_clusters
from coterie.theory.sketch import PARTS, clustered_part
from coterie.theory.threshold import REST, Clustering, Rule, make_rule, threshold_cluster

OWN_RULES = ("auto", "size", "theory", "fixed")


@dataclass(frozen=True)
class PdlTc(HeadSums):
    """Threshold clustering by every client around itself (Threshold-Clustering of Similar Clients, 2022).

    at="own", as printed:  m_i <- momentum g_i(x_i) + (1 - momentum) m_i, sent to all clients;
        v_i = Threshold-Clustering({m_j}, started at m_i),   x_i <- x_i - lr v_i
    at="common":  first `warmup` local steps; then i sends x_i to all clients and receives g_j(x_i);
        v_i = Threshold-Clustering({g_j(x_i)}_j, started at g_i(x_i)),
        m_i <- momentum v_i + (1 - momentum) m_i,   x_i <- x_i - lr m_i;
        but if some x_j has f_i(x_j) < adopt f_i(x_i):   x_i <- the one with the lowest, m_i <- 0
    clusters = 0 with at="common":  all send to all what `pfl-tc` asks for at its start (sums over rows or fits alone,
        and losses on held-out rows), from which everybody finds the same clusters, from one for all to everybody alone;
        x_i starts at its cluster's model, is sent to the members, and v_i is their centre as in pfl-tc

    At own points all gradients vanish at the clients' optima, so that clusters merge; at common points they do not,
    at the price of n gradients per client and round. Deviations: `warmup` and `adopt`, without which clients that
    start between clusters stay there; with at="common" the momentum is that of v_i, which equals the centre of the
    momentums of all pairs while balls are stable and needs n d numbers instead of n n d.
    """

    lr: float = setting(0.1, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    momentum: float = setting(0.5, "weight of the new gradient in the momentum", above=0, high=1)
    clusters: int = setting(
        0,
        "expected number of clusters; a ball aims at 1/clusters of the clients; 0: those that held-out rows ask for",
        low=0,
    )
    at: str = setting(
        "common",
        "compare gradients at common points, or at each client's own model",
        options=("common", "own"),
    )
    passes: int = setting(
        100, "maximal passes of threshold clustering, which stops when centres no longer move", low=1
    )
    warmup: int = setting(50, "local steps before the first round (at = common, clusters above 0)", low=0)
    adopt: float = setting(
        0.5,
        "a received model replaces a client's own if its loss is below this fraction of the own loss",
        low=0,
        high=1,
    )
    rule: str = setting("auto", "threshold rule", options=OWN_RULES)
    share: float = setting(0.0, "fraction of the clients in a cluster; 0: 1/clusters", low=0, high=1)
    tau: float = setting(0.0, "radius (rule = fixed) or distance between clusters (rule = theory)", low=0)
    rho: float = setting(0.0, "spread of a cluster (rule = theory)", low=0)
    cluster_on: str = setting("all", "part of the vector that is clustered", options=PARTS)
    width: int = setting(256, "length of the random projection (cluster_on = projection)", low=1)
    relays: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = HeadSums.reveals | {
        "train": "personal",
        "warm": "personal",
        "own_slope": "personal",
        "step": "personal",
        "slope": "gradient",
        "curvature": "aggregate",
    }
    optional: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def from_theory(cls, fed: Federation, *, lr: float | None = None, **settings: Any) -> Self:
        """Return the algorithm with one gradient per round, lr = 1/(3L) and momentum = 3 L lr (Theorem 4).

        Parameters
        ----------
        fed
            The federation, whose model knows its curvature L.
        lr
            A smaller step size, as noise asks for; the momentum follows it.
        **settings
            Other hyperparameters.

        Returns
        -------
        PdlTc
            The algorithm.
        """
        return cls(**{**settings, **theory_steps(fed, cls().curvature, lr)})

    def start(self, fed: Federation) -> State:
        self._rule(self.clusters, fed.n, share=self.share)  # refuses what it lacks before anybody trains
        return State(k=self.clusters, **strangers(fed))

    def round(self, fed: Federation, s: State, t: int) -> State:
        def look(points: Tensor, starts: Tensor) -> Clustering:
            part = self._part(fed, points)
            rule = self._rule(s.k, len(part), share=self.share)
            return threshold_cluster(part, start_weights=starts, rule=rule, rounds=self.passes, rest=REST)

        if self.at == "own":
            r = fed.map(self.train, each={"x": s.models}, link=INSIDE)
            if s.k == 0 and len(r):
                s = s.replace(k=estimate_clusters(self._part(fed, r.values), seed=fed.seed))
            v, links = around_each(r, look)
            to_all = torch.empty(len(r) * (len(r) - 1), fed.d, dtype=fed.dtype, device="meta")
            fed.exchange("momentums", PEERS, up=to_all)
            return moved(fed, s, r.ids, s.models[r.ids] - self.lr * v, links)
        if self.clusters == 0:
            return self._in_found_groups(fed, s) if "settled" in s else self._found_groups(fed, s)
        if t == 1 and self.warmup:
            s = self._warmed(fed, s)
        r = fed.map(self.own_slope, each={"x": s.models}, link=INSIDE)
        v, links = at_each(fed, self.slope, s.models, r, look)
        step = self._stepped(fed, s, r, v)
        here = torch.isin(r.ids, step.ids)
        return moved(fed, s, step.ids, step.values, links[here][:, here])

    def begin(self, client: Client) -> None:
        x = client.initial_model()
        client.keep.momentum, client.keep.seen = torch.zeros_like(x), torch.zeros_like(client.size)
        client.keep.best, client.keep.loss, client.keep.lowest = x, *[torch.zeros_like(client.size)] * 2

    def train(self, client: Client, x: Tensor) -> Tensor:
        weight = self.momentum + (1 - self.momentum) * (client.keep.seen == 0).to(x.dtype)
        m = weight * client.grad(x) + (1 - weight) * client.keep.momentum
        client.keep.momentum, client.keep.seen = m, torch.ones_like(client.size)
        return m

    def warm(self, client: Client, x: Tensor) -> Tensor:
        return client.sgd(x, self.lr, self.warmup)

    def own_slope(self, client: Client, x: Tensor) -> Tensor:
        if self.adopt:
            client.keep.best, client.keep.loss = x, client.loss(x)
            client.keep.lowest = client.keep.loss
        return client.grad(x)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        """Return the gradient at another client's model, and remember the model if it fits best so far."""
        if self.adopt:
            loss = client.loss(x)
            better = loss < client.keep.lowest
            client.keep.best = torch.where(better, x, client.keep.best)
            client.keep.lowest = torch.where(better, loss, client.keep.lowest)
        return client.grad(x)

    def step(self, client: Client, x: Tensor, v: Tensor) -> Tensor:
        weight = self.momentum + (1 - self.momentum) * (client.keep.seen == 0).to(x.dtype)
        m = weight * v + (1 - weight) * client.keep.momentum
        stranger = client.keep.lowest < self.adopt * client.keep.loss
        client.keep.momentum = torch.where(stranger, 0.0, m)
        client.keep.seen = torch.where(stranger, 0.0, torch.ones_like(client.size))
        return torch.where(stranger, client.keep.best, x - self.lr * m)

    def curvature(self, client: Client) -> Tensor:
        return client.smoothness()

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return ball_quality(fed, s)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        inside = ("begin", "train", "warm", "own_slope", "step", *HeadSums.reveals)
        return {**dict.fromkeys(inside, (0, 0)), "curvature": (0, 1), "slope": (d, d)}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        return self.traffic(model.d)

    def ask_all(self, fed: Federation, phase: Callable[..., Any], **given: Any) -> Replies:
        """Run a phase by which clusters are found: every client sends its answer to all others."""
        r = fed.map(phase, link=INSIDE, **given)
        if len(r):
            numbers = sum(value[0].numel() for value in r.named.values())
            to_all = torch.empty(len(r) * (fed.n - 1), numbers, dtype=fed.dtype, device="meta")
            fed.exchange("answers", PEERS, up=to_all)
        return r

    def _found_groups(self, fed: Federation, s: State) -> State:
        """Start from the models of clusters that are found; who did not answer has none, and starts as before."""
        found = self.find_clusters(fed, None, 0, self.cluster_on, self.width)
        here, label = found.labels >= 0, found.labels.clamp(min=0)
        count = torch.bincount(found.labels[here], minlength=len(found.models))
        models, apart = found.models[label], torch.zeros_like(here)
        if found.own is not None:
            models, apart = models + found.own, found.own.any(1)
        settled = torch.isin(
            found.labels, found.labels[apart]
        )  # fitted from sums, each client with its own part
        models = torch.where(here.unsqueeze(1), models, s.models)
        sizes = torch.where(here, count[label], 1).to(s.neighbours)
        return s.replace(models=models, groups=found.labels, neighbours=sizes, settled=settled)

    def _in_found_groups(self, fed: Federation, s: State) -> State:
        """Let clients that are not settled take a step along the centre of their group's gradients."""

        def centre(points: Tensor, rows: Tensor) -> Tensor:
            part = self._part(fed, points)
            rule = self._rule(1, len(part), share=self.share or 1.0)
            everyone = torch.ones(len(part), dtype=torch.bool, device=part.device)
            return weighted_by_rows(ball_of_members(part, everyone, rule, self.passes), rows)

        moving = (~s.settled).nonzero().squeeze(1)
        if len(moving) == 0:
            return s
        r = fed.map(self.own_slope, each={"x": s.models[moving]}, to=moving, link=INSIDE)
        step = self._stepped(fed, s, r, in_groups(fed, self.slope, s.models, r, s.groups, centre))
        return s.replace(models=step.put(s.models))

    def _stepped(self, fed: Federation, s: State, r: Replies, v: Tensor) -> Replies:
        """Let clients that answered take their steps along v."""
        step = fed.map(self.step, each={"x": s.models[r.ids], "v": v}, to=r.ids, link=INSIDE)
        if len(step) == 0:
            raise NobodyAnswered("no client was there to take its step")
        return step

    def _part(self, fed: Federation, points: Tensor) -> Tensor:
        return clustered_part(points, self.cluster_on, last_layer(fed.model), self.width, fed.seed)

    def _rule(self, k: int, points: int, share: float) -> Rule:
        return make_rule(self.rule, k, points, share=share, tau=self.tau, rho=self.rho)

    def _warmed(self, fed: Federation, s: State) -> State:
        r = fed.map(self.warm, each={"x": s.models}, link=INSIDE)
        return s.replace(models=r.put(s.models)) if len(r) else s
