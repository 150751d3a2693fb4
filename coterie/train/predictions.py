"""What the deployed models say about held-out rows, kept in the run folder for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie._core import files

if TYPE_CHECKING:
    from coterie.train.run import Run

FILE = "predictions.safetensors"
MOST = 5_000_000  # scores that are kept at most
ROWS = 4096  # rows scored at a time


@dataclass(frozen=True)
class Predictions:
    """Scores of held-out rows, each by its client's model, in the order of the split.

    Attributes
    ----------
    split : str
        'test', or 'validation' where there are no test rows.
    client : Tensor
        Index of the client of each row, int64 [N].
    target : Tensor
        Encoded targets: class numbers, or standardised numbers, [N].
    scores : Tensor
        Outputs before the link, [N, outputs].
    """

    split: str
    client: Tensor
    target: Tensor
    scores: Tensor

    @classmethod
    def of(cls, run: Run, split: str) -> Predictions:
        """Score the rows of one split, which have to be in this process."""
        fed, rows = run.fed, run.fed.runtime.rows(split)
        models = run.personal if run.scored is None else run.scored  # what the scores are about
        parts = []
        for k in torch.nonzero(rows.size).squeeze(-1).tolist():
            x, _ = rows.of(k)
            weights = models[k].to(x.device)
            parts += [fed.model.scores(weights, part) for part in x.split(ROWS)]
        client = torch.repeat_interleave(torch.arange(fed.n), rows.size.cpu())
        return cls(split, client, rows.y.cpu(), torch.cat(parts).detach().cpu())

    @classmethod
    def save_those_of(cls, run: Run, folder: Path) -> None:
        """Write the predictions of a run, unless they are too many, or rows are not in this process."""
        fed = run.fed
        split = next((name for name in ("test", "validation") if fed.has_rows(name)), None)
        if split is None or fed.model.task == "language" or not fed.runtime.capabilities.rows_visible:
            return
        if int(fed.rows[split].sum()) * (fed.model.outputs or 1) > MOST:
            return
        found = cls.of(run, split)
        tensors = {"client": found.client, "target": found.target, "scores": found.scores}
        files.write_tensors(folder / FILE, tensors, {"split": split})

    @classmethod
    def load(cls, folder: Path) -> Predictions | None:
        """Return the predictions of a run folder, or None if it has none."""
        if not (folder / FILE).exists():
            return None
        tensors, note = files.read_tensors(folder / FILE)
        return cls(note["split"], tensors["client"], tensors["target"], tensors["scores"])
