"""Laplace's approximation of crossed classes and counts: Newton rounds of all clients at given variances."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from coterie.algorithms.crossed_cells import CrossedLayout, cell_sums
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.replies import Replies
from coterie.engine.state import State
from coterie.models.glm import Glm
from coterie.theory.crossed import Crossed

_NEWTON_STEPS = 30  # for the effects at given variances; three are usual
_SETTLED = 1e-9  # relative change of the objective that ends them
_SHORTEST = 1e-3  # share of a step that is tried


class Phases(Protocol):
    """What the search asks of the method."""

    def ask(self, fed: Federation, s: State, at: CrossedLayout) -> Replies:
        """Return the clients' sums over cells."""

    def adjust(self, client: Client, centre: Tensor, spread: Tensor, noise: float) -> None:
        """Move a client's model to a new centre plus its own effects."""

    def retreat(self, client: Client, share: float) -> None:
        """Go a part of the way of the last `adjust` only."""


class ModeSearch:
    """Laplace's approximation at given variances, by Newton rounds of all clients."""

    def __init__(self, method: Phases, fed: Federation, s: State, at: CrossedLayout, groups: Tensor) -> None:
        self.method, self.fed, self.s, self.at, self.groups = method, fed, s, at, groups
        self.replies = method.ask(fed, s, at)
        self.first = self.model() if len(self.replies) else None

    def model(self) -> Crossed:
        """Return the working model of the last answers."""
        sums = cell_sums(self.replies, self.at)
        return Crossed(sums, self.groups, self.at.names, noise=1.0, ridge=ridge(self.fed, self.at, sums.rows))

    def start(self, near: Tensor | None = None) -> Tensor:
        """Return where a search begins: logarithms of variances, then the parameters beside the predictor."""
        assert self.first is not None
        return torch.cat([self.first.start(near)[1:], self.s.x[self.at.extras].double().cpu()])

    def values(self, point: Tensor) -> Tensor:
        """Return the variances at a point, in the units of the first model."""
        assert self.first is not None
        logs = point[: len(point) - len(self.at.extras)]
        return self.first.variances(torch.cat([torch.zeros(1, dtype=torch.float64), logs]))

    def deviance(self, point: Tensor) -> float:
        """Return -2 log likelihood by Laplace's approximation, and leave everybody at the mode of the effects."""
        assert self.first is not None
        values, method, fed = self.values(point), self.method, self.fed
        _, inside, levels = self.first.at(values)
        spread = torch.zeros(fed.d, dtype=torch.float64).index_copy(0, self.at.fixed, inside)
        self.s = self.s.replace(within=spread.to(fed.device, fed.dtype)[None])
        self._take_extras(point[len(point) - len(self.at.extras) :])
        base = aim = self.s.x
        before, share, volume = torch.inf, 1.0, torch.zeros(())
        for _ in range(_NEWTON_STEPS):
            self.replies = method.ask(fed, self.s, self.at)
            model = self.model()
            height = self._height(model, levels)
            if height > before + _SETTLED * (1 + abs(before)) and share > _SHORTEST:
                share *= 0.5
                fed.map(method.retreat, share=share)
                self._move(base + share * (aim - base))
                continue
            common, effect, volume = model.effects(values)
            if abs(before - height) < _SETTLED * (1 + abs(height)):
                break
            base, before, share = self.s.x, height, 1.0
            aim = filled(fed, self.at, common, effect, base)
            fed.map(method.adjust, centre=aim, spread=self.s.within[0], noise=1.0)
            self._move(aim)
        return height + float(volume)

    def _take_extras(self, extras: Tensor) -> None:
        """Move everybody to other parameters beside the predictor."""
        places = self.at.extras.to(self.s.x.device)
        if bool((self.s.x[places].double().cpu() != extras).any()):
            self._move(self.s.x.index_copy(0, places, extras.to(self.s.x)))
            self.fed.map(self.method.adjust, centre=self.s.x, spread=self.s.within[0], noise=1.0)

    def _move(self, x: Tensor) -> None:
        self.s = self.s.replace(x=x, centres=x[None])

    def _height(self, model: Crossed, levels: Tensor) -> float:
        """Return twice the penalised loss of all clients at their present models."""
        p, x = len(self.at.fixed), self.s.x.double().cpu()
        losses, pulls = self.replies.values.double()[:, p * p + p + 2 : p * p + p + 4].sum(0)
        effect = x[self.at.grouped].square()
        own = torch.where(levels > 0, effect / levels.where(levels > 0, 1.0), 0.0).sum()
        assert model.ridge is not None
        return float(2 * losses + pulls + own + (model.ridge * x[self.at.fixed].square()).sum())


def filled(fed: Federation, at: CrossedLayout, common: Tensor, effect: Tensor, before: Tensor) -> Tensor:
    """Return the model of common coefficients and effects of levels, and the extras of the one before, [d]."""
    x = torch.zeros(fed.d, dtype=torch.float64).index_copy(0, at.fixed, common)
    x = x.index_copy(0, at.grouped, effect).to(fed.device, fed.dtype)
    extras = at.extras.to(x.device)
    return x.index_copy(0, extras, before[extras])


def ridge(fed: Federation, at: CrossedLayout, rows: Tensor) -> Tensor:
    """Return the model's penalty on the common coefficients, summed over rows, [p]."""
    assert isinstance(fed.model, Glm)
    strength = fed.model.l2 * float(rows.sum() if fed.model.reduction == "mean" else len(rows))
    return strength * fed.model.groups["weights"].cpu().double()[at.fixed]
