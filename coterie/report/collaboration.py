"""The collaboration map: who learns from whom, as a matrix in cluster order and as a graph."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from coterie.report import sparse_map
from coterie.report.facts import RunFacts
from coterie.report.graph import NODES, graph
from coterie.report.numbers import count, digits, far_clients, listed
from coterie.report.panels import Panel, Trace, axis, colour, numbers, plain

CELLS = 120  # largest matrix drawn cell by cell; larger ones are averaged over blocks
MOST = 10_000  # clients up to which the models of all pairs are compared
LINES = 150  # at most this many clients have a line of their own in the chart of groups over time
SIMILAR = "similar"


class MixWords(NamedTuple):
    """Words of a chart of what every client's model is made of."""

    key: str
    title: str
    caption: str
    shared: str
    own: str


MIXED = MixWords(
    "mix",
    "Mix of shared and own model",
    "How much of each client's model is shared with everybody; the rest it learned alone.",
    "shared model",
    "own model",
)
PULLED = MixWords(
    "shrinkage",
    "Shrinkage of every client",
    "How much of each client's effects comes from the group's centre; the rest comes from its "
    "own rows. A client with few rows is shrunk most.",
    "group's centre",
    "client's own rows",
)


def collaboration(run: RunFacts, key: str) -> list[Panel]:
    """Draw who learns from whom as matrix and graph, then clusters over time and mixing weights if recorded."""
    panels = []
    weights, kind, n = recorded(run), "weight", len(run.names)
    if weights is None:
        weights, kind = _similarity(run), SIMILAR
    labels = _labels(run)
    if weights is not None and n > 1:
        if labels is None and (kind == SIMILAR or run.links is not None):
            labels = np.zeros(n, dtype=int)  # the method made no groups: none are drawn
        order, groups = _ordered(weights, labels)
        panels.append(_matrix(run, key, weights, order, groups, kind))
        if n <= NODES or len(np.unique(groups)) > 1:
            panels.append(graph(run, key, weights, groups, kind == SIMILAR))
    clusters = run.observed("cluster")
    if clusters:
        panels.append(_over_time(run, key, clusters))
    mixes, pulled = _mixes(run), _last(run, "shrinkage")
    if mixes is not None:
        panels.append(_mix(run, key, mixes, MIXED))
    if pulled is not None and not np.isnan(pulled).all():
        panels.append(_mix(run, key, pulled, PULLED))
    return panels


def neighbours(run: RunFacts, most: int = 3) -> list[str]:
    """Name for each client the clients it learns most from; empty texts if the method has no weights."""
    if run.links is not None:
        return sparse_map.neighbours(run.links, run.names, most)
    weights = run.weights
    if weights is None:
        return [""] * len(run.names)
    weights = weights.copy()
    np.fill_diagonal(weights, -1)
    floor = 0.05 * max(float(weights.max()), 1e-12)
    texts = []
    for row in weights:
        best = [k for k in np.argsort(-row, kind="stable")[:most] if row[k] > floor]
        texts.append(listed([run.names[k] for k in best]) if best else "nobody")
    return texts


def recorded(run: RunFacts) -> Any:
    """Return the weights that the method recorded, of all pairs or, as a sparse array, of few; None without."""
    return run.weights if run.links is None else run.links


def explain(run: RunFacts) -> str:
    """Say in one or two sentences what the collaboration map of this run shows."""
    sentences = []
    clusters = run.observed("cluster")
    if clusters:
        last = next(reversed(clusters.values()))
        sizes = np.unique(last[~np.isnan(last)], return_counts=True)[1]
        if len(sizes) == 1:
            sentences.append("The method put all clients into one group.")
        elif len(sizes):
            sentences.append(
                f"The method put the clients into {count(len(sizes), 'group')}, the largest of "
                f"{count(int(sizes.max()), 'client')}, the smallest of {sizes.min():,}."
            )
    mixes, pulled = _mixes(run), _last(run, "shrinkage")
    if pulled is not None and not np.isnan(pulled).all():
        sentences.append(
            f"Shrinkage, the share of a client's model that comes from its group and not from its own rows, is "
            f"{_range(pulled)}."
        )
    strangers = far_clients(run.names, _last(run, "weight"))
    if strangers:
        sentences.append(strangers)
    if mixes is not None:
        sentences.append(
            f"Every client mixes the shared model with its own; the share of the shared model is {_range(mixes)}."
        )
    if recorded(run) is not None:
        sentences.append(
            "The method itself decided who learns from whom; the map shows these weights after the last round."
        )
    elif not clusters and mixes is None:
        models = run.personal
        if models is not None and _is_one(models):
            sentences.append("All clients use one and the same model, so there is no map to draw.")
        elif _similarity(run) is None:
            sentences.append(
                "There is no map: the models are too many or too large to compare here, or not finite."
            )
        else:
            sentences.append(
                "This method has no weights between pairs of clients; the map shows how similar the clients' models "
                "became."
            )
    return " ".join(sentences)


def _is_one(models: np.ndarray) -> bool:
    """Return True if all clients have the same model."""
    return models.strides[0] == 0 or bool((models == models[:1]).all())


def _similarity(run: RunFacts) -> np.ndarray | None:
    """Return 1 for equal models to 0 for the most distant pair; None if equal, too many, too large or not finite."""
    models = run.personal
    if models is None or not 2 <= len(models) <= MOST or _is_one(models):
        return None
    squares = (models**2).sum(1)
    distance = np.sqrt(np.maximum(squares[:, None] + squares - 2 * models @ models.T, 0))
    np.fill_diagonal(distance, 0)
    largest = float(distance.max())
    if not np.isfinite(distance).all() or largest <= 1e-6 * math.sqrt(squares.max() + 1e-300):
        return None
    similarity: np.ndarray = 1 - distance / largest
    return similarity


def _labels(run: RunFacts) -> np.ndarray | None:
    """Return the cluster of every client: the one the method found, else the known one, else None."""
    clusters = run.observed("cluster")
    if clusters:
        last = next(reversed(clusters.values()))
        return np.where(np.isnan(last), -1, last).astype(int)
    known = None if run.roster is None else run.roster.clusters
    return None if known is None else np.array(known)


def _ordered(weights: Any, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of the clients in the matrix, group by group, and the group of every client."""
    if labels is not None and not isinstance(weights, np.ndarray):
        return np.argsort(labels, kind="stable"), labels
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform

    both = (weights + weights.T) / 2
    distance = both.max() - both
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform(distance, checks=False), "average")
    leaves = leaves_list(tree)
    groups = 0 if labels is None else len(np.unique(labels))
    if labels is None or (len(weights) > NODES and groups > NODES):
        few = min(8, max(1, round(math.sqrt(len(weights)))))
        labels = fcluster(tree, few, "maxclust") - 1
    place = np.empty(len(leaves), dtype=int)
    place[leaves] = np.arange(len(leaves))
    return np.lexsort((place, labels)), labels


def _matrix(run: RunFacts, key: str, weights: Any, order: np.ndarray, groups: np.ndarray, kind: str) -> Panel:
    """Draw the weights, or the similarity of the models, as a heat map."""
    names = plain([run.names[k] for k in order])
    n, what = len(names), "similarity" if kind == SIMILAR else "weight"
    edges = np.linspace(0, n, min(n, CELLS) + 1).astype(int)
    if run.links is not None:
        shown = sparse_map.blocks(weights, order, edges)
    else:
        shown = weights[np.ix_(order, order)]
        if kind == "weight":
            np.fill_diagonal(shown, np.nan)
        shown = _blocks(shown, edges) if n > CELLS else shown
    note = ""
    if n > CELLS:
        names = _ranges(names, edges)
        note = f" Every cell is the mean of about {n / CELLS:.0f} × {n / CELLS:.0f} clients."
    caption = (
        "How similar the clients' models are: 1 for the same model, 0 for the pair that differs most."
        if kind == SIMILAR
        else "How strongly the client of a row is pulled towards the client of a column."
    )
    several = len(np.unique(groups)) > 1
    squares = " Groups of clients show as squares along the diagonal." if several else ""
    inside, across = (_within if run.links is None else sparse_map.within)(weights, groups)
    rows = [[run.names[k], str(groups[k] + 1), digits(inside[k]), digits(across[k])] for k in order[:60]]
    trace: Trace = {
        "type": "heatmap",
        "z": [numbers(row, 3) for row in shown],
        "x": names,
        "y": names,
        "colorscale": "$sequence",
        "zmin": 0,
        "zmax": float(f"{np.nanmax(shown):.4g}") or 1,
        "colorbar": {"title": {"text": what}, "thickness": 12},
        "hovertemplate": "%{y} ← %{x}: %{z:.3g}<extra></extra>",
    }
    below = n <= 40 and max(map(len, names)) <= 14
    ticks = {"showticklabels": n <= 40, "ticks": "", "type": "category", "automargin": True}
    return Panel(
        f"matrix-{key}",
        "Matrix, clients ordered by group",
        f"{caption}{squares}{note}",
        [trace],
        {
            "xaxis": {**ticks, "showticklabels": below},
            "yaxis": {**ticks, "autorange": "reversed", "scaleanchor": "x", "constrain": "domain"},
        },
        ("client", "group", f"mean {what} inside its group", "to the others"),
        rows,
        460,
    )


def _blocks(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Average over the blocks between the edges, ignoring NaN (the diagonal of a matrix of weights)."""
    here = ~np.isnan(values)
    sums = np.add.reduceat(np.add.reduceat(np.where(here, values, 0), edges[:-1], 0), edges[:-1], 1)
    counts = np.add.reduceat(np.add.reduceat(here.astype(float), edges[:-1], 0), edges[:-1], 1)
    return sums / np.maximum(counts, 1)


def _ranges(names: list[str], edges: np.ndarray) -> list[str]:
    """Name each block by its first and last client."""
    pairs = itertools.pairwise(edges)
    return [f"{names[a]} … {names[b - 1]}" if b - a > 1 else names[a] for a, b in pairs]


def _within(weights: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every client its mean weight to the others in its group and to the rest."""
    same = groups[:, None] == groups
    other = ~same
    np.fill_diagonal(same, False)
    inside = (weights * same).sum(1) / np.maximum(same.sum(1), 1)
    return inside, (weights * other).sum(1) / np.maximum(other.sum(1), 1)


def _over_time(run: RunFacts, key: str, clusters: dict[int, np.ndarray]) -> Panel:
    """Draw the group of every client round by round, or the sizes of the groups if there are many clients."""
    rounds, values = list(clusters), np.array(list(clusters.values()))
    last = values[-1]
    marks = np.unique(values[~np.isnan(values)]).astype(int)
    sizes = np.array([(values == mark).sum(1) for mark in marks])
    moves = (values[1:] != values[:-1]) & ~np.isnan(values[:-1])
    rows = [
        [f"group {mark + 1}", *(str(int(sizes[k][t])) for t in _some(len(rounds)))]
        for k, mark in enumerate(marks)
    ]
    settled = f" {count(int(moves[-1].sum()) if len(moves) else 0, 'client')} changed group at the last recorded round."
    if len(run.names) <= LINES:
        order = np.argsort(last, kind="stable")
        few = len(run.names) <= 30 and len(rounds) <= 25
        scale = [
            [edge, colour(int(mark))]
            for k, mark in enumerate(marks)
            for edge in (k / len(marks), (k + 1) / len(marks))
        ]
        trace: Trace = {
            "type": "heatmap",
            "z": [[None if np.isnan(v) else int(v) for v in values[:, k]] for k in order],
            "x": [str(t) for t in rounds],
            "y": plain([run.names[k] for k in order]),
            "colorscale": scale,
            "zmin": float(marks.min()) - 0.5 if len(marks) else 0,
            "zmax": float(marks.max()) + 0.5 if len(marks) else 1,
            "showscale": False,
            "text": [["" if np.isnan(v) else str(int(v) + 1) for v in values[:, k]] for k in order],
            "texttemplate": "%{text}" if few else "",
            "hovertemplate": "%{y}, round %{x}: group %{text}<extra></extra>",
            "xgap": 1,
            "ygap": 1,
        }
        traces, y = [trace], axis("", type="category", showticklabels=len(run.names) <= 40)
        caption = "The group of every client, round by round; numbers and colours are the groups."
        height = 160 + min(460, 22 * len(run.names))
    else:
        traces = [
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "one",
                "x": rounds,
                "y": sizes[k].tolist(),
                "name": f"group {mark + 1}",
                "line": {"color": colour(int(mark)), "width": 1},
            }
            for k, mark in enumerate(marks)
        ]
        y, height = axis("clients"), 360
        caption = "How many clients are in each group, round by round."
    headers = ("group", *(f"round {rounds[t]}" for t in _some(len(rounds))))
    layout = {"xaxis": axis("round"), "yaxis": y}
    return Panel(f"time-{key}", "Groups over time", caption + settled, traces, layout, headers, rows, height)


def _some(length: int, most: int = 6) -> list[int]:
    """Return at most this many evenly spaced positions, the first and the last included."""
    return sorted({round(k) for k in np.linspace(0, length - 1, min(length, most))})


def _range(shares: np.ndarray) -> str:
    low, mean, high = (f"{100 * part(shares):.0f} %" for part in (np.nanmin, np.nanmean, np.nanmax))
    return f"{low} to {high}, {mean} on average"


def _last(run: RunFacts, name: str) -> np.ndarray | None:
    """Return what was recorded last of every client, or None."""
    recorded = run.observed(name)
    return next(reversed(recorded.values())) if recorded else None


def _mixes(run: RunFacts) -> np.ndarray | None:
    """Return FLIX's alpha of every client, or None for other methods."""
    if run.algorithm != "flix":
        return None
    recorded = run.observed("alpha")
    if recorded:
        return next(reversed(recorded.values()))
    alpha = run.settings.get("alpha")
    if isinstance(alpha, list):
        return np.array(alpha, dtype=float)
    return np.full(len(run.names), float(alpha)) if isinstance(alpha, int | float) else None


def _mix(run: RunFacts, key: str, mixes: np.ndarray, words: MixWords) -> Panel:
    """Draw how much of every client's model is shared, client by client or as a histogram."""
    if len(mixes) <= 40:
        names = plain(run.names)
        parts = ((words.shared, 100 * mixes, ""), (words.own, 100 * (1 - mixes), "/"))
        traces: list[Trace] = [
            {
                "type": "bar",
                "orientation": "h",
                "y": names,
                "x": numbers(values),
                "name": name,
                "marker": {"color": colour(k), "pattern": {"shape": shape}},
                "hovertemplate": "%{y}: %{x:.0f} %<extra>%{fullData.name}</extra>",
            }
            for k, (name, values, shape) in enumerate(parts)
        ]
        layout = {
            "barmode": "stack",
            "xaxis": axis("share in the client's model (%)"),
            "yaxis": axis("", type="category", autorange="reversed"),
            "showlegend": True,
        }
        height = 160 + 26 * len(mixes)
    else:
        counts, edges = np.histogram(mixes[~np.isnan(mixes)], bins=np.linspace(-0.05, 1.05, 12))
        middle = 100 * (edges[:-1] + edges[1:]) / 2
        traces = [{"type": "bar", "x": numbers(middle), "y": counts.tolist(), "marker": {"color": "$c0"}}]
        layout = {"xaxis": axis(f"share of the {words.shared} (%)"), "yaxis": axis("clients")}
        height = 340
    rows = [[name, f"{100 * value:.0f} %"] for name, value in list(zip(run.names, mixes, strict=True))[:60]]
    headers, weights = ["client", f"share of the {words.shared}"], _last(run, "weight")
    if weights is not None:
        rows = [[*row, f"{weight:.2f}"] for row, weight in zip(rows, weights, strict=False)]
        headers.append("weight with the others")
    return Panel(
        f"{words.key}-{key}", words.title, words.caption, traces, layout, tuple(headers), rows, height
    )
