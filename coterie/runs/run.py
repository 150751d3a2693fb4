"""The result of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from coterie.algorithms import Algorithm
from coterie.errors import SettingError, nearest
from coterie.federation.federation import Federation
from coterie.federation.state import State
from coterie.models.shared import moved
from coterie.runs.history import History

if TYPE_CHECKING:
    import polars

    from coterie.runs.auto import Choice


@dataclass
class Run:
    """Personal models [n, d], the server's state, metrics and ledger of a finished run.

    In a federation across a network the models stay with the clients; `personal` [n, 1] is then the round they are
    kept under, -1 for a client that was away at the end.
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
    choice: Choice | None = field(default=None, repr=False)  # why this method, where "auto" chose it

    @property
    def metrics(self) -> polars.DataFrame:
        """round, client, split, metric, value."""
        return self.history.frame(self.fed.names)

    @property
    def ledger(self) -> polars.DataFrame:
        """Messages, floats and bytes by round, kind, phase and link."""
        return self.fed.ledger.frame()

    @property
    def left_out(self) -> list[tuple[int, str, str]]:
        """(round, client, reason) for answers that could not be used."""
        return [(t, self.fed.names[k], why) for t, k, why in self.fed.left_out]

    def score(self, split: str, metric: str) -> Tensor:
        """A metric [n] of the deployed models on 'train', 'validation' or 'test'."""
        value = self.history.at(self.deployed_round, split, metric)
        if value is None:
            raise SettingError(f"no {metric!r} on {split!r} rows in this run")
        return value

    def score_test(self) -> dict[str, Tensor]:
        """Score the deployed models on the test rows and add that to the metrics."""
        scores = self.fed.score(moved(self.personal, self.fed.device), "test")
        self.history.add(self.deployed_round, "test", scores)
        return {name: value.cpu() for name, value in scores.items()}

    def traffic(self) -> tuple[float, float]:
        """Megabytes up and down until the deployed models, evaluation not counted."""
        up, down = 0, 0
        for entry, counts in self.fed.ledger.entries.items():
            if entry.kind != "evaluate" and entry.round <= self.deployed_round:
                down, up = down + counts[2], up + counts[5]
        return up / 1e6, down / 1e6

    def common(self) -> Tensor:
        """The model for somebody who was not in training: the shared one, else the mean of the personal ones."""
        shared = self.algorithm.common(self.fed, self.state)
        if shared is not None:
            return shared.cpu()
        self._require_models()
        sizes = self.fed.sizes.cpu()
        return (self.personal * (sizes / sizes.sum())).sum(0)

    def model(self, client: str) -> nn.Module:
        """A client's model, ready to predict from encoded features."""
        if client not in self.fed.names:
            raise SettingError(f"no client {client!r}.{nearest(client, self.fed.names)}")
        self._require_models()
        return self.fed.model.module(self.personal[self.fed.names.index(client)])

    def _require_models(self) -> None:
        if self.fed.runtime.private:
            raise SettingError("the models of this run are on the nodes of its clients, not here")

    def predict(self, table: Any) -> polars.DataFrame:
        """Predictions for new rows, each by its client's model; see `coterie.predict`."""
        from coterie.runs.predict import Predictor

        return Predictor.of(self)(table)

    def __repr__(self) -> str:
        done = f"{self.algorithm.name}, {self.rounds} rounds, {self.fed.n} clients, d = {self.fed.d}"
        return f"Run({done}, {self.seconds:.1f} s)"
