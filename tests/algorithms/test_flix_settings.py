"""FLIX at unusual settings: which keep the promises of every algorithm, and which are refused, and how."""

import pytest
import torch

import coterie
from coterie._core.errors import SettingError
from coterie.algorithms.flix import FLIX

SETTINGS = [
    {"solver": "dcgd", "compressor": "qsgd-2"},
    {"solver": "diana", "compressor": "rand-2"},
    {"solver": "diana", "compressor": "natural", "shift": "zero", "start_at": "average"},
    {"solver": "sgd", "lr": 0.1, "participation": 0.5, "compressor": "top-1"},
    {"solver": "adam", "lr": 0.1, "participation": 0.34},
    {"average": True, "local": "sgd"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_other_settings_keep_the_promises_too(settings):
    coterie.check_algorithm(FLIX(**settings))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"alpha": 1.5}, "at most 1"),
        ({"alpha": -0.1}, "at least 0"),
        ({"alpha": float("nan")}, "at most 1"),
        ({"alpha": (0.5, 2.0)}, "client 1"),
        ({"alpha": "much"}, "not a number"),
        ({"compressor": "rand-2"}, "dgd sends whole vectors"),
        ({"solver": "diana", "compressor": "top-2"}, "biased"),
        ({"solver": "adam"}, "set lr"),
        ({"solver": "newton"}, "is not one of"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, message):
    with pytest.raises(SettingError, match=message):
        FLIX(**settings)


def test_more_coordinates_than_the_model_has_are_refused_at_the_start(logistic):
    with pytest.raises(SettingError, match="choose k from 1 to 6"):
        coterie.fit(logistic(), FLIX(solver="diana", compressor="rand-7"), 1)
    with pytest.raises(SettingError, match="2 values of alpha for 8 clients"):
        coterie.fit(logistic(), FLIX(alpha=(0.5, 0.5)), 1)
    with pytest.raises(SettingError, match="validation rows"):
        coterie.fit(logistic(), FLIX(alpha="auto"), 1)


def test_a_divergent_step_size_is_detected_and_named(least_squares):
    with pytest.raises(SettingError, match=r"lr = 50 diverges.*Theory allows"):
        coterie.fit(least_squares(), FLIX(lr=50.0), 500)
    coterie.fit(least_squares(), FLIX(), 200)


def test_a_local_problem_without_a_minimiser_is_named_and_sgd_is_the_way_out(logistic):
    fed = logistic(rows=3, l2=0.0)
    with pytest.raises(SettingError, match=r"no minimiser.*local='sgd'"):
        coterie.fit(fed, FLIX(), 1)
    run = coterie.fit(fed, FLIX(local="sgd", local_steps=200, batch=0, local_lr=1.0), 5)
    assert torch.isfinite(run.personal).all()
