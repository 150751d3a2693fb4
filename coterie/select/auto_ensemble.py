"""The ensemble of `auto`: a weighted mean of finalists, where rows held out say that it is better than the best one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coterie.engine.federation import Federation
from coterie.models.metrics import Metric, ScoredRows
from coterie.select.auto_race import Race
from coterie.select.entrant import Entrant
from coterie.select.guard import harmed
from coterie.select.held_out import HeldOutRows, choosing_metric
from coterie.select.verdict import Verdict, row_metric
from coterie.theory.stacking import best_strength, client_weights, greedy_weights, row_losses
from coterie.train.blend import Blend, Blended
from coterie.train.history import History
from coterie.train.run import Run

MOST = 12  # finalists whose predictions are averaged
LEAST_GAIN = 0.005  # of the loss of the best one alone, which an ensemble has to save


@dataclass(frozen=True)
class EntrantPredictions:
    """Predictions of entrants for the same rows held out.

    Attributes
    ----------
    task : str
        Kind of target.
    scores : Tensor
        [K, rows, outputs].
    y, client, part : Tensor
        Targets, clients and parts of the rows, [rows]; weights are judged on parts that they are not from.
    """

    task: str
    scores: Tensor
    y: Tensor
    client: Tensor
    part: Tensor

    @classmethod
    def of(cls, task: str, entrants: list[Entrant]) -> EntrantPredictions:
        """Collect what entrants say about the rows held out."""
        found = [entrant.predictions() for entrant in entrants]
        _, y, client, part = found[0]
        part = part if int(part.max()) else torch.arange(len(y)) % 2
        return cls(task, torch.stack([scores for scores, *_ in found]), y, client, part)

    @property
    def likely(self) -> Tensor:
        """Probabilities of the classes, or numbers, [K, rows, C]."""
        if self.task == "regression":
            return self.scores
        if self.task == "binary":
            return torch.cat([torch.sigmoid(-self.scores), torch.sigmoid(self.scores)], -1)
        return torch.softmax(self.scores, -1)

    @property
    def values(self) -> Tensor:
        """Predicted numbers, or probabilities of the right class, [K, rows]."""
        if self.task == "regression":
            return self.scores.squeeze(-1)
        right = self.y.long().expand(len(self.scores), -1).unsqueeze(-1)
        return self.likely.gather(-1, right).squeeze(-1)

    @property
    def numbers(self) -> Tensor | None:
        """Targets that are numbers; None for classes."""
        return self.y.double() if self.task == "regression" else None

    def weights_of_others(self, clients: int, strength: float) -> Tensor:
        """Return weights [rows, K] for every row from the rows of other parts alone, so that no row judges itself."""
        values, y = self.values, self.numbers
        found = torch.zeros(len(self.y), len(values), dtype=values.dtype)
        for k in self.part.unique().tolist():
            mine, others = self.part == k, self.part != k
            rest = (values[:, others], None if y is None else y[others])
            weights = client_weights(greedy_weights(*rest), *rest, self.client[others], clients, strength)
            found[mine] = weights[self.client[mine]]
        return found

    def cross_fitted_losses(self, clients: int) -> tuple[float, float]:
        """Return the mean losses of shared weights, and of the best one alone, on rows that they were not chosen on."""
        weights, losses = self.weights_of_others(clients, 0.0), row_losses(self.values, self.numbers)
        mixed = row_losses((weights.mT * self.values).sum(0), self.numbers)
        best = torch.zeros_like(mixed)
        for k in self.part.unique().tolist():
            mine = self.part == k
            best[mine] = losses[int(losses[:, ~mine].mean(-1).argmin()), mine]
        return float(mixed.mean()), float(best.mean())

    def mixed(self, weights: Tensor) -> Tensor:
        """Return the scores [rows, outputs] of the weighted mean, with weights [rows, K]."""
        likely = torch.einsum("rk,krc->rc", weights, self.likely)
        if self.task == "regression":
            return likely
        logs = likely.clamp_min(1e-12).log()
        return logs[:, 1:] - logs[:, :1] if self.task == "binary" else logs

    def by_row(self, scores: Tensor, metric: Metric, unit: float) -> np.ndarray:
        """Return the metric of every row with these scores, in the target's units."""
        rows = ScoredRows(self.task, scores, self.y, torch.ones(len(self.y), dtype=torch.float64))
        power = 2 if metric.is_root else 1
        return np.asarray(unit**power * metric.by_row(rows).double())

    def over_all(self, scores: Tensor, metric: Metric) -> float:
        """Return a metric over all rows together, so that lower is better."""
        count = len(self.y)
        rows = ScoredRows(self.task, scores, self.y, torch.full((count,), 1 / count, dtype=torch.float64))
        return metric.cost(float(metric.finish(metric.sums(rows))))


@dataclass
class Finalists:
    """Finalists, their weights, and what rows held out say.

    Attributes
    ----------
    members : list of Entrant
        The finalists; the last one is training alone where only guarded clients use it.
    shared, weights : Tensor
        Weights for newcomers [K] and for the clients [n, K].
    personal : bool
        Whether clients' own rows tilt the weights.
    loss, best_loss : float
        Mean loss over rows, and that of the best one alone, each chosen on other rows.
    verdict : Verdict or None
        Against training alone.
    own : list of int
        Clients that keep the model they trained alone.
    held_out : HeldOutRows or None
        Values of the rows held out, each with weights from other rows.
    """

    members: list[Entrant]
    shared: Tensor
    weights: Tensor
    personal: bool
    loss: float
    best_loss: float
    verdict: Verdict | None
    own: list[int]
    held_out: HeldOutRows | None = None

    def json(self) -> list[dict[str, Any]]:
        """Return what choice.json says of the members."""
        return [
            {"method": one.title, "settings": one.algorithm.settings(), "weight": share}
            for one, share in zip(self.members, self.shared.tolist(), strict=True)
        ]

    def run(self, fed: Federation, best: Entrant) -> Run:
        """Return the run of the weighted mean, with the scores of its models."""
        runs = [one.parts[0].finish() for one in self.members]
        return blended(fed, Blend(runs, self.shared, self.weights, best.title))


def find_mixture(race: Race, winner: Entrant, guard: bool) -> Finalists | None:
    """Return the weighted mean of finalists, or None if it saves less than half a percent of the best one's loss.

    Weights are chosen greedily on the rows held out, for all clients together; how much each client's own rows tilt
    them is cross-fitted. So is the verdict: every row is predicted with weights from other rows. With `guard`, clients
    for whom training alone is better keep that.
    """
    fed, alone = race.fed, race.alone()
    if fed.origin is None or fed.model.target_in_units or not fed.runtime.capabilities.rows_visible:
        return None
    ranked = sorted((one for one in race.finalists if one.scores), key=lambda one: one.held_out_cost())
    entrants = list({id(one): one for one in [winner, *ranked[:MOST]]}.values())
    if len(entrants) < 2:
        return None
    found = EntrantPredictions.of(fed.model.task, entrants)
    values, y = found.values, found.numbers
    loss, best_loss = found.cross_fitted_losses(fed.n)
    shared = greedy_weights(values, y)
    chosen = shared.nonzero().squeeze(-1)
    if len(chosen) < 2 or loss > (1 - LEAST_GAIN) * best_loss:
        return None
    values, shared, members = values[chosen], shared[chosen], [entrants[k] for k in chosen.tolist()]
    strength = best_strength(shared, values, y, found.client, found.part, fed.n)
    weights = client_weights(shared, values, y, found.client, fed.n, strength)
    scores = found.mixed(found.weights_of_others(fed.n, strength))
    if race.asked is not None and found.over_all(scores, race.asked) > found.over_all(
        found.scores[0], race.asked
    ):
        return None
    metric = row_metric(race.judge, fed.model.task)
    means = dict.fromkeys([metric, choosing_metric(race.judge, fed.model), race.metric])
    rows = {one.name: found.by_row(scores, one, fed.unit_of(one)) for one in means if one.is_mean}
    held_out = HeldOutRows(found.client, {name: torch.from_numpy(value) for name, value in rows.items()})
    mixture = Finalists(members, shared, weights, strength > 0, loss, best_loss, None, [], held_out)
    if alone is not None:
        other = alone.held_out_rows([metric])
        assert other is not None
        mine, what = rows[metric.name], race.held_out_name
        client, values_alone = found.client.numpy(), other.values[metric.name].numpy()
        mixture.verdict = Verdict.of_rows(
            mine, values_alone, client, fed.names, metric, held_out=what, task=fed.model.task
        )
        if guard:
            _keep_own(mixture, alone)
    return mixture


def _keep_own(mixture: Finalists, alone: Entrant) -> None:
    """Give clients for whom training alone is better with a probability of at least 0.8 that model alone."""
    assert mixture.verdict is not None
    mixture.own = harmed(mixture.verdict)
    if not mixture.own:
        return
    if alone not in mixture.members:
        mixture.members = [*mixture.members, alone]
        mixture.shared, mixture.weights = (
            functional.pad(w, (0, 1)) for w in (mixture.shared, mixture.weights)
        )
    mixture.weights[mixture.own] = 0.0
    mixture.weights[mixture.own, mixture.members.index(alone)] = 1.0


def blended(fed: Federation, blend: Blend) -> Run:
    """Return a run whose models are the weighted means of those of other runs.

    Parameters
    ----------
    fed
        The federation of a table, in any encoding.
    blend
        The runs and their weights.

    Returns
    -------
    Run
        A run with scores of validation and training rows; traffic is the sum over the runs.
    """
    whole, first = fed.with_model(blend.model), blend.parts[0]
    for part in blend.parts:
        for entry, counts in part.fed.ledger.entries.items():
            whole.ledger.add(entry, (counts[0], counts[1], counts[2]), (counts[3], counts[4], counts[5]))
        whole.left_out += part.fed.left_out
        whole.shortened += part.fed.shortened
    shares = zip(blend.parts, blend.shared.tolist(), strict=True)
    told = ", ".join(f"{share:.2f} {part.algorithm.name}" for part, share in shares)
    rounds = max(part.deployed_round for part in blend.parts)
    models, history = blend.models(), History()
    for split in ("validation", "train"):
        if whole.has_rows(split):
            history.add(rounds, split, whole.score(models, split, first.further))
    return Run(
        fed=whole,
        algorithm=Blended(members=told, best=blend.best),
        personal=models,
        state=blend.state(),
        history=history,
        rounds=max(part.rounds for part in blend.parts),
        deployed_round=rounds,
        lost_rounds=sum(part.lost_rounds for part in blend.parts),
        seconds=sum(part.seconds for part in blend.parts),
        metric=first.metric,
        further=first.further,
        blend=blend,
    )
