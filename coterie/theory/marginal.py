"""A client's marginal likelihood in a generalised linear mixed model, with its first and second derivatives.

t = w + L u with u standard normal and L = sum_p psi_p L_p: the likelihood of a client's rows is the integral of
exp(-loss(t)) over u. Everything is a sum over clients, so each client sends its own part. Shapes: `...` are clients,
B rows, S scores of a row, d parameters, q effects, p numbers in psi, K points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.hierarchical import times
from coterie.theory.quadrature import QuadratureRule

Derivatives = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
MOST_STEPS = 30  # to the mode of a client's effects; three or four are usual
_HALVINGS = 12


@dataclass(frozen=True)
class LikelihoodRows:
    """The rows of clients, as a likelihood sees them.

    Parameters
    ----------
    design
        Scores are design @ t: [..., B, S, d].
    weight
        Weight of each row, [..., B]; zero for padding.
    derivatives
        From scores [..., S, B] (or with a further axis for points, [..., K, S, B]) to the losses of the rows [..., B]
        and their first [..., S, B] and second [..., S, S, B] derivatives.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal import LikelihoodRows
    >>> def squared(scores):  # half squared errors of one target, 2
    ...     return (scores - 2).square().sum(-2) / 2, scores - 2, torch.ones_like(scores).unsqueeze(-3)
    >>> rows = LikelihoodRows(torch.ones(1, 1, 1).double(), torch.ones(1).double(), squared)
    >>> loss, first, second = rows.derivatives(torch.zeros(1, 1))
    >>> loss.tolist(), first.tolist(), second.tolist()
    ([2.0], [[-2.0]], [[[1.0]]])
    """

    design: Tensor
    weight: Tensor
    derivatives: Derivatives


@dataclass(frozen=True)
class Structure:
    """Which coordinates vary between clients, and how: L = sum_p psi_p L_p.

    Parameters
    ----------
    at
        Coordinates that vary, [q].
    parameter, row, column
        For each entry of L that may differ from zero: which psi it is, and where it stands, [E].
    d
        Number of coordinates.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal import Structure
    >>> Structure.of(torch.tensor([0, -1, 1]), full=True).factor(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]]
    """

    at: Tensor
    parameter: Tensor
    row: Tensor
    column: Tensor
    d: int

    @classmethod
    def of(cls, groups: Tensor, *, full: bool = False) -> Structure:
        """Return the structure of effects.

        Parameters
        ----------
        groups
            Which variance each coordinate has, [d]; -1 where clients do not differ (`variance_components.pattern`).
        full
            Whether effects may be correlated: L is then a lower triangle, whatever the groups.

        Returns
        -------
        Structure
            The structure.
        """
        at = (groups >= 0).nonzero().squeeze(-1)
        q = len(at)
        if full:
            row, column = torch.tril_indices(q, q, device=groups.device)
            return cls(at, torch.arange(len(row), device=groups.device), row, column, len(groups))
        here = torch.arange(q, device=groups.device)
        return cls(at, groups[at], here, here, len(groups))

    @property
    def p(self) -> int:
        """Length of psi."""
        return int(self.parameter.max()) + 1

    @property
    def q(self) -> int:
        """Number of effects of a client."""
        return len(self.at)

    def factor(self, psi: Tensor) -> Tensor:
        """Return L [..., d, q] for psi [..., p]."""
        found = psi.new_zeros(*psi.shape[:-1], self.d, self.q)
        found[..., self.at[self.row], self.column] = psi[..., self.parameter]
        return found

    def gather(self, entries: Tensor) -> Tensor:
        """Return sums over the entries [..., E] that belong to each psi, [..., p]."""
        empty = entries.new_zeros(*entries.shape[:-1], self.p)
        return empty.index_add(-1, self.parameter, entries)


@dataclass(frozen=True)
class Mode:
    """The most likely effects of a client, and how far they may be off.

    Parameters
    ----------
    effects
        u, [..., q].
    model
        t = w + L u, [..., d].
    root
        C with C C' the inverse of the second derivative in u, [..., q, q].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.marginal import Mode
    >>> mode = Mode(effects=torch.tensor([1.0]), model=torch.tensor([3.0]), root=torch.tensor([[0.5]]))
    >>> (mode.root @ mode.root.mT).item()  # variance of the effect
    0.25
    """

    effects: Tensor
    model: Tensor
    root: Tensor


@dataclass(frozen=True)
class Marginal:
    """The logarithm of a client's marginal likelihood as a function of (w, psi), up to second order.

    Parameters
    ----------
    value
        [..., 1].
    gradient
        [..., d + p].
    hessian
        [..., d + p, d + p].

    Examples
    --------
    Parts of clients add up.

    >>> import torch
    >>> from coterie.theory.marginal import Marginal
    >>> parts = Marginal(torch.tensor([[-1.0], [-2.0]]), torch.ones(2, 2), -torch.eye(2).expand(2, 2, 2))
    >>> parts.value.sum().item(), parts.gradient.sum(0).tolist(), parts.hessian.sum(0).diagonal().tolist()
    (-3.0, [2.0, 2.0], [-2.0, -2.0])
    """

    value: Tensor
    gradient: Tensor
    hessian: Tensor


def find_mode(rows: LikelihoodRows, centre: Tensor, factor: Tensor, start: Tensor) -> Mode:
    """Minimise loss(w + L u) + |u|^2 / 2 over u by Newton steps that never raise it.

    Parameters
    ----------
    rows
        Rows of the clients.
    centre
        w, [..., d].
    factor
        L, [..., d, q].
    start
        Where u starts, [..., q].

    Returns
    -------
    Mode
        The mode.

    Examples
    --------
    With one row at 2 and w = 0, L = 1, the mode of (u - 2)^2 / 2 + u^2 / 2 is 1, with second derivative 2.

    >>> import torch
    >>> from coterie.theory.marginal import LikelihoodRows, find_mode
    >>> def squared(scores):  # half squared errors of one target, 2
    ...     return (scores - 2).square().sum(-2) / 2, scores - 2, torch.ones_like(scores).unsqueeze(-3)
    >>> one, none = torch.ones(1, 1).double(), torch.zeros(1).double()
    >>> mode = find_mode(LikelihoodRows(one.unsqueeze(0), one[0], squared), none, one, none)
    >>> round(mode.effects.item(), 6), round(mode.root.item() ** -2, 6)
    (1.0, 2.0)
    """
    base = times(rows.design, centre.unsqueeze(-2))
    lever = rows.design @ factor.unsqueeze(-3)
    identity = torch.eye(factor.shape[-1], dtype=centre.dtype, device=centre.device)

    def look(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = (base + times(lever, u.unsqueeze(-2))).mT
        loss, first, second = rows.derivatives(scores)
        value = (loss * rows.weight).sum(-1, keepdim=True) + 0.5 * u.square().sum(-1, keepdim=True)
        slope = ((first * rows.weight.unsqueeze(-2)).mT.unsqueeze(-2) @ lever).sum((-3, -2)) + u
        bent = torch.einsum("...stb,...btq->...bsq", second * rows.weight[..., None, None, :], lever)
        return value, slope, identity + lever.flatten(-3, -2).mT @ bent.flatten(-3, -2)

    u = start
    value, slope, curvature = look(u)
    if not bool(value.isfinite().all()):
        u = torch.where(value.isfinite(), u, 0.0)
        value, slope, curvature = look(u)
    for _ in range(MOST_STEPS):
        step = -_positive_solve(curvature, slope)
        fall = -(step * slope).sum(-1, keepdim=True)
        if not bool((fall > 1e-13 * (1 + value.abs())).any()):
            break
        share, limit = torch.ones_like(value), value + 1e-13 * value.abs()
        for _ in range(_HALVINGS):
            after = look(u + share * step)
            worse = ~(after[0] <= limit)
            if not bool(worse.any()):
                break
            share = torch.where(worse, 0.5 * share, share)
        else:
            share = torch.where(worse, 0.0, share)
            after = look(u + share * step)
        u = u + share * step
        value, slope, curvature = after
    root, info = torch.linalg.cholesky_ex(curvature)
    root = torch.where((info == 0)[..., None, None], root, identity)
    inverse = torch.linalg.solve_triangular(root, identity.expand(curvature.shape), upper=False)
    return Mode(u, centre + times(factor, u), inverse.mT)


def marginal(
    rows: LikelihoodRows, structure: Structure, mode: Mode, centre: Tensor, psi: Tensor, rule: QuadratureRule
) -> Marginal:
    """Integrate over a client's effects around their mode (adaptive quadrature), with derivatives in (w, psi).

    The points stay where the mode puts them while w and psi move, so that the derivatives are quadratures of the
    derivatives of the integrand. One point would be Laplace's approximation.

    Parameters
    ----------
    rows
        Rows of the clients.
    structure
        Which coordinates vary.
    mode
        From `find_mode`.
    centre
        w, [..., d].
    psi
        [..., p].
    rule
        Points and weights, from `quadrature.rule`.

    Returns
    -------
    Marginal
        Value, gradient and Hessian.

    Examples
    --------
    With one row at 2 and w = 0, psi = 1 the row is normal with variance 2: the value is -log(2) / 2 - 1.

    >>> import torch
    >>> from coterie.theory.marginal import LikelihoodRows, Structure, find_mode, marginal
    >>> from coterie.theory.quadrature import rule
    >>> def squared(scores):  # half squared errors of one target, 2
    ...     return (scores - 2).square().sum(-2) / 2, scores - 2, torch.ones_like(scores).unsqueeze(-3)
    >>> one, none = torch.ones(1).double(), torch.zeros(1).double()
    >>> rows, structure = LikelihoodRows(one.view(1, 1, 1), one, squared), Structure.of(torch.tensor([0]))
    >>> mode = find_mode(rows, none, structure.factor(one), none)
    >>> found = marginal(rows, structure, mode, none, one, rule(1))
    >>> round(found.value.item(), 6), [round(slope, 6) for slope in found.gradient.tolist()]
    (-1.346574, [1.0, 0.5])
    """
    points = mode.effects.unsqueeze(-2) + rule.points @ mode.root.mT  # [..., K, q]
    lever = rows.design @ structure.factor(psi).unsqueeze(-3)
    base = times(rows.design, centre.unsqueeze(-2))
    steep = torch.cat([lever, base.unsqueeze(-1)], -1).movedim(-1, -3).mT.flatten(-2)  # [..., q + 1, S B]
    ones = torch.ones_like(points[..., :1])
    scores = (torch.cat([points, ones], -1) @ steep).unflatten(-1, base.mT.shape[-2:])
    loss, first, second = rows.derivatives(scores)
    heights = 0.5 * (rule.points.square().sum(-1) - points.square().sum(-1)) - times(loss, rows.weight)
    joint = heights.nan_to_num(nan=-torch.inf, posinf=-torch.inf) + rule.weights.log()
    value, shares = torch.logsumexp(joint, -1, keepdim=True), torch.softmax(joint, -1)
    weighted = (rows.design * rows.weight[..., None, None]).transpose(-3, -2).flatten(-3, -2)  # [..., S B, d]
    slopes = first.flatten(-2) @ weighted
    along = slopes[..., structure.at[structure.row]] * points[..., structure.column]
    slopes = -torch.cat([slopes, structure.gather(along)], -1)
    gradient = (shares.unsqueeze(-1) * slopes).sum(-2)
    outer = (shares.unsqueeze(-1) * slopes).mT @ slopes - gradient.unsqueeze(-1) * gradient.unsqueeze(-2)
    bend = _bend(rows, structure, points, shares, second)
    log_volume = mode.root.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1, keepdim=True)
    return Marginal(value + log_volume, gradient, outer - bend)


def _bend(
    rows: LikelihoodRows, structure: Structure, points: Tensor, shares: Tensor, second: Tensor
) -> Tensor:
    """Return the mean over points of the second derivative of the loss in (w, psi), [..., d + p, d + p]."""
    design, entries = rows.design, structure.at[structure.row]
    curved = second.flatten(-3)  # [..., K, S S B]
    shape = second.shape[-3:]

    def moment(weights: Tensor) -> Tensor:
        """Return sums over points with weights [..., j, K], times those of the rows, as [..., j, S, S, B]."""
        sums: Tensor = (weights @ curved).unflatten(-1, shape)
        return sums * rows.weight[..., None, None, None, :]

    weighted = shares.unsqueeze(-1) * points  # [..., K, q]
    flat, moved = design.flatten(-3, -2), design[..., entries]  # [..., B S, d], [..., B, S, E]
    middle = torch.einsum("...stb,...btd->...bsd", moment(shares.unsqueeze(-2)).squeeze(-4), design)
    corner = flat.mT @ middle.flatten(-3, -2)
    once = moment(weighted.mT)[..., structure.column, :, :, :]  # [..., E, S, S, B]
    side = flat.mT @ torch.einsum("...estb,...bte->...bse", once, moved).flatten(-3, -2)
    q = structure.q
    pairs = (weighted.unsqueeze(-1) * points.unsqueeze(-2)).flatten(-2).mT  # [..., q q, K]
    twice = moment(pairs).unflatten(-4, (q, q))[..., structure.column[:, None], structure.column, :, :, :]
    low = torch.einsum("...bse,...efstb,...btf->...ef", moved, twice, moved)
    side, low = structure.gather(side), structure.gather(structure.gather(low).mT)
    return torch.cat([torch.cat([corner, side], -1), torch.cat([side.mT, low.mT], -1)], -2)


def _positive_solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return H^-1 g for symmetric H, with eigenvalues below one (those of the prior) raised to it."""
    root, info = torch.linalg.cholesky_ex(matrix)
    if not bool(info.any()):
        return torch.cholesky_solve(right.unsqueeze(-1), root).squeeze(-1)
    values, vectors = torch.linalg.eigh(matrix.nan_to_num())
    return times(vectors, times(vectors.mT, right.nan_to_num()) / values.clamp(min=1.0))
