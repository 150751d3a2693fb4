"""A client's model as TorchScript: columns by name in, predictions out, preprocessing inside."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coterie.runs import files

if TYPE_CHECKING:
    from coterie.runs.export import Takeaway


class FromColumns(nn.Module):
    """forward(numbers by column, NaN where missing; texts by column, "" where missing)."""

    def __init__(self, one: Takeaway, predict: Any) -> None:
        super().__init__()
        assert one.preprocessor is not None
        preprocessor = one.preprocessor
        self.predict = predict
        self.number_columns = [scale.name for scale in preprocessor.scales]
        self.means = [scale.mean for scale in preprocessor.scales]
        self.sds = [scale.sd for scale in preprocessor.scales]
        self.number_gaps = [scale.missing for scale in preprocessor.scales]
        self.text_columns = [choice.name for choice in preprocessor.choices]
        self.widths = [len(choice.levels) + choice.missing for choice in preprocessor.choices]
        self.levels = [
            {
                **{level: k for k, level in enumerate(choice.levels)},
                "": len(choice.levels) if choice.missing else -1,
            }
            for choice in preprocessor.choices
        ]
        regression = one.task == "regression"
        self.target_mean = preprocessor.target_mean if regression else 0.0
        self.target_sd = preprocessor.target_sd if regression else 1.0

    def forward(self, numbers: dict[str, Tensor], texts: dict[str, list[str]]) -> Tensor:
        parts: list[Tensor] = []
        for k, name in enumerate(self.number_columns):
            values = numbers[name].to(torch.float64).reshape(-1, 1)
            gap = torch.isnan(values)
            if self.sds[k] != 0.0:
                parts.append(
                    torch.where(gap, torch.zeros_like(values), (values - self.means[k]) / self.sds[k])
                )
            if self.number_gaps[k]:
                parts.append(gap.to(torch.float64))
        for k, name in enumerate(self.text_columns):
            column = texts[name]
            spread = torch.zeros(len(column), self.widths[k], dtype=torch.float64)
            for row, text in enumerate(column):
                at = self.levels[k].get(text, -1)
                if at >= 0:
                    spread[row, at] = 1.0
            parts.append(spread)
        return self.predict(torch.cat(parts, 1)) * self.target_sd + self.target_mean


class FromFeatures(nn.Module):
    """forward(x): predictions from features as the model was trained on."""

    def __init__(self, predict: Any) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)


def to_torchscript(one: Takeaway, path: Path) -> None:
    """Write the scripted module, with the names of columns and classes as the extra file `coterie.json`."""
    shape = getattr(one.model, "features", one.features)
    example = torch.zeros(2, *(shape if isinstance(shape, tuple) else (shape,)), dtype=one.weights.dtype)
    with _as_asked(), torch.no_grad():
        predict = torch.jit.trace(one.module(), example)
        whole = FromFeatures(predict) if one.preprocessor is None else FromColumns(one, predict)
        scripted = torch.jit.script(whole)
        note = {**one.note(), "numbers": one.numbers, "texts": one.texts}
        extra = {"coterie.json": json.dumps(note)}
        files.write_with(path, lambda temporary: scripted.save(str(temporary), _extra_files=extra))


@contextmanager
def _as_asked() -> Iterator[None]:
    """TorchScript was asked for, so that torch would rather have another format is no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit.*deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", r".*torch\.jit.*deprecated", FutureWarning)
        yield
