"""A client's model as TorchScript: columns by name in, predictions out, with preprocessing inside."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.data.preprocess import RAW

if TYPE_CHECKING:
    from coterie.train.exported_model import ExportedModel


class FromColumns(nn.Module):
    """Predicts from columns: numbers by name (NaN: missing) and texts by name ("": missing)."""

    def __init__(self, one: ExportedModel, predict: Any) -> None:
        super().__init__()
        assert one.preprocessor is not None
        preprocessor = one.preprocessor
        self.predict = predict
        # TorchScript takes the type of an empty list from its annotation, and of nothing else.
        attribute: Any = torch.jit.Attribute
        self.raw = preprocessor.encoding == RAW
        codes = [preprocessor.as_codes(choice) for choice in preprocessor.choices]
        self.as_codes = attribute(codes, list[bool])
        self.number_columns = attribute([scale.name for scale in preprocessor.scales], list[str])
        self.means = attribute([scale.mean for scale in preprocessor.scales], list[float])
        self.sds = attribute([scale.sd for scale in preprocessor.scales], list[float])
        self.number_gaps = attribute([scale.missing for scale in preprocessor.scales], list[bool])
        self.text_columns = attribute([choice.name for choice in preprocessor.choices], list[str])
        self.widths = attribute([choice.width for choice in preprocessor.choices], list[int])
        self.limits = attribute([scale.limit for scale in preprocessor.scales], list[float])
        self.others = attribute([c.width - 1 if c.other else -1 for c in preprocessor.choices], list[int])
        levels = [
            {
                **{level: k for k, level in enumerate(choice.levels)},
                "": len(choice.levels) if choice.missing else -1,
            }
            for choice in preprocessor.choices
        ]
        self.levels = attribute(levels, list[dict[str, int]])
        regression = one.task == "regression"
        self.target_mean = preprocessor.target_mean if regression else 0.0
        self.target_sd = preprocessor.target_sd if regression else 1.0

    def forward(self, numbers: dict[str, Tensor], texts: dict[str, list[str]]) -> Tensor:
        """Return predictions for the rows of these columns."""
        parts: list[Tensor] = []
        for k, name in enumerate(self.number_columns):
            values = numbers[name].to(torch.float64).reshape(-1, 1)
            if self.raw:
                parts.append(values)
                continue
            gap = torch.isnan(values)
            if self.sds[k] != 0.0:
                scaled = (values - self.means[k]) / self.sds[k]
                if self.limits[k] > 0.0:
                    scaled = torch.where(scaled.abs() > self.limits[k], torch.zeros_like(values), scaled)
                parts.append(torch.where(gap, torch.zeros_like(values), scaled))
            if self.number_gaps[k]:
                parts.append(gap.to(torch.float64))
        for k, name in enumerate(self.text_columns):
            column = texts[name]
            if self.as_codes[k]:
                codes = torch.full((len(column), 1), float("nan"), dtype=torch.float64)
                for row, text in enumerate(column):
                    known = self.levels[k].get(text, -1)
                    if text != "" and known >= 0:
                        codes[row, 0] = float(known)
                parts.append(codes)
                continue
            spread = torch.zeros(len(column), self.widths[k], dtype=torch.float64)
            for row, text in enumerate(column):
                at = self.levels[k].get(text, self.others[k])
                if at >= 0:
                    spread[row, at] = 1.0
            parts.append(spread)
        predicted: Tensor = self.predict(torch.cat(parts, 1))
        return predicted * self.target_sd + self.target_mean


class FromFeatures(nn.Module):
    """Predicts from features as the model was trained on."""

    def __init__(self, predict: Any) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions for features [rows, ...]."""
        predicted: Tensor = self.predict(x)
        return predicted


def to_torchscript(one: ExportedModel, path: Path) -> None:
    """Write the scripted module; names of columns and classes are in its extra file `coterie.json`."""
    shape = getattr(one.model, "features", one.features)
    example = torch.zeros(2, *(shape if isinstance(shape, tuple) else (shape,)), dtype=one.weights.dtype)
    jit: Any = torch.jit  # torch gives its functions no types
    with _as_asked(), torch.no_grad():
        try:
            predict = jit.trace(one.module(), example)
        except RuntimeError as problem:
            raise SettingError(
                f"torch cannot write this model as TorchScript ({str(problem).splitlines()[0]}). "
                "Use --to safetensors."
            ) from None
        whole = FromFeatures(predict) if one.preprocessor is None else FromColumns(one, predict)
        scripted = jit.script(whole)
        note = {**one.note(), "numbers": one.numbers, "texts": one.texts}
        extra = {"coterie.json": json.dumps(note)}
        whole_file = io.BytesIO()
        jit.save(scripted, whole_file, _extra_files=extra)
    files.write_with(path, lambda temporary: _write_without_sources(whole_file, temporary, path.stem))


def _write_without_sources(archive: io.BytesIO, path: Path, name: str) -> None:
    """Copy an archive of torch without its debug records, which hold paths of the machine that exports.

    As torch writes them, records lie in a folder with the name of the file and begin at multiples of 64 bytes.
    """
    with zipfile.ZipFile(archive) as old, open(path, "wb") as stream, zipfile.ZipFile(stream, "w") as new:
        for record in old.infolist():
            if record.filename.endswith(".debug_pkl"):
                continue
            place = name + record.filename[record.filename.index("/") :]
            entry = zipfile.ZipInfo(place)
            entry.compress_type = record.compress_type
            gap = (
                -(stream.tell() + 30 + len(place.encode()) + 4) % 64
            )  # after a header of 30 bytes, name and mark
            entry.extra = struct.pack("<2sH", b"FB", gap) + b"Z" * gap
            new.writestr(entry, old.read(record))


@contextmanager
def _as_asked() -> Iterator[None]:
    """TorchScript was asked for, so that torch would rather have another format is no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit.*deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", r".*torch\.jit.*deprecated", FutureWarning)
        yield
