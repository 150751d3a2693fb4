"""Oracle: FedAvg inside each true cluster, the result of perfect knowledge of the clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.finding import Finder
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State


@dataclass(frozen=True)
class Oracle(Finder):
    """FedAvg inside each known cluster, the reference point of the CoBo paper (2024, section 4).

    y_i = centre of i's cluster after `steps` SGD steps,   centre_j <- mean of y_i over i in cluster j

    clusters = "found": the clusters are not known but found first, by held-out rows in a tree of the clients' own fits.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    clusters: str = setting("known", "use the known clusters, or find them first", options=("known", "found"))
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = Finder.reveals | {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}

    def start(self, fed: Federation) -> State:
        found = self.use_found(fed) if self.clusters == "found" else {}
        clusters = fed.known_clusters(self.name)
        return State(centres=fed.initial_model().repeat(int(clusters.max()) + 1, 1), **found)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        r = fed.map(self.train, each={"x": self._own(fed, s, ids)}, to=ids)
        uniform = self.weighting == "uniform"
        return s.replace(centres=r.mean(uniform=uniform, by=fed.known_clusters(), default=s.centres))

    def train(self, client: Client, x: Tensor) -> Tensor:
        return client.sgd(x, self.lr, self.steps)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": self._own(fed, s, None)}

    def common(self, fed: Federation, s: State) -> Tensor:
        return (self._own(fed, s, None) * fed.sizes).sum(0) / fed.sizes.sum()

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d), **self.finding_traffic(d)}

    def _own(self, fed: Federation, s: State, ids: Tensor | None) -> Tensor:
        """Return the centre of each client's cluster, [n, d]."""
        clusters = fed.known_clusters()
        own: Tensor = s.centres[clusters if ids is None else clusters[ids]]
        return own
