"""Robust aggregation: means that a few wrong or malicious clients cannot move far.

Every mean that an algorithm takes with `replies.mean()` follows the federation's rule. The plain mean is the default
for clients in this process; steps of nodes elsewhere are screened and their weights capped (`ON_NODES`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest
from coterie.models.fast.lazy_models import materialize

ENOUGH = 4  # replies below which nobody can tell who is wrong; one more for replies of one or two numbers
WIDE = 8  # numbers in a reply from which on steps of honest clients are about equally long
ABSURD = 100.0  # times the median step: such a reply is left out
ITERATIONS = 100  # of the geometric median at most
TINY = 1e-12
BLOCK = 1 << 16  # columns sorted at once


@dataclass(frozen=True)
class Aggregate:
    """How answers of clients become one: weights are capped, long steps shortened, then a rule takes the centre.

    A step is the difference between a reply and what the client was sent. A reply whose step is too long moves the mean
    no farther than a typical one: its step becomes as long as the median step and its weight at most the median weight.
    So a liar has the influence of one honest client, and an honest client that is different keeps its direction. A
    client with fewer rows than the median may take a longer step, in proportion: it moves the mean no farther.

    Parameters
    ----------
    rule
        'mean'; 'clip' (replies farther away than `strength` are drawn in to it, then averaged, after Karimireddy, He,
        Jaggi, ICML 2021; distances are from the coordinate-wise median of the replies, in units of their median);
        'median' (coordinate-wise, Yin et al., ICML 2018); 'trimmed' (mean without the share `strength` of the weight
        at each end of each coordinate); 'geometric-median' (Pillutla et al. 2022).
    strength
        Radius of 'clip' or share of 'trimmed'; None takes 2 and 0.2.
    cap
        Largest weight of a client in units of the median weight; infinite: no limit.
    screen
        Longest step that is left as it is, in units of the median step; 8 / d times as long for replies of d < 8
        numbers, whose lengths differ by chance. Steps more than 100 times as long as the median are left out.
        Fewer than four replies (five of one or two numbers) are not screened. Infinite: no limit.

    Examples
    --------
    >>> import torch
    >>> from coterie.engine.aggregate import Aggregate
    >>> replies = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [1e6]])
    >>> Aggregate.parse("median")(replies, torch.ones(6, 1)).item()
    3.5
    >>> Aggregate.parse("screen,cap")(replies, torch.tensor([[1.0]] * 5 + [[1e15]])).item()
    3.0
    """

    rule: str = "mean"
    strength: float | None = None
    cap: float = math.inf
    screen: float = math.inf

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise SettingError(f"no aggregation {self.rule!r}.{nearest(self.rule, (*RULES, *LIMITS))}")
        if self.strength is None:
            object.__setattr__(self, "strength", STRENGTH.get(self.rule, 0.0))
        if self.rule == "trimmed" and not 0 <= float(self.strength or 0) < 0.5:
            raise SettingError(f"aggregate: trimmed:{self.strength} must be at least 0 and below 0.5")
        for name, value in (
            ("strength", float(self.strength or 0)),
            ("cap", self.cap),
            ("screen", self.screen),
        ):
            if not value >= 0 or (name != "strength" and value < 1):
                raise SettingError(
                    f"aggregate: {name} is {value}; it must be at least {int(name != 'strength')}"
                )

    @classmethod
    def parse(cls, text: str) -> Aggregate:
        """Return the rule that a text names, such as "median", "trimmed:0.1" or "clip:2,cap:5".

        Raises
        ------
        SettingError
            There is no such rule, or its number cannot be read.
        """
        found: dict[str, str | float] = {}
        for part in text.split(","):
            name, _, given = part.strip().partition(":")
            try:
                number = float(given) if given else None
            except ValueError:
                raise SettingError(f"aggregate: {part.strip()!r} needs a number after the colon") from None
            if name in LIMITS:
                found[name] = LIMITS[name] if number is None else number
            elif "rule" in found:
                raise SettingError(f"aggregate: {found['rule']!r} and {name!r} are both rules; name one")
            else:
                found["rule"] = name
                if number is not None:
                    found["strength"] = number
        return cls(**found)  # type: ignore[arg-type]

    @property
    def plain(self) -> bool:
        """True if this is the weighted mean without any limit."""
        return self.rule == "mean" and math.isinf(self.cap) and math.isinf(self.screen)

    def __str__(self) -> str:
        number = f":{self.strength:g}" if self.rule in STRENGTH else ""
        limits = [f"{name}:{getattr(self, name):g}" for name in LIMITS if math.isfinite(getattr(self, name))]
        return ",".join([f"{self.rule}{number}", *limits])

    def weights(self, weights: Tensor) -> Tensor:
        """Return weights [k, 1] with none above `cap` times their median."""
        if math.isinf(self.cap) or not len(weights):
            return weights
        return weights.minimum(self.cap * weights.median())

    def steps(self, values: Tensor, weights: Tensor, origin: Tensor | None = None) -> Tensor:
        """Return how long the step of each reply is in units of the median step, [k].

        Steps of clients that weigh less than the median count in proportion to their weight. All are 0 where nobody can
        tell who is wrong: too few replies, or nobody moved.
        """
        lengths: Tensor = torch.linalg.vector_norm(values if origin is None else values - origin, dim=1)
        moved = lengths[lengths > 0]
        if len(values) < ENOUGH + (values.shape[1] < 3) or not len(moved):
            return torch.zeros_like(lengths)
        light = weights.squeeze(1) / weights.median().clamp(min=TINY)
        return lengths / moved.median() * light.clamp(max=1).to(lengths.dtype)

    def __call__(self, values: Tensor, weights: Tensor, origin: Tensor | None = None) -> Tensor:
        """Return one vector [d] for replies [k, d] with weights [k, 1]."""
        return self.combine(values, weights, origin)[0]

    def combine(
        self, values: Tensor, weights: Tensor, origin: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return one vector [d] for replies [k, d], and which of them were left out and which shortened, [k] each.

        Parameters
        ----------
        values
            The replies, [k, d].
        weights
            Their weights, [k, 1].
        origin
            What the clients were sent, [k, d]; None: zero.
        """
        values, weights = materialize(values), self.weights(weights).to(values.dtype)
        if math.isinf(self.screen):
            nobody = torch.zeros(len(values), dtype=torch.bool, device=values.device)
            return RULES[self.rule](values, weights, float(self.strength or 0.0)), nobody, nobody
        steps, limit = (
            self.steps(values, weights, origin),
            self.screen * max(1.0, WIDE / max(values.shape[1], 1)),
        )
        absurd = steps > max(ABSURD, limit)
        long = (steps > limit) & ~absurd
        if long.any():
            base = values.new_zeros(()) if origin is None else origin
            values = torch.where(long.unsqueeze(1), base + (values - base) / steps.unsqueeze(1), values)
            weights = torch.where(long.unsqueeze(1), weights.minimum(weights.median()), weights)
        if absurd.any():
            values, weights = values[~absurd], weights[~absurd]
        return RULES[self.rule](values, weights, float(self.strength or 0.0)), absurd, long


def _mean(values: Tensor, weights: Tensor, strength: float) -> Tensor:
    return (weights.t() @ values).div_(weights.sum()).squeeze(0)


def _median(values: Tensor, weights: Tensor, strength: float = 0.0) -> Tensor:
    """Return the weighted median of every coordinate; the midpoint where half of the weight is on either side."""
    ordered, order = values.sort(0)
    below = weights.expand_as(values).gather(0, order).cumsum(0) / weights.sum()
    low = (below < 0.5 - TINY).sum(0, keepdim=True)
    high = (below <= 0.5 + TINY).sum(0, keepdim=True).clamp(max=len(values) - 1)
    return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2).squeeze(0)


def _middle(values: Tensor) -> Tensor:
    """Return the median of every coordinate; numpy sorts columns many times faster than torch."""
    if values.device.type != "cpu":
        return _median(values, torch.ones_like(values[:, :1]))
    k, columns = len(values), values.detach().numpy()
    found = np.empty(values.shape[1], dtype=columns.dtype)
    for first in range(0, len(found), BLOCK):
        part = np.sort(columns[:, first : first + BLOCK], axis=0)
        found[first : first + BLOCK] = (part[(k - 1) // 2] + part[k // 2]) / 2
    return torch.from_numpy(found)


def _trimmed(values: Tensor, weights: Tensor, strength: float) -> Tensor:
    """Return the mean of every coordinate without this share of the weight at each end."""
    ordered, order = values.sort(0)
    own = weights.expand_as(values).gather(0, order) / weights.sum()
    upto = own.cumsum(0)
    kept = upto.clamp(max=1 - strength) - (upto - own).clamp(min=strength)
    kept = torch.where(kept > TINY, kept, 0.0)  # no rest of rounding on a huge value
    return (kept * ordered).sum(0) / kept.sum(0)


def _clip(values: Tensor, weights: Tensor, strength: float) -> Tensor:
    """Return the mean of replies that are drawn in to `strength` median distances from the median."""
    centre = _middle(values)
    away = _distances(values, centre)
    shrink = (strength * away.median() / away.clamp(min=TINY)).clamp(max=1)
    return centre + _mean((values - centre) * shrink.unsqueeze(-1), weights, 0.0)


def _geometric_median(values: Tensor, weights: Tensor, strength: float) -> Tensor:
    """Return the point with the least weighted sum of distances, by Weiszfeld's iteration from the median."""
    centre = _median(values, weights)
    least = TINY * (1 + float(_distances(values, centre).median()))
    for _ in range(ITERATIONS):
        pull = weights / _distances(values, centre).clamp(min=least).unsqueeze(-1)
        before, centre = centre, _mean(values, pull, 0.0)
        if float((centre - before).abs().max()) <= 1e-10 * (1 + float(centre.abs().max())):
            break
    return centre


def _distances(values: Tensor, centre: Tensor) -> Tensor:
    away: Tensor = torch.linalg.vector_norm(values - centre, dim=1)
    return away


RULES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "mean": _mean,
    "clip": _clip,
    "median": _median,
    "trimmed": _trimmed,
    "geometric-median": _geometric_median,
}
STRENGTH = {"clip": 2.0, "trimmed": 0.2}
LIMITS = {"cap": 10.0, "screen": 2.0}
PLAIN = Aggregate()
ON_NODES = Aggregate(cap=LIMITS["cap"], screen=LIMITS["screen"])
"""The rule for nodes elsewhere, unless a run names another: the mean without long steps and huge weights."""
