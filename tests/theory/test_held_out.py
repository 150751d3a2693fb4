"""The best penalty between the points of the grid."""

import math

import pytest
import torch

from coterie.theory import held_out


@pytest.mark.parametrize("best", [-3.1, 0.05, 2.0, 4.44])
def test_a_parabola_in_the_logarithm_is_found_exactly(best):
    lam = held_out.penalties(scale=2.0)
    curve = 1 + (lam[1:-1].log() - best).square()
    curve = torch.cat([curve.max()[None], curve, curve.max()[None]])
    found, value = held_out.lowest(curve, lam)
    assert float(found) == pytest.approx(math.exp(best), rel=1e-6) and float(value) == pytest.approx(
        1.0, abs=1e-9
    )


def test_the_ends_of_the_grid_are_penalties_too():
    lam = held_out.penalties(scale=1.0)
    rising = torch.arange(len(lam), dtype=torch.float64)
    assert [float(part) for part in held_out.lowest(rising, lam)] == [0.0, 0.0]
    assert float(held_out.lowest(-rising, lam)[0]) == math.inf
