"""Boosted trees as a model: one flat vector holds the splits of all trees and the values of their leaves.

The vector is base [C], splits [T, C, L - 1, 5] and values [T, C, L] for T rounds of C trees (one per score) with L
leaves. Splits are the "body", base and values the "head". Given the splits, a score is linear in the head: the sum of
the base and one value of each tree.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from coterie._core.errors import DataError, SettingError
from coterie.models import histograms
from coterie.models.base import Model, dot
from coterie.models.binning import NO_EDGE
from coterie.models.class_weights import checked, weigh
from coterie.models.groups import ParameterGroups
from coterie.models.metrics import Metric, ScoredRows
from coterie.models.objectives import COUNTS, OBJECTIVES, TWEEDIE_POWER, Objective
from coterie.models.targets import check_column, count_classes
from coterie.models.tree_predictor import TreePredictor
from coterie.models.tree_walk import (
    COLUMNS,
    FEATURE,
    MISSING,
    MOST_LEVELS,
    PARENT,
    SHARE,
    THRESHOLD,
    Walk,
    leaves,
    leaves_of_stack,
    trees_in_use,
)


@dataclass(frozen=True, eq=False)
class Trees(Model):
    """Boosted trees: score = base + sum over trees of the value of the row's leaf."""

    trees: int = 100
    leaves: int = 16
    objective: str = "auto"
    classes: int | None = None
    features: int | None = None
    levels: tuple[int, ...] | None = None
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.trees < 1 or self.leaves < 2:
            raise SettingError(
                f"trees={self.trees}, leaves={self.leaves}: give at least one tree with two leaves"
            )
        if self.objective not in ("auto", *OBJECTIVES):
            raise SettingError(
                f"objective={self.objective!r} is unknown: choose auto, {', '.join(OBJECTIVES)}"
            )
        if any(count > MOST_LEVELS for count in self.levels or ()):
            raise SettingError(f"a category may have {MOST_LEVELS} levels; spread one with more over columns")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trees) and asdict(self) == asdict(other)

    __hash__ = Model.__hash__

    @property
    def outputs(self) -> int:
        return self.classes if self.loss_of.name == "multiclass" and self.classes else 1

    @property
    def loss_of(self) -> Objective:
        """The loss, known once the model was fitted to rows."""
        if self.objective == "auto":
            raise SettingError("trees() does not know its targets yet; call fit_to(x, y) first.")
        return OBJECTIVES[self.objective]

    @property
    def task(self) -> str:
        return "regression" if self.objective in COUNTS else self.loss_of.name

    @property
    def encoding(self) -> str:
        return "raw"

    @property
    def target_in_units(self) -> bool:
        return self.objective in COUNTS

    @property
    def width(self) -> int:
        """Number of features."""
        if self.features is None:
            raise SettingError("trees() does not know its inputs yet; call fit_to(x, y) first.")
        return self.features

    @property
    def d(self) -> int:
        return self.outputs + self.trees * self.outputs * ((self.leaves - 1) * COLUMNS + self.leaves)

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        """Return a copy with its loss: squared for numbers, logistic for two classes, softmax for more."""
        if x.dim() != 2 or x.shape[0] != y.shape[0]:
            raise DataError(
                f"trees() takes inputs [rows, features] and one target per row, not {tuple(x.shape)}, {tuple(y.shape)}"
            )
        if self.features not in (None, x.shape[1]):
            raise DataError(f"The model expects {self.features} features; these rows have {x.shape[1]}.")
        if self.levels is not None and len(self.levels) != x.shape[1]:
            raise DataError(
                f"levels has {len(self.levels)} entries for {x.shape[1]} features; 0 means a number"
            )
        fitted = replace(self, features=x.shape[1])
        if self.objective in ("regression", *COUNTS) or (self.objective == "auto" and y.is_floating_point()):
            check_column(y)
            if self.objective in COUNTS and bool((y < 0).any()):
                row = int((y < 0).nonzero()[0])
                raise DataError(
                    f"Target of row {row} is {y[row].item():g}; {self.objective} counts from 0 up. "
                    "Use objective='regression'."
                )
            return replace(fitted, objective="regression" if self.objective == "auto" else self.objective)
        classes = max(2, count_classes(y, self.classes))
        if self.objective == "binary" and classes > 2:
            raise DataError(f"objective='binary' is for labels 0 and 1; label {classes - 1} was found.")
        kind = "binary" if classes == 2 and self.objective != "multiclass" else "multiclass"
        return replace(fitted, objective=kind, classes=classes)

    def with_levels(self, levels: Sequence[int]) -> Self:
        return replace(self, levels=tuple(levels))

    def with_class_weights(self, weights: Sequence[float]) -> Self:
        return replace(self, class_weights=checked(weights))

    @functools.cached_property
    def categorical(self) -> Tensor:
        """Which features are categories, bool [features]."""
        return torch.tensor([count > 0 for count in self.levels or [0] * self.width])

    def parts(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return base [..., C], splits [..., T, C, L - 1, 5] and values [..., T, C, L], as views of w [..., d]."""
        c, t, size = self.outputs, self.trees, self.leaves
        cut = c + t * c * (size - 1) * COLUMNS
        splits = w[..., c:cut].unflatten(-1, (t, c, size - 1, COLUMNS))
        return w[..., :c], splits, w[..., cut:].unflatten(-1, (t, c, size))

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return a vector of trees that split nothing and add nothing."""
        w = torch.zeros(self.d, dtype=dtype, device=device)
        self.parts(w)[1][..., PARENT] = -1
        return w

    @property
    def groups(self) -> ParameterGroups:
        """Splits are the body, base and values of leaves the head."""
        cut = self.d - self.trees * self.outputs * self.leaves
        head, body = [slice(0, self.outputs), slice(cut, self.d)], [slice(self.outputs, cut)]
        return ParameterGroups(
            self.d,
            {"all": [slice(0, self.d)], "head": head, "body": body, "buffers": [], "values": head[1:]},
        )

    def in_units(self, splits: Tensor, edges: Tensor) -> Tensor:
        """Return splits whose thresholds are bins with the cut points [features, count] in their place."""
        feature, place = splits[..., FEATURE].long(), splits[..., THRESHOLD]
        last = torch.full_like(edges[:, :1], NO_EDGE)
        cuts = torch.cat([edges, last], 1)[feature, place.long().clamp(0, edges.shape[1])]
        units = splits.to(edges.dtype).clone()
        kinds = nn.functional.pad(self.categorical, (0, len(edges) - self.width)).to(edges.device)
        number = ~kinds[feature]
        units[..., THRESHOLD] = torch.where(number, cuts, place.to(edges.dtype))
        return units

    def along(self, w: Tensor, profile: Tensor | None = None) -> Tensor:
        """Return w with the way of a client in place of splits that tell clients apart.

        Such a split has a number beyond the features, and a threshold for one number of the client's profile [..., C];
        without a profile, the larger side is taken. What is left is a split of a feature that sends all rows one way.
        """
        w = w.clone()
        splits = self.parts(w)[1]
        apart = splits[..., FEATURE] >= self.width
        right = splits[..., SHARE] > 0.5
        if profile is not None:
            which = (splits[..., FEATURE] - self.width).clamp(min=0).long()
            mine = profile.to(w).view(*profile.shape[:-1], 1, 1, -1).expand(*which.shape[:-1], -1)
            right = mine.gather(-1, which) > splits[..., THRESHOLD]
        at = int((~self.categorical).nonzero()[0]) if bool((~self.categorical).any()) else 0
        ends = (
            (0.0, float(2 ** self.levels[at] - 1)) if self.levels and self.levels[at] else (NO_EDGE, -NO_EDGE)
        )
        ways = {FEATURE: 0.0 * right + at, THRESHOLD: torch.where(right, ends[1], ends[0])}
        ways |= {MISSING: right.to(w), SHARE: right.to(w)}
        for column, value in ways.items():
            splits[..., column] = torch.where(apart, value.to(w), splits[..., column])
        return w

    def first_trees(self, w: Tensor, count: int) -> Tensor:
        """Make the trees after the first `count` of w void, and return it."""
        _, splits, values = self.parts(w)
        splits[..., count:, :, :, PARENT] = -1
        values[..., count:, :, :] = 0
        return w

    def leaf_numbers(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the leaf of each row in each tree in use, int64 [..., B, t * C], for w [..., d]."""
        _, splits, values = self.parts(w)
        count = trees_in_use(splits, values)
        if not count:
            return torch.zeros(*x.shape[:-1], 0, dtype=torch.long, device=x.device)
        splits = splits[..., :count, :, :, :].flatten(-4, -3)
        if w.dim() == 1:
            return leaves(splits, self.categorical, x)
        stack = w.shape[:-1].numel()
        splits, rows = splits.reshape(stack, *splits.shape[-3:]), x.reshape(stack, *x.shape[-2:])
        return leaves_of_stack(splits, self.categorical, rows).view(*x.shape[:-1], splits.shape[1])

    def margins(self, w: Tensor, x: Tensor, found: Tensor | None = None) -> Tensor:
        """Return the scores on the scale on which trees add up, [..., B, C]."""
        found = self.leaf_numbers(w, x) if found is None else found
        base, _, values = self.parts(w)
        return base.unsqueeze(-2) + self._sums(values, found)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return self.loss_of.inverse_link(self.margins(w, x))

    def indicators(self, w: Tensor, x: Tensor) -> Tensor:
        """Return 1 where a row is in a leaf, [..., B, t * C * L]: features for a linear model on finished trees."""
        found = self.leaf_numbers(w, x)
        return nn.functional.one_hot(found, self.leaves).flatten(-2).to(w.dtype)

    def measure(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        margins = self.margins(w, x)
        rows = ScoredRows(
            self.task, self.loss_of.inverse_link(margins), y, weight, self.loss_of.loss(margins, y)
        )
        return {metric.name: metric.sums(rows) for metric in metrics}

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return dot(self.loss_of.loss(self.margins(w, x), y), weigh(weight, y, self.class_weights))

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient in base and values of trees in use; it is zero in the splits."""
        found = self.leaf_numbers(w, x)
        first, _ = self.loss_of.derivatives(self.margins(w, x, found), y)
        return self._spread(w, found, first * weigh(weight, y, self.class_weights).unsqueeze(-1))

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        found = self.leaf_numbers(w, x)
        base, _, values = self.parts(v)
        change = base.unsqueeze(-2) + self._sums(values, found)
        margins = self.margins(w, x, found)
        if self.outputs > 1:
            likely = torch.softmax(margins, -1)
            bent = likely * (change - (likely * change).sum(-1, keepdim=True))
        else:
            bent = self.loss_of.derivatives(margins, y)[1] * change
        return self._spread(w, found, bent * weigh(weight, y, self.class_weights).unsqueeze(-1))

    def hidden_features(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the rows themselves."""
        return x

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the bound of the curvature in base and values: rows have one entry in each tree."""
        second = self.loss_of.derivatives(self.margins(w, x), y)[1].amax(-1)
        return (1 + self.trees) * dot(second, weight)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        raise SettingError("trees have no minimiser in closed form; train them with the method 'trees'")

    def paths_used(self) -> Counter[str]:
        return Counter(histograms.used)

    def module(self, w: Tensor) -> nn.Module:
        base, splits, values = self.parts(w.detach())
        count = max(1, trees_in_use(splits, values))
        walk = Walk(splits[:count].flatten(0, 1), self.categorical)
        return TreePredictor(walk, base, values, self.task, self.target_in_units)

    def describe(self) -> dict[str, Any]:
        levels = None if self.levels is None else list(self.levels)
        described = {"model": "trees", **asdict(self), "levels": levels}
        if self.class_weights is None:
            del described["class_weights"]  # as files before there were any
        return described

    def _sums(self, values: Tensor, found: Tensor) -> Tensor:
        """Return the sum over trees of the values [..., T, C, L] of the leaves found, [..., B, C]."""
        trees = values.flatten(-3, -2)[..., : found.shape[-1], :]
        if not found.shape[-1]:
            return values.new_zeros(*found.shape[:-1], self.outputs)
        picked: Tensor = trees.gather(-1, found.mT).unflatten(-2, (-1, self.outputs))
        return picked.sum(-3).mT

    def _spread(self, w: Tensor, found: Tensor, per_row: Tensor) -> Tensor:
        """Return a vector [..., d] with the sums over rows of per_row [..., B, C] in base and leaves."""
        result = torch.zeros_like(w)
        base, _, values = self.parts(result)
        base.copy_(per_row.sum(-2))
        count = found.shape[-1] // self.outputs
        if count:
            spread = per_row.mT.unsqueeze(-3).expand(*per_row.shape[:-2], count, self.outputs, -1)
            found = found.mT.unflatten(-2, (count, self.outputs))
            values[..., :count, :, :].scatter_add_(-1, found, spread)
        return result


def trees(
    trees: int = 100,
    leaves: int = 16,
    objective: str = "auto",
    levels: Sequence[int] | None = None,
    classes: int | None = None,
) -> Trees:
    """Return boosted trees, which the method `trees` grows; splits are shared, values of leaves personal.

    Parameters
    ----------
    trees
        Room for so many trees, or so many for each class: rounds beyond it add none.
    leaves
        Most leaves of a tree.
    objective
        "regression", "binary", "multiclass", "poisson" or "tweedie" (counts and amounts, on the log scale); "auto" goes
        by the targets: numbers, two classes or more.
    levels
        Number of levels of each feature that is a category with codes 0, 1, ..., and 0 for numbers; a table says it by
        itself.
    classes
        Number of classes if some may be missing from the data.

    Returns
    -------
    Trees
        A model that takes NaN for missing values.

    Examples
    --------
    >>> import torch, coterie
    >>> xs = [torch.tensor([[0.0], [1.0], [2.0], [3.0]])] * 2
    >>> ys = [torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 3.0, 3.0])]
    >>> fed = coterie.Federation.from_arrays(xs, ys, coterie.models.trees(trees=20, leaves=2))
    >>> run = coterie.fit(fed, coterie.algorithms.BoostedTrees(lr=0.5, lambda_=0.1, least=0.5), rounds=20)
    >>> [round(float(run.model(name)(torch.tensor([[3.0]]))), 1) for name in fed.names]
    [1.0, 3.0]
    """
    return Trees(trees, leaves, objective, classes, None, None if levels is None else tuple(levels))


def with_loss_of(own: Model, given: Model | str) -> Model:
    """Return trees with the loss of a given model of counts or amounts; other models as they are.

    Parameters
    ----------
    own
        The model that a method brings along.
    given
        The model that was asked for, or its name.

    Returns
    -------
    Model
        Trees for Poisson regression have Poisson's loss.

    Raises
    ------
    SettingError
        Tweedie's loss is asked for with a power that trees do not have.

    Examples
    --------
    >>> with_loss_of(trees(), "poisson").objective
    'poisson'
    """
    name = given if isinstance(given, str) else getattr(given, "name", "")
    if not isinstance(own, Trees) or name not in COUNTS:
        return own
    if getattr(given, "power", TWEEDIE_POWER) != TWEEDIE_POWER:
        raise SettingError(f"trees have Tweedie's loss with power {TWEEDIE_POWER} only")
    return replace(own, objective=name)


def restore(**settings: Any) -> Trees:
    """Return the model that `Trees.describe` described."""
    lists = {name: settings.get(name) for name in ("levels", "class_weights")}
    return Trees(**settings | {name: None if one is None else tuple(one) for name, one in lists.items()})
