"""The measures behind `coterie reproduce threshold/...`, at a size of seconds."""

import dataclasses

import numpy as np
import pytest
import torch

from coterie._core.errors import DataError
from coterie.data.leaf_files import leaf
from coterie.experiments.cluster_shapes import measure
from coterie.experiments.jobs import load
from coterie.experiments.spec import shared_data
from coterie.experiments.threshold_figures import (
    cluster_sizes,
    rotated_clients,
    rotated_writers,
    section_four,
)


def shortened(name, key=None, **changes):
    experiment = load(f"threshold/{name}", quick=True)
    plan = experiment.plan(key or experiment.plans[0].key)
    return dataclasses.replace(experiment, plans=(dataclasses.replace(plan, **changes),))


def names_of(experiment):
    return {row.metric for row in experiment.rows}


@pytest.mark.slow
def test_figure_one_measures_every_row():
    experiment = shortened("fig1", tries=1, rounds=2)
    found = section_four(experiment, 0)
    assert names_of(experiment) <= set(found)
    assert found["pfl-tc"] > 0 and 0 <= found["pfl-tc below ifca-model"] <= 1
    assert section_four(experiment, 0) == found


def test_figure_two_measures_every_row():
    experiment = shortened("fig2", tries=1, rounds=10)
    found = cluster_sizes(experiment, 0)
    assert names_of(experiment) <= set(found) and found["pfl-tc slope"] < 0


@pytest.mark.slow
def test_the_error_falls_like_one_over_the_cluster_size():
    """Log-log slope between -1.3 and -0.6, flat for training alone."""
    found = cluster_sizes(shortened("fig2", tries=3, rounds=200), 5)
    assert -1.3 < found["pfl-tc slope"] < -0.6 and abs(found["standalone slope"]) < 0.2


@pytest.mark.slow
def test_rules_measure_every_row():
    experiment = shortened("rules", tries=2)
    assert names_of(experiment) <= set(measure(experiment, 3))


def archive():
    try:
        return shared_data("femnist/slz-ai_leaf-torch.tar.xz")
    except DataError as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_writers_are_turned_by_quarters():
    archive()
    clients = rotated_clients("femnist/slz-ai_leaf-torch.tar.xz", 8, 28, 150, seed=0)
    written = leaf(archive())
    assert clients.clusters.tolist() == [0, 1, 2, 3] * 2 and min(map(len, clients.xs)) >= 150
    for k, (name, x, y) in enumerate(zip(clients.names, clients.xs, clients.ys, strict=True)):
        source = written.names.index(name)
        image = 1 - written.xs[source].numpy()[:, 0]
        np.testing.assert_allclose(x.view(-1, 28, 28), np.rot90(image, k % 4, (1, 2)), atol=1e-6)
        assert torch.equal(y, written.ys[source])


@pytest.mark.slow
def test_rotated_writers_are_found():
    archive()
    found = rotated_writers(shortened("femnist-rotations", "pfl-tc", rounds=15), 10)
    assert found["ari"] > 0.9 and 0 < found["accuracy"] < 100
