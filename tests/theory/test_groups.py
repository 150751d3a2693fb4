"""Sums over groups and back, with an index or as a view."""

import pytest
import torch

from coterie.theory.groups import Groups


@pytest.mark.parametrize(
    "of", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 2], [1, 1, 1, 1, 1, 1]]
)
def test_groups(of):
    of, count = torch.tensor(of), 3
    values, own = torch.randn(6, 4, dtype=torch.float64), torch.rand(3, 1, dtype=torch.float64)
    groups = Groups(of, count)
    expected = torch.stack([values[of == j].sum(0) for j in range(count)])
    torch.testing.assert_close(groups.sum(values), expected)
    out = torch.empty_like(values)
    assert groups.blend(expected, own, values, out) is out
    torch.testing.assert_close(out, expected[of] + own[of] * values)
    assert (groups.shape is not None) == (of.tolist() == [0, 0, 1, 1, 2, 2])
