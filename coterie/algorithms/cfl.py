"""CFL: clusters that split where their clients want to go in opposite directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import scipy  # loads its parts when they are first used
import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State
from coterie.models.base import norm
from coterie.theory.cluster_quality import cluster_quality


@dataclass(frozen=True)
class Cfl(Algorithm):
    """Clustered federated learning by bipartitions (Sattler, Mueller, Samek 2020, arXiv:1910.01991).

    delta_i = x_k after `steps` SGD steps on client i - x_k,   x_k <- x_k + mean of delta_i over the clients i in k
    k is split if  |mean delta_i| < still max |delta_i|  and  max |delta_i| > moving (its largest in the first rounds),
    into the two groups of its clients that complete linkage of the cosines of delta_i gives

    Training begins with one cluster. It is split when it has come to rest although its clients still want to move, as a
    mixture of different clients does. Deviation: the paper's thresholds eps_1 and eps_2 are lengths; here they are
    relative to the longest moves, now and at first.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (-1.0, -1.0, 1.0, 1.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.Cfl(), rounds=50)
    >>> run.state.labels.tolist(), run.personal.squeeze().round(decimals=2).tolist()
    ([0, 0, 1, 1], [-1.0, -1.0, 1.0, 1.0])
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    still: float = setting(
        0.3,
        "a cluster is at rest if its mean move is below this fraction of the longest",
        above=0,
        high=1,
        tune=(0.2, 0.3, 0.5),
    )
    moving: float = setting(
        0.2,
        "clients move if the longest move exceeds this fraction of the longest ever",
        low=0,
        high=1,
        tune=(0.1, 0.2, 0.4),
    )
    smallest: int = setting(2, "clients that each part of a split must have", low=1)
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "model"}

    def start(self, fed: Federation) -> State:
        return State(
            models=fed.initial_model().unsqueeze(0),
            labels=torch.zeros(fed.n, dtype=torch.long, device=fed.device),
            longest=torch.zeros(1, dtype=fed.dtype, device=fed.device),
        )

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        before = s.models[s.labels if ids is None else s.labels[ids]]
        r = fed.map(self.train, each={"x": before}, to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model was trained")
        moves = r.values - (before if len(r) == len(before) else s.models[s.labels[r.ids]])
        lengths = norm(moves)
        models = r.mean(uniform=self.weighting == "uniform", by=s.labels, default=s.models)
        longest = torch.maximum(s.longest, lengths.amax())
        labels, parents = s.labels, list(range(len(models)))
        for k in range(len(s.models)):
            inside = (s.labels[r.ids] == k).nonzero().squeeze(1)
            if self._wants_apart(lengths[inside], norm(models[k] - s.models[k]), longest):
                second = self._second_part(moves[inside])
                if self.smallest <= int(second.sum()) <= len(inside) - self.smallest:
                    labels = labels.index_fill(0, r.ids[inside[second]], len(parents))
                    parents.append(k)
        return State(models=models[parents], labels=labels, longest=longest)

    def _wants_apart(self, lengths: Tensor, mean: Tensor, longest: Tensor) -> bool:
        if len(lengths) < 2 * self.smallest:
            return False
        now = lengths.amax()
        return bool((mean < self.still * now) & (now > self.moving * longest))

    @staticmethod
    def _second_part(moves: Tensor) -> Tensor:
        """Return which clients leave: those apart from the first in two groups by complete linkage of cosines."""
        direction = torch.nn.functional.normalize(moves, dim=1)
        apart = (1 - direction @ direction.t()).clamp(min=0).double().cpu()
        upper = torch.triu_indices(len(moves), len(moves), 1)
        tree = scipy.cluster.hierarchy.linkage(apart[upper[0], upper[1]], "complete")
        parts = torch.from_numpy(scipy.cluster.hierarchy.fcluster(tree, 2, "maxclust"))
        return (parts != parts[0]).to(moves.device)

    def train(self, client: Client, x: Tensor) -> Tensor:
        return client.sgd(x, self.lr, self.steps)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.models[s.labels]}

    def common(self, fed: Federation, s: State) -> Tensor:
        mean: Tensor = (fed.sizes * s.models[s.labels]).sum(0) / fed.sizes.sum()
        return mean

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return cluster_quality(s.labels, fed.clusters)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}
