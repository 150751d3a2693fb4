"""One client's model from a run folder: parameters, model and the encoding of its table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._core import files
from coterie._core.errors import RunError, SettingError, nearest
from coterie.data.preprocess import Preprocessor
from coterie.models.base import Model
from coterie.models.description import CUSTOM, description, from_description
from coterie.models.predictor import LinearPredictor
from coterie.models.table_models import as_model
from coterie.train.folder import RunFolder
from coterie.train.predict import fitted_to


@dataclass(frozen=True)
class ExportedModel:
    """One client's model and the encoding of its table.

    Attributes
    ----------
    client : str
        Name of the client, or 'common'.
    model : Model
        What the parameters mean.
    weights : Tensor
        The parameters, [d].
    preprocessor : Preprocessor or None
        The encoding of the table; None for a run from arrays.
    features : int
        Number of encoded features.
    """

    client: str
    model: Model
    weights: Tensor
    preprocessor: Preprocessor | None
    features: int

    @classmethod
    def load(cls, folder: str | Path, client: str | None, model: Model | None = None) -> ExportedModel:
        """Load a model from a run folder.

        Parameters
        ----------
        folder
            A finished run folder.
        client
            Name of the client; None loads the common model.
        model
            The model, where it was a module of your own.

        Returns
        -------
        ExportedModel
            The model, ready to be written in another format.
        """
        opened = RunFolder.open(Path(folder))
        path = opened.path / "models"
        if not (path / "model.json").exists():
            raise RunError(f"{folder} has no finished models; run `coterie resume {folder}` first")
        with opened.reading():
            note = files.read_json(path / "model.json")
            tensors, _ = files.read_tensors(path / "models.safetensors", note["sha256"])
            clients, stored, custom = note["clients"], note["preprocessor"], note["model"]["model"] == CUSTOM
            preprocessor = None if stored is None else Preprocessor.from_json(stored).for_client(client)
            model = from_description(note["model"]) if model is None and not custom else model
        if client is not None and client not in clients:
            raise SettingError(f"{folder}: no client {client!r}.{nearest(client, clients)}")
        if model is None:
            raise RunError(
                f"{folder} trained a module of your own: export it from Python with model=network(factory)"
            )
        weights = tensors["common"] if client is None else tensors["personal"][clients.index(client)]
        model = as_model(model) if preprocessor is None else fitted_to(as_model(model), preprocessor)
        return cls.of(model, weights, client, preprocessor)

    @classmethod
    def of(
        cls, model: Model, weights: Tensor, client: str | None, preprocessor: Preprocessor | None
    ) -> ExportedModel:
        """Return a model that is at hand, fitted to its shapes; client None means the common model."""
        shape = getattr(model, "features", None)
        if preprocessor is not None:
            shape = len(preprocessor.feature_names)
        if shape is None:
            raise RunError("the model does not say how many features it takes; give model=... fitted to them")
        return cls(client or "common", model, weights, preprocessor, int(np.prod(shape)))

    @property
    def task(self) -> str:
        """'regression', 'binary' or 'multiclass'."""
        return self.model.task

    @property
    def classes(self) -> list[str]:
        """Names of the classes; empty for regression and for runs from arrays."""
        return [] if self.preprocessor is None else list(self.preprocessor.spec.classes)

    @property
    def numbers(self) -> list[str]:
        """Columns read as numbers."""
        return [] if self.preprocessor is None else [scale.name for scale in self.preprocessor.scales]

    @property
    def texts(self) -> list[str]:
        """Columns read as text."""
        return [] if self.preprocessor is None else [choice.name for choice in self.preprocessor.choices]

    def module(self) -> torch.nn.Module:
        """Return a module from encoded features to predictions, which are standardised for regression."""
        return self.model.module(self.weights).eval().requires_grad_(False)

    def linear(self) -> LinearPredictor:
        """Return the module of a linear model; raise `SettingError` for other models."""
        module = self.module()
        if not isinstance(module, LinearPredictor):
            raise SettingError(
                "only linear, logistic and softmax models have a coefficient for each feature; export this one to "
                "safetensors, onnx or torchscript"
            )
        return module

    def note(self) -> dict[str, Any]:
        """Return what the numbers mean, as JSON values."""
        return {
            "client": self.client,
            "task": self.task,
            "classes": self.classes,
            "model": description(self.model),
            "features": None if self.preprocessor is None else self.preprocessor.feature_names,
            "preprocessor": None if self.preprocessor is None else self.preprocessor.to_json(),
        }
