"""The others' model and the risks of tuning the shared one at home, against brute force."""

import math

import pytest
import torch

from coterie.theory import filters, left_out

LAM = torch.tensor([0.0, 0.3, math.inf], dtype=torch.float64)


def clients(rows, d=6, count=5):
    draw = torch.Generator().manual_seed(rows)
    xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(count)]
    ys = [torch.randn(rows, generator=draw, dtype=torch.float64) for _ in range(count)]
    return xs, ys


def test_the_model_of_the_others():
    xs, ys = clients(4)
    matrix, side = sum(x.T @ x for x in xs), sum(x.T @ y for x, y in zip(xs, ys, strict=True))
    found = left_out.model(
        matrix,
        side,
        torch.stack([x.T @ x for x in xs]),
        torch.stack([x.T @ y for x, y in zip(xs, ys, strict=True)]),
    )
    for k in range(5):
        x, y = torch.cat(xs[:k] + xs[k + 1 :]), torch.cat(ys[:k] + ys[k + 1 :])
        assert torch.allclose(found[k], torch.linalg.lstsq(x, y[:, None]).solution[:, 0])


@pytest.mark.parametrize("rows", [4, 20])
def test_curves_are_the_estimators_risks(rows):
    """The estimators are linear in the residual at the others' model: push unit residuals through them."""
    xs, _ = clients(rows)
    matrix, x, d = sum(x.T @ x for x in xs), xs[0], 6
    own, zero, unit = x.T @ x, torch.zeros(d, rows, dtype=torch.float64), torch.eye(rows, dtype=torch.float64)
    covariance = (matrix - own) / (4 * rows)
    count, total = torch.tensor([[float(rows)]]).double(), torch.tensor(5.0 * rows).double()
    found = left_out.curves(matrix, own[None], count, total, LAM)[0]
    for at, lam in enumerate(LAM.tolist()):
        f = filters.interpolate if lam == 0 else filters.nothing if math.isinf(lam) else filters.ridge(lam)
        shared = torch.linalg.pinv(matrix) @ x.T
        for kind, passed in enumerate(
            (filters.personal(x, unit, shared, f), filters.personal(x, unit, zero, f))
        ):
            left = torch.eye(d, dtype=torch.float64) - passed @ x
            deviation = float((left.T @ covariance @ left).trace())
            noise = float((passed.T @ covariance @ passed).trace())
            assert found[2 * kind : 2 * kind + 2, at].tolist() == pytest.approx([deviation, noise], abs=1e-10)
