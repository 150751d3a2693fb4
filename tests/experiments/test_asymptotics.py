"""The experiments asymptotics/risk and asymptotics/last-layer, in small."""

import dataclasses

import pytest
import torch

from coterie._core.errors import DataError
from coterie.algorithms import FTFA, FedAvg, Local, PFedMe
from coterie.experiments.asymptotics import simulated_risk
from coterie.experiments.jobs import load
from coterie.experiments.last_layer import (
    LOCAL_RATES,
    METHODS,
    RATES,
    TUNING_RATES,
    at_the_end,
    last_layer,
)
from coterie.experiments.last_layer_bound import _one_split
from coterie.experiments.pretrained_features import Features
from coterie.experiments.spec import shared_data
from coterie.theory.monte_carlo import ESTIMATORS


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(name, key, **settings):
    experiment = load(name).only(key)
    plan = dataclasses.replace(experiment.plans[0], settings={**experiment.plans[0].settings, **settings})
    return dataclasses.replace(experiment, plans=(plan,))


@pytest.mark.slow
def test_risk_has_every_estimator_and_its_prediction():
    found = simulated_risk(
        small("asymptotics/risk", "ar-100", features=40, rows=20, clients=60, judged=10), 0
    )
    assert all(found[f"{name} errors"] <= found["worst"] for name in ESTIMATORS)
    assert found["worst"] < 5
    assert found["ftfa predicted bias"] == pytest.approx(0.39, abs=0.03)
    assert len(found["curve"]["values"]) == len(ESTIMATORS)
    rows = load("asymptotics/risk").rows
    measured = simulated_risk(small("asymptotics/risk", "identity-100", features=20, rows=10, clients=20), 0)
    assert {row.metric for row in rows} <= measured.keys()


@pytest.mark.slow
def test_last_layer_measures_every_method_and_claim():
    try:
        shared_data("shakespeare.tar.xz")
    except DataError:
        pytest.skip("needs shakespeare.tar.xz of ../shared/data")
    size = {"clients": 6, "pretraining": 4, "rows": 60, "width": 8, "epochs": 1}
    size |= {"rounds": 2, "every": 1, "trial": 1, "repeats": 2}
    experiment = small("asymptotics/last-layer", "shakespeare", **size)
    found = last_layer(experiment, 0)
    assert all(0 <= found[name] <= 100 for name in METHODS)
    rows = load("asymptotics/last-layer").rows
    assert {row.metric for row in rows if not row.run.endswith(("room", "large"))} <= found.keys()
    for word in ("seeds", "splits"):
        worst, average, best = (found[f"ftfa, {rank} over {word}"] for rank in ("worst", "average", "best"))
        assert worst <= average <= best
    assert found["ftfa after 0 epochs"] == pytest.approx(
        found["fedavg"] if found["fedavg lr"] == found["ftfa lr"] else found["ftfa after 0 epochs"]
    )
    assert {len(panel["curves"]) for panel in found["plots"]["methods"]["panels"]} == {6, 4}


def test_steps_at_the_upper_end_of_their_grids_are_counted():
    inside = {"local": Local(lr=1.0), "fedavg": FedAvg(lr=1.0), "ftfa": FTFA(lr=1.0, tuning_lr=0.1)}
    assert at_the_end({**inside, "pfedme": PFedMe(lr=max(RATES))}) == []
    outside = {"fedavg": FedAvg(lr=max(RATES)), "ftfa": FTFA(lr=1.0, tuning_lr=max(TUNING_RATES))}
    assert at_the_end({**inside, **outside}) == ["fedavg lr", "ftfa tuning_lr"]
    assert at_the_end({"local": Local(lr=max(LOCAL_RATES))}) == ["local lr"]


@pytest.mark.parametrize("different", [False, True])
def test_personal_layers_gain_where_clients_differ(different):
    """Two classes told apart by one number; half of the clients call them the other way round."""
    noise = torch.Generator().manual_seed(0)
    xs = [torch.randn(60, 3, generator=noise) for _ in range(12)]
    ys = [((x[:, 0] > 0) ^ (different and k % 2 == 1)).long() for k, x in enumerate(xs)]
    found = _one_split(Features(xs, ys, 2, 50.0), 0, 0)
    if different:
        assert found["shared"] < 70
        assert found["gain"] > 25
        assert found["loss taken off, percent"] > 50
    else:
        assert found["shared"] > 90
        assert abs(found["gain"]) < 3
    rows = load("asymptotics/last-layer").rows
    wanted = {row.metric for row in rows if row.run.endswith(("room", "large"))}
    assert wanted <= {*found, "largest gain at any pull"}
