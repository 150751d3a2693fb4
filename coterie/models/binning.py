"""Bins of features for histograms: quantile sketches that merge, and the cut points that follow from them.

A sketch of a feature is a set of weighted values. Sketches of several clients merge by putting their points together;
`compress` shortens a sketch to evenly spaced ranks, which moves a rank by at most half a step. A client with few
different values sends them all, so its sketch is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

SKETCHED = 1 << 14  # rows of a client that its sketch is made of, at most
NO_EDGE = torch.finfo(torch.float32).max  # stands for no cut point: no value exceeds it


def sketch(x: Tensor, weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a sketch of each feature: values and their weights, [..., features, size] each.

    Parameters
    ----------
    x
        Rows [..., B, features]; NaN is missing and not part of the sketch.
    weight
        Weights [..., B] of the rows, 0 on padding, which comes last.
    size
        Points of the sketch.
    """
    if x.shape[-2] > SKETCHED:
        own = (weight > 0).sum(-1, keepdim=True).clamp(min=SKETCHED)
        rows = torch.arange(SKETCHED, device=x.device) * own // SKETCHED
        x = x.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, x.shape[-1]))
        weight = weight.gather(-1, rows) * own / SKETCHED
    columns = x.mT
    weights = torch.where(columns.isnan(), 0.0, weight.unsqueeze(-2))
    return compress(columns, weights, size)


def compress(values: Tensor, weights: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return at most `size` weighted points for those along the last axis; points of weight 0 stand for none.

    Equal values are put together. Where more than `size` different ones remain, a point stands for those of an equal
    share of the weight, and the smallest and the largest value stay.
    """
    values = torch.where(weights > 0, values, torch.inf)
    values, order = values.sort(-1)
    weights = weights.gather(-1, order)
    first = torch.ones_like(values, dtype=torch.bool)
    first[..., 1:] = values[..., 1:] != values[..., :-1]
    group = first.long().cumsum(-1) - 1  # number of the distinct value
    distinct = torch.zeros_like(weights).scatter_add_(-1, group, weights)
    points = torch.full_like(values, torch.inf).scatter(-1, group, values)
    count = (distinct > 0).sum(-1, keepdim=True)
    total = distinct.sum(-1, keepdim=True)
    middle = distinct.cumsum(-1) - 0.5 * distinct
    share = (middle / total.clamp(min=torch.finfo(total.dtype).tiny)).clamp(0, 1)
    cell = torch.where(
        count <= size,
        torch.arange(points.shape[-1], device=points.device).expand_as(points),
        (share * size).long().clamp(max=size - 1),
    )
    cell = torch.where(distinct > 0, cell, 0).clamp(max=size - 1)
    mass = torch.zeros(*points.shape[:-1], size, dtype=weights.dtype, device=weights.device)
    mass.scatter_add_(-1, cell, distinct)
    largest = torch.where(distinct > 0, points, -torch.inf)  # of a cell: its weight lies at or below it
    ends = torch.full_like(mass, -torch.inf).scatter_reduce(-1, cell, largest, "amax")
    smallest = points.amin(-1)
    ends[..., 0] = torch.where(count.squeeze(-1) > size, smallest, ends[..., 0])
    return torch.where(mass > 0, ends, 0.0), mass


def cut_points(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return increasing cut points [features, count] between the points of sketches [features, points].

    If there is one for each value, they lie in the middle between neighbours. Else they split the weight evenly, and
    are values themselves: what lies between two points of a sketch is not known. `NO_EDGE` fills up.
    """
    edges = torch.full((len(values), count), NO_EDGE, dtype=values.dtype, device=values.device)
    for feature, (points, mass) in enumerate(zip(values, weights, strict=True)):
        points, back = points[mass > 0].unique(return_inverse=True)
        mass = torch.zeros_like(points).index_add_(0, back, mass[mass > 0])
        if len(points) < 2:
            continue
        between = points[:-1] + 0.5 * (points[1:] - points[:-1])
        if len(between) > count:
            share = mass.cumsum(0)[:-1] / mass.sum()
            aims = torch.arange(1, count + 1, dtype=share.dtype, device=share.device) / (count + 1)
            above = torch.searchsorted(share, aims).clamp(1, len(between) - 1)
            nearer = (aims - share[above - 1] < share[above] - aims).long()
            between = points[(above - nearer).unique()]
        edges[feature, : len(between)] = between
    return edges


def to_bins(x: Tensor, edges: Tensor, categorical: Tensor) -> Tensor:
    """Return the bin of each value, uint8 [..., B, features]; the last bin, edges.shape[-1] + 1, is for missing values.

    Parameters
    ----------
    x
        [..., B, features].
    edges
        Cut points [features, count]: a value is in bin b if b of them are below it.
    categorical
        Features whose values are their bins, bool [features].
    """
    columns = x.reshape(-1, x.shape[-1]).t().contiguous()
    found = torch.searchsorted(edges, torch.where(columns.isnan(), 0.0, columns))
    codes = torch.where(columns.isnan(), 0.0, columns).long().clamp(0, edges.shape[-1])
    found = torch.where(categorical.unsqueeze(-1), codes, found)
    found = torch.where(columns.isnan(), edges.shape[-1] + 1, found)
    return found.to(torch.uint8).t().reshape(x.shape).contiguous()
