"""The page with the weights between clients over the rounds."""

import json
import re

import pytest
import torch

from coterie import fit
from coterie.algorithms.cobo import PRINTED, CoBo
from coterie.experiments.cobo_quadratic import bowls
from coterie.report.weights import CELLS, save_weights, weights_of, weights_plot
from coterie.train.history import History


def trained(**options):
    fed = bowls((2, 3, 2), d=3)
    return fit(
        fed,
        CoBo(lr=0.05, rho=0.5, gamma=0.05, **{**PRINTED, "sampling": "all"}, batch=0),
        40,
        evaluate_every=10,
        **options,
    )


def test_matrices_are_in_cluster_order_and_curves_are_shown():
    history = History()
    weights = torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.2], [0.9, 0.2, 0.0]])
    history.add(5, "server", {"weights": weights, "recovery": torch.tensor(0.7)})
    found = weights_of(history, ["a", "b", "c"], torch.tensor([1, 0, 1]))
    assert found["names"] == ["b", "a", "c"] and found["rounds"] == [5]
    assert found["matrices"][0] == [[0.0, 0.1, 0.2], [0.1, 0.0, 0.9], [0.2, 0.9, 0.0]]
    assert found["curves"]["recovery"] == ([5], [pytest.approx(0.7)])
    json.dumps(found)


def test_a_run_has_the_page(tmp_path):
    run = trained()
    title = "cobo: weights between clients"
    assert save_weights(tmp_path / "weights.html", run.history, run.fed.names, run.fed.clusters, title)
    page = (tmp_path / "weights.html").read_text()
    assert "mean weight inside clusters" in page and re.search(r'"prefix": ?"round "', page)
    figure = weights_plot(**weights_of(run.history, run.fed.names, run.fed.clusters))
    heat = [trace for trace in figure.data if trace.type == "heatmap"]
    assert [step["label"] for step in figure.layout.sliders[0].steps] == ["0", "10", "20", "30", "40"]
    assert [trace.visible for trace in heat] == [False] * 4 + [True]
    assert figure.layout.sliders[0].steps[1].args[0]["visible"] == [
        False,
        True,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_many_clients_are_shown_in_blocks():
    history = History()
    history.add(1, "server", {"weights": torch.eye(2 * CELLS)})
    found = weights_of(history, [str(k) for k in range(2 * CELLS)], None)
    assert len(found["matrices"][0]) == len(found["names"]) == CELLS and found["matrices"][0][3][3] == 0.5
    assert found["names"][1] == "2 to 3"


def test_a_run_without_weights_has_no_page(tmp_path):
    assert not save_weights(tmp_path / "weights.html", History(), [], None, "")
    assert not (tmp_path / "weights.html").exists()
