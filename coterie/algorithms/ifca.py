"""IFCA: several models, of which every client trains the one that fits it best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.head_sums import HeadSums
from coterie.algorithms.several_starts import several_starts
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.replies import UNNAMED, Replies
from coterie.engine.state import State
from coterie.theory.cluster_quality import cluster_quality


@dataclass(frozen=True)
class Ifca(HeadSums):
    """Iterative federated clustering (Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020, arXiv:2006.04088).

    client i:  k(i) = argmin_k f_i(theta_k) on all its rows (judge="batch": all theta_k on one minibatch)
    average="gradient":  theta_k <- theta_k - (lr/N) sum_{k(i)=k} g_i(theta_k), N the clients that answered
        (divide="all", as in the paper) or those in k (divide="cluster")
    average="model":  theta_k <- mean of the models of k(i)=k after `steps` SGD steps; an unused model stays

    clusters = 0: the number of models and their starts come from clients that fitted alone, by their held-out rows;
    then models are offered one by one to clients that have company, and who is alone stays so. Where sums over rows
    say that members of a cluster differ, each deploys theta_k plus what its own rows add (empirical Bayes).

    IFCA collapses from bad starts. Deviation: with restarts > 1, that many sets of models are trained for `trial`
    rounds, and the set with the lowest mean of min_k f_i is kept. More models than clients are allowed; the surplus
    is never chosen.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.ones(2, 1)] * 4
    >>> ys = [torch.full((2,), target) for target in (-1.0, -1.0, 1.0, 1.0)]
    >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
    >>> run = coterie.fit(fed, coterie.algorithms.Ifca(clusters=2, restarts=5), rounds=50)
    >>> run.personal.squeeze().round(decimals=2).tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """

    lr: float = setting(0.05, "step size", above=0, tune=(0.01, 0.03, 0.1, 0.3))
    clusters: int = setting(0, "number of models; 0: as many as held-out rows ask for", low=0)
    average: str = setting(
        "model",
        "what a cluster averages: models after local steps, or gradients",
        options=("model", "gradient"),
    )
    divide: str = setting(
        "all",
        "divisor of a sum of gradients: all clients that answered, or those of the cluster",
        options=("all", "cluster"),
    )
    steps: int = setting(5, "local steps per round (average=model)", low=1)
    restarts: int = setting(1, "number of sets of starting models", low=1)
    trial: int = setting(10, "rounds after which only the best set is kept", low=1)
    spread: float = setting(0.1, "standard deviation of the noise added to each starting model", low=0)
    judge: str = setting("all", "rows on which models are compared in training", options=("all", "batch"))
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    pulls: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = HeadSums.reveals | {
        "train": "model",
        "explore": "model",
        "weigh": "aggregate",
        "improve": "model",
    }

    def start(self, fed: Federation) -> State:
        if not self.clusters:
            nobody = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
            return State(models=fed.initial_model().unsqueeze(0), labels=nobody, tried=0)
        models = several_starts(fed, self.name, self.restarts * self.clusters, self.spread)
        models = models.view(self.restarts, self.clusters, fed.d)
        labels = torch.full((fed.n,), -1, dtype=torch.long, device=fed.device)
        return State(models=models if self.restarts > 1 else models[0], labels=labels, tried=0)

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        if not self.clusters:
            return self._found_round(fed, s, ids)
        r = fed.map(self.train if s.models.dim() == 2 else self.explore, models=s.models, to=ids)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model was trained")
        if s.models.dim() == 2:
            models = self._averaged(s.models, r, "update", "choice")
            return State(models=models, labels=self._labelled(s.models, s.labels, r, "choice"), tried=s.tried)
        sets = [
            (
                self._averaged(s.models[k], r, f"update{k}", f"choice{k}"),
                self._labelled(s.models[k], s.labels, r, f"choice{k}"),
            )
            for k in range(self.restarts)
        ]
        if s.tried + 1 < self.trial:
            return State(models=torch.stack([m for m, _ in sets]), labels=sets[0][1], tried=s.tried + 1)
        best, labels = sets[int(r.mean("loss").argmin())]
        return State(models=best, labels=labels, tried=s.tried + 1)

    def train(self, client: Client, models: Tensor) -> dict[str, Tensor]:
        x, choice, _ = self._chosen(client, models, self.judge)
        return {"update": self._update(client, x), "choice": choice}

    def explore(self, client: Client, models: Tensor) -> dict[str, Tensor]:
        """Choose and train a model of each set."""
        chosen = [self._chosen(client, models[..., k, :, :], self.judge) for k in range(self.restarts)]
        return {
            **{f"update{k}": self._update(client, x) for k, (x, _, _) in enumerate(chosen)},
            **{f"choice{k}": choice for k, (_, choice, _) in enumerate(chosen)},
            "loss": torch.cat([loss for _, _, loss in chosen], -1),
        }

    def _found_round(self, fed: Federation, s: State, ids: Tensor | None) -> State:
        """Find the clusters in the first round; then train each client's model, the one that fits it best."""
        if s.tried == 0:
            found = self.find_clusters(fed, ids)
            return State(models=found.models, labels=found.labels, tried=1, **found.memory)
        labels = self._offered(fed, s, ids)
        asked = fed.everyone if ids is None else ids
        asked = asked[labels[asked] >= 0]
        r = fed.map(self.improve, each={"x": s.models[labels[asked]]}, to=asked)
        if len(r) == 0:
            raise NobodyAnswered("no client answered, so no model was trained")
        models = self._averaged(s.models, r, UNNAMED, labels)
        return s.replace(models=models, labels=labels, tried=s.tried + 1)

    def _offered(self, fed: Federation, s: State, ids: Tensor | None) -> Tensor:
        """Return labels after every model of several clients was offered to all clients that are not alone.

        Who differs from its cluster, and adds to its model what its own rows say, stays there.
        """
        count = torch.bincount(s.labels.clamp(min=0), s.labels >= 0, minlength=len(s.models))
        asked = fed.everyone if ids is None else ids
        social = asked[(s.labels[asked] < 0) | (count[s.labels[asked].clamp(min=0)] > 1)]
        if "own" in s:
            social = social[~s.own[social].any(-1)]
        lowest = torch.full((fed.n,), torch.inf, dtype=torch.float64, device=fed.device)
        labels: Tensor = s.labels.clone()
        for k in (count > 1).nonzero().squeeze(1).tolist() if len(social) and len(s.models) > 1 else []:
            r = fed.map(self.weigh, x=s.models[k], to=social)
            better = r.values.double().squeeze(-1) < lowest[r.ids] if len(r) else labels[:0] > 0
            lowest[r.ids[better]] = r.values[better].double().squeeze(-1) if len(r) else lowest[:0]
            labels[r.ids[better]] = k
        lost = labels[asked] < 0
        return labels.index_fill(0, asked[lost], 0) if lost.any() else labels

    def weigh(self, client: Client, x: Tensor) -> Tensor:
        return client.batch_loss(x) if self.judge == "batch" else client.loss(x)

    def improve(self, client: Client, x: Tensor) -> Tensor:
        return self._update(client, x)

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self.clusters:
            return {"models": s.models}, {}
        own = s.models[s.labels.clamp(min=0)]
        own = own + s.own if "own" in s else own
        return {}, {"x": torch.where((s.labels >= 0).unsqueeze(-1), own, s.models.mean(0))}

    def deploy(self, client: Client, models: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        if models is None:
            assert x is not None
            return x
        return self._chosen(client, models if models.dim() < len(client.lead) + 3 else models[..., 0, :, :])[
            0
        ]

    def common(self, fed: Federation, s: State) -> Tensor:
        models: Tensor = s.models.reshape(-1, fed.d)
        return models[: self.clusters or len(models)].mean(0)

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return cluster_quality(s.labels, fed.clusters)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        sets = self.restarts
        given = {"train": (self.clusters * d, d + 1), "explore": (sets * self.clusters * d, sets * (d + 2))}
        return {
            **given,
            **self.finding_traffic(d),
            **self.head_traffic(d),
            "weigh": (d, 1),
            "improve": (d, d),
        }

    def _chosen(self, client: Client, models: Tensor, judge: str = "all") -> tuple[Tensor, Tensor, Tensor]:
        """Return the model that fits best, its number and its loss."""
        each = range(models.shape[-2])
        if judge == "batch":
            losses = torch.cat([client.batch_loss(models[..., k, :], again=k > 0) for k in each], -1)
        else:
            losses = torch.cat([client.loss(models[..., k, :]) for k in each], -1)
        loss, choice = losses.min(-1, keepdim=True)
        place = choice.unsqueeze(-1).expand(*models.shape[:-2], 1, models.shape[-1])
        return models.gather(-2, place).squeeze(-2), choice.to(losses.dtype), loss

    def _update(self, client: Client, x: Tensor) -> Tensor:
        if self.average == "gradient":
            return client.grad(x)
        return client.sgd(x, self.lr, self.steps)

    def _averaged(self, models: Tensor, r: Replies, name: str, by: Tensor | str) -> Tensor:
        """Return new models from the answers; a choice outside 0..clusters-1 is ignored."""
        uniform = self.weighting != "size"
        if self.average == "gradient":
            mean = r.mean(name, uniform=uniform, by=by, default=torch.zeros_like(models))
            if self.divide == "all":
                share = r.count(by, len(models), uniform=uniform).to(mean.dtype)
                mean = mean * share / share.sum().clamp(min=1)
            return models - self.lr * mean
        return r.mean(name, uniform=uniform, by=by, default=models)

    @staticmethod
    def _labelled(models: Tensor, labels: Tensor, r: Replies, choice: str) -> Tensor:
        """Return labels with the clients' own choices, where these are told; one outside 0..clusters-1 is ignored."""
        if not r.single:
            return labels
        picked = r[choice].squeeze(-1).round().long()
        valid = (picked >= 0) & (picked < len(models))
        return labels.index_copy(0, r.ids, torch.where(valid, picked, labels[r.ids]))
