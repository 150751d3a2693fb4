"""Federations that the tests of several algorithms share."""

from collections.abc import Callable

import pytest
import torch

from coterie import Federation, models

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
