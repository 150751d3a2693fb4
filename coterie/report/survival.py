"""Survival data in the report: concordance with its interval, and survival by predicted risk."""

from __future__ import annotations

import math

import numpy as np
import torch

from coterie.report.held_out import HeldOut
from coterie.report.panels import Panel, Trace, axis, colour, numbers
from coterie.train.baseline import Baseline

GROUPS = ("lowest risk", "middle", "highest risk")
POINTS = 60  # of a curve
MOST_ROWS = 4000  # of a client, beyond which the interval takes too long
Z = 1.959964


def concordance(held: HeldOut, rows: np.ndarray) -> tuple[float, float, float]:
    """Return Harrell's C over pairs of rows of the same client, with its 95 % interval.

    The variance is that of the infinitesimal jackknife: each row moves C by its own concordant pairs less C times its
    comparable ones.

    Parameters
    ----------
    held
        Held-out rows of survival data.
    rows
        Positions to look at.

    Returns
    -------
    tuple of float
        The value and the ends of the interval; NaN where there is no pair, or too many rows for the interval.
    """
    moved, pairs, sizes = [], 0.0, []
    for client in np.unique(held.client[rows]):
        mine = rows[held.client[rows] == client]
        if len(mine) > MOST_ROWS:
            return held.value("concordance", rows), math.nan, math.nan
        time, event, score = np.abs(held.target[mine]), held.target[mine] > 0, held.output[mine]
        later = (time[None] > time[:, None]) | ((time[None] == time[:, None]) & ~event[None])
        usable = event[:, None] & later
        right = usable * (0.5 + 0.5 * np.sign(score[:, None] - score[None]))
        moved.append(right.sum(1) + right.sum(0))
        sizes.append(usable.sum(1).astype(float) + usable.sum(0))
        pairs += float(usable.sum())
    if not pairs:
        return math.nan, math.nan, math.nan
    value = float(sum(part.sum() for part in moved)) / (2 * pairs)
    spread = math.sqrt(sum(float(np.square(a - value * b).sum()) for a, b in zip(moved, sizes, strict=True)))
    half = Z * spread / pairs
    return value, max(0.0, value - half), min(1.0, value + half)


def kaplan_meier(target: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of rows without event at each of these times, and its standard error (Greenwood).

    Parameters
    ----------
    target
        Signed times, [N].
    at
        Times, ascending, [k].

    Returns
    -------
    tuple of ndarray
        Estimates and standard errors, [k]; NaN beyond the last row.

    Examples
    --------
    >>> kaplan_meier(np.array([1.0, 2.0, -3.0, 4.0]), np.array([0.5, 1.0, 2.5]))[0]
    array([1.  , 0.75, 0.5 ])
    """
    time = np.abs(target)
    steps, count = np.unique(time[target > 0], return_counts=True)
    risk = len(time) - np.searchsorted(np.sort(time), steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        curve = np.append(1.0, np.cumprod(1 - count / risk))
        terms = np.append(0.0, np.cumsum(count / (risk * (risk - count))))
        place = np.searchsorted(steps, at, side="right")
        error = np.nan_to_num(curve[place] * np.sqrt(terms[place]))
    known = at <= time.max()
    return np.where(known, curve[place], np.nan), np.where(known, error, np.nan)


def panels(held: HeldOut) -> list[Panel]:
    """Return the chart of survival by predicted risk, observed and predicted; nothing without baseline hazards."""
    folder = held.run.folder / "models"
    baseline = Baseline.load(folder, scored=True) or Baseline.load(folder)
    if baseline is None or len(held) < 2 * len(GROUPS):
        return []
    client, score = torch.tensor(held.client), torch.tensor(held.output)
    risk = baseline.relative_risk(client, score).numpy()
    group = np.digitize(risk, np.quantile(risk, [1 / 3, 2 / 3]))
    end = float(min(np.abs(held.target).max(), baseline.last))
    at = np.linspace(0, end, POINTS + 1)[1:]
    traces: list[Trace] = []
    rows = []
    for k, name in enumerate(GROUPS):
        mine = np.flatnonzero(group == k)
        if not len(mine):
            continue
        seen, error = kaplan_meier(held.target[mine], at)
        said = np.array([float(baseline.survival(client[mine], score[mine], float(t)).mean()) for t in at])
        for what, values, dash in (("observed", seen, "solid"), ("predicted", said, "dot")):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": numbers(np.append(0.0, at)),
                    "y": numbers(100 * np.append(1.0, values)),
                    "name": f"{name}, {what}",
                    "line": {
                        "color": colour(k),
                        "dash": dash,
                        "width": 2,
                        "shape": "hv" if dash == "solid" else "linear",
                    },
                    "hovertemplate": f"{name}, {what}: %{{y:.0f}} % at %{{x:.4g}}<extra></extra>",
                }
            )
        for j in (POINTS // 4, POINTS // 2, 3 * POINTS // 4):
            low, high = np.clip([seen[j] - Z * error[j], seen[j] + Z * error[j]], 0, 1)
            observed = (
                "–" if math.isnan(seen[j]) else f"{100 * seen[j]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            )
            rows.append([name, f"{len(mine):,}", f"{at[j]:.4g}", observed, f"{100 * said[j]:.1f} %"])
    return [
        Panel(
            "survival",
            "Survival by predicted risk",
            "Held-out rows in thirds by their predicted risk, relative to the average row of their client. Solid lines "
            "show how many were without event (Kaplan and Meier), dotted ones what the models said. The farther the "
            "thirds lie apart, the better the models tell risks apart; the nearer the dotted lines are to the solid "
            "ones, the more their probabilities can be trusted.",
            traces,
            {
                "xaxis": axis("time"),
                "yaxis": axis("without event (%)", range=[0, 102]),
                "hovermode": "closest",
            },
            ("group", "rows", "time", "observed without event (95 % interval)", "predicted"),
            rows,
            420,
        )
    ]
