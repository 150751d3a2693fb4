"""The collaboration map of methods that keep weights of few pairs: sums over links, without an array of all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.report.numbers import listed


def blocks(weights: Any, order: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean weight in each block of clients, in this order between these edges; nobody counts with itself."""
    place = np.empty(len(order), dtype=int)
    place[order] = np.arange(len(order))
    part = (np.searchsorted(edges, np.arange(len(order)), side="right") - 1)[place]
    links, sizes = weights.tocoo(), np.diff(edges)
    sums = np.zeros((len(sizes), len(sizes)))
    np.add.at(sums, (part[links.coords[0]], part[links.coords[1]]), links.data)
    means: np.ndarray = sums / np.maximum(sizes[:, None] * sizes - np.diag(sizes), 1)
    return means


def within(weights: Any, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every client its mean weight to the others in its group and to the rest."""
    links, n = weights.tocoo(), len(groups)
    same = groups[links.coords[0]] == groups[links.coords[1]]
    inside, across = (
        np.bincount(links.coords[0][which], links.data[which], minlength=n) for which in (same, ~same)
    )
    numbered, counts = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    size = counts[numbered]
    return inside / np.maximum(size - 1, 1), across / np.maximum(n - size, 1)


def neighbours(weights: Any, names: list[str], most: int) -> list[str]:
    """Name for each client the clients it learns most from."""
    floor = 0.05 * max(float(weights.max()), 1e-12)
    texts = []
    for start, end in zip(weights.indptr, weights.indptr[1:], strict=False):
        strength, others = weights.data[start:end], weights.indices[start:end]
        first = np.lexsort((others, -strength))[:most]
        best = [names[others[k]] for k in first if strength[k] > floor]
        texts.append(listed(best) if best else "nobody")
    return texts
