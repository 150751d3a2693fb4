"""A client's model as a file that needs no Coterie: raw columns in, predictions out."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.preprocess import Preprocessor
from coterie.errors import RunError, SettingError, nearest
from coterie.models.base import Model
from coterie.models.description import CUSTOM, description, from_description
from coterie.models.predictor import LinearPredictor
from coterie.runs import files
from coterie.runs.folder import RunFolder

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torchscript": ".pt", "csv": ".csv"}


@dataclass(frozen=True)
class Takeaway:
    """One client's parameters, the model they belong to, and the encoding of its table (None: arrays)."""

    client: str
    model: Model
    weights: Tensor
    preprocessor: Preprocessor | None
    features: int

    @classmethod
    def load(cls, folder: str | Path, client: str | None, model: Model | None = None) -> Takeaway:
        """The model of a client, or the common one (None), from a run folder.

        `model` is needed when it was a module of the user's own.
        """
        path = RunFolder.open(Path(folder)).path / "models"
        if not (path / "model.json").exists():
            raise RunError(f"{folder} has no finished models; run `coterie resume {folder}` first")
        note = files.read_json(path / "model.json")
        tensors, _ = files.read_tensors(path / "models.safetensors", note["sha256"])
        if client is not None and client not in note["clients"]:
            raise SettingError(f"{folder}: no client {client!r}.{nearest(client, note['clients'])}")
        if model is None:
            if note["model"]["model"] == CUSTOM:
                raise RunError(
                    f"{folder} trained a module of your own: export it from Python with model=network(factory)"
                )
            model = from_description(note["model"])
        weights = tensors["common"] if client is None else tensors["personal"][note["clients"].index(client)]
        preprocessor = None if note["preprocessor"] is None else Preprocessor.from_json(note["preprocessor"])
        shape = getattr(model, "features", None)
        if preprocessor is not None:
            from coterie.runs.predict import _fitted

            model, shape = _fitted(model, preprocessor), len(preprocessor.feature_names)
        if shape is None:
            raise RunError(
                f"{folder} does not say how many features its model takes; give model=... fitted to them"
            )
        width = int(np.prod(shape))
        return cls(client or "common", model, weights, preprocessor, width)

    @property
    def task(self) -> str:
        return self.model.task

    @property
    def classes(self) -> list[str]:
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
        """From encoded features to predictions (standardised, for regression)."""
        return self.model.module(self.weights).eval().requires_grad_(False)

    def linear(self) -> LinearPredictor:
        module = self.module()
        if not isinstance(module, LinearPredictor):
            raise SettingError(
                "only linear, logistic and softmax models have a coefficient for each feature; export this one to "
                "safetensors, onnx or torchscript"
            )
        return module

    def note(self) -> dict[str, Any]:
        """What the numbers mean, as JSON."""
        return {
            "client": self.client,
            "task": self.task,
            "classes": self.classes,
            "model": description(self.model),
            "features": None if self.preprocessor is None else self.preprocessor.feature_names,
            "preprocessor": None if self.preprocessor is None else self.preprocessor.to_json(),
        }


def export(
    folder: str | Path,
    client: str | None,
    to: str,
    out: str | Path | None = None,
    model: Model | None = None,
) -> Path:
    """Write a client's model (None: the common one) as 'safetensors', 'onnx', 'torchscript' or 'csv'.

    Preprocessing travels inside: the file takes raw columns and gives predictions in the target's units.
    """
    if to not in SUFFIXES:
        raise SettingError(f"unknown format {to!r}.{nearest(to, SUFFIXES)}")
    one = Takeaway.load(folder, client, model)
    name = re.sub(r"[^\w.-]+", "_", one.client).strip("._") or "client"
    path = Path(folder) / "exports" / f"{name}{SUFFIXES[to]}" if out is None else Path(out)
    if to == "safetensors":
        _to_safetensors(one, path)
    elif to == "csv":
        _to_csv(one, path)
    elif to == "onnx":
        from coterie.runs.export_onnx import to_onnx

        to_onnx(one, path)
    else:
        from coterie.runs.export_torchscript import to_torchscript

        to_torchscript(one, path)
    return path


def _to_safetensors(one: Takeaway, path: Path) -> None:
    """The module's parameters by name; how to encode columns and decode predictions is in the header's note."""
    tensors = {name: value for name, value in one.module().state_dict().items()}
    if one.preprocessor is not None:
        scales = one.preprocessor.scales
        tensors["preprocess.mean"] = torch.tensor([scale.mean for scale in scales], dtype=torch.float64)
        tensors["preprocess.sd"] = torch.tensor([scale.sd for scale in scales], dtype=torch.float64)
        if one.task == "regression":
            pair = [one.preprocessor.target_mean, one.preprocessor.target_sd]
            tensors["target.mean_sd"] = torch.tensor(pair, dtype=torch.float64)
    files.write_tensors(path, tensors, one.note())


def _to_csv(one: Takeaway, path: Path) -> None:
    """A line per coefficient, for values as they are in the table: score = sum of the lines that apply.

    `intercept` always applies, `number` times the value (the value in `if_missing` where it is missing), `missing` if
    the value is missing, `level` if the value is that text. For classes the scores go through the link named in
    `link` (logistic: of the second class; softmax: of all); for a quantity the score is the prediction.
    """
    rows = coefficients(one)

    def write(temporary: Path) -> None:
        with open(temporary, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    files.write_with(path, write)


def coefficients(one: Takeaway) -> list[dict[str, Any]]:
    """Coefficients of a linear model on raw columns, each with its feature, and on standardised ones."""
    module = one.linear()
    weight = module.linear.weight.detach().double()
    bias = (
        torch.zeros(len(weight)).double()
        if module.linear.bias is None
        else module.linear.bias.detach().double()
    )
    link = {"regression": "identity", "binary": "logistic", "multiclass": "softmax"}[one.task]
    outputs = one.classes[1:] if one.task == "binary" else one.classes
    outputs = outputs or [str(k) for k in range(len(weight))] if one.task != "regression" else [""]
    unit = 1.0
    if one.preprocessor is not None and one.task == "regression":
        unit, bias = (
            one.preprocessor.target_sd,
            bias * one.preprocessor.target_sd + one.preprocessor.target_mean,
        )
    rows = []
    for k, output in enumerate(outputs):
        lines, shift = _lines(one, weight[k], unit)
        first = {"feature": "(intercept)", "column": "", "kind": "intercept", "level": "", "if_missing": ""}
        intercept = {
            **first,
            "coefficient": repr(float(bias[k]) + shift),
            "standardized": repr(float(bias[k])),
        }
        rows += [{"output": output, "link": link, **line} for line in [intercept, *lines]]
    return rows


def _lines(one: Takeaway, weight: Tensor, unit: float) -> tuple[list[dict[str, Any]], float]:
    """Lines of one output, and what centring adds to its intercept."""

    def line(
        feature: str,
        column: str,
        kind: str,
        at: int,
        level: str = "",
        mean: float | None = None,
        sd: float = 1.0,
    ) -> dict[str, Any]:
        value = float(weight[at]) * unit
        return {
            "feature": feature,
            "column": column,
            "kind": kind,
            "level": level,
            "if_missing": "" if mean is None else repr(mean),
            "coefficient": repr(value / sd),
            "standardized": repr(value),
        }

    if one.preprocessor is None:
        return [line(f"x{k}", f"x{k}", "number", k) for k in range(one.features)], 0.0
    names, shift = one.preprocessor.feature_names, 0.0
    lines: list[dict[str, Any]] = []
    for scale in one.preprocessor.scales:
        if scale.sd:
            at = len(lines)
            lines.append(line(names[at], scale.name, "number", at, mean=scale.mean, sd=scale.sd))
            shift -= float(weight[at]) * unit * scale.mean / scale.sd
        if scale.missing:
            lines.append(line(names[len(lines)], scale.name, "missing", len(lines)))
    for choice in one.preprocessor.choices:
        for level in choice.levels:
            lines.append(line(names[len(lines)], choice.name, "level", len(lines), level))
        if choice.missing:
            lines.append(line(names[len(lines)], choice.name, "missing", len(lines)))
    return lines, shift
