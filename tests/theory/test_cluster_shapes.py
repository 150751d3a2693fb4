"""AUTO on freshly drawn shapes beside the published table (clusters.md, B2)."""

import pytest
import torch

from coterie.theory.cluster_shapes import METHODS, SCATTER, draw_cloud, scores

TABLE = {1.0: 2.43, 1.5: 1.99, 2.0: 1.78, 3.0: 1.44, 5.0: 1.18, 10.0: 1.03}


def test_a_cloud_has_unit_spread_and_the_asked_separation():
    spreads = []
    for seed in range(40):
        cloud = draw_cloud(3.0, seed)
        assert float(torch.pdist(cloud.means).min()) == pytest.approx(3.0)
        spreads.append(float(((cloud.points - cloud.means[cloud.truth]) ** 2).sum(1).mean()))
    assert sum(spreads) / len(spreads) == pytest.approx(1.0, abs=0.1)
    assert len(SCATTER) == 4


def test_the_mean_of_the_true_cluster_scores_one():
    def oracle(cloud):
        means = [cloud.points[cloud.truth == k].mean(0) for k in range(len(cloud.means))]
        return torch.stack(means)[cloud.truth]

    assert scores(oracle, 2.0, range(60)) == pytest.approx(1.0, abs=0.1)


def test_auto_is_near_the_oracle_far_apart_and_an_overestimated_size_is_fatal():
    seeds = range(900, 912)
    assert scores(METHODS["auto[f/2,1.5F]"], 5.0, seeds) < 1.1 * TABLE[5.0]
    assert scores(METHODS["size(2f)"], 5.0, seeds) > 10


@pytest.mark.slow
@pytest.mark.parametrize("ratio", TABLE)
def test_auto_is_no_more_than_ten_percent_above_the_table(ratio):
    assert scores(METHODS["auto[f/2,1.5F]"], ratio, range(7000, 7096)) < 1.1 * TABLE[ratio]
