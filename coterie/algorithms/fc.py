"""FC: federated clustering by cluster size, a baseline of CoBo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, setting
from coterie.algorithms.pdl_tc import at_each, moved
from coterie.federation.client import Client
from coterie.federation.federation import Federation
from coterie.federation.ledger import INSIDE
from coterie.federation.state import State
from coterie.theory.cluster_quality import cluster_quality
from coterie.theory.sketch import PARTS, clustered_part
from coterie.theory.threshold import Rule, Size


@dataclass(frozen=True)
class Fc(Algorithm):
    """Each client averages the gradients nearest to its own (Werner et al. 2023; the baseline in CoBo, 2024).

    i sends x_i, every j returns g_j(x_i) on j's data;  v <- (1/N) sum_j (g_j if |g_j - v| <= tau else v), started at
    g_i, `passes` times, tau the distance of the `size`-th nearest gradient;   x_i <- x_i - lr v

    CoBo's code takes gradients of the others' models on i's own data instead, and does much worse for it.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    size: int = setting(0, "clients in a cluster, oneself included; 0: of the smallest known cluster", low=0)
    passes: int = setting(10, "passes of the clustering per round", low=1)
    cluster_on: str = setting("all", "part of the gradient that is clustered", options=PARTS)
    width: int = setting(256, "length of the random projection", low=1)

    def start(self, fed: Federation) -> State:
        size = self.size or int(torch.bincount(fed.known_clusters(f"{self.name} with size = 0")).min())
        groups = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        neighbours = torch.zeros(fed.n, device=fed.device)
        return State(
            size=size, models=fed.initial_model().repeat(fed.n, 1), groups=groups, neighbours=neighbours
        )

    def round(self, fed: Federation, s: State, t: int) -> State:
        def part(points: Tensor) -> Tensor:
            return clustered_part(points, self.cluster_on, fed.model, self.width, fed.seed)

        def nearest(points: int) -> Rule:
            return Size(min(1.0, s.size / points))

        r = fed.map(self.own_slope, each={"x": s.models}, link=INSIDE)
        v, links = at_each(fed, self.slope, s.models, r, part, nearest, self.passes)
        after = moved(fed, s, r.ids, s.models[r.ids] - self.lr * v, links, r.ids)
        return State(size=s.size, **after.fields())

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def own_slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def handout(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return {**cluster_quality(s.groups, fed.clusters), "neighbours": s.neighbours}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"own_slope": (0, 0), "slope": (d, d)}
