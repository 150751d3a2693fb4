"""PFL-TC: in every round the server finds groups of similar clients by threshold clustering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered, SettingError
from coterie._core.randomness import key
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.head_sums import HeadSums
from coterie.algorithms.neighbours import ball_of_members, theory_steps, weighted_by_rows
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.heads import last_layer
from coterie.theory.cluster_count import estimate_clusters
from coterie.theory.cluster_quality import align_labels, cluster_quality
from coterie.theory.sketch import PARTS, clustered_part
from coterie.theory.threshold import Clustering, Rule, make_rule, threshold_cluster
from coterie.theory.threshold_rules import RULES
from coterie.theory.threshold_starts import group_weights, seed_weights


@dataclass(frozen=True)
class PflTc(HeadSums):
    """Threshold clustering of client momentums by the server (Threshold-Clustering of Similar Clients, 2022).

    at="own", as printed:  m_i <- momentum u_i(x_i) + (1 - momentum) m_i,   V = Threshold-Clustering({m_i}),
        x_i <- x_i - lr v_{a(i)},   a(i) the nearest centre,   all x_i from one start
    at="common":  first all clients fit alone, clusters are found among the fits (see `clusters`), and their centres
        are the first models y_k;  then clients answer at y_k;  v_k = the threshold centre of {u_i(y_k)}_i started from
        k's members and weighted by rows,   m_k <- momentum v_k + (1 - momentum) m_k,   y_k <- y_k - lr m_k;  with
        clusters > 0 everybody answers at every y_k and joins the k with the smallest |u_i(y_k) - v_k|

    u_i is a gradient (steps = 1) or (x - y)/lr after local steps. clusters = 0: held-out rows choose the clusters in a
    tree of the clients' own fits, from one for all to everybody alone. Where sums over rows say that members differ,
    client i deploys y_k + o_i, o_i what its own rows add to the fit of its cluster (empirical Bayes, at the start). The
    page of this algorithm lists corrected signs and the corrected divisor. At own points all gradients vanish at the
    clients' optima, so that clusters merge; at common points they do not. Deviations: the fits, because one gradient
    tells too little and a bad first clustering is never left; with at="common" the momentum is the centre's, which
    equals the centre of momentums while balls are stable, so that no client stores K vectors.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 6
    >>> ys = [torch.full((2,), target) for target in (-1.0, -1.1, -0.9, 1.0, 1.1, 0.9)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.PflTc(clusters=2), rounds=20)
    >>> run.state.labels.tolist()
    [0, 0, 0, 1, 1, 1]
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    momentum: float = setting(0.5, "weight of the new gradient in the momentum", above=0, high=1)
    clusters: int = setting(0, "number of clusters; 0: as many as held-out rows ask for", low=0)
    at: str = setting(
        "common",
        "compare gradients at common points, or at each client's own model",
        options=("common", "own"),
    )
    steps: int = setting(5, "local steps summed up in one gradient", low=1)
    warmup: int = setting(100, "steps of clients that fit alone before the first clustering", low=1)
    passes: int = setting(8, "passes of threshold clustering per round", low=1)
    rule: str = setting("auto", "threshold rule", options=RULES)
    share: float = setting(0.0, "fraction of the clients in a cluster; 0: 1/clusters", low=0, high=1)
    tau: float = setting(0.0, "radius (rule = fixed) or distance between clusters (rule = theory)", low=0)
    rho: float = setting(0.0, "spread of a cluster (rule = theory)", low=0)
    spare: int = setting(0, "additional centres, which groups of Byzantine clients may take", low=0)
    cluster_on: str = setting("all", "part of the vector that is clustered", options=PARTS)
    width: int = setting(256, "length of the random projection (cluster_on = projection)", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    pulls: ClassVar[bool] = True

    @classmethod
    def from_theory(cls, fed: Federation, *, lr: float | None = None, **settings: Any) -> Self:
        """Return the algorithm with one gradient per round, lr = 1/(3L) and momentum = 3 L lr (Theorem 3).

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
        PflTc
            The algorithm.
        """
        return cls(**{**settings, **theory_steps(fed, cls().curvature, lr)}, steps=1)

    @property
    def fit_steps(self) -> int:
        return self.warmup

    reveals: ClassVar[Reveals] = HeadSums.reveals | {
        "train": "model",
        "slope": "gradient",
        "curvature": "aggregate",
    }
    optional: ClassVar[frozenset[str]] = frozenset()

    def start(self, fed: Federation) -> State:
        if self.clusters > fed.n:
            raise SettingError(f"{self.name}: clusters = {self.clusters}, but there are only {fed.n} clients")
        self._rule(self.clusters, fed.n, share=self.share)  # refuses what it lacks before anybody trains
        x = fed.initial_model()
        models = x.repeat(1 if self.at == "common" else fed.n, 1)
        labels = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        return State(k=0, models=models, momentum=torch.zeros_like(models[:1]), labels=labels)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        if self.at == "own":
            return self._at_own_points(fed, s, t, ids)
        return self._at_cluster_models(fed, s, ids) if s.k else self._first_clusters(fed, s, ids)

    def begin(self, client: Client) -> None:
        if self.at == "own":
            client.keep.momentum = torch.zeros_like(client.initial_model())
            client.keep.seen = torch.zeros_like(client.size)

    def train(self, client: Client, x: Tensor) -> Tensor:
        weight = self.momentum + (1 - self.momentum) * (client.keep.seen == 0).to(x.dtype)
        m = weight * self.slope(client, x) + (1 - weight) * client.keep.momentum
        client.keep.momentum, client.keep.seen = m, torch.ones_like(client.size)
        return m

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return self._path(client, x, self.steps)

    def curvature(self, client: Client) -> Tensor:
        return client.smoothness()

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": self._own(fed, s)}

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return cluster_quality(s.labels, fed.clusters)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        given = {"begin": (0, 0), "curvature": (0, 1), "train": (d, d), "slope": (d, d)}
        return {**given, **self.finding_traffic(d), **self.head_traffic(d)}

    def _path(self, client: Client, x: Tensor, steps: int) -> Tensor:
        """Return the sum of the gradients along so many local steps from x."""
        if steps == 1 and self.optimizer == "sgd":
            return client.grad(x)
        return (x - client.sgd(x, self.lr, steps)) / self.lr

    def _own(self, fed: Federation, s: State) -> Tensor:
        """Return the model of every client; clients without a cluster get the mean of the models."""
        models: Tensor = s.models
        if self.at == "own":
            return models
        own = models[s.labels.clamp(min=0)]
        own = own + s.own if "own" in s else own
        return torch.where((s.labels >= 0).unsqueeze(-1), own, models.mean(0))

    def _at_own_points(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        asked = fed.everyone if ids is None else ids
        r = fed.map(self.train, each={"x": s.models[asked]}, to=ids)
        k, found = self._search(fed, s, t, r.values if len(r) else None)
        v = (found.weights.to(r.values) @ r.values)[found.membership]
        models = s.models.index_copy(0, r.ids, s.models[r.ids] - self.lr * v)
        labels = align_labels(found.membership, s.labels[r.ids], k + self.spare)
        return s.replace(k=k, models=models, labels=s.labels.index_copy(0, r.ids, labels))

    def _first_clusters(self, fed: Federation, s: State, ids: Tensor | None) -> State:
        """Find the clusters among clients that fitted alone; their centres are the first models."""
        found = self.find_clusters(
            fed, ids, self.clusters + (self.clusters and self.spare), self.cluster_on, self.width
        )
        still = torch.zeros_like(found.models)
        return s.replace(
            k=len(still), models=found.models, momentum=still, labels=found.labels, **found.memory
        )

    def _at_cluster_models(self, fed: Federation, s: State, ids: Tensor | None) -> State:
        models, momentum = s.models.clone(), s.momentum.clone()
        asked = fed.everyone if ids is None else ids
        distance = torch.full((len(models), fed.n), torch.inf, dtype=torch.float64, device=fed.device)
        for c in range(len(models)):
            if "own" in s and bool(s.own[s.labels == c].any()):
                continue  # fitted from sums, and members' own parts are relative to this fit
            wanted = asked if self.clusters else asked[(s.labels[asked] == c) | (s.labels[asked] < 0)]
            r = fed.map(self.slope, x=s.models[c], to=ids if len(wanted) == len(asked) else wanted)
            members = s.labels[r.ids] == c if len(r) else s.labels[:0] > 0
            if not members.any():
                continue
            weights, distance[c, r.ids] = self._centre(fed, r, members)
            v = weights.to(r.values) @ r.values
            fresh = 1.0 if not momentum[c].any() else self.momentum
            momentum[c] = fresh * v + (1 - fresh) * momentum[c]
            models[c] = models[c] - self.lr * momentum[c]
        nearest, labels = distance.min(0)
        stays = ~torch.isfinite(nearest) | ((self.clusters == 0) & (s.labels >= 0))
        return s.replace(models=models, momentum=momentum, labels=torch.where(stays, s.labels, labels))

    def _centre(self, fed: Federation, r: Replies, members: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [N] of the threshold centre of the members' answers, and all distances from it."""
        part = clustered_part(r.values, self.cluster_on, last_layer(fed.model), self.width, fed.seed)
        rule = self._rule(1, len(part), share=self.share or float(members.double().mean()))
        if self.clusters:
            start = group_weights(part, (~members).long(), 1)
            balls = threshold_cluster(part, start_weights=start, rule=rule, rounds=self.passes).weights[0]
        else:
            balls = ball_of_members(part, members, rule, self.passes)
        weights = weighted_by_rows(balls, r.weights)
        centre = weights @ part.double()
        return weights, torch.linalg.vector_norm(part.double() - centre, dim=1)

    def _search(self, fed: Federation, s: State, t: int, points: Tensor | None) -> tuple[int, Clustering]:
        """Return the number of clusters, fixed in the first round, and the clusters of the answers."""
        if points is None:
            raise NobodyAnswered("no client answered, so there is nothing to cluster")
        part = clustered_part(points, self.cluster_on, last_layer(fed.model), self.width, fed.seed)
        k = s.k or self.clusters or estimate_clusters(part, seed=fed.seed)
        count = min(k + self.spare, len(part))
        seed = int(key(fed.seed, self.name, t))
        starts = seed_weights(part, count, tries=10 if s.k == 0 else 2, far=True, seed=seed)
        rule = self._rule(k, len(part), share=self.share)
        return k, threshold_cluster(part, start_weights=starts, rule=rule, rounds=self.passes)

    def _rule(self, k: int, points: int, share: float) -> Rule:
        return make_rule(self.rule, k, points, share=share, tau=self.tau, rho=self.rho)
