"""Saved models and predictions: each row by its client's model, an unknown client by the common one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.data.preprocess import Preprocessor
from coterie.errors import DataError, RunError, nearest
from coterie.models.base import Model
from coterie.models.description import CUSTOM, description
from coterie.runs import files

if TYPE_CHECKING:
    import polars

    from coterie.runs.run import Run

UNKNOWN = "unknown client: common model"


def save_models(folder: Path, run: Run) -> None:
    """models.safetensors (personal [n, d], common [d]) and model.json (what the numbers mean).

    Where models stay with the clients, only the common one is here, if the method has one.
    """
    names, personal = run.fed.names, run.personal
    if run.fed.runtime.private:
        if run.algorithm.common(run.fed, run.state) is None:
            return
        names, personal = [], torch.empty(0, run.fed.d, dtype=run.fed.dtype)
    files.write_tensors(folder / "models.safetensors", {"personal": personal, "common": run.common()})
    table = run.fed.table
    files.write_json(
        folder / "model.json",
        {
            "algorithm": run.algorithm.name,
            "sha256": files.sha256(folder / "models.safetensors"),
            "clients": names,
            "client_column": table.options["client"] if table is not None else None,
            "model": description(run.fed.model),
            "preprocessor": table.preprocessor.to_json() if table is not None else None,
        },
    )


@dataclass(frozen=True)
class Predictor:
    """Everything needed to predict: models by client, the common model, and the encoding of a table."""

    model: Model
    personal: Tensor
    common: Tensor
    clients: list[str]
    client_column: str
    preprocessor: Preprocessor

    @classmethod
    def of(cls, run: Run) -> Predictor:
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
        )

    @classmethod
    def load(cls, folder: str | Path, model: Model | None = None) -> Predictor:
        """From a run folder; `model` is needed when it was a module of the user's own."""
        from coterie.models import from_description
        from coterie.runs.folder import RunFolder

        path = RunFolder.open(Path(folder)).path / "models"
        if not (path / "model.json").exists():
            raise RunError(f"{folder} has no finished models; run `coterie resume {folder}` first")
        note = files.read_json(path / "model.json")
        if note["preprocessor"] is None:
            raise RunError(f"{folder} was not made from a table, so a table cannot be encoded for it")
        tensors, _ = files.read_tensors(path / "models.safetensors", note["sha256"])
        preprocessor = Preprocessor.from_json(note["preprocessor"])
        if model is not None:
            model = _fitted(model, preprocessor)
        elif note["model"]["model"] == CUSTOM:
            raise RunError(
                f"{folder} holds a module of your own: load it with Predictor.load(folder, model=...)"
            )
        else:
            model = from_description(note["model"])
        clients, column = note["clients"], note["client_column"]
        return cls(model, tensors["personal"], tensors["common"], clients, column, preprocessor)

    def __call__(self, table: Any) -> polars.DataFrame:
        """The client column, `prediction`, class probabilities where there are classes, and `warning`.

        Where there is one client only, as on its own node, a table without a client column is all its own.
        """
        import polars

        from coterie.data import tables
        from coterie.data.column_types import labels

        frame = tables.read(table)
        if self.client_column not in frame.columns and len(self.clients) == 1:
            frame = frame.with_columns(polars.lit(self.clients[0]).alias(self.client_column))
        if self.client_column not in frame.columns:
            hint = nearest(self.client_column, frame.columns)
            raise DataError(f"{_name(table)}: there is no client column {self.client_column!r}.{hint}")
        place = {name: k for k, name in enumerate(self.clients)}
        names = labels(frame[self.client_column]).to_list()
        rows = torch.tensor([place.get(name, len(place)) for name in names])
        encoded = self.preprocessor.encode(frame, _name(table))
        scores = self._scores(rows, self.model.prepare(encoded.to(self.personal.dtype)))
        outputs = self._outputs(scores)
        own = "client" if self.client_column in (*outputs, "warning") else self.client_column
        columns = {own: frame[self.client_column], **outputs}
        warning = [None if row < len(place) else UNKNOWN for row in rows.tolist()]
        return polars.DataFrame(columns).with_columns(polars.Series("warning", warning, dtype=polars.String))

    def _scores(self, rows: Tensor, x: Tensor) -> Tensor:
        """Scores of each row by the model at its place (the last place is the common model)."""
        scores: Tensor | None = None
        for place in rows.unique().tolist():
            mine = rows == place
            w = self.personal[place] if place < len(self.personal) else self.common
            part = self.model.scores(w, x[mine])
            scores = part.new_empty((len(rows), part.shape[-1])) if scores is None else scores
            scores[mine] = part
        assert scores is not None
        return scores

    def _outputs(self, scores: Tensor) -> dict[str, Any]:
        if self.model.task == "regression":
            return {"prediction": self.preprocessor.decode(scores.squeeze(-1))}
        if self.model.task == "binary":
            one = torch.sigmoid(scores.squeeze(-1))
            probabilities = torch.stack([1 - one, one], -1)
        else:
            probabilities = torch.softmax(scores, -1)
        columns: dict[str, Any] = {"prediction": self.preprocessor.decode(probabilities.argmax(-1))}
        for k, name in enumerate(self.preprocessor.spec.classes):
            columns[f"probability_{name}"] = probabilities[:, k].numpy()
        return columns


def _fitted(model: Model, preprocessor: Preprocessor) -> Model:
    """A model given anew, told the shapes of the table it was trained on."""
    classes = len(preprocessor.spec.classes)
    x = torch.zeros(max(2, classes), len(preprocessor.feature_names))
    return model.fit_to(x, torch.arange(classes) if classes else torch.zeros(len(x)))


def _name(table: Any) -> str:
    return str(table) if isinstance(table, str | Path) else "the table"
