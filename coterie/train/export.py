"""A client's model as a file that needs no Coterie: raw columns in, predictions out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core import files, systems
from coterie._core.errors import SettingError, nearest
from coterie.models.base import Model
from coterie.models.ensemble import Ensemble
from coterie.train.export_lightgbm import to_lightgbm
from coterie.train.export_onnx import to_onnx
from coterie.train.export_torchscript import to_torchscript
from coterie.train.exported_model import ExportedModel

SUFFIXES = {
    "safetensors": ".safetensors",
    "onnx": ".onnx",
    "torchscript": ".pt",
    "csv": ".csv",
    "lightgbm": ".txt",
}


LINKS = {"regression": "identity", "binary": "logistic", "multiclass": "softmax", "survival": "log-hazard"}


def export(
    folder: str | Path,
    client: str | None,
    to: str,
    out: str | Path | None = None,
    model: Model | None = None,
) -> Path:
    """Write a client's model in a format that needs no Coterie.

    Preprocessing is included: the file takes raw columns and returns predictions in the target's units.

    Parameters
    ----------
    folder
        A finished run folder.
    client
        Name of the client; None exports the common model.
    to
        'safetensors', 'onnx', 'torchscript', 'csv' (coefficients of linear models) or 'lightgbm' (trees).
    out
        File to write; by default in the folder `exports` of the run.
    model
        The model, where it was a module of your own.

    Returns
    -------
    Path
        The file.

    Examples
    --------
    >>> import tempfile, coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = coterie.fit(fed, "ditto", rounds=2, out=f"{folder}/run")
    ...     export(f"{folder}/run", "cleveland", to="csv").name
    'cleveland.csv'
    """
    _require_format(to)
    return write_model(ExportedModel.load(folder, client, model), to, out, Path(folder))


def _require_format(to: str) -> None:
    if to not in SUFFIXES:
        raise SettingError(f"unknown format {to!r}.{nearest(to, SUFFIXES)}")


def write_model(one: ExportedModel, to: str, out: str | Path | None, beside: Path) -> Path:
    """Write a model in one of the formats of `export`; without `out` into the folder `exports` inside `beside`."""
    _require_format(to)
    if isinstance(one.model, Ensemble) and to != "safetensors":
        raise SettingError(
            f"{to} holds one model, and this run deploys the weighted mean of {len(one.model.members)}: export it to "
            f"safetensors, or deploy the best one alone ({one.model.best}): coterie fit ... --no-ensemble"
        )
    if one.task == "survival" and to not in ("csv", "safetensors"):
        raise SettingError(
            f"a survival model is a relative hazard and a baseline, which {to} files of Coterie do not hold; export "
            "its coefficients to csv or safetensors, and take survival probabilities from `coterie predict`"
        )
    name = systems.file_names([one.client])[0]
    path = beside / "exports" / f"{name}{SUFFIXES[to]}" if out is None else Path(out)
    if to == "safetensors":
        _to_safetensors(one, path)
    elif to == "csv":
        _to_csv(one, path)
    elif to == "onnx":
        to_onnx(one, path)
    elif to == "lightgbm":
        to_lightgbm(one, path)
    else:
        to_torchscript(one, path)
    return path


def _to_safetensors(one: ExportedModel, path: Path) -> None:
    """Write the module's parameters by name; the header's note says how to encode columns and decode predictions."""
    tensors = {name: value for name, value in one.module().state_dict().items()}
    if one.preprocessor is not None:
        scales = one.preprocessor.scales
        tensors["preprocess.mean"] = torch.tensor([scale.mean for scale in scales], dtype=torch.float64)
        tensors["preprocess.sd"] = torch.tensor([scale.sd for scale in scales], dtype=torch.float64)
        if one.task == "regression":
            pair = [one.preprocessor.target_mean, one.preprocessor.target_sd]
            tensors["target.mean_sd"] = torch.tensor(pair, dtype=torch.float64)
    files.write_tensors(path, tensors, one.note())


def _to_csv(one: ExportedModel, path: Path) -> None:
    """Write a line per coefficient, for values as they are in the table: score = sum of the lines that apply.

    `intercept` always applies, `number` times the value (the value in `if_missing` where it is missing or not between
    `low` and `high`, if these are given), `missing` if the value is missing, `level` if the value is that text, `other`
    if it is a text that no line of its column names. For classes the scores go through the link named in `link`
    (logistic: of the second class; softmax: of all); for a quantity the score is the prediction, for survival
    (log-hazard) the logarithm of the hazard, up to the client's baseline.
    """
    rows = coefficients(one)

    def write(temporary: Path) -> None:
        with open(temporary, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    files.write_with(path, write)


def coefficients(one: ExportedModel) -> list[dict[str, Any]]:
    """Return the coefficients of a linear model, for raw columns and for standardised ones.

    Parameters
    ----------
    one
        The model of a client.

    Returns
    -------
    list of dict
        A line per coefficient with its feature and column.

    Raises
    ------
    SettingError
        The model is not linear.
    """
    module = one.linear()
    weight = module.linear.weight.detach().double()
    bias = (
        torch.zeros(len(weight)).double()
        if module.linear.bias is None
        else module.linear.bias.detach().double()
    )
    link = LINKS[one.task]
    outputs = one.classes[1:] if one.task == "binary" else one.classes
    outputs = (
        outputs or [str(k) for k in range(len(weight))]
        if one.task not in ("regression", "survival")
        else [""]
    )
    unit = 1.0
    if one.preprocessor is not None and one.task == "regression":
        unit, bias = (
            one.preprocessor.target_sd,
            bias * one.preprocessor.target_sd + one.preprocessor.target_mean,
        )
    rows = []
    for k, output in enumerate(outputs):
        lines, shift = _lines(one, weight[k], unit)
        first = {
            "feature": "(intercept)",
            "column": "",
            "kind": "intercept",
            "level": "",
            "if_missing": "",
        } | {"low": "", "high": ""}
        intercept = {
            **first,
            "coefficient": repr(float(bias[k]) + shift),
            "standardized": repr(float(bias[k])),
        }
        rows += [{"output": output, "link": link, **line} for line in [intercept, *lines]]
    return rows


def _lines(one: ExportedModel, weight: Tensor, unit: float) -> tuple[list[dict[str, Any]], float]:
    """Return the lines of one output, and what centring adds to its intercept."""

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
            "low": "",
            "high": "",
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
            found = line(names[at], scale.name, "number", at, mean=scale.mean, sd=scale.sd)
            if scale.limit:
                width = scale.limit * abs(scale.sd)
                found |= {"low": repr(scale.mean - width), "high": repr(scale.mean + width)}
            lines.append(found)
            shift -= float(weight[at]) * unit * scale.mean / scale.sd
        if scale.missing:
            lines.append(line(names[len(lines)], scale.name, "missing", len(lines)))
    for choice in one.preprocessor.choices:
        for level in choice.levels:
            lines.append(line(names[len(lines)], choice.name, "level", len(lines), level))
        if choice.missing:
            lines.append(line(names[len(lines)], choice.name, "missing", len(lines)))
        if choice.other:
            lines.append(line(names[len(lines)], choice.name, "other", len(lines)))
    return lines, shift
