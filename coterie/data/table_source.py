"""Where the rows of a federation came from, and how they were encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coterie.data.preprocess import Preprocessor


@dataclass(frozen=True)
class TableSource:
    """The options a table was read with, its fitted preprocessor, and warnings about its columns.

    Parameters
    ----------
    options
        Arguments of `Federation.from_table`, as a run folder records them.
    preprocessor
        Encoding fitted on the training rows.
    warnings
        What `tables.check` noticed.
    times
        Times of all rows, client after client and ascending inside each, [rows], if rows are ordered in time.
    """

    options: dict[str, Any]
    preprocessor: Preprocessor
    warnings: list[str] = field(default_factory=list)
    times: Tensor | None = None

    @property
    def target_scale(self) -> float:
        """Units of the target per unit of the model's output (1 for classes)."""
        return self.preprocessor.target_scale
