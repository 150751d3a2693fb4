"""AUTO on freshly drawn shapes beside the published table."""

import pytest
import torch

from coterie.experiments.cluster_shapes import METHODS, SCATTER, STRESS, draw_cloud, scores, stress_cloud

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


@pytest.mark.slow
def test_auto_is_near_the_oracle_far_apart_and_an_overestimated_size_is_fatal():
    seeds = range(900, 912)
    assert scores(METHODS["auto[f/2,1.5F]"], 5.0, seeds) < 1.1 * TABLE[5.0]
    assert scores(METHODS["size(2f)"], 5.0, seeds) > 10


@pytest.mark.slow
@pytest.mark.parametrize("ratio", TABLE)
def test_auto_is_no_more_than_ten_percent_above_the_table(ratio):
    assert scores(METHODS["auto[f/2,1.5F]"], ratio, range(7000, 7096)) < 1.1 * TABLE[ratio]


HARD = {"nested": (1.22, 1.01), "outliers": (1.22, 0.93), "unequal": (1.71, 1.05), "one": (1.0, 1.0)}


@pytest.mark.quick("one")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("nested", "unequal"))) for name in STRESS],
)
def test_auto_on_shapes_that_break_simple_rules(name):
    """Stress shapes: AUTO not more than 10 % above the table at 2 and 5, beside the noise of eight data sets."""
    for ratio, published in zip((2.0, 5.0), HARD[name], strict=True):
        clouds = [stress_cloud(name, ratio, seed) for seed in range(8)]
        logs = [torch.tensor(c.score(METHODS["auto[f/2,1.5F]"](c))).log() for c in clouds]
        assert torch.stack(logs).mean().exp() < 1.1 * max(published, 1.0)


def test_size_is_right_for_equal_clusters_and_wrong_for_unequal_ones():
    """Stress shapes: SIZE(f) 1.17/.99 nested, 1.17/.91 with stray points, 7.8 for sizes 30, 12, 5."""
    scores_of = {
        name: [METHODS["size(f)"](cloud) for cloud in (stress_cloud(name, 5.0, seed) for seed in range(6))]
        for name in ("nested", "outliers", "unequal")
    }
    mean = {
        name: sum(stress_cloud(name, 5.0, k).score(v) for k, v in enumerate(found)) / len(found)
        for name, found in scores_of.items()
    }
    assert mean["nested"] < 1.2 and mean["outliers"] < 1.2 and mean["unequal"] > 4


def test_stray_points_are_not_scored():
    cloud = stress_cloud("outliers", 2.0, 0)
    assert len(cloud.points) == 42 and cloud.fractions.tolist() == pytest.approx([12 / 42] * 3)
    centres = torch.cat([cloud.means[cloud.truth[:36]], torch.full((6, 20), 1e9)])
    assert cloud.score(centres) == 0.0
