"""The number of clusters on clouds where it is known, down to one."""

import pytest
import torch

from coterie.experiments.cluster_shapes import _scattered, draw_cloud
from coterie.theory.cluster_count import estimate_clusters


@pytest.mark.quick("3.0")
@pytest.mark.parametrize("ratio", [3.0, 5.0])
def test_clusters_apart_are_counted(ratio):
    clouds = [draw_cloud(ratio, seed) for seed in (50, 51)]
    assert [estimate_clusters(c.points) for c in clouds] == [len(c.means) for c in clouds]


@pytest.mark.slow
@pytest.mark.parametrize("scatter", ["gaussian", "axes", "tails", "ball"])
def test_one_cloud_is_one_cluster(scatter):
    found = [estimate_clusters(_scattered(36, d, scatter, seed)) for d, seed in ((2, 7), (200, 8))]
    assert found == [1, 1]


@pytest.mark.slow
def test_weak_clusters_in_many_dimensions():
    """Means one spread apart, as rotated writers are: the silhouette in all 2,000 dimensions is below 0.2."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4, 2000, generator=generator) / 2000**0.5 / 2**0.5
    noise = torch.randn(40, 2000, generator=generator) / 2000**0.5
    points = means.repeat(10, 1) * 1.2 + noise
    assert estimate_clusters(points) == 4
    assert estimate_clusters(noise) == 1


def test_stray_points_bad_answers_and_few_points():
    cloud = draw_cloud(5.0, 50)
    spoilt = torch.cat([cloud.points, 1e6 * torch.ones(1, cloud.points.shape[1])])
    spoilt = torch.cat([spoilt, torch.full((1, cloud.points.shape[1]), torch.nan)])
    assert estimate_clusters(spoilt) == len(cloud.means)
    assert estimate_clusters(torch.ones(9, 3)) == 1
    assert estimate_clusters(torch.randn(1, 3)) == 1
