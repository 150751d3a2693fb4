"""FLIX on mushrooms and a6a: rates, stalls, theorems and uplink floats."""

import numpy as np
import pytest
import torch

from coterie._core.errors import DataError
from coterie.algorithms.flix import FLIX
from coterie.engine.compressors import compressor
from coterie.experiments.flix_logistic import (
    Curves,
    Problem,
    distances,
    factor,
    grid,
    logistic,
    over_bound,
    tails,
)
from coterie.experiments.flix_stacked import Lane
from coterie.experiments.jobs import load
from coterie.select.flix_runs import states
from coterie.theory import flix_rates

ALPHAS = (0.1, 0.5, 1.0)


def problem_of(name: str, n: int = 50) -> Problem:
    try:
        return Problem.make(name, n, 0.1, 0)
    except DataError:
        pytest.skip("needs ../shared/data/libsvm")


def test_k_is_linearly_spaced_from_one_to_d():
    assert grid(112) == [1, 20, 38, 56, 75, 94, 112] and len(set(grid(22))) == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a6a", "mushrooms"])
def test_rates_are_free_of_alpha_theorems_hold_and_diana_goes_on_where_dcgd_stalls(name):
    problem = problem_of(name)
    lanes = [Lane(alpha, k) for alpha in ALPHAS for k in (20, problem.fed.d)]
    diana, dcgd = (Curves.draw(problem, solver, lanes, 900) for solver in ("diana", "dcgd"))
    reached, stalled = distances(diana), distances(dcgd)
    factors = {
        k: [factor(diana.rounds, reached[:, lanes.index(Lane(a, k))]) for a in ALPHAS]
        for k in (20, problem.fed.d)
    }
    for values in factors.values():
        assert max(values) - min(values) <= 2e-3 and max(values) / min(values) <= 1.01
        logs = np.log(values)
        assert logs.min() / logs.max() <= 1.01
    assert max(factors[20]) <= flix_rates.diana_rate(
        problem.at(0.5), compressor("rand-20").omega(problem.fed.d)
    )
    for lane in lanes[::2]:
        j = lanes.index(lane)
        assert reached[-1, j] <= 1e-12 and tails(stalled)[j] >= 1e-6
        assert over_bound(diana, reached, lane) <= 1 and over_bound(dcgd, stalled, lane) <= 1
    whole = [j for j, lane in enumerate(lanes) if lane.k == problem.fed.d]
    gaps = diana.loss[:, whole] - diana.loss[:, whole].min(0)
    bound = gaps[0] * flix_rates.dgd_rate(problem.at(0.5)) ** diana.rounds[:, None]
    assert (gaps <= bound * (1 + 1e-9) + 1e-14).all()


REFERENCE = {
    "a6a": {"identity": 17812, "rand-7": 3349, "natural": 5200, "qsgd-4": 3323},
    "mushrooms": {"identity": 33376, "rand-7": 6727, "natural": 9688, "qsgd-4": 6292},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCE)
def test_uplink_floats_to_a_relative_error_of_1e_8(name):
    """The reference does not say where it starts; x0 ~ N(0, I), which also moves where only l2 curves, fits."""
    problem = problem_of(name)
    best, d, used = problem.minimiser(0.5), problem.fed.d, {}
    for sent, floats in REFERENCE[name].items():
        solver = "dgd" if sent == "identity" else "diana"
        algorithm = FLIX.from_theory(problem.fed, solver=solver, compressor=sent)
        size, once = compressor(sent).floats(d), d if solver == "diana" else 0
        start = (problem.x0 - best).square().sum()
        rounds = states(problem.fed, algorithm, int(1.2 * floats / size), problem.own, problem.x0)
        k, ran = next(
            (k, ran) for k, (ran, s) in enumerate(rounds) if (s.x - best).square().sum() <= 1e-8 * start
        )
        used[sent] = ran.ledger.total("floats_up") / problem.fed.n
        assert used[sent] == once + k * size
        assert abs(used[sent] / floats - 1) <= 0.1, (sent, used[sent], floats)
    assert used["identity"] >= 4 * used["rand-7"]


@pytest.mark.slow
def test_the_experiment_has_its_numbers_and_all_curves():
    from dataclasses import replace

    problem_of("mushrooms")
    experiment = load("flix/logistic").only("mushrooms")
    short = replace(experiment.plans[0], rounds=40, settings={"data": "mushrooms", "alphas": (0.1, 0.5)})
    found = logistic(replace(experiment, plans=(short,)), 0)
    plots, curve = found.pop("plots"), found.pop("curve")
    asked = {row.metric for row in experiment.rows if row.run == "mushrooms"}
    assert asked <= set(found) and all(np.isfinite(value) for value in found.values())
    names = {f"{solver}{kind}" for solver in ("gd", "diana", "dcgd") for kind in ("", "-unregularised")}
    assert set(plots) == names and len(curve["rounds"]) == len(curve["values"])
    for name, plot in plots.items():
        axes = {(panel["x"], panel["y"]) for panel in plot["panels"]}
        second = "squared gradient norm" if "unregularised" in name else "relative squared distance"
        against = ("rounds", "uplink floats per client")
        assert axes == {(x, y) for x in against for y in ("loss", second)}
        assert all(len(panel["curves"]) == (2 if "gd" in name[:2] else 14) for panel in plot["panels"])
    assert torch.tensor(found["saving"]) >= 4
