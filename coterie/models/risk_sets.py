"""Who is at risk when: partial likelihood and concordance of survival times, over the rows of every client by itself.

A target is a signed time: +t for an event at t, -t for a row that was last seen at t without one. Functions take scores
z [..., B], targets [..., B] and row weights [..., B], zero for padding, which is in no risk set. Leading axes are
clients: each is a stratum of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RiskSets:
    """Rows of every client from the latest time to the earliest, padding last.

    The rows at risk at a row's time are those up to the last one of equal time (Breslow's way with ties).

    Parameters
    ----------
    order
        Positions of the rows, [..., B].
    first, last
        First and last place of the rows with an equal time, [..., B].
    event
        Weight of the row where it has an event, else 0, [..., B].
    share
        Weight of the row in risk sets, 1 for the heaviest rows of a client, [..., B].

    Examples
    --------
    >>> y, weight = torch.tensor([3.0, -5.0, 3.0]), torch.ones(3)
    >>> sets = RiskSets.of(y, weight)
    >>> sets.order, sets.last
    (tensor([1, 0, 2]), tensor([0, 2, 2]))
    """

    order: Tensor
    first: Tensor
    last: Tensor
    event: Tensor
    share: Tensor

    @classmethod
    def of(cls, y: Tensor, weight: Tensor) -> RiskSets:
        """Sort rows by their times."""
        real = weight > 0
        time = torch.where(real, y.abs(), -1.0)
        order = torch.sort(time, dim=-1, descending=True, stable=True).indices
        falling = -time.gather(-1, order)
        first = torch.searchsorted(falling, falling)
        last = torch.searchsorted(falling, falling, right=True) - 1
        event = (weight * (y > 0)).gather(-1, order)
        largest = weight.amax(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        return cls(order, first, last, event, (weight / largest).gather(-1, order))

    def sort(self, values: Tensor) -> Tensor:
        """Return values of rows [..., B] in this order."""
        return values.expand(self.order.shape).gather(-1, self.order)

    def back(self, values: Tensor) -> Tensor:
        """Return values in this order as values of the rows where they were."""
        return torch.zeros_like(values).scatter(-1, self.order, values)

    def log_risks(self, z: Tensor) -> Tensor:
        """Return the logarithm of the sum of exp(z) over the rows at risk, for sorted scores."""
        return torch.logcumsumexp(z + self.share.log(), -1).gather(-1, self.last)

    def over_events(self, values: Tensor) -> Tensor:
        """Return for every row the sum of the values of rows with no later time, [..., B]."""
        whole = values.flip(-1).cumsum(-1).flip(-1)
        return whole.gather(-1, self.first)


def row_losses(z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return minus the logarithm of the partial likelihood of every row: 0 for a row without event, [..., B].

    Parameters
    ----------
    z, y, weight
        Scores, signed times and row weights, [..., B].

    Returns
    -------
    Tensor
        log sum over the rows at risk of exp(z_j), less z, for a row with an event.

    Examples
    --------
    >>> row_losses(torch.zeros(3), torch.tensor([1.0, -2.0, 3.0]), torch.ones(3)).exp()
    tensor([3., 1., 1.])
    """
    sets = RiskSets.of(y, weight)
    z = sets.sort(z)
    return sets.back(torch.where(sets.event > 0, sets.log_risks(z) - z, 0.0))


def slopes(z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the derivative of the weighted sum of `row_losses` in every score, [..., B].

    It is the expected number of events of the row by Breslow's estimate, less the observed one.
    """
    sets = RiskSets.of(y, weight)
    z = sets.sort(z)
    rates = torch.where(sets.event > 0, sets.event.log() - sets.log_risks(z), -torch.inf)
    summed = torch.logcumsumexp(rates.flip(-1), -1).flip(-1).gather(-1, sets.first)
    return sets.back((z + sets.share.log() + summed).exp() - sets.event)


@dataclass(frozen=True)
class RiskCurvature:
    """Second derivatives of the weighted sum of `row_losses` at given scores.

    Parameters
    ----------
    sets
        The rows in their order.
    force
        exp(z) of the sorted rows up to a factor, [..., B].
    risk
        Sums of `force` over the rows at risk, [..., B].
    expected
        Expected events of the sorted rows, [..., B].
    """

    sets: RiskSets
    force: Tensor
    risk: Tensor
    expected: Tensor

    @classmethod
    def at(cls, z: Tensor, y: Tensor, weight: Tensor) -> RiskCurvature:
        """Return the curvature at scores z [..., B]."""
        sets = RiskSets.of(y, weight)
        z = sets.sort(z)
        top = torch.where(sets.share > 0, z, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        force = (torch.where(sets.share > 0, z - top, 0.0)).exp() * sets.share
        risk = force.cumsum(-1).gather(-1, sets.last).clamp_min(torch.finfo(z.dtype).tiny)
        return cls(sets, force, risk, force * sets.over_events(sets.event / risk))

    def means(self, values: Tensor) -> Tensor:
        """Return the mean over the rows at risk of sorted values [..., B, k], weighted by `force`."""
        last = self.sets.last.unsqueeze(-1).expand(values.shape)
        return (self.force.unsqueeze(-1) * values).cumsum(-2).gather(-2, last) / self.risk.unsqueeze(-1)

    def bend(self, change: Tensor) -> Tensor:
        """Return the first-order change of `slopes` for a change of the scores, [..., B]."""
        change = self.sets.sort(change)
        mean = self.means(change.unsqueeze(-1)).squeeze(-1)
        drawn = self.force * self.sets.over_events(self.sets.event * mean / self.risk)
        return self.sets.back(self.expected * change - drawn)

    def matrix(self, x: Tensor) -> Tensor:
        """Return the Hessian [..., d, d] for scores that are linear in rows x [..., B, d]."""
        x = x.gather(-2, self.sets.order.unsqueeze(-1).expand(*self.sets.order.shape, x.shape[-1]))
        mean = self.means(x)
        whole = (x.mT * self.expected.unsqueeze(-2)) @ x
        return whole - (mean.mT * self.sets.event.unsqueeze(-2)) @ mean


def concordance_counts(z: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return concordant pairs, with half of those of equal score, and comparable pairs (Harrell), [...] each.

    A pair is comparable if the row with the earlier time has an event; of rows with equal times, if one of them has an
    event and the other none. It is concordant if the earlier row has the higher score. Counted in O(B log² B).

    Parameters
    ----------
    z, y, weight
        Scores, signed times and row weights, [..., B]; a weight counts as 1 if it is above zero.

    Returns
    -------
    tuple of Tensor
        Concordant and comparable pairs, float64.

    Examples
    --------
    >>> z, y = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, -4.0])
    >>> [float(count) for count in concordance_counts(z, y, torch.ones(3))]
    [2.0, 3.0]
    """
    real, rank = (weight > 0).double(), _ranks(z)
    event = real * (y > 0)
    time = _ranks(2 * _ranks(y.abs()) + (y < 0))  # of rows with equal times those with an event come first
    above = _pairs(time, rank, event, real)
    below = _pairs(time, rank.amax(-1, keepdim=True) - rank, event, real)
    later = _pairs(time, time.amax(-1, keepdim=True) - time, event, real)
    return above + (later - above - below) / 2, later


def _ranks(values: Tensor) -> Tensor:
    """Return 0, 1, ... in the order of the values, equal ones alike, [..., B]."""
    values = values.contiguous()
    return torch.searchsorted(values.sort(-1).values, values)


def _pairs(time: Tensor, rank: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of first_i second_j over pairs with time_i < time_j and rank_i > rank_j, [...].

    Ranks that differ do so first in one of their binary digits: for each digit, pairs that agree in all higher ones are
    counted by a running sum.
    """
    size = time.shape[-1]
    order = (time * size + rank).argsort(-1)  # at equal times no higher rank comes first
    rank, first, second = (part.gather(-1, order) for part in (rank, first, second))
    total = torch.zeros(time.shape[:-1], dtype=torch.float64, device=time.device)
    for digit in range(max(1, (size - 1).bit_length())):
        group, order = (rank >> (digit + 1)).sort(dim=-1, stable=True)
        high = (rank >> digit & 1).gather(-1, order)
        before = (first.gather(-1, order) * high).cumsum(-1)
        start = torch.searchsorted(group, group)
        earlier = before - torch.where(start > 0, before.gather(-1, (start - 1).clamp_min(0)), 0.0)
        total += (second.gather(-1, order) * (1 - high) * earlier).sum(-1)
    return total
