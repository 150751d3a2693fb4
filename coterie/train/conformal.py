"""Prediction intervals and prediction sets with guaranteed coverage, for every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest
from coterie.data.column_types import labels
from coterie.models.base import Model
from coterie.models.metrics import ScoredRows
from coterie.theory.conformal import quantiles
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    import polars

    from coterie.train.run import Run


@dataclass(frozen=True)
class Conformal:
    """Calibrated predictions of a run: an interval for a number, a set for classes, right with probability `level`.

    Calibrated on rows that did not train the models, the validation rows by default. A client with enough of them (9
    for 90 %) has a bound of its own, so that its new rows are covered; others share a bound that covers on average over
    clients, and so do clients that were not in training.

    Parameters
    ----------
    run
        The run.
    level
        Coverage.
    bounds
        Largest score of a row that is covered, for each client, [n].
    own
        Whether it rests on the client's own rows, [n].
    new
        The bound for new clients.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> run = coterie.fit(fed, "ditto", rounds=3)
    >>> calibrated = run.conformal(0.8)
    >>> calibrated.coverage("test").shape
    torch.Size([4])
    """

    run: Run
    level: float
    bounds: Tensor
    own: Tensor
    new: float

    @classmethod
    def of(cls, run: Run, level: float = 0.9, split: str = "validation") -> Conformal:
        """Calibrate a run.

        Parameters
        ----------
        run
            A run whose clients are in this process.
        level
            Coverage.
        split
            Rows to calibrate on: 'validation' or 'test'.

        Returns
        -------
        Conformal
            The calibrated run.

        Raises
        ------
        SettingError
            If there are no such rows, the models are elsewhere, or they trained the models.
        """
        if split not in ("validation", "test"):
            raise SettingError(
                f"split = {split!r}: calibrate on 'validation' or 'test' rows, which trained no model"
            )
        if run.fed.model.task == "survival":
            raise SettingError(
                "censored times have no conformal intervals here; see survival_* of run.predict"
            )
        if not run.fed.has_rows(split):
            raise SettingError(f"no client has {split} rows to calibrate on; give a split with some")
        if split in run.trained_on:
            other = "test" if "test" not in run.trained_on and run.fed.has_rows("test") else None
            remedy = f"calibrate on split={other!r}" if other else "train without refitting (--refit none)"
            raise SettingError(f"the deployed models were trained on the {split} rows too; {remedy}")
        bounds, own, new = quantiles(_scores(run, split), level)
        return cls(run, level, bounds, own, new)

    def coverage(self, split: str = "test") -> Tensor:
        """Return the share of each client's rows that is covered, [n]; NaN without rows."""
        found = _scores(self.run, split)
        shares = [
            float((one <= bound).double().mean()) if len(one) else torch.nan
            for one, bound in zip(found, self.bounds, strict=True)
        ]
        return torch.tensor(shares, dtype=torch.float64)

    def rows(self, client: str | None, x: Tensor) -> Tensor:
        """Return intervals [rows, 2] for numbers, or which classes are in the set, bool [rows, C].

        Parameters
        ----------
        client
            Name of the client; None for a new one, which has the common model.
        x
            Encoded features, [rows, features].

        Returns
        -------
        Tensor
            In the units of the model's targets.
        """
        names, model = self.run.fed.names, self.run.fed.model
        if client is not None and client not in names:
            raise SettingError(f"no client {client!r}.{nearest(client, names)}")
        w = self.run.common() if client is None else self.run.personal[names.index(client)]
        bound = self.new if client is None else float(self.bounds[names.index(client)])
        return _region(model, w, model.prepare(x.to(w.dtype)), bound)

    def predict(self, table: Any) -> polars.DataFrame:
        """Predict the rows of a table as `Run.predict` does, with `lower` and `upper`, or with the `set` of classes.

        Parameters
        ----------
        table
            A file or data frame.

        Returns
        -------
        polars.DataFrame
            The predictions. Classes of a set are joined by " | ".
        """
        import polars

        predictor = Predictor.of(self.run)
        found = predictor(table)
        place = {name: float(bound) for name, bound in zip(self.run.fed.names, self.bounds, strict=True)}
        bounds = torch.tensor(
            [place.get(name, self.new) for name in labels(found[predictor.client_output]).to_list()]
        ).double()
        if self.run.fed.model.task == "regression":
            reach = self.run.fed.table.target_scale * bounds.numpy()
            return found.with_columns(
                (polars.col("prediction") - reach).alias("lower"),
                (polars.col("prediction") + reach).alias("upper"),
            )
        names = [name for name in found.columns if name.startswith("probability_")]
        likely = torch.from_numpy(found.select(names).to_numpy().copy())
        inside = (1 - likely) <= bounds.unsqueeze(-1)
        classes = [name.removeprefix("probability_") for name in names]
        sets = [
            " | ".join(label for label, yes in zip(classes, row, strict=True) if yes)
            for row in inside.tolist()
        ]
        return found.with_columns(polars.Series("set", sets, dtype=polars.String))


def _scores(run: Run, split: str) -> list[Tensor]:
    """Return the scores of each client's rows: the error of a number, 1 - probability of the right class."""
    if run.fed.runtime.capabilities.models_stay:
        raise SettingError("the models of this run are on the nodes of its clients; calibrate them there")
    rows, model, found = run.fed.runtime.rows(split), run.fed.model, []
    for w, start, size in zip(run.personal, rows.start.tolist(), rows.size.tolist(), strict=True):
        x, y = rows.x[start : start + size], rows.y[start : start + size]
        scored = ScoredRows(model.task, model.scores(w.to(x), x), y, torch.ones(size))
        if model.task == "regression":
            found.append(scored.error.abs().double().cpu())
        else:
            right = scored.probabilities.gather(-1, scored.labels.unsqueeze(-1)).squeeze(-1)
            found.append((1 - right).cpu())
    return found


def _region(model: Model, w: Tensor, x: Tensor, bound: float) -> Tensor:
    scores = model.scores(w, x)
    if model.task == "regression":
        middle = scores.squeeze(-1).double()
        return torch.stack([middle - bound, middle + bound], -1)
    nothing = torch.zeros(len(x), dtype=torch.long)
    return 1 - ScoredRows(model.task, scores, nothing, torch.ones(len(x))).probabilities <= bound
