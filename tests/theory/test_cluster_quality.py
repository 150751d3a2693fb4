"""Cluster quality against values worked out by hand."""

import pytest
import torch

from coterie.theory.cluster_quality import align_labels, cluster_quality, linked_groups


def test_quality_of_perfect_shuffled_and_partly_known_labels():
    truth = torch.tensor([0, 0, 0, 1, 1, 1])
    found = cluster_quality(torch.tensor([2, 2, 2, 5, 5, 5]), truth)
    assert (found["ari"].item(), found["purity"].item(), found["clusters_found"].item()) == (1.0, 1.0, 2.0)
    partly = cluster_quality(torch.tensor([0, 0, 1, 1, -1, 1]), truth)
    assert partly["purity"].item() == pytest.approx(4 / 5) and partly["cluster"].isnan().tolist()[4]
    assert set(cluster_quality(truth, None)) == {"cluster", "clusters_found"}
    assert "ari" not in cluster_quality(torch.full((6,), -1), truth)


def test_ari_is_that_of_the_pair_counts():
    truth, labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]), torch.tensor([0, 0, 1, 1, 1, 2, 2, 0])
    pairs = [(a, b) for a in range(8) for b in range(a)]
    same_truth = [bool(truth[a] == truth[b]) for a, b in pairs]
    same_found = [bool(labels[a] == labels[b]) for a, b in pairs]
    both = sum(t and f for t, f in zip(same_truth, same_found, strict=True))
    expected = sum(same_truth) * sum(same_found) / len(pairs)
    ari = (both - expected) / ((sum(same_truth) + sum(same_found)) / 2 - expected)
    assert cluster_quality(labels, truth)["ari"].item() == pytest.approx(ari)


def test_labels_keep_their_meaning_from_round_to_round():
    before = torch.tensor([0, 0, 1, 1, 2, 2])
    assert align_labels(torch.tensor([2, 2, 0, 0, 1, 1]), before, 3).tolist() == before.tolist()
    assert align_labels(torch.tensor([1, 1, 1, 0, 0, 0]), torch.full((6,), -1), 2).tolist() == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]
    assert align_labels(torch.tensor([1, -1, 0, 0]), torch.tensor([0, 0, 1, 1]), 2).tolist() == [0, -1, 1, 1]


def test_groups_are_linked_both_ways():
    links = torch.eye(4, dtype=torch.bool)
    links[0, 1] = links[1, 0] = links[1, 2] = True
    assert linked_groups(links).tolist() == [0, 0, 1, 2]
