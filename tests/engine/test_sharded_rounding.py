"""A convolutional network in one process and over workers: what differs is rounding, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie.algorithms import make
from tests.engine.sharding import METHODS, crew, gap

ROUNDS = 3


def federation(stacked: bool, dtype: torch.dtype) -> Federation:
    """Return clients with images; their gradients are computed as a stack, or one client after the other."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(10 + 3 * k, 1, 14, 14, generator=generator).to(dtype) for k in range(6)]
    ys = [torch.randint(0, 10, (len(x),), generator=generator) for x in xs]
    return Federation.from_arrays(xs, ys, models.cnn(stacked=stacked), dtype=dtype)


def trained(method: str, stacked: bool, dtype: torch.dtype, workers: int = 1, exact: bool = False) -> Tensor:
    algorithm = make(method, **METHODS[method])
    sharing = {"workers": crew(workers, exact)} if workers > 1 or exact else {}
    return fit(federation(stacked, dtype), algorithm, rounds=ROUNDS, **sharing).personal


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_workers_that_compute_otherwise_differ_by_rounding(method: str) -> None:
    """In double precision nothing is left of the difference, so no client, row or minibatch is another."""
    one, four = trained(method, True, torch.float64), trained(method, False, torch.float64, workers=4)
    assert gap(one, four) < 1e-12
    one, four = trained(method, True, torch.float32), trained(method, False, torch.float32, workers=4)
    assert gap(one, four) < 1e-4  # rounding that units at zero and equal maxima of a pool make larger


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_exact_workers_have_the_same_bits_in_single_precision(method: str) -> None:
    """Whichever way one process would have chosen."""
    one, four = (trained(method, True, torch.float32, workers=count, exact=True) for count in (1, 4))
    assert torch.equal(one, four)
