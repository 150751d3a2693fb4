"""Charts of the report on time: how errors grow over the test rows, and which inputs have moved."""

from __future__ import annotations

import numpy as np

from coterie.report.facts import RunFacts
from coterie.report.numbers import count, digits
from coterie.report.panels import Panel, axis, line, numbers, plain
from coterie.train.drift import BLOCKS, Drift

SHOWN = 7  # clients with a line of their own
LISTED = 100  # inputs in the table
BARS = 20  # inputs in the chart


def panels(run: RunFacts) -> list[Panel]:
    """Return the charts for a run whose rows are ordered in time; nothing for others."""
    drift = Drift.load(run.folder)
    if drift is None or not drift.names:
        return []
    return [_errors(drift), *([_inputs(drift)] if drift.moved else [])]


def _errors(drift: Drift) -> Panel:
    """Draw the mean loss on validation rows and on consecutive blocks of test rows."""
    steps = ["validation", *(f"test {k + 1} of {BLOCKS}" for k in range(BLOCKS))]
    width = BLOCKS + 1
    table = np.full((len(drift.names), width), np.nan)
    for k, (first, later) in enumerate(zip(drift.validation, drift.test, strict=True)):
        table[k, 0], table[k, 1 : 1 + len(later)] = first, later
    rise = np.nanmean(table[:, 1:], 1) - table[:, 0]
    top = np.argsort(-rise, kind="stable")
    traces = [
        {
            **line(0, steps, numbers(np.nanmean(table, 0)), "mean over clients"),
            "line": {"color": "$text", "width": 4},
        }
    ]
    traces += [line(j + 1, steps, numbers(table[k]), drift.names[k]) for j, k in enumerate(top[:SHOWN])]
    said = drift.sentence() or "Chance explains the difference between validation and test rows."
    return Panel(
        "drift",
        "Errors over time",
        f"Mean loss on validation rows and then on the test rows, which are later, from the first quarter to the last. "
        f"Shown are the clients where it rises most. {said}",
        traces,
        {"xaxis": axis("", type="category"), "yaxis": axis("mean loss"), "hovermode": "x unified"},
        ("client", *steps),
        [[drift.names[k], *("–" if np.isnan(v) else digits(float(v)) for v in table[k])] for k in top],
        400,
    )


def _inputs(drift: Drift) -> Panel:
    """Draw the inputs whose mean has moved most."""
    top = drift.moved[:BARS]
    names = plain([f"{one.client}: {one.feature}" for one in top])
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": numbers([one.change for one in top]),
        "y": names,
        "marker": {"color": "$c0"},
        "hovertemplate": "%{y}: %{x:.3g} standard deviations<extra></extra>",
    }
    return Panel(
        "moved-inputs",
        "Inputs that have moved",
        f"{count(len(drift.moved), 'input')} of {drift.looked_at:,} (clients times inputs) have another mean in "
        "the test rows than in the training rows before them, in standard deviations of the client's training rows. At "
        "most 5 % of those named are expected to be chance, if rows are independent.",
        [trace],
        {
            "xaxis": axis("change of the mean (standard deviations)", zeroline=True),
            "yaxis": axis("", type="category", autorange="reversed"),
            "showlegend": False,
        },
        ("client", "input", "change (standard deviations)", "p"),
        [[one.client, one.feature, f"{one.change:+.2f}", f"{one.p:.2g}"] for one in drift.moved[:LISTED]],
        160 + 24 * len(top),
    )
