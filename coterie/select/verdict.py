"""The verdict on two models for the same clients: paired losses of test rows, judged and said in one sentence.

Console, report and `auto` say what `Verdict.sentence` returns, and count clients by `Verdict.called`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.models.metrics import LOSS, Metric, find
from coterie.models.metrics.metric import itself
from coterie.theory.verdicts import CLEAR_ROWS, Evidence, Mean, Verdicts, judge

MOST_NAMES = 4
CLIENTS = "clients"  # what is counted where single rows are not known


def row_metric(metric: Metric, task: str) -> Metric:
    """Return the metric that single rows are compared by: the one asked for if it is a mean over rows, else the loss.

    Accuracy is a coarse view of the loss, and is shown beside it; squared errors stand for the loss of a regression.
    """
    if task == "regression" and (metric.name == LOSS.name or not metric.is_mean):
        return find("rmse")
    return LOSS if metric.name == "accuracy" or not metric.is_mean else metric


@dataclass(frozen=True)
class Verdict:
    """What the same held-out rows say about two models of every client.

    Attributes
    ----------
    metric
        Metric that rows are compared by.
    names
        Names of the clients.
    judged
        Differences, posteriors and calls; positive where the first model is better.
    level_rows, level_clients
        Mean of the second model's values, over rows and over clients.
    held_out
        What the rows are, for the sentence.
    task
        Kind of target, which gives the loss its name.
    """

    metric: Metric
    names: Sequence[str]
    judged: Verdicts
    level_rows: float
    level_clients: float
    held_out: str = "test rows"
    task: str = "binary"

    @classmethod
    def of_rows(
        cls,
        first: np.ndarray,
        second: np.ndarray,
        client: np.ndarray,
        names: Sequence[str],
        metric: Metric,
        row: np.ndarray | None = None,
        held_out: str = "test rows",
        task: str = "binary",
    ) -> Verdict:
        """Judge the values of two models on the same rows.

        Parameters
        ----------
        first, second
            Values of the metric on each row, [rows].
        client
            Index of the client of each row, [rows].
        names
            Names of the clients.
        metric
            The metric, a mean over rows.
        row
            What tells rows apart that occur several times, [rows].
        held_out
            What the rows are, for the sentence.
        task
            Kind of target.

        Returns
        -------
        Verdict

        Examples
        --------
        >>> import numpy as np
        >>> client = np.repeat([0, 1], 30)
        >>> loss = np.random.default_rng(0).gamma(2.0, size=60)
        >>> found = Verdict.of_rows(loss - 0.5, loss, client, ["north", "south"], find("loss"))
        >>> found.sentence("ditto", "training alone")[:56]
        'Ditto is better than training alone for these clients: t'
        """
        gain = metric.sign * (np.asarray(first, dtype=float) - second)
        evidence = Evidence.of_rows(gain, client, len(names), row)
        known = np.isfinite(second)
        counts = np.bincount(np.asarray(client)[known], minlength=len(names))
        with np.errstate(all="ignore"):
            sums = np.bincount(np.asarray(client)[known], second[known], len(names))
            by_client = float(np.nanmean(np.where(counts > 0, sums / counts, np.nan)))
        level = float(sums.sum() / counts.sum())
        return cls(metric, list(names), judge(evidence), level, by_client, held_out, task)

    @classmethod
    def of_clients(
        cls, first: np.ndarray, second: np.ndarray, names: Sequence[str], metric: Metric, task: str
    ) -> Verdict:
        """Judge one value per client, [n], where single rows are not known; how clients differ is the only noise."""
        plain = replace(metric, finish=itself)
        return cls.of_rows(first, second, np.arange(len(names)), names, plain, held_out=CLIENTS, task=task)

    @property
    def called(self) -> np.ndarray:
        """1 for clients that are better off with the first model, -1 for those with the second, else 0, [n]."""
        return self.judged.called

    @property
    def intervals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shrunken gain of every client and the ends of its 95 % interval, [n] each; squared for roots."""
        return self.judged.estimate, self.judged.low, self.judged.high

    @property
    def improved(self) -> int:
        """Number of clients that are better off with the first model."""
        return int((self.called > 0).sum())

    @property
    def harmed(self) -> int:
        """Number of clients that are better off with the second model."""
        return int((self.called < 0).sum())

    @property
    def known(self) -> int:
        """Number of clients that have rows to judge by."""
        return int(self.judged.known.sum())

    @property
    def by_rows(self) -> Mean:
        """Mean gain, each row counting alike, in the metric's units."""
        return self._in_units(self.judged.by_rows, self.level_rows)

    @property
    def by_clients(self) -> Mean:
        """Mean gain, each client counting alike, in the metric's units."""
        return self._in_units(self.judged.by_clients, self.level_clients)

    def _in_units(self, mean: Mean, level: float) -> Mean:
        """Return a difference of squares as one of roots, a² - b² = (a - b)(a + b), for metrics that are roots."""
        if not self.metric.is_root:
            return mean
        other = max(level - mean.value, 0.0)
        scale = 1 / max(math.sqrt(level) + math.sqrt(other), 1e-300)
        ends = (None if end is None else scale * end for end in (mean.low, mean.high))
        return Mean(scale * mean.value, *ends)

    @property
    def sign(self) -> int:
        """1 or -1 if rows or clients on average are clearly better or worse off, and neither says otherwise, else 0."""
        signs = {self.judged.by_rows.sign, self.judged.by_clients.sign} - {0}
        return signs.pop() if len(signs) == 1 else 0

    def headline(self, first: str, second: str) -> str:
        """Return the verdict without numbers, such as 'Ditto is better than training alone for these clients'."""
        rows, clients = self.judged.by_rows.sign, self.judged.by_clients.sign
        subject = first[:1].upper() + first[1:]
        if rows * clients < 0:
            more = "where most rows are" if rows > 0 else "for the average client"
            return f"{subject} is better than {second} {more}, and worse otherwise"
        if self.sign == 0:
            return f"No difference between {first} and {second} is certain"
        word = "better" if self.sign > 0 else "worse"
        if rows == clients:
            return f"{subject} is {word} than {second} for these clients"
        what = "over all rows" if rows else "for the average client"
        return f"{subject} is {word} than {second} {what}"

    def sentence(self, first: str, second: str) -> str:
        """Say what the rows allow to say about the two models, in the federation and for single clients.

        Parameters
        ----------
        first, second
            What the models are called, such as 'ditto' and 'training alone'.

        Returns
        -------
        str
            Two sentences: the means with their intervals, and the clients.
        """
        rows = int(self.judged.evidence.rows.sum())
        held_out = self.held_out if rows != 1 else self.held_out.removesuffix("s")
        text = (
            f"{self.headline(first, second)}: the {self.title} {self.change(self.by_rows)} over "
            f"{rows:,} {held_out}"
        )
        if self.known > 1 and self.held_out != CLIENTS:  # else both means are the same
            text += f", and {self.change(self.by_clients)} for the average client"
        return f"{text}. {self.clients_sentence(first, second)}"

    @property
    def title(self) -> str:
        """Name of the metric, for readers."""
        if self.metric.name == LOSS.name and self.task in ("binary", "multiclass"):
            return "log-loss"
        if self.metric.name == LOSS.name and self.task == "survival":
            return "loss per event"
        return self.metric.title

    def change(self, mean: Mean) -> str:
        """Say by how much the metric changes from the second model to the first, with the interval."""
        better = "rises" if self.metric.higher_is_better else "falls"
        worse = "falls" if self.metric.higher_is_better else "rises"
        if mean.value == 0 and (mean.low, mean.high) in ((0, 0), (None, None)):
            return "stays the same"
        text = f"{better if mean.value >= 0 else worse} by {_digits(abs(mean.value))}"
        if mean.low is None or mean.high is None:
            return f"{text} (no interval: too few rows)"
        low, high = (mean.low, mean.high) if mean.value >= 0 else (-mean.high, -mean.low)
        return f"{text} (95 % interval {_digits(low)} to {_digits(high)})"

    def clients_sentence(self, first: str, second: str) -> str:
        """Say for how many clients one of the models is better, and name those for which it is clear."""
        known, up, down = self.known, self.improved, self.harmed
        if not up and not down:
            who = "the client" if known == 1 else f"any of {known:,} clients"
            return f"For {who} by itself it cannot be told which is better."
        parts = []
        for count, model, sign in ((up, first, 1), (down, second, -1)):
            if count:
                verb = "is" if count == 1 else "are"
                parts.append(f"{count:,} {verb} better off with {model}{self._clear(sign)}")
        rest = known - up - down
        if rest:
            parts.append(f"for {rest:,} it cannot be told")
        return f"Of {known:,} client{'s' if known != 1 else ''} {'; '.join(parts)}."

    def _clear(self, sign: int) -> str:
        """Name the clients whose own rows are enough to call the difference clear."""
        clear = [name for name, said in zip(self.names, self.judged.clear, strict=True) if said == sign]
        if not clear:
            return f" (none clearly: under {CLEAR_ROWS} rows each)"
        named = ", ".join(clear[:MOST_NAMES])
        return (
            f" (clearly: {named}{f' and {len(clear) - MOST_NAMES} more' if len(clear) > MOST_NAMES else ''})"
        )


def _digits(value: float) -> str:
    """Format a number with three significant digits, without exponent if it is of ordinary size."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
