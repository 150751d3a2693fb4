"""Federations that the tests of several algorithms share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from coterie import Federation, models
from coterie._core import randomness

Make = Callable[..., Federation]


@pytest.fixture(scope="session")
def least_squares() -> Make:
    """Clients whose true parameters differ; ridge regression."""

    def make(n: int = 6, d: int = 8, rows: int = 20, seed: int = 0) -> Federation:
        draw = torch.Generator().manual_seed(seed)
        xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(n)]
        ys = [x @ torch.randn(d, generator=draw, dtype=torch.float64) for x in xs]
        return Federation.from_arrays(xs, ys, models.linear(l2=0.1))

    return make


@pytest.fixture(scope="session")
def logistic() -> Make:
    """Clients whose classes are divided by different planes, with noise; logistic regression."""

    def make(n: int = 8, d: int = 6, rows: int = 30, seed: int = 1, l2: float = 0.1, **options) -> Federation:
        draw = torch.Generator().manual_seed(seed)
        xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(n)]
        planes = (torch.randn(d, generator=draw, dtype=torch.float64) for _ in range(n))
        noise = (torch.randn(rows, generator=draw) for _ in range(n))
        ys = [(x @ w + e > 0).double() for x, w, e in zip(xs, planes, noise, strict=True)]
        return Federation.from_arrays(xs, ys, models.logistic(l2=l2), **options)

    return make


@dataclass(frozen=True)
class Reference:
    """Least-squares clients in numpy, with the minibatches that the engine draws: for plain loops in tests."""

    fed: Federation
    xs: list[np.ndarray]
    ys: list[np.ndarray]

    @property
    def share(self) -> np.ndarray:
        """Rows of each client as a fraction of all."""
        rows = np.array([len(x) for x in self.xs], dtype=float)
        return rows / rows.sum()

    def rows(self, phase: str, t: int, call: int, client: int, step: int, batch: int) -> np.ndarray:
        """Rows of minibatch `step` = 1, 2, ... of a phase; all rows if batch is 0 or there are no more."""
        size = len(self.xs[client])
        if batch == 0 or size <= batch:
            return np.arange(size)
        key = randomness.fold(randomness.key(self.fed.seed, phase, t, call), torch.tensor([client]))
        return randomness.integers(randomness.slots(randomness.fold(key, step), batch), size)[0].numpy()

    def grad(self, client: int, w: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Gradient of half the mean squared error."""
        x, y = self.xs[client], self.ys[client]
        x, y = (x, y) if rows is None else (x[rows], y[rows])
        return x.T @ (x @ w - y) / len(y)

    def optimum(self, share: np.ndarray | None = None) -> np.ndarray:
        """Minimiser of the average loss."""
        share = self.share if share is None else share
        left = sum(p * x.T @ x / len(x) for p, x in zip(share, self.xs, strict=True))
        right = sum(p * x.T @ y / len(x) for p, x, y in zip(share, self.xs, self.ys, strict=True))
        return np.linalg.solve(left, right)


@pytest.fixture
def reference() -> Callable[..., Reference]:
    """Ragged clients; with `opposite`, the second half has the parameters of the first with the other sign."""

    def make(
        sizes: tuple[int, ...] = (6, 9, 30, 12), d: int = 3, opposite: bool = False, noise: float = 0.1
    ) -> Reference:
        rng = np.random.default_rng(5)
        xs = [rng.normal(size=(rows, d)) for rows in sizes]
        truth = rng.normal(size=d)
        ys = []
        for k, x in enumerate(xs):
            own = (truth if k < len(xs) / 2 else -truth) if opposite else truth + rng.normal(size=d)
            ys.append(x @ own + noise * rng.normal(size=len(x)))
        return Reference(Federation.from_arrays(xs, ys, models.linear()), xs, ys)

    return make
