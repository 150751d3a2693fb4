"""Predict rows: each by its client's model, those of an unknown client by the common model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core import files
from coterie._core.errors import DataError, RunError, SettingError, nearest
from coterie.data import bundled, tables
from coterie.data.column_types import kind, labels
from coterie.data.preprocess import Preprocessor
from coterie.models.base import Model
from coterie.models.description import CUSTOM, from_description
from coterie.models.table_models import as_model
from coterie.train.baseline import Baseline
from coterie.train.folder import RunFolder

if TYPE_CHECKING:
    import polars

    from coterie.train.run import Run

UNKNOWN = "unknown client: common model"


@dataclass(frozen=True)
class Predictor:
    """Predicts the rows of a table, each with its client's model.

    Attributes
    ----------
    model : Model
        What the parameters mean.
    personal, common : Tensor
        Models of the clients [n, d], and the common model [d].
    clients : list of str
        Names of the clients.
    client_column : str
        Column of the table that names the client.
    preprocessor : Preprocessor
        The encoding of the table.
    baseline : Baseline or None
        Baseline hazards of the clients, for Cox regression.

    Examples
    --------
    >>> import tempfile, coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = coterie.fit(fed, "ditto", rounds=2, out=f"{folder}/run")
    ...     predictor = Predictor.load(f"{folder}/run")
    >>> predictor(coterie.data.bundled.path("heart_disease")).columns[:3]
    ['row', 'hospital', 'prediction']
    """

    model: Model
    personal: Tensor
    common: Tensor
    clients: list[str]
    client_column: str
    preprocessor: Preprocessor
    baseline: Baseline | None = None

    @classmethod
    def of(cls, run: Run) -> Predictor:
        """Return the predictor of a run that was made from a table."""
        if run.fed.table is None:
            raise RunError("this run was not made from a table; use run.model(client) on encoded features")
        table = run.fed.table
        return cls(
            run.fed.model,
            run.personal,
            run.common(),
            run.fed.names,
            table.options["client"],
            table.preprocessor,
            Baseline.of(run),
        )

    @classmethod
    def load(cls, folder: str | Path, model: Model | None = None) -> Predictor:
        """Load a predictor from a run folder.

        Parameters
        ----------
        folder
            A finished run folder.
        model
            The model, where it was a module of your own.

        Returns
        -------
        Predictor
            Call it with a table.
        """
        opened = RunFolder.open(Path(folder))
        path = opened.path / "models"
        if not (path / "model.json").exists():
            raise RunError(f"{folder} has no finished models; run `coterie resume {folder}` first")
        with opened.reading():
            note = files.read_json(path / "model.json")
            if note["preprocessor"] is None:
                raise RunError(f"{folder} was not made from a table, so a table cannot be encoded for it")
            tensors, _ = files.read_tensors(path / "models.safetensors", note["sha256"])
            personal, common, clients = tensors["personal"], tensors["common"], note["clients"]
            preprocessor, column = Preprocessor.from_json(note["preprocessor"]), note["client_column"]
            custom = note["model"]["model"] == CUSTOM
            known = from_description(note["model"]) if model is None and not custom else None
            baseline = Baseline.load(path)
        if model is not None:
            known = fitted_to(as_model(model), preprocessor)
        if known is None:
            raise RunError(
                f"{folder} holds a module of your own: load it with Predictor.load(folder, model=...)"
            )
        return cls(known, personal, common, clients, column, preprocessor, baseline)

    def __call__(self, table: Any, times: Sequence[float] | None = None) -> polars.DataFrame:
        """Predict the rows of a table.

        Parameters
        ----------
        table
            A file or data frame. Where there is one client only, as on its own node, the client column may be missing.
        times
            Of survival data: times at which to tell the probability that nothing has happened yet; three by default.

        Returns
        -------
        DataFrame
            `row` (from 1, in the order of the table), columns that identify rows, the client column, `prediction`, the
            probability of each class where there are classes, and `warning`. For survival data the prediction is the
            hazard relative to the client's average row, and `survival_5` the probability to get beyond time 5.
        """
        import polars

        frame = self._frame(table)
        rows, encoded, names = self._encoded(frame, table)
        place, scores = self.clients, self._scores(rows, self.model.prepare(encoded))
        if times and self.model.task != "survival":
            raise SettingError("times are for runs on survival data, which have --event")
        survival = self.model.task == "survival"
        outputs = self._risks(scores, rows, times) if survival else self._outputs(scores, names)
        taken = {*outputs, "warning", "row", self.client_output}
        left_out = self.preprocessor.spec.left_out
        keys = [name for name, why in left_out.items() if why == "identifier" and name in frame.columns]
        columns: dict[str, Any] = {"row": range(1, frame.height + 1)}
        kept = [name for name in keys if name not in taken and kind(frame[name]) is not None]
        columns |= {name: _plain(frame[name]) for name in kept}
        columns |= {self.client_output: _plain(frame[self.client_column]), **outputs}
        warning = [None if row < len(place) else UNKNOWN for row in rows.tolist()]
        return polars.DataFrame(columns).with_columns(polars.Series("warning", warning, dtype=polars.String))

    @property
    def client_output(self) -> str:
        """Name of the client column in predictions: its own, or 'client' where that means something else there."""
        name = self.client_column
        other = name in ("row", "prediction", "warning") or name.startswith("probability_")
        return "client" if other else name

    def encoded(self, table: Any) -> tuple[Tensor, Tensor, list[str | None]]:
        """Return the number of each row's client (n if it is unknown), encoded features [rows, f], and names."""
        return self._encoded(self._frame(table), table)

    def _frame(self, table: Any) -> polars.DataFrame:
        """Return the table with its client column."""
        import polars

        frame = tables.read(bundled.resolve(table))
        if self.client_column not in frame.columns and len(self.clients) == 1:
            frame = frame.with_columns(polars.lit(self.clients[0]).alias(self.client_column))
        if self.client_column not in frame.columns:
            hint = nearest(self.client_column, frame.columns)
            raise DataError(f"{_name(table)}: there is no client column {self.client_column!r}.{hint}")
        tables.require_plain(frame, "client", self.client_column, _name(table))
        return frame

    def _encoded(self, frame: polars.DataFrame, table: Any) -> tuple[Tensor, Tensor, list[str | None]]:
        place = {name: k for k, name in enumerate(self.clients)}
        names = labels(frame[self.client_column]).to_list()
        rows = torch.tensor([place.get(name, len(place)) for name in names])
        encoded = self.preprocessor.encode(frame, _name(table))
        return rows, encoded.to(self.personal.dtype), names

    def _scores(self, rows: Tensor, x: Tensor) -> Tensor:
        """Scores of each row by the model at its place (the last place is the common model)."""
        scores: Tensor | None = None
        for place in torch.unique(rows).tolist():
            mine = rows == place
            w = self.personal[place] if place < len(self.personal) else self.common
            part = self.model.scores(w, x[mine])
            scores = part.new_empty((len(rows), part.shape[-1])) if scores is None else scores
            scores[mine] = part
        assert scores is not None
        return scores

    def _risks(self, scores: Tensor, clients: Tensor, times: Sequence[float] | None) -> dict[str, Any]:
        """Return relative risks, and survival at these times where the baseline is known."""
        z = scores.squeeze(-1)
        if self.baseline is None:
            if times:
                raise RunError("this run has no baseline hazard, so only relative risks can be told")
            return {"prediction": z.exp().numpy()}
        columns = {"prediction": self.baseline.relative_risk(clients, z).numpy()}
        for time in self.baseline.usual_times() if times is None else times:
            columns[f"survival_{time:g}"] = self.baseline.survival(clients, z, time).numpy()
        return columns

    def _outputs(self, scores: Tensor, clients: Sequence[str | None]) -> dict[str, Any]:
        """Return predictions and probabilities, each in the units and classes of its client."""
        decode = self.preprocessor.decode
        if self.model.task == "regression":
            return {"prediction": decode(scores.squeeze(-1), clients)}
        if self.model.task == "binary":
            one = torch.sigmoid(scores.squeeze(-1))
            probabilities = torch.stack([1 - one, one], -1)
        else:
            probabilities = torch.softmax(scores, -1)
        columns: dict[str, Any] = {"prediction": decode(probabilities.argmax(-1), clients)}
        turned = torch.tensor([self.preprocessor.reverses(name) for name in clients], dtype=torch.bool)
        probabilities[turned] = probabilities[turned].flip(-1)
        for k, name in enumerate(self.preprocessor.spec.classes):
            columns[f"probability_{name}"] = probabilities[:, k].numpy()
        return columns


def fitted_to(model: Model, preprocessor: Preprocessor) -> Model:
    """Return a model that is given anew, with the shapes of the table it was trained on."""
    classes = len(preprocessor.spec.classes)
    x = torch.zeros(max(2, classes), len(preprocessor.feature_names))
    return model.fit_to(x, torch.arange(classes) if classes else torch.ones(len(x)))


def _plain(column: polars.Series) -> polars.Series:
    """Return a column that every format of predictions can hold: dates and durations as text."""
    return labels(column) if column.dtype.is_temporal() else column


def _name(table: Any) -> str:
    return str(table) if isinstance(table, str | Path) else "the table"
