"""Charts of the report on how clients differ: their sizes and what they have to predict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.report.charts import NAMED
from coterie.report.facts import RunFacts
from coterie.report.numbers import digits
from coterie.report.panels import Panel, Trace, axis, colour, numbers, plain


def heterogeneity(run: RunFacts) -> list[Panel]:
    """Draw the numbers of rows of the clients and the distribution of their targets."""
    if run.roster is None:
        return []
    rows = np.array(run.roster.rows["train"])
    quartiles = np.quantile(rows, [0, 0.25, 0.5, 0.75, 1])
    found = [
        Panel(
            "rows",
            "Rows per client",
            "How many training rows the clients have.",
            [_bars(run.names, rows) if len(rows) <= NAMED else _histogram(rows)],
            _bar_layout("training rows", len(rows)),
            ("fewest", "a quarter has fewer than", "middle", "a quarter has more than", "most"),
            [[f"{value:,.0f}" for value in quartiles]],
            300,
        )
    ]
    spread = _spread_panel(run)
    found += [] if spread is None else [spread]
    targets = run.roster.targets
    if targets is not None and "shares" in targets:
        found.append(_class_panel(run, targets["classes"], np.array(targets["shares"])))
    elif targets is not None:
        found.append(_mean_panel(run, np.array(targets["mean"]), np.array(targets["sd"])))
    return found


def _spread_panel(run: RunFacts) -> Panel | None:
    """Draw the standard deviations that a hierarchical model estimated."""
    import polars as pl

    rows = run.metrics.filter((pl.col("split") == "server") & pl.col("metric").str.starts_with("sd "))
    rows = rows.filter(pl.col("client").is_null())
    if not rows.height:
        return None
    last = rows.filter(pl.col("round") == rows["round"].max())
    names, values = [name.removeprefix("sd ") for name in last["metric"]], last["value"].to_numpy()
    share = values**2 / max(float((values**2).sum()), 1e-300)
    return Panel(
        "spread-of-effects",
        "Where outcomes differ",
        "Standard deviation of what a row owes to chance (noise), to its client, and to its cluster or the level of "
        "each grouping column, in units of the target; of log odds or log counts for classes and counts.",
        [_bars(names, values)],
        _bar_layout("standard deviation", len(names)),
        ("what", "standard deviation", "share of the variance"),
        [
            [name, digits(float(v)), f"{100 * s:.1f} %"]
            for name, v, s in zip(names, values, share, strict=True)
        ],
        140 + 24 * len(names),
    )


def _class_panel(run: RunFacts, classes: list[str], shares: np.ndarray) -> Panel:
    """Draw the share of each class at every client, at most eight classes."""
    shown = classes if len(classes) <= 8 else [*classes[:7], "others"]
    if len(classes) > 8:
        shares = np.concatenate([shares[:, :7], shares[:, 7:].sum(1, keepdims=True)], 1)
    named = len(run.names) <= NAMED
    order = np.argsort(-shares[:, -1], kind="stable")
    traces: list[Trace] = []
    for k, name in enumerate(plain(shown)):
        values = 100 * shares[:, k]
        if named:
            bar = _bars([run.names[c] for c in order], values[order])
            traces.append({**bar, "name": name})
            traces[-1]["marker"] = {"color": colour(k), "pattern": {"shape": ("", "/", ".", "x")[k % 4]}}
            traces[-1]["hovertemplate"] = "%{y}: %{x:.1f} %<extra>%{fullData.name}</extra>"
        else:
            traces.append({"type": "box", "y": numbers(values), "name": name, "boxpoints": "outliers"})
            traces[-1] |= {"marker": {"color": colour(k), "size": 3}, "line": {"color": colour(k)}}
    low, high = shares.min(0), shares.max(0)
    layout = _bar_layout("share of training rows (%)", len(run.names))
    if named:
        layout |= {"barmode": "stack", "showlegend": True}
    else:
        layout = {
            "yaxis": axis("share of a client's rows (%)"),
            "xaxis": axis("", type="category"),
            "showlegend": False,
        }
    return Panel(
        "targets",
        "What clients have to predict",
        "How often each class occurs at each client. The more the clients differ, the less one model fits all.",
        traces,
        layout,
        ("class", "lowest share at a client", "mean over clients", "highest share at a client"),
        [
            [name, f"{100 * a:.1f} %", f"{100 * m:.1f} %", f"{100 * b:.1f} %"]
            for name, a, m, b in zip(shown, low, shares.mean(0), high, strict=True)
        ],
        300 if not named else 140 + 24 * len(run.names),
    )


def _mean_panel(run: RunFacts, mean: np.ndarray, sd: np.ndarray) -> Panel:
    """Draw the mean of a numeric target at every client."""
    order = np.argsort(mean, kind="stable")
    named = len(mean) <= NAMED
    trace = _bars([run.names[k] for k in order], mean[order]) if named else _histogram(mean)
    if named:
        trace["error_x"] = {"type": "data", "array": numbers(sd[order]), "color": "$muted", "thickness": 1.2}
    whole = float((sd**2).mean() + mean.var())
    share = mean.var() / whole if whole else 0.0
    return Panel(
        "targets",
        "What clients have to predict",
        f"The mean of the target at each client{', and its spread' if named else ''}. "
        f"{100 * share:.0f} % of all variation is between clients.",
        [trace],
        _bar_layout("mean of the target", len(mean)),
        ("lowest mean", "middle", "highest mean", "typical spread inside a client"),
        [[*(digits(value) for value in np.quantile(mean, [0, 0.5, 1])), digits(float(np.median(sd)))]],
        300 if not named else 140 + 24 * len(mean),
    )


def _bars(names: Sequence[str], values: np.ndarray) -> Trace:
    """Return one horizontal bar per name."""
    return {
        "type": "bar",
        "orientation": "h",
        "x": numbers(values),
        "y": plain(names),
        "marker": {"color": "$c0"},
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }


def _histogram(values: np.ndarray) -> Trace:
    """Return a histogram of one value per client."""
    counts, edges = np.histogram(values, bins=min(30, max(5, math.ceil(math.sqrt(len(values))))))
    middle = (edges[:-1] + edges[1:]) / 2
    return {
        "type": "bar",
        "x": numbers(middle),
        "y": counts.tolist(),
        "width": numbers(np.diff(edges) * 0.95),
        "marker": {"color": "$c0"},
        "hovertemplate": "about %{x:.4g}: %{y} clients<extra></extra>",
    }


def _bar_layout(title: str, clients: int) -> dict[str, object]:
    """Return the axes for `_bars` or, with many clients, for `_histogram`."""
    if clients <= NAMED:
        return {
            "xaxis": axis(title),
            "yaxis": axis("", type="category", autorange="reversed"),
            "showlegend": False,
        }
    return {"xaxis": axis(title), "yaxis": axis("clients"), "showlegend": False}
