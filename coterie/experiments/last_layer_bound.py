"""Experiment asymptotics/last-layer: how much the best personal last layer gains over the best shared one.

There are no rounds and no step sizes. The shared layer is the best one for all clients (L-BFGS, ridge penalty chosen on
validation rows). A client's personal layer minimises its loss plus lam/2 |w - shared|^2, for lam from 1 to 0.003.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie._core.randomness import key, permutation
from coterie.experiments.pretrained_features import Features, Source, features
from coterie.experiments.spec import Experiment, Table

RIDGES = (1e-4, 1e-3)  # of the shared layer
PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)  # lam of the personal layers
SPLITS = 3
FEWEST_ROWS = 10


@dataclass(frozen=True)
class _Rows:
    """Padded rows of all clients [n, B, d] with a column of ones, classes, and weights that sum to one per client."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def loss(self, w: Tensor) -> Tensor:
        """Return the cross-entropy of every client [n] at its layer w [n, classes, d]."""
        each = cross_entropy((self.x @ w.mT).flatten(0, 1), self.y.flatten(), reduction="none")
        return (each.view(self.y.shape) * self.weight).sum(1)

    def accuracy(self, w: Tensor) -> Tensor:
        """Return the accuracy of every client in percent [n]."""
        return 100 * (((self.x @ w.mT).argmax(-1) == self.y) * self.weight).sum(1)


def personal_layer_gain(experiment: Experiment, seed: int) -> Table:
    """Return the test accuracy of the shared layer, and the gain of personal layers with lam chosen by validation."""
    settings: dict[str, Any] = dict(experiment.plans[0].settings)
    data = features(Source(**settings), seed)
    found = [_one_split(data, seed, split) for split in range(SPLITS)]
    mean: Table = {name: sum(float(one[name]) for one in found) / SPLITS for name in found[0]}
    gains = torch.tensor([[one[f"gain at {lam}"] for lam in PENALTIES] for one in found])
    return mean | {"largest gain at any pull": float(gains.mean(0).max())}


def _one_split(data: Features, seed: int, split: int) -> Table:
    """Measure the gain on one split of the rows."""
    train, validation, test = _split(data, seed, split)
    n, classes = len(train.x), data.classes

    def shared_layer(ridge: float) -> Tensor:
        zero = torch.zeros(1, classes, train.x.shape[-1])
        w = _lowest(
            zero, lambda w: train.loss(w.expand(n, -1, -1)).mean() + ridge / 2 * w.square().sum(), 120
        )
        return w.expand(n, -1, -1)

    shared = min(map(shared_layer, RIDGES), key=lambda w: float(validation.loss(w).mean()))
    before, loss = test.accuracy(shared), test.loss(shared)
    found: Table = {"shared": float(before.mean()), "shared loss": float(loss.mean())}
    own, chosen, lowest = shared.clone(), shared, float(validation.loss(shared).mean())
    for lam in PENALTIES:
        own = _lowest(own, lambda w, lam=lam: (train.loss(w) + lam / 2 * _square(w - shared)).sum(), 40)  # type: ignore[misc]
        found[f"gain at {lam}"] = float((test.accuracy(own) - before).mean())
        if float(validation.loss(own).mean()) < lowest:
            chosen, lowest = own, float(validation.loss(own).mean())
    gains = test.accuracy(chosen) - before
    found |= {"gain": float(gains.mean()), "standard error of the gain": float(gains.std() / n**0.5)}
    found["loss taken off, percent"] = 100 * (1 - float(test.loss(chosen).mean() / loss.mean()))
    return found


def _square(w: Tensor) -> Tensor:
    """Return |w|^2 of every client."""
    return w.square().sum((-1, -2))


def _lowest(start: Tensor, loss: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Minimise a loss by L-BFGS."""
    w = start.clone().requires_grad_()
    solver = torch.optim.LBFGS([w], max_iter=steps, line_search_fn="strong_wolfe")

    def evaluate() -> Tensor:
        solver.zero_grad()
        value = loss(w)
        torch.autograd.backward(value)
        return value

    step: Callable[[Callable[[], Tensor]], object] = solver.step
    step(evaluate)
    return w.detach()


def _split(data: Features, seed: int, split: int) -> list[_Rows]:
    """Split every client's rows into 60, 20 and 20 percent."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    for k, (x, y) in enumerate(zip(data.xs, data.ys, strict=True)):
        if len(x) >= FEWEST_ROWS:
            order = permutation(key(seed, "headroom", split, k), len(x))
            ends = int(0.6 * len(x)), int(0.8 * len(x))
            for part, rows in zip(parts, order.tensor_split(ends), strict=True):
                part.append((x[rows], y[rows]))
    return [_padded(part) for part in parts]


def _padded(clients: list[tuple[Tensor, Tensor]]) -> _Rows:
    """Pad the rows of every client to the longest client."""
    longest, d = max(len(y) for _, y in clients), clients[0][0].shape[1]
    x = torch.zeros(len(clients), longest, d + 1)
    y = torch.zeros(len(clients), longest, dtype=torch.long)
    weight = torch.zeros(len(clients), longest)
    for k, (own, classes) in enumerate(clients):
        rows = len(classes)
        x[k, :rows, :d], x[k, :rows, d], y[k, :rows], weight[k, :rows] = own, 1.0, classes, 1 / rows
    return _Rows(x, y, weight)
