"""Charts of the report about quality, data and communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie._core.amounts import size
from coterie.models.metrics import find
from coterie.report.facts import RunFacts
from coterie.report.gains import Scores
from coterie.report.numbers import show, show_gain
from coterie.report.panels import SYMBOLS, Panel, Trace, axis, colour, line, numbers, plain

NAMED = 40  # at most this many clients have their names on an axis
BANDS = 3  # at most this many runs have a band around their curve
DOTTED = 300  # at most this many clients are drawn as dots


def percent(run: RunFacts) -> float:
    """Return the factor by which an axis multiplies the metric: 100 for shares, else 1."""
    return 100.0 if find(run.metric).percent else 1.0


def metric_name(run: RunFacts) -> str:
    """Return the title of an axis that shows the run's metric."""
    known = {"accuracy": "right answers (%)", "rmse": "typical error (rmse)"}
    metric = find(run.metric)
    return known.get(run.metric, f"{metric.title} (%)" if metric.percent else metric.title)


def curves(runs: Sequence[RunFacts]) -> list[Panel]:
    """Plot the mean over clients and their middle half against rounds and against megabytes."""
    by_round: list[Trace] = []
    by_size: list[Trace] = []
    rows, means, ends = [], [], []
    banded = len(runs) <= BANDS
    for k, run in enumerate(runs):
        split = "validation" if run.per_client("validation", run.metric) else "train"
        points = run.per_client(split, run.metric)
        if len(points) < 2:
            continue
        scale = percent(run)
        rounds, values = list(points), np.array(list(points.values())) * scale
        mean = np.nanmean(values, 1)
        low, high = np.nanquantile(values, [0.25, 0.75], axis=1)
        traffic = [run.megabytes_at(t) for t in rounds]
        label = f"{run.label} (on {split} rows)" if split == "train" else run.label
        ends.append((values[1:] if rounds[0] == 0 else values).copy())
        means.append(mean[1:] if rounds[0] == 0 else mean)
        if banded and len(run.names) > 1:
            by_round.append(
                {
                    "type": "scatter",
                    "x": [*rounds, *rounds[::-1]],
                    "y": numbers([*high, *low[::-1]]),
                    "fill": "toself",
                    "fillcolor": f"{colour(k)}/0.12",
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "legendgroup": str(k),
                }
            )
        by_round.append(line(k, rounds, numbers(mean), label, legendgroup=str(k)))
        if not run.alone:
            by_size.append(line(k, numbers(traffic), numbers(mean), label))
        else:
            level = numbers(mean[-1:])[0]
            by_size.append({**line(k, [0], [level], f"{label}: sends nothing"), "mode": "markers"})
        rows.append(
            [
                run.label,
                str(rounds[0]),
                show(run.metric, mean[0] / scale),
                str(rounds[-1]),
                show(run.metric, mean[-1] / scale),
                size(traffic[-1]),
            ]
        )
    if not by_round:
        return []
    y = axis(metric_name(runs[0]), range=_window(means, ends if banded else means))
    band = "; the shaded band holds the middle half of the clients" if banded else ""
    headers = ("method", "first round", "there", "last round", "there", "sent until then")
    return [
        Panel(
            "rounds",
            "Over rounds",
            f"Mean over clients on rows held back for checking{band}. A round is one exchange with all clients. The "
            "vertical axis leaves out the first point, before training; double-click to see it.",
            by_round,
            {"xaxis": axis("round"), "yaxis": y, "hovermode": "x unified"},
            headers,
            rows,
        ),
        Panel(
            "megabytes",
            "Over megabytes",
            "The same means, against what had crossed the network by then, up and down together.",
            by_size,
            {"xaxis": axis("megabytes sent and received"), "yaxis": y, "hovermode": "closest"},
            headers,
            rows,
        ),
    ]


def _window(means: Sequence[np.ndarray], spread: Sequence[np.ndarray]) -> list[float]:
    """Return the range of the axis that holds the curves once training has begun."""
    low = min(
        float(min(np.nanmin(mean), np.nanquantile(values, 0.25)))
        for mean, values in zip(means, spread, strict=True)
    )
    high = max(
        float(max(np.nanmax(mean), np.nanquantile(values, 0.75)))
        for mean, values in zip(means, spread, strict=True)
    )
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return [low - room, high + room]


def distribution(runs: Sequence[RunFacts]) -> Panel:
    """Draw a box for each run, with a dot for each client if there are not too many."""
    traces, rows = [], []
    dotted = len(runs[0].names) <= DOTTED
    for k, run in enumerate(runs):
        values = run.scores * percent(run)
        known = ~np.isnan(values)
        traces.append(
            {
                "type": "box",
                "y": numbers(values[known]),
                "text": plain([name for name, here in zip(run.names, known, strict=True) if here]),
                "name": plain([run.label])[0],
                "boxpoints": "all" if dotted else "outliers",
                "jitter": 0.5,
                "pointpos": 0 if dotted else None,
                "boxmean": True,
                "marker": {"color": colour(k), "size": 5, "symbol": SYMBOLS[k % len(SYMBOLS)]},
                "line": {"color": colour(k)},
                "hovertemplate": "%{text}: %{y:.4g}<extra></extra>",
            }
        )
        quartiles = np.nanquantile(run.scores, [0, 0.25, 0.5, 0.75, 1])
        rows.append([run.label, *(show(run.metric, value) for value in quartiles)])
    return Panel(
        "distribution",
        "Every client, method by method",
        "Half of the clients are inside the box, the line is the middle client, the dashed line the mean; "
        + ("every dot is a client." if dotted else "dots are clients far from the others."),
        traces,
        {
            "yaxis": axis(metric_name(runs[0])),
            "showlegend": False,
            "xaxis": axis("", type="category"),
        },
        ("method", "lowest", "a quarter below", "middle", "a quarter above", "highest"),
        rows,
    )


def gain_chart(run: RunFacts, scores: Scores) -> Panel | None:
    """Draw the gains, sorted from the client that lost most to the one that gained most."""
    known = np.flatnonzero(~np.isnan(scores.gain))
    if not len(known):
        return None
    order = known[np.argsort(scores.gain[known], kind="stable")]
    scale, names = percent(run), plain(run.names)
    values = scores.gain[order] * scale
    metric = find(run.metric)
    in_target = "in the units of the target" if metric.scales_with_target else metric.title
    title = f"gain ({'percentage points' if metric.percent else in_target})"
    if len(order) <= NAMED:
        few = [names[k] for k in order]
        trace: Trace = {
            "type": "bar",
            "orientation": "h",
            "x": numbers(values),
            "y": few,
            "marker": {"color": ["$good" if v > 0 else "$bad" if v < 0 else "$muted" for v in values]},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": numbers(scores.gain_high[order] * scale - values),
                "arrayminus": numbers(values - scores.gain_low[order] * scale),
                "color": "$muted",
                "thickness": 1.2,
            },
            "hovertemplate": "%{y}: %{x:+.3g}<extra></extra>",
        }
        layout = {"xaxis": axis(title, zeroline=True), "yaxis": axis("", type="category")}
        caption = (
            "Bars to the right: better off together. The whiskers are 95 % intervals; where they cross zero the "
            "difference may be chance."
        )
        height = 140 + 26 * len(order)
    else:
        share = 100 * (np.arange(len(order)) + 0.5) / len(order)
        trace = {
            "type": "scatter",
            "mode": "lines",
            "x": numbers(share),
            "y": numbers(values),
            "text": [names[k] for k in order],
            "fill": "tozeroy",
            "line": {"color": "$c0", "width": 2},
            "hovertemplate": "%{text}: %{y:+.3g}<extra></extra>",
        }
        layout = {
            "xaxis": axis("clients, from the one that lost most (%)"),
            "yaxis": axis(title, zeroline=True),
        }
        caption = "All clients in order of their gain. Where the curve is above zero, clients are better off together."
        height = 360
    ends = [*order[:5], *order[-5:]] if len(order) > 10 else list(order)
    rows = [[run.names[k], show_gain(run.metric, scores.gain[k])] for k in ends]
    note = "" if len(order) <= 10 else " The table shows five clients at each end."
    return Panel("gain", "Gains in order", caption + note, [trace], layout, ("client", "gain"), rows, height)


def size_chart(runs: Sequence[RunFacts], scores: Sequence[Scores]) -> Panel | None:
    """Plot gains, or scores if there are none, against the clients' numbers of training rows."""
    first = runs[0].rows("train")
    if first is None:
        return None
    traces = []
    gained = any(not np.isnan(one.gain).all() for one in scores)
    for k, (run, one) in enumerate(zip(runs, scores, strict=True)):
        values = (one.gain if gained else one.value) * percent(run)
        if np.isnan(values).all():
            continue
        traces.append(
            {
                **line(k, first.tolist(), numbers(values), run.label),
                "mode": "markers",
                "text": plain(run.names),
                "hovertemplate": "%{text}: %{x} rows, %{y:.3g}<extra></extra>",
            }
        )
        traces[-1]["marker"] |= {"opacity": 0.75 if len(first) <= DOTTED else 0.4}
    x = axis(
        "training rows of the client", type="log" if first.max() > 20 * max(1, first.min()) else "linear"
    )
    y = axis("gain over training alone" if gained else metric_name(runs[0]), zeroline=gained)
    quarter = np.quantile(first, [0.25, 0.75])
    rows = []
    for run, one in zip(runs, scores, strict=True):
        values = one.gain if gained else one.value
        if not np.isnan(values).all():
            text = show_gain if gained else show
            few, many = values[first <= quarter[0]], values[first >= quarter[1]]
            rows.append([run.label, *(text(run.metric, float(np.nanmean(part))) for part in (few, many))])
    return Panel(
        "sizes",
        "Does it depend on how much data a client has?",
        "Every mark is a client. Clients with few rows usually have most to gain from the others.",
        traces,
        {"xaxis": x, "yaxis": y, "hovermode": "closest"},
        ("method", "mean of the quarter with the fewest rows", "with the most rows"),
        rows,
    )


def communication(runs: Sequence[RunFacts]) -> Panel | None:
    """Draw the megabytes of every run by link, up and down."""
    import polars as pl

    parts: list[tuple[Any, ...]] = []
    for run in runs:
        sums = (
            run.ledger.filter(pl.col("kind") != "evaluate")
            .group_by("link", "phase")
            .agg(pl.col("bytes_up").sum(), pl.col("bytes_down").sum(), pl.col("messages_up").sum())
            .sort("link", "phase")
        )
        for link, phase, up, down, messages in sums.iter_rows():
            if up or down:
                parts.append((run.label, link, phase, up / 1e6, down / 1e6, messages))
    if not parts:
        return None
    links = sorted({(link, way) for _, link, *_ in parts for way in ("up", "down")})
    labels = list(dict.fromkeys(run.label for run in runs))
    traces = []
    for k, (link, way) in enumerate(links):
        totals = [
            sum(part[4 if way == "down" else 3] for part in parts if part[0] == label and part[1] == link)
            for label in labels
        ]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": plain(labels),
                "x": numbers(totals),
                "name": f"{link}, {way}",
                "marker": {"color": colour(k), "pattern": {"shape": "" if way == "up" else "/"}},
                "hovertemplate": "%{y}: %{x:.3g} MB<extra>%{fullData.name}</extra>",
            }
        )
    rows = [
        [label, link, phase, size(up), size(down), f"{messages:,}"]
        for label, link, phase, up, down, messages in parts
    ]
    return Panel(
        "communication",
        "Communication by link",
        "What crossed the network during training, by who talks to whom. Up is from a client, down is to it.",
        traces,
        {
            "barmode": "stack",
            "xaxis": axis("megabytes"),
            "yaxis": axis("", type="category", autorange="reversed"),
            "showlegend": True,
        },
        ("method", "link", "phase", "up", "down", "messages up"),
        rows,
        180 + 34 * len(labels),
    )


def direction(run: RunFacts) -> str:
    """Return "higher is better" or "lower is better" for the run's metric."""
    return find(run.metric).direction
