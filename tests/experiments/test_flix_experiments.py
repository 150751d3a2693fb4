"""The other experiments of FLIX: sines, tags and networks."""

from dataclasses import replace

import pytest

from coterie._core.errors import DataError
from coterie.experiments.jobs import load, measure
from coterie.experiments.spec import shared_data


def measured(name: str, **settings: object) -> dict[str, float]:
    """An experiment's first run at the quick size, with other settings, on seed 0."""
    try:
        shared_data()
    except DataError:
        pytest.skip("needs ../shared/data")
    experiment = load(f"flix/{name}", quick=True)
    plan = experiment.plans[0]
    plan = replace(plan, settings={**plan.settings, **settings})
    found = measure(plan.measure or "")(replace(experiment, plans=(plan,)), 0)
    shown = {row.metric for row in experiment.rows if row.run == plan.key}
    assert {metric for metric in shown if not metric.startswith("flix_")} <= set(found)  # other alphas here
    return found


@pytest.mark.slow
def test_on_sines_the_stopping_rule_decides_and_with_the_tight_one_an_interior_alpha_wins():
    found = measured("sine", sizes=(50, 150), alphas=(0.3,), steps=400)
    assert found["loose_best_alpha"] == 0.0
    assert found["tight_best_alpha"] == 0.3
    assert found["tight_inside_over_local"] < 1 and found["tight_inside_over_shared"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["femnist", "shakespeare"])
def test_networks_are_scored_for_every_alpha(name):
    plan = load(f"flix/{name}", quick=True).plans[0]
    short = {**plan.settings["flix"], "local_steps": 5}
    found = measured(name, flix=short, alphas=(0.3,), fedavg_lr=(0.1,))
    assert found["alpha"] == 0.3 and found["gain_over_fedavg"] == found["flix"] - found["fedavg"]
    assert found["flix"] == found["flix_0.3"] == found["best_inside"]
    assert all(0 <= found[name] <= 100 for name in ("flix_0", "flix_0.3", "flix_1", "fedavg"))


@pytest.mark.slow
def test_tags_are_recalled_and_every_method_is_tuned():
    found = measured("tags", words=100, tags=10, local_steps=(5,), alphas=(0.25,))
    assert found["alpha"] in (0.0, 0.25, 1.0) and found["flix"] == found[f"flix_{found['alpha']:g}"]
    assert all(0.3 <= found[name] <= 1 for name in ("flix", "fomaml", "reptile"))
