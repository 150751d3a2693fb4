"""Draw the collaboration map as a graph: clients are near those they learn from."""

from __future__ import annotations

import html
import math
from typing import Any

import numpy as np

from coterie.report.facts import RunFacts
from coterie.report.numbers import count, digits
from coterie.report.panels import SYMBOLS, Panel, Trace, colour, numbers, plain

NODES = 60  # at most this many nodes are drawn; more clients are merged into their groups
NEAREST = 3  # links drawn per node, the strongest ones


def graph(run: RunFacts, key: str, weights: Any, groups: np.ndarray, similar: bool) -> Panel:
    """Draw clients, or groups if there are many clients, as points near those they learn from."""
    names, sizes, marks = plain(run.names), np.ones(len(run.names)), groups
    if len(names) > NODES:
        weights, names, sizes, marks = _merged(weights, groups)
    links = (weights + weights.T) / 2
    np.fill_diagonal(links, 0)
    if similar:
        links = np.maximum(links - links[links > 0].mean(), 0) if (links > 0).any() else links
    places = _spread(links)
    edges = _strongest(links)
    top = max((links[a, b] for a, b in edges), default=1.0)
    traces: list[Trace] = []
    for a, b in edges:
        strength = float(links[a, b] / top)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": numbers(places[[a, b], 0], 4),
                "y": numbers(places[[a, b], 1], 4),
                "line": {"width": round(0.5 + 4 * strength, 2), "color": "$muted"},
                "opacity": round(0.25 + 0.6 * strength, 2),
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    for mark in np.unique(marks):
        mine = np.flatnonzero(marks == mark)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text" if len(names) <= 30 else "markers",
                "x": numbers(places[mine, 0], 4),
                "y": numbers(places[mine, 1], 4),
                "text": [_short(names[k]) for k in mine],
                "customdata": [names[k] for k in mine],
                "textposition": "top center",
                "cliponaxis": False,
                "marker": {
                    "size": numbers(np.minimum(10 + 3 * np.sqrt(sizes[mine] - 1), 36)),
                    "color": colour(int(mark)),
                    "symbol": SYMBOLS[int(mark) % len(SYMBOLS)],
                    "line": {"width": 1, "color": "$background"},
                },
                "name": f"group {int(mark) + 1}" if mark >= 0 else "no group",
                "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
            }
        )
    bare = {"visible": False, "zeroline": False}
    what = "are most similar" if similar else "learn most from each other"
    who = "Every mark is a client" if len(names) == len(run.names) else "Every mark is a group of clients"
    several = len(np.unique(groups))
    who += f" (the {NODES} largest of {several:,})" if NODES < several < len(run.names) else ""
    rows = [
        [html.unescape(names[a]), html.unescape(names[b]), digits(float(links[a, b]))] for a, b in edges[:60]
    ]
    return Panel(
        f"graph-{key}",
        "Graph",
        f"{who}; lines join those that {what}, thicker for more. Shapes and colours are the groups of the matrix.",
        traces,
        {"xaxis": bare, "yaxis": {**bare, "scaleanchor": "x"}, "hovermode": "closest", "showlegend": True},
        ("one", "other", "strength"),
        rows,
        460,
    )


def _short(name: str, most: int = 22) -> str:
    """Shorten an HTML-escaped name to at most this many characters."""
    text = html.unescape(name)
    return name if len(text) <= most else html.escape(text[: most - 1], quote=False) + "…"


def _merged(weights: Any, groups: np.ndarray) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    """Merge clients into at most `NODES` groups: mean weights between them, names, sizes and group numbers."""
    marks, sizes = np.unique(groups, return_counts=True)
    keep = marks[np.argsort(-sizes, kind="stable")[:NODES]]
    member = (groups == keep[:, None]).astype(float)
    member /= member.sum(1, keepdims=True)
    counts = [int((groups == mark).sum()) for mark in keep]
    names = [f"group {mark + 1}: {count(many, 'client')}" for mark, many in zip(keep, counts, strict=True)]
    return member @ weights @ member.T, names, np.array(counts, dtype=float) ** 0.8, keep


def _strongest(links: np.ndarray) -> list[tuple[int, int]]:
    """Return the strongest links of every node, without repetition, strongest first."""
    chosen: dict[tuple[int, int], float] = {}
    for a, row in enumerate(links):
        for b in np.argsort(-row, kind="stable")[:NEAREST]:
            if row[b] > 0.02 * links.max():
                chosen[min(a, int(b)), max(a, int(b))] = float(row[b])
    return sorted(chosen, key=lambda pair: -chosen[pair])


def _spread(links: np.ndarray, steps: int = 200) -> np.ndarray:
    """Lay out the nodes in the plane [n, 2] by force-directed placement (Fruchterman and Reingold 1991)."""
    n = len(links)
    angle = 2 * math.pi * np.arange(n) / n
    places = np.stack([np.cos(angle), np.sin(angle)], 1)
    pull = links / links.max() if links.max() > 0 else links
    ideal = 2.2 / math.sqrt(n)
    for step in range(steps):
        gap = places[:, None] - places
        distance = np.maximum(np.linalg.norm(gap, axis=-1, keepdims=True), 1e-3)
        force = (gap / distance * (ideal**2 / distance - pull[..., None] * distance**2 / ideal)).sum(1)
        force -= 0.5 * places
        length = np.maximum(np.linalg.norm(force, axis=-1, keepdims=True), 1e-9)
        places = places + force / length * np.minimum(length, 0.2 * (1 - step / steps))
    return places
