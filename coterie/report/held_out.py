"""Held-out rows of a run with what the models say about them, for the report."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coterie._core import files
from coterie._core.errors import DataError, RunError, nearest
from coterie.data import bundled, tables
from coterie.data.column_types import labels
from coterie.data.preprocess import Preprocessor
from coterie.data.split import split_rows
from coterie.data.time_order import in_time, split_in_time
from coterie.models.metrics import Metric, ScoredRows, find, names
from coterie.report.facts import RunFacts
from coterie.train.predictions import Predictions

FEWEST = 5  # rows of a subgroup below which it is not shown on its own
BINS = 4  # groups into which a number is cut
FEW_VALUES = 8  # different values up to which a number is not cut


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of one run, each with the output of its client's model.

    Attributes
    ----------
    run : RunFacts
        The run.
    task : str
        'regression', 'binary', 'multiclass' or 'survival'.
    split : str
        Where the rows are from, 'test' if there are test rows.
    client : ndarray
        Index of each row's client, [N].
    target : ndarray
        Class numbers, numbers in the target's units, or signed times, [N].
    output : ndarray
        Probabilities [N, C], predictions in the target's units, or scores of survival times [N].
    classes : list of str
        Names of the classes; empty for a regression.
    raw : Predictions
        Scores and targets as the model has them.
    """

    run: RunFacts
    task: str
    split: str
    client: np.ndarray
    target: np.ndarray
    output: np.ndarray
    classes: list[str]
    raw: Predictions

    def __len__(self) -> int:
        return len(self.client)

    @property
    def positive(self) -> str:
        """What probabilities of two classes are about, such as “sick = 1”."""
        target = self.run.data.get("target")
        return f"“{target} = {self.classes[1]}”" if target else f"“{self.classes[1]}”"

    @functools.cached_property
    def right(self) -> np.ndarray:
        """Whether the most likely class is the right one, bool [N]."""
        found: np.ndarray = self.output.argmax(1) == self.target
        return found

    @functools.cached_property
    def error(self) -> np.ndarray:
        """Prediction minus target of a regression, [N]."""
        return np.asarray(self.output - self.target)

    def value(self, metric: str | Metric, rows: np.ndarray | slice = slice(None)) -> float:
        """Return a metric over some of the rows, all by default; NaN where it is not defined."""
        found = find(metric) if isinstance(metric, str) else metric
        scores, targets = self.raw.scores[rows], self.raw.target[rows]
        if not len(targets):
            return float("nan")
        if self.task == "survival":  # pairs and risk sets are those of a client
            whose = torch.from_numpy(self.client)[
                torch.as_tensor(rows) if isinstance(rows, np.ndarray) else rows
            ]
            sums, sizes = [], []
            for client in whose.unique():
                z, y = scores[whose == client].double(), targets[whose == client].double()
                sums.append(found.sums(ScoredRows(self.task, z, y, torch.full_like(y, 1 / len(y)))))
                sizes.append([float(len(y))])
            return float(found.pooled(torch.stack(sums), torch.tensor(sizes)))
        unit = self._unit if found.scales_with_target else 1.0
        return unit * found.value(self.task, scores.double(), targets.double())

    @functools.cached_property
    def _unit(self) -> float:
        preprocessor = _preprocessor(self.run)
        return 1.0 if preprocessor is None else preprocessor.target_scale

    def metrics(self) -> list[str]:
        """Return the names of the metrics that are worth a line."""
        known = {
            "regression": ("rmse", "mae", "r2"),
            "survival": ("concordance",),
            "binary": ("accuracy", "auc", "log-loss", "brier", "ece"),
        }
        wanted = known.get(self.task, ("accuracy", "balanced-accuracy", "auc", "log-loss", "ece"))
        return [name for name in wanted if name in names(self.task)]

    def by_client(self) -> list[tuple[str, np.ndarray]]:
        """Return the rows of every client that has some, by its name."""
        order = np.argsort(self.client, kind="stable")
        cuts = np.searchsorted(self.client[order], np.arange(len(self.run.names) + 1))
        parts = zip(self.run.names, cuts[:-1], cuts[1:], strict=True)
        return [(name, order[a:b]) for name, a, b in parts if b > a]

    def by_column(self, column: str) -> list[tuple[str, np.ndarray]]:
        """Return the rows of each value of a column of the table, few rows pooled and numbers cut into groups.

        Parameters
        ----------
        column
            Any column of the table, also one that is no feature.

        Returns
        -------
        list of tuple
            Name of the group, and positions of its rows.

        Raises
        ------
        DataError
            There is no such column.
        RunError
            The table is not where it was, or has changed.
        """
        values = self._column(column)
        numeric = values.dtype.is_numeric() and values.n_unique() > FEW_VALUES
        texts, order = _cut(values) if numeric else _levels(values)
        found: dict[str, list[int]] = {text: [] for text in order}
        for row, text in enumerate(texts):
            found[text].append(row)
        few = [text for text, rows in found.items() if len(rows) < FEWEST]
        pooled = [row for text in few for row in found.pop(text)]
        groups = list(found.items())
        if len(pooled) >= FEWEST:
            groups.append((f"others (values in fewer than {FEWEST} rows)", pooled))
        return [(f"{column} {text}", np.array(rows)) for text, rows in groups if rows]

    def _column(self, column: str) -> Any:
        """Return a column of the table for these rows, after a check that it is the table of the run."""
        data, preprocessor = self.run.data, _preprocessor(self.run)
        if not data.get("source") or preprocessor is None:
            raise RunError(
                f"{self.run.folder} was not made from a file, so there is no column {column!r} to group by"
            )
        frame = tables.read(bundled.resolve(data["source"]))
        if column not in frame.columns:
            raise DataError(
                f"{data['source']}: there is no column {column!r}.{nearest(column, frame.columns)}"
            )
        frame, _, counts = tables.by_client(frame, data["client"])
        a, b, c = (float(part) for part in data["split"])
        if data.get("time"):
            frame, times = in_time(frame, counts, data["time"])
            parts = split_in_time(torch.tensor(counts), times, (a, b, c))
        else:
            parts = split_rows(torch.tensor(counts), (a, b, c), int(self.run.config["federation"]["seed"]))
        mine = frame[getattr(parts, self.split).order.numpy()]
        same = mine.height == len(self) and torch.allclose(
            preprocessor.encode_target(mine).double(), self.raw.target.double()
        )
        if not same:
            raise RunError(
                f"{data['source']} has changed since the run; --by {column} needs the table as it was"
            )
        return mine[column]


def _cut(values: Any) -> tuple[list[str], list[str]]:
    """Return the quarter that every number is in, in words, and all of these in order."""
    numbers = values.cast(float).to_numpy()
    edges = np.unique(np.nanquantile(numbers, np.linspace(0, 1, BINS + 1)))
    place = np.clip(np.searchsorted(edges, numbers, side="left") - 1, 0, max(0, len(edges) - 2))
    order = [f"{a:.4g} to {b:.4g}" for a, b in itertools.pairwise(edges)]
    texts = ["missing" if np.isnan(number) else order[k] for number, k in zip(numbers, place, strict=True)]
    return texts, [*order, "missing"]


def _levels(values: Any) -> tuple[list[str], list[str]]:
    """Return every value as text, and all of these from the most frequent to the rarest."""
    texts = [f"= {text}" for text in labels(values).fill_null("missing").to_list()]
    return texts, [text for text, _ in Counter(texts).most_common()]


def _preprocessor(run: RunFacts) -> Preprocessor | None:
    """Return the encoding of the run's table, or None."""
    path = run.folder / "models" / "model.json"
    if not path.exists():
        return None
    stored = files.read_json(path)["preprocessor"]
    return None if stored is None else Preprocessor.from_json(stored)


def held_out(run: RunFacts) -> HeldOut | None:
    """Return the held-out rows of a run with their predictions, or None if the run kept none."""
    raw = Predictions.load(run.folder)
    if raw is None or not len(raw.target) or not bool(torch.isfinite(raw.scores).all()):
        return None
    preprocessor = _preprocessor(run)
    client = raw.client.numpy()
    if raw.target.is_floating_point() and "rmse" in set(run.metrics["metric"]):
        decode: Callable[..., Any] = (lambda value: value) if preprocessor is None else preprocessor.decode
        output, target = decode(raw.scores.double().squeeze(-1)), decode(raw.target.double())
        return HeldOut(run, "regression", raw.split, client, target.numpy(), output.numpy(), [], raw)
    if "concordance" in set(run.metrics["metric"]):
        target, output = raw.target.double().numpy(), raw.scores.double().squeeze(-1).numpy()
        return HeldOut(run, "survival", raw.split, client, target, output, [], raw)
    scores = raw.scores.double()
    binary = scores.shape[1] == 1
    chances = torch.cat([torch.sigmoid(-scores), torch.sigmoid(scores)], 1) if binary else scores.softmax(1)
    names_of = [str(k) for k in range(chances.shape[1])]
    if preprocessor is not None:
        names_of = list(preprocessor.spec.classes)
    task = "binary" if binary else "multiclass"
    return HeldOut(run, task, raw.split, client, raw.target.long().numpy(), chances.numpy(), names_of, raw)
