"""Ward's tree against scipy's and against brute force; clusters by held-out losses."""

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from coterie.theory.cluster_quality import cluster_quality
from coterie.theory.cluster_tree import chosen, coarse, credible, cut, numbered, ward
from coterie.theory.sparse_links import candidates, merge, sparse_consensus
from coterie.theory.threshold_starts import seed_weights, stray


def test_equal_weights_give_scipys_tree():
    points = torch.tensor(np.random.default_rng(0).normal(size=(30, 4)))
    tree = ward(points, torch.ones(30))
    theirs = linkage(points.numpy(), "ward")
    np.testing.assert_allclose(tree.costs, theirs[:, 2] ** 2 / 2, rtol=1e-9)
    for k in (2, 5, 9):
        labels = torch.zeros(30, dtype=torch.long)
        parts = [58]
        while len(parts) < k:
            last = max(parts)
            parts.remove(last)
            parts += tree.children[last - 30].tolist()
        for label, node in enumerate(parts):
            labels[tree.members[node]] = label
        truth = torch.tensor(fcluster(theirs, k, "maxclust"))
        assert float(cluster_quality(labels, truth)["ari"]) == 1.0


def test_a_weight_is_as_many_equal_points():
    points = torch.tensor([[0.0, 1.0], [2.0, 0.5], [2.5, 3.0]], dtype=torch.float64)
    weights = torch.tensor([3.0, 1.0, 2.0])
    tree = ward(points, weights)
    copies = linkage(points.repeat_interleave(weights.long(), 0).numpy(), "ward")
    np.testing.assert_allclose(tree.costs, copies[-2:, 2] ** 2 / 2)


def test_given_a_number_of_clusters_lone_points_take_none():
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(20, 3, generator=draw, dtype=torch.float64)
    points[12:16, 0] += 40
    points[16:, 1] += 40
    far = torch.cat([points, torch.tensor([[1e6, 0, 0], [0, -1e7, 0]], dtype=torch.float64)])
    labels = cut(ward(far, torch.ones(22)), far, 3)
    assert torch.equal(labels[:20], torch.tensor([0] * 12 + [1] * 4 + [2] * 4))


def test_whole_clusters_are_not_stray_but_lone_points_are():
    draw = torch.Generator().manual_seed(1)
    points = torch.randn(18, 3, generator=draw, dtype=torch.float64)
    points[12:, 0] += 1e4
    assert not stray(points).any()
    alone = torch.cat([points, torch.tensor([[0.0, 5e3, 0.0]], dtype=torch.float64)])
    assert stray(alone).tolist() == [False] * 18 + [True]
    centres = seed_weights(alone, 2, far=True) @ alone
    assert sorted((centres[:, 0] > 5e3).tolist()) == [False, True]


def test_held_out_losses_choose_from_one_cluster_to_everybody_alone():
    points = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    tree = ward(points, torch.ones(4))
    nodes, fine = torch.arange(7), torch.arange(4)
    sizes = tree.members.sum(1)
    losses = torch.zeros(7, 4, 5)
    losses[sizes == 2] = -1.0
    losses[sizes == 4] = 3.0
    losses = losses * tree.members.unsqueeze(-1)
    assert chosen(tree, nodes, losses, fine).tolist() == [0, 0, 1, 1]
    assert chosen(tree, nodes, losses.abs(), fine).tolist() == [0, 1, 2, 3]
    assert chosen(tree, nodes, -losses.abs(), fine).tolist() == [0, 0, 0, 0]


def test_chance_splits_few_clusters():
    """Clients of one cluster gain a little by sharing, whatever the group; each fold is noisy."""
    tree = ward(torch.tensor([[0.0], [0.1], [5.0], [5.1]]), torch.ones(4))
    inside = tree.members.unsqueeze(-1) & (tree.members.sum(1) > 1).view(-1, 1, 1)
    split = 0
    for seed in range(60):
        noise = torch.randn(7, 4, 5, generator=torch.Generator().manual_seed(seed))
        split += int(chosen(tree, torch.arange(7), (0.1 * noise - 0.05) * inside, torch.arange(4)).max() > 0)
    assert split <= 9


def test_near_points_of_a_coarse_tree_may_each_be_alone():
    fine = torch.tensor([0, 0, 1])
    tree = ward(torch.tensor([[0.0], [5.0]]), torch.tensor([2.0, 1.0]))
    losses = torch.zeros(3, 3, 5)
    losses[0, :2], losses[2] = 1.0, 9.0
    assert chosen(tree, torch.arange(3), losses, fine).tolist() == [0, 1, 2]
    losses[0, :2] = -1.0
    assert chosen(tree, torch.arange(3), losses, fine).tolist() == [0, 0, 1]


def test_many_points_are_first_put_together():
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(40, 2, generator=draw).repeat_interleave(25, 0) * 50 + torch.randn(
        1000, 2, generator=draw
    )
    groups = coarse(points, torch.ones(1000), 200, seed=0)
    assert int(groups.max()) < 200
    assert all(len(numbered(groups[k : k + 25])) == 25 for k in range(0, 1000, 25))


def test_one_voice_is_limited():
    said = torch.tensor([1.0, -1.0, 0.0, 2.0, -1e12])
    assert credible(said).tolist() == [1.0, -1.0, 0.0, 2.0, -3.0]


def test_candidates_are_the_nearest_and_steps_solve_the_system():
    draw = torch.Generator().manual_seed(0)
    points = (torch.randn(30, 6, generator=draw) * 9).repeat_interleave(10, 0) + torch.randn(
        300, 6, generator=draw
    )
    links = candidates(points, 9)
    assert (links[0] < links[1]).all() and float((links[0] // 10 == links[1] // 10).double().mean()) > 0.9
    weights = torch.rand(links.shape[1], generator=draw, dtype=torch.float64)
    dense = torch.zeros(300, 300, dtype=torch.float64)
    dense[links[0], links[1]] = weights
    dense = dense + dense.T
    models = points.double()
    exact = torch.linalg.solve(torch.eye(300).double() + 0.7 * (torch.diag(dense.sum(1)) - dense), models)
    torch.testing.assert_close(
        sparse_consensus(models, links, weights, 0.7, tol=1e-12, most=300), exact, rtol=0, atol=1e-8
    )
    again, kept = merge(links, weights, links[:, :5], 300)
    assert torch.equal(again, links) and torch.equal(kept, weights)
