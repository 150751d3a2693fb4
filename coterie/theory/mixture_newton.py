"""Finite mixtures of generalised linear mixed models: Newton steps from the clients' marginal likelihoods.

Client i belongs to cluster k with probability pi_k, and then its log marginal likelihood is m_ik(w_k, psi), which it
integrates itself. The likelihood is the sum over clients of log sum_k pi_k exp(m_ik); its derivatives in all centres,
psi and the logits of pi follow from values, gradients and Hessians of the m_ik.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.marginal import Marginal
from coterie.theory.marginal_newton import ascent, room_for


@dataclass(frozen=True)
class MixturePoint:
    """Parameters of the mixture.

    Parameters
    ----------
    shares
        pi, [K].
    centres
        w, [K, d].
    psi
        Entries of the root of the clients' covariance inside clusters, [p].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture_newton import MixturePoint
    >>> here = MixturePoint(torch.tensor([0.5, 0.5]), torch.tensor([[-2.0], [2.0]]), torch.ones(1))
    >>> there = MixturePoint(torch.tensor([0.8, 0.2]), torch.tensor([[-1.0], [2.0]]), torch.ones(1))
    >>> here.towards(there, 0.5).centres.tolist()
    [[-1.5], [2.0]]
    """

    shares: Tensor
    centres: Tensor
    psi: Tensor

    def towards(self, other: MixturePoint, share: float) -> MixturePoint:
        """Return the point at a share of the way to another."""
        pairs = zip(
            (self.shares, self.centres, self.psi), (other.shares, other.centres, other.psi), strict=True
        )
        return MixturePoint(*(a + share * (b - a) for a, b in pairs))


@dataclass(frozen=True)
class MixtureStep:
    """What the clients' answers at a point say.

    Parameters
    ----------
    value
        Log likelihood at the point.
    gain
        How much a Newton step promises.
    target
        Where it leads.
    membership
        Probability that each client belongs to each cluster, [n, K].
    certainty
        Inverse covariances of the centres given all rows, [K, d, d].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.mixture_newton import MixturePoint, MixtureStep
    >>> point = MixturePoint(torch.ones(1), torch.ones(1, 1), torch.ones(1))
    >>> MixtureStep(-3.0, 0.5, point, torch.ones(4, 1), torch.eye(1).unsqueeze(0)).membership.sum().item()
    4.0
    """

    value: float
    gain: float
    target: MixturePoint
    membership: Tensor
    certainty: Tensor


def mixture_step(point: MixturePoint, found: list[Marginal], largest: Tensor) -> MixtureStep:
    """Return the value at a point and the Newton step from it.

    Parameters
    ----------
    point
        Where clients were asked.
    found
        Their answers in each cluster, a row for each client.
    largest
        Largest change of each psi, [p].

    Returns
    -------
    MixtureStep
        Value and step.

    Examples
    --------
    Two clients with one row each, at -4 and at 4, with noise 1 and clusters around -3 and 3: each is sure of its own.

    >>> import torch
    >>> from coterie.theory.marginal import LikelihoodRows, Structure, find_mode, marginal
    >>> from coterie.theory.mixture_newton import MixturePoint, mixture_step
    >>> from coterie.theory.quadrature import rule
    >>> y = torch.tensor([-4.0, 4.0]).double()
    >>> def squared(scores):
    ...     left = scores - y.view(2, *[1] * (scores.dim() - 1))
    ...     return left.square().sum(-2) / 2, left, torch.ones_like(left).unsqueeze(-3)
    >>> rows = LikelihoodRows(torch.ones(2, 1, 1, 1).double(), torch.ones(2, 1).double(), squared)
    >>> structure, psi = Structure.of(torch.tensor([0])), torch.full((2, 1), 0.5).double()
    >>> point = MixturePoint(torch.full((2,), 0.5).double(), torch.tensor([[-3.0], [3.0]]).double(), psi[0])
    >>> found = []
    >>> for centre in point.centres.unbind(0):
    ...     mode = find_mode(rows, centre.expand(2, 1), structure.factor(psi), torch.zeros(2, 1).double())
    ...     found.append(marginal(rows, structure, mode, centre.expand(2, 1), psi, rule(1)))
    >>> step = mixture_step(point, found, torch.ones(1).double())
    >>> step.membership.round().tolist(), (step.target.centres.abs() > 3).all().item()
    ([[1.0, 0.0], [0.0, 1.0]], True)
    """
    (k, d), p = point.centres.shape, len(point.psi)
    each = point.shares.log() + torch.cat([one.value for one in found], -1)
    likelihood, membership = each.logsumexp(-1), each.softmax(-1)
    size = k * d + p + k  # centres, psi, logits of the shares
    matrix = each.new_zeros(size, size)
    mean = each.new_zeros(len(each), size)
    logits, sure = torch.arange(k * d + p, size), []
    for j, one in enumerate(found):
        share = membership[:, j : j + 1]
        at = torch.cat([torch.arange(j * d, (j + 1) * d), torch.arange(k * d, k * d + p)])
        slope = each.new_zeros(len(each), size)
        slope[:, at], slope[:, logits] = one.gradient, -point.shares
        slope[:, logits[j]] += 1
        curved = (share.unsqueeze(-1) * one.hessian).sum(0)
        matrix[at.unsqueeze(-1), at] -= curved
        matrix -= slope.mT @ (share * slope)
        mean += share * slope
        sure.append(-curved[:d, :d])
    matrix += mean.mT @ mean
    spread = torch.diag(point.shares) - point.shares.unsqueeze(-1) * point.shares
    matrix[logits.unsqueeze(-1), logits] += len(each) * spread
    step, gain = ascent(matrix, mean.sum(0))
    inside = slice(k * d, k * d + p)
    change = step[inside]
    limit = float(
        (room_for(change, point.psi, largest) / change.abs().clamp(min=1e-300)).min().clamp(max=1.0)
    )
    limit = min(limit, 1 / max(1.0, float(step[logits].abs().max())))
    step = limit * step
    saddle = (point.psi.abs() < 1e-3 * largest) & (matrix.diagonal()[inside] < 0)
    psi = torch.where(saddle, 0.3 * largest, point.psi + step[inside])
    target = MixturePoint(
        (point.shares.log() + step[logits]).softmax(0), point.centres + step[: k * d].view(k, d), psi
    )
    gain = torch.inf if bool(saddle.any()) else gain
    return MixtureStep(float(likelihood.sum()), gain, target, membership, torch.stack(sure))
