"""The result of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from coterie._core import broadcast
from coterie._core.errors import SettingError, nearest
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models import fast
from coterie.models.metrics import Metric, resolve
from coterie.train.conformal import Conformal
from coterie.train.effects import client_table, difference_tests, variance_table
from coterie.train.history import History
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    import polars


def metric_plan(metric: str | None, further: Sequence[Metric]) -> dict[str, Any]:
    """Return what the plan of a run says of metrics; nothing where the usual ones are meant."""
    others = [one.name for one in further if one.name != metric]
    return ({"metric": metric} if metric else {}) | ({"metrics": others} if others else {})


@dataclass
class Run:
    """The result of training: personal models, the server's state, metrics and ledger.

    Attributes
    ----------
    fed : Federation
        The federation after training.
    algorithm : Algorithm
        What was run.
    personal : Tensor
        Personal models [n, d]. In a federation across a network models stay with the clients; `personal` [n, 1] is then
        the round under which they are stored, -1 for a client that was away at the end.
    state : State
        The server's state when models were deployed.
    history : History
        Metrics over rounds.
    rounds, deployed_round : int
        Number of rounds, and the round whose models are deployed.
    lost_rounds : int
        Rounds in which nobody answered.
    seconds : float
        Duration of the training.
    folder : Path or None
        The run folder.
    metric : str or None
        The metric that reports show, if not the main one of the task.
    further : tuple of Metric
        Metrics recorded beside the loss and the main one.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> run = coterie.fit(fed, "ditto", rounds=3)
    >>> run.score("test", "accuracy").shape
    torch.Size([4])
    >>> run.metrics.columns
    ['round', 'client', 'split', 'metric', 'value']
    """

    fed: Federation
    algorithm: Algorithm
    personal: Tensor
    state: State
    history: History
    rounds: int
    deployed_round: int
    lost_rounds: int = 0
    seconds: float = 0.0
    folder: Path | None = field(default=None)
    metric: str | None = None
    further: tuple[Metric, ...] = ()

    @property
    def metrics(self) -> polars.DataFrame:
        """Metrics as a table: round, client, split, metric, value."""
        return self.history.frame(self.fed.names)

    @property
    def ledger(self) -> polars.DataFrame:
        """Communication as a table: messages, floats and bytes by round, kind, phase and link."""
        return self.fed.ledger.frame()

    @property
    def left_out(self) -> list[tuple[int, str, str]]:
        """Answers that could not be used: round, client, reason."""
        return [(t, self.fed.names[k], why) for t, k, why in self.fed.left_out]

    def explain(self) -> str:
        """Say which fast paths and which plain code computed this run.

        Returns
        -------
        str
            A line for each, with how often it was taken. `COTERIE_FAST` switches fast paths off.

        Examples
        --------
        >>> import torch, coterie
        >>> xs, ys = [torch.ones(3, 1), torch.ones(2, 1)], [torch.zeros(3), torch.ones(2)]
        >>> fed = coterie.Federation.from_arrays(xs, ys, coterie.models.linear())
        >>> print(coterie.fit(fed, "fedavg", rounds=2).explain())
        plain steps: 2 times, local SGD, one gradient for each step
        row-statistics: 2 times, sums over rows (X'X, X'y) that replace the rows of least squares
        """
        used = self.fed.runtime.paths_used()
        if not used:
            return "Computed by the plain code, or by nodes elsewhere."
        return "\n".join(
            f"{name}: {count:,} times, {fast.explain(name)}" for name, count in sorted(used.items())
        )

    def score(self, split: str, metric: str | Metric) -> Tensor:
        """Return a metric of every client's deployed model.

        Parameters
        ----------
        split
            'train', 'validation' or 'test'.
        metric
            A metric or its name, such as 'auc'. One that was not recorded during training is computed now.

        Returns
        -------
        Tensor
            A value per client, [n]; NaN for a client without such rows, or where the metric is not defined.
        """
        found = resolve(metric, self.fed.model.task)
        value = self.history.at(self.deployed_round, split, found.name)
        if value is not None:
            return value
        return self.fed.score(self._models_of(split), split, [found])[found.name].cpu().double()

    def pooled(self, split: str, metric: str | Metric) -> float:
        """Return a metric over the rows of all clients together, each scored by its own model.

        Parameters
        ----------
        split
            'train', 'validation' or 'test'.
        metric
            A metric or its name.

        Returns
        -------
        float
            The value; NaN where the metric is not defined.
        """
        found = resolve(metric, self.fed.model.task)
        return self.fed.pooled(self._models_of(split), split, [found])[found.name]

    def _models_of(self, split: str) -> Tensor:
        if split not in self.fed.rows:
            raise SettingError(f"no split {split!r}; it is 'train', 'validation' or 'test'")
        if not self.fed.has_rows(split):
            raise SettingError(f"no client of this run has {split} rows")
        return broadcast.to(self.personal, self.fed.device)

    def score_test(self) -> dict[str, Tensor]:
        """Score the deployed models on the test rows, add that to the metrics, and return it."""
        scores = self.fed.score(broadcast.to(self.personal, self.fed.device), "test", self.further)
        self.history.add(self.deployed_round, "test", scores)
        return {name: value.cpu() for name, value in scores.items()}

    def traffic(self) -> tuple[float, float]:
        """Return megabytes up and down until the deployed round, evaluation not counted."""
        up, down = 0, 0
        for entry, counts in self.fed.ledger.entries.items():
            if entry.kind != "evaluate" and entry.round <= self.deployed_round:
                down, up = down + counts[2], up + counts[5]
        return up / 1e6, down / 1e6

    def common(self) -> Tensor:
        """Return the model for a client that was not in training: the shared one, else the mean of all."""
        shared = self.algorithm.common(self.fed, self.state)
        if shared is not None:
            return shared.cpu()
        self._require_models()
        sizes = self.fed.sizes.cpu()
        return (self.personal * (sizes / sizes.sum())).sum(0)

    def model(self, client: str) -> nn.Module:
        """Return a client's model as a module that predicts from encoded features.

        Parameters
        ----------
        client
            Name of the client.

        Raises
        ------
        SettingError
            There is no such client, or the models are on the nodes of the clients.
        """
        if client not in self.fed.names:
            raise SettingError(f"no client {client!r}.{nearest(client, self.fed.names)}")
        self._require_models()
        return self.fed.model.module(self.personal[self.fed.names.index(client)])

    def _require_models(self) -> None:
        if self.fed.runtime.capabilities.models_stay:
            raise SettingError("the models of this run are on the nodes of its clients, not here")

    def effects(self, level: float = 0.9) -> polars.DataFrame:
        """Return every client's coefficients with intervals and shrinkage (`hierarchical` only).

        Parameters
        ----------
        level
            Coverage of the intervals.

        Returns
        -------
        polars.DataFrame
            Columns client, coefficient, estimate, lower, upper, centre, shrinkage.

        Examples
        --------
        >>> import coterie
        >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
        >>> method = coterie.algorithms.Hierarchical(grouping="one", effects="intercept")
        >>> run = coterie.fit(fed, method, rounds=12)
        >>> run.effects().columns
        ['client', 'coefficient', 'estimate', 'lower', 'upper', 'centre', 'shrinkage']
        """
        return client_table(self, level)

    def variances(self, level: float = 0.9) -> polars.DataFrame:
        """Return the variances with intervals (`hierarchical` only): variance, estimate, lower, upper."""
        return variance_table(self, level)

    def tests(self) -> dict[str, float]:
        """Return p-values of "clients differ" and "clusters differ" by likelihood ratio (`hierarchical` only)."""
        return difference_tests(self)

    def conformal(self, level: float = 0.9, split: str = "validation") -> Conformal:
        """Return predictions with intervals, or sets of classes, that are right with this probability.

        Parameters
        ----------
        level
            Coverage.
        split
            Rows to calibrate on, 'validation' or 'test'.

        Returns
        -------
        Conformal
            Call its `predict` with a table, or `rows` with encoded features.
        """
        return Conformal.of(self, level, split)

    def predict(self, table: Any) -> polars.DataFrame:
        """Predict the rows of a table, each with its client's model; see `Predictor`."""
        return Predictor.of(self)(table)

    def __repr__(self) -> str:
        done = f"{self.algorithm.name}, {self.rounds} rounds, {self.fed.n} clients, d = {self.fed.d}"
        return f"Run({done}, {self.seconds:.1f} s)"
