"""Averages of replies by hand."""

import pytest
import torch

from coterie.engine.replies import Replies

ROWS = torch.tensor([[10.0], [30.0], [5.0], [5.0]])
REPLIES = Replies(torch.tensor([0, 1, 3, 4]), {"": torch.tensor([[1.0], [5.0], [2.0], [4.0]])}, ROWS)
CLUSTERS = torch.tensor([0, 0, 2, 1, 1])


def test_clusters_are_averaged_by_rows_or_evenly():
    empty = torch.full((3, 1), -7.0)
    assert REPLIES.mean(by=CLUSTERS, default=empty).tolist() == [[4.0], [3.0], [-7.0]]
    assert REPLIES.mean(by=CLUSTERS, default=empty, uniform=True).tolist() == [[3.0], [3.0], [-7.0]]
    assert REPLIES.mean().item() == pytest.approx((10 + 150 + 10 + 20) / 50)
