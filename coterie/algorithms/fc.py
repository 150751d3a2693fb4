"""FC: federated clustering by cluster size, a baseline in the CoBo paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.algorithms.neighbours import at_each, ball_quality, moved, strangers
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.ledger import INSIDE
from coterie.engine.state import State
from coterie.models.heads import last_layer
from coterie.theory.sketch import PARTS, clustered_part
from coterie.theory.threshold import Clustering, Size, threshold_cluster


@dataclass(frozen=True)
class Fc(Algorithm):
    """Each client averages the gradients nearest to its own (Werner et al. 2023; the baseline in CoBo, 2024).

    client i sends x_i, every j returns g_j(x_i) on j's data;   x_i <- x_i - lr v, where v starts at g_i and
    v <- (1/N) sum_j (g_j if |g_j - v| <= tau else v)   `passes` times, tau the distance of the `size`-th nearest g_j

    Deviation: CoBo's code takes gradients of the others' models on i's own data instead, which is much worse.
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    size: int = setting(
        0,
        "clients in a cluster, including the client itself; 0: as many as in the smallest known cluster",
        low=0,
    )
    passes: int = setting(10, "passes of the clustering per round", low=1)
    cluster_on: str = setting("all", "part of the gradient that is clustered", options=PARTS)
    width: int = setting(256, "length of the random projection (cluster_on = projection)", low=1)
    relays: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"own_slope": "personal", "slope": "gradient"}

    def start(self, fed: Federation) -> State:
        size = self.size or int(torch.bincount(fed.known_clusters(f"{self.name} with size = 0")).min())
        return State(size=size, **strangers(fed))

    def round(self, fed: Federation, s: State, t: int) -> State:
        def look(points: Tensor, starts: Tensor) -> Clustering:
            part = clustered_part(points, self.cluster_on, last_layer(fed.model), self.width, fed.seed)
            nearest = Size(min(1.0, s.size / len(part)))
            return threshold_cluster(part, start_weights=starts, rule=nearest, rounds=self.passes)

        r = fed.map(self.own_slope, each={"x": s.models}, link=INSIDE)
        v, links = at_each(fed, self.slope, s.models, r, look)
        return moved(fed, s, r.ids, s.models[r.ids] - self.lr * v, links)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def own_slope(self, client: Client, x: Tensor) -> Tensor:
        return client.grad(x)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return ball_quality(fed, s)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"own_slope": (0, 0), "slope": (d, d)}
