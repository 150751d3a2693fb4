"""Shared code of methods without a server, in which every client clusters gradients around its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import NobodyAnswered
from coterie.engine.federation import Federation
from coterie.engine.ledger import PEERS
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.theory.cluster_quality import cluster_quality, linked_groups
from coterie.theory.threshold import REST, Clustering, Rule, threshold_cluster
from coterie.theory.threshold_starts import group_weights

FEW = 3  # members up to which a cluster takes their mean
WIDE = 3.0  # times the median distance of the members of a found cluster: nearer ones are in its ball
HEAVIEST = 4.0  # times the median number of rows: no client weighs more in a centre
Look = Callable[[Tensor, Tensor], Clustering]  # points [N, d] and starting weights [K, N] to a clustering
Centre = Callable[
    [Tensor, Tensor], Tensor
]  # gradients [N, d] of a group and numbers of rows [N, 1] to weights [N]


def strangers(fed: Federation) -> dict[str, Any]:
    """Return the state fields before the first round: all clients at the common start, without neighbours."""
    return {
        "models": fed.initial_model().repeat(fed.n, 1),
        "groups": torch.full((fed.n,), -1, dtype=torch.long, device=fed.device),
        "neighbours": torch.zeros(fed.n, device=fed.device),
    }


def around_each(r: Replies, look: Look) -> tuple[Tensor, Tensor]:
    """Return directions v_i and links (j is in the ball of i) if all clients cluster the same points."""
    if len(r) == 0:
        raise NobodyAnswered("no client answered, so there is nothing to cluster")
    found = look(r.values, torch.eye(len(r), dtype=torch.float64, device=r.values.device))
    return found.weights.to(r.values) @ r.values, found.balls


def at_each(
    fed: Federation, phase: Callable[..., Any], models: Tensor, own: Replies, look: Look
) -> tuple[Tensor, Tensor]:
    """Return directions v_i and links if client i clusters the gradients of all clients at x_i, one after the other.

    `own` are the gradients of present clients at their own models; links are among these clients.
    """
    if len(own) == 0:
        raise NobodyAnswered("no client answered, so there is nothing to cluster")
    directions = torch.empty_like(own.values)
    links = torch.eye(len(own), dtype=torch.bool, device=own.ids.device)
    for row, i in enumerate(own.ids.tolist()):
        r = fed.map(phase, x=models[i], to=own.ids[own.ids != i], link=PEERS)
        points = torch.cat([own.values[row : row + 1], r.values]) if len(r) else own.values[row : row + 1]
        first = torch.zeros(1, len(points), dtype=torch.float64, device=points.device)
        first[0, 0] = 1.0
        found = look(points, first)
        directions[row] = found.weights[0].to(points) @ points
        links[row] |= torch.isin(own.ids, r.ids[found.balls[0, 1:]])
    return directions, links


def in_groups(
    fed: Federation, phase: Callable[..., Any], models: Tensor, own: Replies, groups: Tensor, centre: Centre
) -> Tensor:
    """Return directions v_i if client i asks the others of its group, and who has none (-1), for gradients at x_i.

    v_i has the weights that `centre` gives the group's gradients; a client without a group takes its own.
    """
    if len(own) == 0:
        raise NobodyAnswered("no client answered, so no model moves")
    directions = own.values.clone()
    for row, i in enumerate(own.ids.tolist()):
        asked = own.ids[(own.ids != i) & ((groups[own.ids] == groups[i]) | (groups[own.ids] < 0))]
        if len(asked) == 0:
            continue
        r = fed.map(phase, x=models[i], to=asked, link=PEERS)
        if len(r) and groups[i] >= 0:
            members = (groups[r.ids] == groups[i]).cpu()
            points = torch.cat([own.values[row : row + 1], r.values[members]])
            rows = torch.cat([own.weights[row : row + 1], r.weights[members]])
            directions[row] = centre(points, rows).to(points) @ points
    return directions


def ball_of_members(points: Tensor, members: Tensor, rule: Rule, passes: int) -> Tensor:
    """Return which members of a found cluster are in the ball around its threshold centre, [N]; of few all are."""
    if int(members.sum()) <= FEW:
        return members.double()
    start = group_weights(points, (~members).long(), 1)
    found = threshold_cluster(points, start_weights=start, rule=rule, rounds=passes, rest=REST)
    far = torch.linalg.vector_norm(points.double() - found.centres[0].double(), dim=1)
    inside: Tensor = members & (far <= WIDE * far[members].median())
    return inside.double()


def weighted_by_rows(balls: Tensor, rows: Tensor) -> Tensor:
    """Return the weights, of sum 1, of those in a ball: by rows, of which nobody has more than four medians."""
    rows = rows.flatten().double()
    weights: Tensor = balls.double() * rows.clamp(max=HEAVIEST * rows.median())
    return weights / weights.sum()


def moved(fed: Federation, s: State, ids: Tensor, models: Tensor, links: Tensor) -> State:
    """Return the state with new models for `ids`, and groups of clients that are in each other's balls."""
    whole = torch.zeros(fed.n, fed.n, dtype=torch.bool, device=fed.device)
    whole[ids.unsqueeze(1), ids] = links
    groups = torch.where(torch.isin(fed.everyone, ids), linked_groups(whole).to(fed.device), -1)
    neighbours = whole.sum(1).to(s.neighbours.dtype)
    return s.replace(models=s.models.index_copy(0, ids, models), groups=groups, neighbours=neighbours)


def ball_quality(fed: Federation, s: State) -> dict[str, Tensor]:
    """Return what `observe` records: quality of the groups, and the size of every client's ball."""
    return {**cluster_quality(s.groups, fed.clusters), "neighbours": s.neighbours}


def theory_steps(fed: Federation, curvature: Callable[..., Any], lr: float | None) -> dict[str, float]:
    """Return lr (1/(3L) unless given) and momentum = 3 L lr, at most 1, of Theorems 3 and 4 of threshold clustering."""
    r = fed.fresh(dropout=0.0).map(curvature)
    largest = float(r.values.max())
    chosen = lr or 1 / (3 * largest)
    return {"lr": chosen, "momentum": min(1.0, 3 * largest * chosen)}
