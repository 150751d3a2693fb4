"""Predicted risks against published limits, closed forms and simulation."""

import math

import numpy as np
import pytest
import torch

from coterie._core.errors import SettingError
from coterie.data import generate
from coterie.theory import filters, learned_centre, monte_carlo, ridge_limits, risk
from coterie.theory.monte_carlo import ESTIMATORS, World
from coterie.theory.spectrum import Spectrum, marchenko_pastur

STANDARD = {"gamma": 2.0, "r2": 1.0, "sigma2": 0.25}
ALONE = {"gamma": 2.0, "rho2": 2.0, "sigma2": 0.25}
LIMITS = {
    "fedavg": (1.0, 0.0),
    "local": (1.0, 0.25),
    "ridge-local*": (1.0466, 0.1288),
    "ftfa": (0.5, 0.25),
    "maml-fl": (0.5, 0.25),
    "rtfa": (0.6429, 0.0357),
    "pfedme": (0.6429, 0.0357),
    "rtfa*": (0.5532, 0.0872),
    "pfedme*": (0.5532, 0.0872),
}
CORRELATED = {
    "local": (0.7370, 0.3145),
    "ftfa": (0.3685, 0.3145),
    "rtfa": (0.5305, 0.0425),
    "rtfa*": (0.4324, 0.0988),
    "ridge-local*": (0.7970, 0.1462),
}


def pair(found):
    return found.bias, found.variance


def ar_spectrum(rho, d=4000):
    """Eigenvalues of an AR(1) covariance as d grows: (1 - rho^2) / (1 - 2 rho cos t + rho^2)."""
    t = (np.arange(d) + 0.5) * np.pi / d
    return (1 - rho**2) / (1 - 2 * rho * np.cos(t) + rho**2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_identity_limits(name):
    assert pair(World().predicted(clients=False)[name]) == pytest.approx(LIMITS[name], abs=5e-5)


def test_correlated_limits():
    spectrum = ar_spectrum(0.5)
    found = {
        "local": risk.local(**ALONE, spectrum=spectrum),
        "ftfa": risk.ftfa(**STANDARD, spectrum=spectrum),
        "rtfa": risk.rtfa(**STANDARD, lam=1.5, spectrum=spectrum),
        "rtfa*": risk.rtfa(**STANDARD, spectrum=spectrum),
        "ridge-local*": risk.ridge_local(**ALONE, spectrum=spectrum),
    }
    for name, value in found.items():
        assert pair(value) == pytest.approx(CORRELATED[name], abs=6e-5), name


def test_two_level_limits():
    spectrum, common = [0.4, 1.6], {"gamma": 4.0, "sigma2": 1.0}
    assert pair(risk.local(**common, rho2=1.5, spectrum=spectrum)) == pytest.approx(
        (1.0158, 0.4469), abs=5e-5
    )
    assert pair(risk.ftfa(**common, r2=1.0, spectrum=spectrum)) == pytest.approx((0.6772, 0.4469), abs=5e-5)
    given = risk.rtfa(**common, r2=1.0, lam=1.5, spectrum=spectrum)
    assert pair(given) == pytest.approx((0.7142, 0.1702), abs=5e-5)
    assert ridge_limits.optimal_lambda(**common, r2=1.0, spectrum=spectrum) == 4.0
    assert pair(risk.rtfa(**common, r2=1.0, spectrum=spectrum)) == pytest.approx((0.7736, 0.0737), abs=5e-5)


@pytest.mark.parametrize("gamma", [0.2, 0.9, 1.0, 1.1, 5.0])
@pytest.mark.parametrize("lam", [1e-3, 0.5, 20.0])
def test_identity_is_the_marchenko_pastur_integral(gamma, lam):
    bias = marchenko_pastur(gamma, lambda s: lam**2 / (s + lam) ** 2, at_zero=1.0)
    variance = gamma * marchenko_pastur(gamma, lambda s: s / (s + lam) ** 2)
    found = risk.rtfa(gamma=gamma, r2=1.0, sigma2=1.0, lam=lam)
    assert pair(found) == pytest.approx((bias, variance), rel=1e-6)


@pytest.mark.parametrize("spectrum", [None, [0.3, 1.0, 1.7], ar_spectrum(0.7, 50)], ids=["I", "three", "ar"])
def test_best_lambda_is_the_minimiser(spectrum):
    for gamma in (0.5, 1.0, 3.0):
        settings = {"gamma": gamma, "r2": 1.3, "sigma2": 0.6, "spectrum": spectrum}
        best = ridge_limits.optimal_lambda(**settings)
        lowest = risk.rtfa(**settings).risk
        for factor in (1.02, 1 / 1.02):
            assert risk.rtfa(**settings, lam=factor * best).risk > lowest


def test_best_lambda_for_aligned_deviations():
    spectrum = Spectrum.of([0.2, 1.0, 3.0], signal=[0.0, 0.1, 0.9])
    settings = {"gamma": 2.0, "r2": 1.0, "sigma2": 0.5, "spectrum": spectrum}
    best, lowest = ridge_limits.optimal_lambda(**settings), risk.rtfa(**settings).risk
    assert best < 1.0
    assert all(risk.rtfa(**settings, lam=f * best).risk > lowest for f in (1.02, 1 / 1.02))


@pytest.mark.parametrize("gamma", [0.3, 1.5, 2.0, 7.0])
def test_crossover_of_tuning_and_sharing(gamma):
    noise = risk.crossover_noise(gamma=gamma, r2=1.7)
    assert noise == pytest.approx(1.7 * abs(gamma - 1) / gamma, rel=1e-12)
    assert risk.ftfa(gamma=gamma, r2=1.7, sigma2=noise).risk == pytest.approx(1.7, abs=1e-12)
    assert risk.ftfa(gamma=gamma, r2=1.7, sigma2=0.9 * noise).risk < risk.fedavg(r2=1.7).risk


def test_crossover_with_a_covariance():
    spectrum = ar_spectrum(0.6, 60)
    noise = risk.crossover_noise(gamma=2.0, r2=1.0, spectrum=spectrum)
    shared = risk.fedavg(r2=1.0, spectrum=spectrum).risk
    assert risk.ftfa(gamma=2.0, r2=1.0, sigma2=noise, spectrum=spectrum).risk == pytest.approx(
        shared, rel=1e-12
    )


def test_best_ridge_beats_everything():
    gamma = np.linspace(0.1, 8, 60)
    for spectrum in (None, [0.5, 1.5]):
        common = {"gamma": gamma, "sigma2": 0.4, "spectrum": spectrum}
        best = risk.rtfa(**common, r2=1.0).risk
        others = (
            risk.ftfa(**common, r2=1.0),
            risk.ridge_local(**common, rho2=1.8),
            risk.fedavg(r2=1.0, spectrum=spectrum),
        )
        assert all((best <= other.risk * (1 + 1e-12)).all() for other in others)


def test_best_risk_in_closed_form():
    gamma, r2, s2 = np.array([0.4, 1.0, 3.0]), 1.3, 0.7
    a = r2 * (1 - 1 / gamma)
    closed = 0.5 * (a - s2 + np.sqrt(a**2 + s2**2 + 2 * s2 * r2 * (1 + 1 / gamma)))
    assert risk.rtfa(gamma=gamma, r2=r2, sigma2=s2).risk == pytest.approx(closed, rel=1e-12)


def test_stable_near_one_feature_per_row():
    gamma = 1 + np.array([-1e-6, -1e-9, -1e-12, 0.0, 1e-12, 1e-9, 1e-6])
    for spectrum in (None, [0.5, 1.5]):
        for lam in (1e-12, 1e-6, 1e-3):
            found = risk.rtfa(gamma=gamma, r2=1.0, sigma2=1.0, lam=lam, spectrum=spectrum)
            assert np.isfinite(found.risk).all()
            assert (np.diff(found.bias) >= 0).all()
        edge = risk.ftfa(gamma=gamma, r2=1.0, sigma2=1.0, spectrum=spectrum)
        assert np.isinf(edge.variance[3])
        assert np.isfinite(np.delete(edge.variance, 3)).all()
    gap = gamma - 1
    exact = np.where(gap < 0, gamma / np.where(gap < 0, -gap, 1), 1 / np.where(gap > 0, gap, np.nan))
    found = risk.ftfa(gamma=gamma, r2=1.0, sigma2=1.0).variance
    assert np.delete(found, 3) == pytest.approx(np.delete(exact, 3), rel=1e-9)


def test_limits_of_lambda():
    common = {"gamma": 2.0, "r2": 1.0, "sigma2": 0.25, "spectrum": [0.5, 1.5]}
    assert pair(risk.rtfa(**common, lam=np.inf)) == (1.0, 0.0)
    assert pair(risk.rtfa(**common, lam=1e-13)) == pytest.approx(pair(risk.ftfa(**common)), rel=1e-9)
    assert risk.rtfa(gamma=2.0, r2=0.0, sigma2=1.0).risk == 0.0


def test_arrays_and_numbers_agree():
    grid = risk.rtfa(gamma=[[0.5], [2.0]], r2=[1.0, 2.0, 3.0], sigma2=0.3, spectrum=[0.5, 1.5])
    assert grid.risk.shape == (2, 3)
    one = risk.rtfa(gamma=2.0, r2=3.0, sigma2=0.3, spectrum=[0.5, 1.5])
    assert grid.risk[1, 2] == pytest.approx(one.risk, rel=1e-12)
    assert isinstance(one.risk, float)


def test_stopped_tuning_ends_at_interpolation():
    found = risk.ftfa(**STANDARD, steps=20_000, lr=0.1)
    assert pair(found) == pytest.approx((0.5, 0.25), rel=1e-6)
    assert pair(risk.ftfa(**STANDARD, steps=0, lr=0.1)) == pytest.approx((1.0, 0.0))


def test_bad_numbers_are_named():
    with pytest.raises(SettingError, match="gamma"):
        risk.ftfa(gamma=0.0, r2=1.0, sigma2=1.0)
    with pytest.raises(SettingError, match="sigma2"):
        risk.ftfa(gamma=1.0, r2=1.0, sigma2=-1.0)
    with pytest.raises(SettingError, match="spectrum"):
        risk.ftfa(gamma=1.0, r2=1.0, sigma2=1.0, spectrum=[-1.0])
    with pytest.raises(SettingError, match="steps and lr"):
        risk.ftfa(gamma=1.0, r2=1.0, sigma2=1.0, steps=3)


def test_spectrum_from_rows():
    draw = np.random.default_rng(0)
    scale = np.sqrt(np.repeat([0.4, 1.6], 40))
    found = Spectrum.from_rows([draw.normal(size=(50, 80)) * scale for _ in range(8)])
    assert found.mean == pytest.approx(1.0, abs=0.05)
    assert found.values.std() == pytest.approx(0.6, abs=0.05)
    true = risk.rtfa(gamma=2.0, r2=1.0, sigma2=0.5, spectrum=[0.4, 1.6]).risk
    assert risk.rtfa(gamma=2.0, r2=1.0, sigma2=0.5, spectrum=found).risk == pytest.approx(true, rel=0.03)


def test_predicted_centre_error():
    fedavg = learned_centre.centre_error(**STANDARD, clients=40)
    assert fedavg.risk == pytest.approx(0.0875)
    prox = learned_centre.centre_error(**STANDARD, clients=40, method="pfedme").risk
    assert prox == pytest.approx(0.0695, abs=5e-5)
    assert learned_centre.centre_error(**STANDARD, clients=40, method="maml").risk == pytest.approx(0.0875)
    assert learned_centre.centre_error(
        **STANDARD, clients=40, spectrum=[0.999999, 1.000001]
    ).risk == pytest.approx(0.0875)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_centre_error_of_maml_by_moments(alpha):
    """g = s (1 - alpha s)^2 is a polynomial, and the moments of Marchenko and Pastur's law are Narayana's."""
    gamma, clients = STANDARD["gamma"], 40

    def mean(polynomial):
        """E of a polynomial without a constant."""
        moments = [
            sum(gamma**r * math.comb(k, r) * math.comb(k - 1, r) / (r + 1) for r in range(k))
            for k in range(1, len(polynomial.coef))
        ]
        return float(polynomial.coef[1:] @ np.array(moments))

    s = np.polynomial.Polynomial([0.0, 1.0])
    g = s * (1 - alpha * s) ** 2
    noise = STANDARD["sigma2"] * gamma * mean(g**2 // s)
    expected = (STANDARD["r2"] * mean(g**2) + noise) / (clients * mean(g) ** 2)
    found = learned_centre.centre_error(**STANDARD, clients=clients, method="maml", alpha=alpha).risk
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_measured_centre_error():
    measured = {"fedavg": [], "pfedme": []}
    for seed in range(25):
        made = generate.random_effects(40, 60, 30, r2=1.0, rho2=2.0, sigma2=0.25, seed=seed)
        for name, g in (("fedavg", filters.average()), ("pfedme", filters.proximal(0.5))):
            # th_0 is the common direction, of length one; deviations are orthogonal to it
            middle = _centre(made.truth)
            measured[name].append(float((filters.centre(made.xs, made.ys, g) - middle).square().sum()))
    for name, values in measured.items():
        predicted = learned_centre.centre_error(**STANDARD, clients=40, method=name).risk
        assert np.mean(values) == pytest.approx(predicted, rel=0.15), name


def _centre(truth):
    """th_0 from th_j = th_0 + D_j with D_j orthogonal to th_0: the vector with truth @ th_0 = |th_0|^2 = 1."""
    return torch.linalg.lstsq(truth, torch.ones(len(truth), 1, dtype=truth.dtype), driver="gelsd").solution[
        :, 0
    ]


def test_clients_needed_for_a_useful_centre():
    needed = learned_centre.clients_needed(**STANDARD, centre2=0.5)
    assert needed == pytest.approx(7.0)
    for clients, better in ((6, False), (8, True)):
        shared = 1.0 + learned_centre.centre_error(**STANDARD, clients=clients).risk
        assert (shared < 1.5) == better


def check_simulation(world, judged, seed, limits=None):
    found, predicted = monte_carlo.simulate(world, judged, seed), world.predicted()
    for name in ESTIMATORS:
        ours, theory = found[name], predicted[name]
        assert abs(ours.bias - theory.bias) <= 3 * ours.bias_error, (name, ours, theory)
        assert abs(ours.variance - theory.variance) <= 3 * ours.variance_error, (name, ours, theory)
        if limits and name in limits:
            assert abs(ours.bias - limits[name][0]) <= 0.02, name
            assert abs(ours.variance - limits[name][1]) <= 0.005, name


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_simulation_of_all_nine_estimators(correlation):
    check_simulation(World(features=120, rows=60, clients=300, correlation=correlation), 30, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("correlation", "limits"), [(0.0, LIMITS), (0.5, CORRELATED)])
def test_simulation_at_400_features(correlation, limits):
    check_simulation(World(correlation=correlation), 30, seed=0, limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_simulation_of_flix_ditto_and_first_order_maml_at_400_features(correlation):
    world = World(clients=400, correlation=correlation)
    found, predicted = monte_carlo.simulate(world, 30, 0), world.predicted()
    for name in set(monte_carlo.BEYOND) & set(predicted):
        ours, theory = found[name], predicted[name]
        assert abs(ours.bias - theory.bias) <= 3 * ours.bias_error, (name, ours, theory)
        assert abs(ours.variance - theory.variance) <= 3 * ours.variance_error, (name, ours, theory)
        assert abs(ours.bias - theory.bias) <= 0.02 and abs(ours.variance - theory.variance) <= 0.006, name
