"""Predictions of a hierarchical run with the intervals that the model itself gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest
from coterie.algorithms import effect_uncertainty
from coterie.algorithms.crossed_cells import layout
from coterie.algorithms.crossed_uncertainty import crossed_posterior
from coterie.models.glm import Glm
from coterie.theory.crossed_posterior import CrossedPosterior
from coterie.theory.uncertainty import Effects
from coterie.train.effects import trained_clients
from coterie.train.predict import Predictor

if TYPE_CHECKING:
    import polars

    from coterie.train.run import Run


@dataclass(frozen=True)
class RowIntervals:
    """Predictions with intervals that are right with probability `level` if the model is.

    For a number the interval is of a new value, for two classes of the probability of the second, for counts of the
    mean. It includes that the client's coefficients, the centres and the variances are estimated. `Run.conformal`
    needs no model to be right, but rows to calibrate on.

    Parameters
    ----------
    run
        A run of `hierarchical`.
    level
        Coverage.
    ids
        Clients that are known, [m].
    posterior
        What is known of them.

    Examples
    --------
    >>> import coterie, torch
    >>> ys = [torch.tensor([-1.0, 0.0, 1.0]) + mean for mean in (0.0, 1.0, 5.0)]
    >>> fed = coterie.Federation.from_arrays([torch.zeros(3, 1)] * 3, ys, coterie.models.linear(intercept=True))
    >>> method = coterie.algorithms.Hierarchical(grouping="one", effects="intercept")
    >>> run = coterie.fit(fed, method, rounds=1)
    >>> lower, upper = run.intervals(0.9).rows(run.fed.names[2], torch.zeros(1, 1))[0].tolist()
    >>> lower < 5 < upper
    True
    """

    run: Run
    level: float
    ids: Tensor
    posterior: Effects | CrossedPosterior

    @classmethod
    def of(cls, run: Run, level: float = 0.9) -> RowIntervals:
        """Return the intervals of a run; raise `SettingError` where the model has none."""
        (method, fed), model = trained_clients(run), run.fed.model
        if not isinstance(model, Glm) or model.outputs != 1:
            raise SettingError(
                "intervals of a hierarchical model are for one score per row: numbers, two classes or counts; "
                "run.conformal(level) has prediction sets for every model"
            )
        known = (
            effect_uncertainty.posterior(method, fed, run.state)
            if layout(fed) is None
            else crossed_posterior(method, fed, run.state)
        )
        return cls(run, level, *known)

    def rows(self, client: str, x: Tensor) -> Tensor:
        """Return intervals for the rows of a client.

        Parameters
        ----------
        client
            Name of a client that was in training.
        x
            Encoded features, [rows, features].

        Returns
        -------
        Tensor
            Lower and upper ends, [rows, 2]; numbers in units of the model's targets.
        """
        from scipy.stats import norm

        fed = self.run.fed
        if client not in fed.names:
            raise SettingError(f"no client {client!r}.{nearest(client, fed.names)}")
        number = fed.names.index(client)
        place = (self.ids == number).nonzero().flatten().tolist()
        if not place:
            raise SettingError(f"client {client!r} did not answer, so nothing is known of it")
        rows = fed.model.prepare(x.to(fed.dtype)).double()
        rows = torch.nn.functional.pad(rows, (0, fed.d - rows.shape[-1]))  # a dispersion is in no score
        if isinstance(self.posterior, Effects):
            error = self.posterior.row_error(place[0], rows)
        else:
            at = layout(fed)
            assert at is not None
            error = self.posterior.row_error(place[0], rows[:, at.fixed], rows[:, at.grouped])
        score = rows @ self.run.personal[number].double()
        if fed.model.has_statistics:
            state = self.run.state
            noise = float(state.noises[number]) if "noises" in state else float(state.noise)
            error = (error.square() + noise).sqrt()
        reach = float(norm.ppf(0.5 + self.level / 2)) * error
        ends = torch.stack([score - reach, score + reach], -1)
        if fed.model.task == "binary":
            return ends.sigmoid()
        return ends if fed.model.has_statistics else ends.exp()

    def predict(self, table: Any) -> polars.DataFrame:
        """Predict the rows of a table as `Run.predict` does, with `lower` and `upper`; none for unknown clients.

        Parameters
        ----------
        table
            A file or data frame.

        Returns
        -------
        polars.DataFrame
            The predictions.
        """
        import polars

        predictor = Predictor.of(self.run)
        found = predictor(table)
        rows, encoded, names = predictor.encoded(table)
        ends = torch.full((len(rows), 2), torch.nan, dtype=torch.float64)
        known = set(self.ids.tolist())
        for place in torch.unique(rows).tolist():
            if place in known:
                ends[rows == place] = self.rows(self.run.fed.names[place], encoded[rows == place])
        columns: list[Any]
        if self.run.fed.model.task == "binary":
            turned = torch.tensor([predictor.preprocessor.reverses(name) for name in names])
            ends[turned] = 1 - ends[turned].flip(-1)
            columns = [ends[:, 0].numpy(), ends[:, 1].numpy()]
        else:
            columns = [predictor.preprocessor.decode(ends[:, k], names) for k in (0, 1)]
        low, high = (polars.Series(column).fill_nan(None) for column in columns)
        return found.with_columns(
            polars.min_horizontal(low, high).alias("lower"), polars.max_horizontal(low, high).alias("upper")
        )
