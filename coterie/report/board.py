"""What a board asks first: how good, how sure, what it rests on, and whether everybody is served alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie._core.errors import RunError
from coterie.models.metrics import find
from coterie.report import fairness, quality, quality_panels
from coterie.report.facts import RunFacts
from coterie.report.gains import Scores
from coterie.report.held_out import HeldOut, held_out
from coterie.report.importance import Coefficients, read_coefficients
from coterie.report.numbers import digits, show, show_gain
from coterie.report.panels import Panel


@dataclass(frozen=True)
class Tile:
    """One number at the top of the page: what it is, its value, and a line below it."""

    what: str
    value: str
    note: str


@dataclass(frozen=True)
class Grouping:
    """Quality by client or by the values of one column, in words and as a chart."""

    sentence: str
    panel: Panel


@dataclass(frozen=True)
class Quality:
    """The parts of the page that look at single held-out rows.

    Attributes
    ----------
    held : HeldOut or None
        The rows of the run that the page is about; None if the run kept no predictions.
    sentences, headers, rows
        In words, and a table with a row per method.
    panels : list of Panel
        ROC and calibration curves, or what fits the task.
    coefficients : Coefficients or None
        Of linear models.
    groups : list of Grouping
        By client and by the columns asked for.
    """

    held: HeldOut | None
    sentences: list[str]
    headers: list[str]
    rows: list[list[str]]
    panels: list[Panel]
    coefficients: Coefficients | None
    groups: list[Grouping]

    @classmethod
    def of(cls, main: RunFacts, alone: RunFacts | None, by: Sequence[str], threshold: float) -> Quality:
        """Collect the parts for the run that the page is about and the one that trained alone."""
        held = held_out(main)
        if held is None:
            if by:
                raise RunError(
                    f"{main.folder} has no predictions of held-out rows, which --by needs; train it again"
                )
            return cls(None, [], [], [], [], read_coefficients(main), [])
        beside = None if alone is None or alone is main else held_out(alone)
        both = [held] if beside is None or len(beside) != len(held) else [held, beside]
        headers, rows = quality.summary_table(both)
        groups = [("client", client_column(main) or "client", held.by_client())]
        groups += [(f"by-{k}", column, held.by_column(column)) for k, column in enumerate(by)]
        return cls(
            held,
            _sentences(held, threshold),
            headers,
            rows,
            quality_panels.panels(both, threshold),
            read_coefficients(main),
            [
                Grouping(
                    fairness.sentence(held, what, parts, threshold),
                    fairness.panel(held, f"served-{key}", what, parts, threshold),
                )
                for key, what, parts in groups
            ],
        )


def _sentences(held: HeldOut, threshold: float) -> list[str]:
    """Say what the held-out rows show, for the task."""
    rows = f"{len(held):,} {held.split} rows{held.run.of_the_first}"
    where = f"These numbers rest on {rows}, which nobody had trained on."
    if held.task == "binary":
        return [where, quality.threshold_sentence(held, threshold)]
    if held.task == "regression":
        _, overall = quality.half_widths(held)
        if math.isfinite(overall):
            level = f"{100 * quality.LEVEL:.0f} %"
            return [
                where,
                f"A new row is within {digits(overall)} of its prediction with {level} probability.",
            ]
    return [where]


def client_column(run: RunFacts) -> str:
    """Return the name of the column that says whose a row is; empty if the run was not made from a table."""
    return str(run.data.get("client", ""))


def tiles(main: RunFacts, alone: RunFacts | None, scores: Scores, shown: Quality) -> list[Tile]:
    """Return the numbers at the top of the page."""
    known = scores.value[~np.isnan(scores.value)]
    rows = main.rows(main.split)
    held = "" if rows is None else f"{int(rows.sum()):,} {main.split} rows{main.of_the_first}"
    found = [Tile("Clients", f"{len(main.names):,}", held)]
    if len(known):
        title, note = find(main.metric).title, f"mean over clients, {main.split} rows"
        found.append(Tile(title[:1].upper() + title[1:], show(main.metric, float(known.mean())), note))
    one = shown.held
    if one is not None and one.task == "binary":
        area, low, high = quality.auc(one.output[:, 1], one.target == 1)
        if not math.isnan(area):
            sure = "" if math.isnan(low) else f"95 % interval {show('auc', low)} to {show('auc', high)}"
            found.append(Tile(f"AUC over all rows{main.of_the_first}", show("auc", area), sure))
    if one is not None and one.task == "regression":
        value = one.value("r2")
        found.append(Tile("Variance explained (R²)", show("r2", value), f"over all rows{main.of_the_first}"))
    if scores.verdict is not None and alone is not None and alone is not main:
        gain, metric = scores.verdict.by_rows, scores.verdict.metric.name
        sure = ""
        if gain.low is not None and gain.high is not None:
            ends = (show_gain(metric, end, unit=False) for end in (gain.low, gain.high))
            sure = f"95 % interval {' to '.join(ends)}"
        found.append(
            Tile(f"Gain in {scores.verdict.title} over training alone", show_gain(metric, gain.value), sure)
        )
    return found
