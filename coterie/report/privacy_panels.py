"""What differential privacy has cost: epsilon of every client, and scores against epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie._core import files
from coterie.report.charts import metric_name, percent
from coterie.report.facts import RunFacts
from coterie.report.numbers import show
from coterie.report.panels import Panel, axis, colour, line, numbers, plain

PRIVACY = "privacy.json"


def spent(run: RunFacts) -> dict[str, Any] | None:
    """Return what a run wrote about its privacy, or None if it had no budget."""
    path = run.folder / PRIVACY
    return files.read_json(path) if path.exists() else None


def privacy(runs: Sequence[RunFacts]) -> list[Panel]:
    """Return the panels on privacy: none if no run had a budget."""
    told = [(run, one) for run in runs if (one := spent(run)) is not None]
    if not told:
        return []
    curve = _curve(runs)
    return [_by_client(*told[0])] + ([] if curve is None else [curve])


def _by_client(run: RunFacts, told: dict[str, Any]) -> Panel:
    """Draw the epsilon that every client has spent, with the promise."""
    names = list(told["spent"])
    values = [float(told["spent"][name]) for name in names]
    who = "client with all its rows" if told["unit"] == "client" else "row"
    bars = {
        "type": "bar",
        "x": plain(names),
        "y": numbers(values),
        "marker": {"color": colour(0)},
        "name": "spent",
    }
    promise = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": told["epsilon"],
        "y1": told["epsilon"],
    }
    rows = [[name, f"{value:.3g}"] for name, value in zip(names, values, strict=True)]
    return Panel(
        "privacy",
        "Privacy spent",
        f"Epsilon of every {who} in {run.label}, with delta {told['delta']:g}; the line is what was promised, "
        f"{told['epsilon']:g}. Smaller is more private. What stays with a client costs nothing.",
        [bars],
        {
            "xaxis": axis("", type="category"),
            "yaxis": axis("epsilon", rangemode="tozero"),
            "shapes": [{**promise, "line": {"dash": "dash", "width": 1.5, "color": colour(1)}}],
            "showlegend": False,
        },
        ("client", "epsilon spent"),
        rows,
    )


def _curve(runs: Sequence[RunFacts]) -> Panel | None:
    """Draw the mean score of methods against epsilon, where the report has several prices of one."""
    points: dict[str, list[tuple[float, float]]] = {}
    free = {}
    for run in runs:
        told, mean = spent(run), float(np.nanmean(run.scores)) * percent(run)
        if told is None:
            free[run.algorithm] = mean
        else:
            points.setdefault(run.algorithm, []).append((float(told["epsilon"]), mean))
    if not any(len(some) + (name in free) > 1 for name, some in points.items()):
        return None
    traces, rows, unit = [], [], percent(runs[0])
    for k, (name, some) in enumerate(points.items()):
        some.sort()
        traces.append(
            line(k, numbers([price for price, _ in some]), numbers([mean for _, mean in some]), name)
        )
        rows += [[name, f"{price:g}", show(runs[0].metric, mean / unit)] for price, mean in some]
        if name in free:
            rows.append([name, "no noise", show(runs[0].metric, free[name] / unit)])
            ends = [some[0][0], some[-1][0]] if len(some) > 1 else [some[0][0] / 2, some[0][0] * 2]
            flat = line(k, numbers(ends), numbers([free[name]] * 2), f"{name}, no noise")
            traces.append({**flat, "mode": "lines"})
    return Panel(
        "privacy-curve",
        "What privacy costs",
        "Mean over clients against epsilon; to the right less noise, flat lines none at all.",
        traces,
        {"xaxis": axis("epsilon", type="log"), "yaxis": axis(metric_name(runs[0]))},
        ("method", "epsilon", metric_name(runs[0])),
        rows,
    )
