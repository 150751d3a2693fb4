"""Growth of trees from histograms: the best split of each node, and one level of splits after the other.

All trees of a round (one for each score) grow together. The best splits of a level are taken first, until the tree has
its leaves. Of two children only the one with less curvature is asked for: the other is the difference to their parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.errors import SettingError, nearest
from coterie.models import fast
from coterie.models.tree_walk import FEATURE, MOST_LEVELS, PARENT, void
from coterie.models.trees import Trees

TIE = 1e-12  # relative difference of gains that is a matter of rounding
ORDERING = 10.0  # curvature added to each level of a category when levels are put in order


@dataclass(frozen=True)
class Rules:
    """What a split must fulfil.

    Attributes
    ----------
    smoothing : float
        Curvature added to each leaf: its value is -G / (H + smoothing).
    least : float
        Least curvature of a leaf; for squared loss, rows.
    gain : float
        Least reduction of the loss.
    categorical : Tensor
        Which features are categories, bool [features].
    signs : Tensor
        1 where the score may only rise with the feature, -1 where it may only fall, else 0, [features].
    """

    smoothing: float
    least: float
    gain: float
    categorical: Tensor
    signs: Tensor


@dataclass(frozen=True)
class BestSplits:
    """The best split of each node: its gain, the split without its parent, and the sums on the left, [nodes, ...]."""

    gain: Tensor
    feature: Tensor
    threshold: Tensor
    missing: Tensor
    left: Tensor


def value(sums: Tensor, smoothing: float, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Return the value -G / (H + smoothing) of leaves with sums [..., 2], between low and high."""
    best = -sums[..., 0] / (sums[..., 1] + smoothing).clamp(min=torch.finfo(sums.dtype).tiny)
    return best.clamp(min=torch.as_tensor(low).to(best), max=torch.as_tensor(high).to(best))


def reduction(sums: Tensor, at: Tensor, smoothing: float) -> Tensor:
    """Return twice by how much the value `at` lowers the loss of leaves with sums [..., 2]."""
    return -at * (2 * sums[..., 0] + (sums[..., 1] + smoothing) * at)


def _score(first: Tensor, second: Tensor, smoothing: float) -> Tensor:
    """Return G^2 / (H + smoothing), the `reduction` by the best value."""
    return first.square().div_((second + smoothing).clamp_(min=torch.finfo(first.dtype).tiny))


def best_splits(histograms: Tensor, low: Tensor, high: Tensor, rules: Rules) -> BestSplits:
    """Return the best split of each node.

    Parameters
    ----------
    histograms
        Sums of first and second derivatives, [nodes, features, bins, 2]; the last bin is for missing values. With a
        third number, the sum of first derivatives with a random sign for each client, a split gains also by what it
        tells of the differences between clients: the square of that sum is on average the sum of the clients' squares.
    low, high
        Bounds of the values in each node, [nodes].
    rules
        What a split must fulfil.
    """
    nodes, features, bins, width = histograms.shape
    total = histograms[:, 0].sum(1)
    parent = reduction(total, value(total, rules.smoothing, low, high), rules.smoothing)
    if width > 2:
        parent = parent + _score(total[:, 2], total[:, 1], rules.smoothing)
    path = fast.find("tree splits", histograms, rules.signs)
    if path is not None:
        limits = (rules.smoothing, rules.least, ORDERING, TIE)
        return BestSplits(*path.run(histograms, total, parent, rules.categorical, limits, MOST_LEVELS))
    parts = histograms.movedim(-1, 0).contiguous()  # [width, nodes, features, bins], which is faster
    values, gone = parts[..., :-1], parts[..., -1]
    order = torch.arange(bins - 1, device=values.device).expand(nodes, features, -1)
    if bool(rules.categorical.any()):
        mean = values[0] / (values[1] + ORDERING)
        ranked = torch.where(values[1] > 0, mean, torch.inf).argsort(dim=-1, stable=True)
        order = torch.where(rules.categorical.unsqueeze(-1), ranked, order)
        values = values.gather(-1, order.expand_as(values))
    left = values.cumsum(-1).unsqueeze(2)  # [width, nodes, ways, features, bins - 1]
    if bool((gone != 0).any()):  # missing values go right, or left
        left = torch.cat([left, left + gone.view(width, nodes, 1, features, 1)], 2)
    right = total.T.view(width, nodes, 1, 1, 1) - left
    allowed = (left[1] >= rules.least) & (right[1] >= rules.least)
    if bool(rules.signs.any()):
        lows, highs = low.view(nodes, 1, 1, 1), high.view(nodes, 1, 1, 1)
        sides = [side.movedim(0, -1) for side in (left, right)]
        on_left, on_right = (value(side, rules.smoothing, lows, highs) for side in sides)
        gains = reduction(sides[0], on_left, rules.smoothing) + reduction(sides[1], on_right, rules.smoothing)
        allowed &= rules.signs.view(1, 1, -1, 1) * (on_right - on_left) >= 0
    else:
        gains = _score(left[0], left[1], rules.smoothing) + _score(right[0], right[1], rules.smoothing)
    if width > 2:
        gains = (
            gains + _score(left[2], left[1], rules.smoothing) + _score(right[2], right[1], rules.smoothing)
        )
    gains = gains - parent.view(nodes, 1, 1, 1)
    gains = torch.where(allowed, gains, -torch.inf).flatten(1)
    gain = gains.max(1).values
    close = TIE * (gain.abs() + parent.abs())  # a tie goes to the first, whatever the last digits of sums are
    where = (gains >= (gain - close).unsqueeze(1)).int().argmax(1)
    count, node = features * (bins - 1), torch.arange(nodes, device=where.device)
    stays, feature, place = where // count, where % count // (bins - 1), where % (bins - 1)
    chosen = left[:, node, stays, feature, place].T
    nothing = gone[1, node, feature] <= 0
    larger = (chosen[:, 1] < total[:, 1] - chosen[:, 1]).long()  # 1: more lies on the right
    missing = torch.where(nothing, larger, 1 - stays)
    codes, ranks = order[node, feature], torch.arange(bins - 1, device=where.device)
    chosen_codes = (ranks > place.unsqueeze(-1)) & (codes < MOST_LEVELS)
    bits = torch.where(chosen_codes, torch.exp2(codes.double()), 0.0).sum(-1)
    threshold = torch.where(rules.categorical[feature], bits, place.double())
    return BestSplits(gain, feature, threshold, missing, chosen)


class Growth:
    """Trees of one round while they grow.

    Parameters
    ----------
    trees, leaves
        Number of trees, and most leaves of each.
    room
        Leaves that the tensors have room for.
    rules
        What a split must fulfil.
    """

    def __init__(self, trees: int, leaves: int, room: int, rules: Rules) -> None:
        self.rules, self.leaves, self.monotone = rules, leaves, bool(rules.signs.any())
        self.splits = void(trees, room - 1, like=torch.zeros((), dtype=torch.float64))
        self.sums = torch.zeros(trees, room, 2, dtype=torch.float64)
        self.low = torch.full((trees, room), -torch.inf, dtype=torch.float64)
        self.high = -self.low
        self.count = [1] * trees
        self.asked = torch.zeros(trees, 1, dtype=torch.long)  # leaves whose histograms are needed; -1: none
        self.siblings: dict[
            tuple[int, int], tuple[int, Tensor]
        ] = {}  # asked leaf -> sibling, parent's histogram

    @property
    def growing(self) -> bool:
        """True if another level may be split."""
        return bool((self.asked >= 0).any()) and any(count < self.leaves for count in self.count)

    def others(self) -> Tensor:
        """Return the siblings of the asked leaves, to be asked where clients differ from those asked before."""
        found = torch.full_like(self.asked, -1)
        for (tree, leaf), (sibling, _) in self.siblings.items():
            found[tree, (self.asked[tree] == leaf).nonzero().squeeze(-1)] = sibling
        return found

    def learn(self, histograms: Tensor, others: Tensor | None = None) -> None:
        """Split the leaves that were asked for, and their siblings.

        Parameters
        ----------
        histograms
            Sums [trees, asked, features, bins, 2 or 3] of the asked leaves.
        others
            Those of their siblings, if they are not to be the difference to their parents.
        """
        frontier: list[tuple[int, int]] = []
        found: list[Tensor] = []
        for tree, row in enumerate(self.asked.tolist()):
            for place, leaf in enumerate(row):
                if leaf < 0:
                    continue
                mine = histograms[tree, place]
                frontier.append((tree, leaf))
                found.append(mine)
                if (tree, leaf) in self.siblings:
                    sibling, parent = self.siblings[tree, leaf]
                    frontier.append((tree, sibling))
                    found.append(parent - mine if others is None else others[tree, place])
                else:
                    self.sums[tree, leaf] = mine[0].sum(0)[:2]
        at = tuple(torch.tensor(frontier).t())
        stacked = torch.stack(found)
        best = best_splits(stacked, self.low[at], self.high[at], self.rules)
        gains, totals = best.gain.tolist(), stacked[:, 0].sum(1)[:, :2].tolist()
        chosen = [part.tolist() for part in (best.feature, best.threshold, best.missing, best.left)]
        self.siblings, fresh = {}, [[] for _ in self.count]  # type: ignore[var-annotated]
        for k in best.gain.argsort(descending=True, stable=True).tolist():
            tree, leaf = frontier[k]
            if gains[k] > self.rules.gain and self.count[tree] < self.leaves:
                asked, sibling = self._split(tree, leaf, totals[k], *(part[k] for part in chosen))
                self.siblings[tree, asked] = sibling, stacked[k]
                fresh[tree].append(asked)
        width = max(1, *map(len, fresh))
        self.asked = torch.tensor([row + [-1] * (width - len(row)) for row in fresh])

    def values(self) -> Tensor:
        """Return the values of the leaves, [trees, leaves]."""
        return value(self.sums, self.rules.smoothing, self.low, self.high)

    def _split(
        self,
        tree: int,
        leaf: int,
        total: list[float],
        feature: int,
        threshold: float,
        missing: float,
        left: list[float],
    ) -> tuple[int, int]:
        """Split a leaf; return the child to be asked for, and its sibling."""
        fresh = self.count[tree]
        self.count[tree] += 1
        (g, h), right = left[:2], [total[0] - left[0], total[1] - left[1]]
        sides = torch.tensor([[g, h], right], dtype=torch.float64)
        self.sums[tree, leaf], self.sums[tree, fresh] = sides
        split = (leaf, feature, threshold, missing, right[1] / ((h + right[1]) or 1.0))  # PARENT, ..., SHARE
        self.splits[tree, fresh - 1] = torch.tensor(split, dtype=torch.float64)
        if self.monotone:
            self._narrow(tree, leaf, fresh, float(self.rules.signs[feature]), sides)
        return (leaf, fresh) if h <= right[1] else (fresh, leaf)

    def _narrow(self, tree: int, leaf: int, fresh: int, sign: float, sides: Tensor) -> None:
        """Give the two children of a leaf its bounds; those of a monotone feature meet in the middle."""
        low, high = self.low[tree, leaf].clone(), self.high[tree, leaf].clone()
        self.low[tree, fresh], self.high[tree, fresh] = low, high
        if sign:
            ends = value(sides, self.rules.smoothing, low, high)
            middle = 0.5 * (ends[0] + ends[1])
            below, above = (leaf, fresh) if sign > 0 else (fresh, leaf)
            self.high[tree, below] = torch.minimum(high, middle)
            self.low[tree, above] = torch.maximum(low, middle)


def bounds(splits: Tensor, values: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return between which values the leaves of trees may lie so that they keep the order that `signs` asks for.

    At a split on a feature with a sign, the leaves of both sides meet in the middle between their shared values.

    Parameters
    ----------
    splits, values
        Trees [trees, splits, 5] whose shared values [trees, leaves] are in order.
    signs
        [features].
    """
    low, high = torch.full_like(values, -torch.inf), torch.full_like(values, torch.inf)
    if not bool(signs.any()):
        return low, high
    for tree, rows in enumerate(splits.tolist()):
        under = {leaf: [leaf] for leaf in range(values.shape[1])}
        for s in range(len(rows) - 1, -1, -1):
            parent, feature = int(rows[s][PARENT]), int(rows[s][FEATURE])
            if parent < 0:
                continue
            left, right = under[parent], under[s + 1]
            sign = float(signs[feature])
            if sign:
                below, above = (left, right) if sign > 0 else (right, left)
                middle = 0.5 * (values[tree, below].max() + values[tree, above].min())
                high[tree, below] = high[tree, below].clamp(max=middle)
                low[tree, above] = low[tree, above].clamp(min=middle)
            under[parent] = left + right
    return low, high


def monotone_signs(text: str, names: Sequence[str], model: Trees) -> Tensor:
    """Return 1, -1 or 0 for each feature, as a text such as "age+, dose-" says."""
    signs = torch.zeros(model.width, dtype=torch.float64)
    for word in text.replace(",", " ").split():
        name, sign = word[:-1], {"+": 1.0, "-": -1.0}.get(word[-1])
        if sign is None or name not in names:
            raise SettingError(
                f"trees: monotone = {word!r} is not a column with + or - behind it.{nearest(name, names)}"
            )
        at = names.index(name)
        if bool(model.categorical[at]) or model.outputs > 1:
            what = "a category" if bool(model.categorical[at]) else "for more than two classes"
            raise SettingError(f"trees: monotone = {word!r}: {name} is {what}, which has no order")
        signs[at] = sign
    return signs
