"""Products with few vectors are the products of matrices, whoever makes them."""

from __future__ import annotations

import pytest
import torch

from coterie.models import few


@pytest.mark.parametrize("vectors", [1, 2, 10, 64, 65])
@pytest.mark.parametrize("rows", [1, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_products(vectors: int, rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(vectors, 401, generator=draw, dtype=torch.float64)
    x = torch.randn(rows, 401, generator=draw, dtype=torch.float64)
    shares = torch.randn(vectors, rows, generator=draw, dtype=torch.float64)
    scores = few.scores(table.to(dtype), x.to(dtype))
    total = few.combine(shares.to(dtype), x.to(dtype))
    assert scores.dtype == total.dtype == dtype
    close = {"rtol": 0, "atol": 2e-4 if dtype == torch.float32 else 1e-12}
    torch.testing.assert_close(scores.double(), table @ x.t(), **close)
    torch.testing.assert_close(total.double(), shares @ x, **close)


def test_rows_that_are_part_of_something_else() -> None:
    """Every other column is not contiguous; rows from the middle are."""
    whole, table = torch.randn(1500, 802), torch.randn(10, 401)
    for x in (whole[:, ::2], whole[:, :401], whole[300:1200, :401].contiguous()[100:]):
        torch.testing.assert_close(few.scores(table, x), table @ x.t(), rtol=1e-4, atol=1e-3)
        shares = torch.randn(10, len(x))
        torch.testing.assert_close(few.combine(shares, x), shares @ x, rtol=1e-4, atol=1e-3)
