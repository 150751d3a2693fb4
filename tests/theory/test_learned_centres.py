"""Errors of centres with any filter and covariance, and the risk of FLIX, against simulation and closed forms."""

import numpy as np
import pytest
import torch

from coterie._core.errors import SettingError
from coterie.theory import crossover, filters, flix_risk, learned_centre, ridge_limits, risk
from coterie.theory.learned_centre import Centre, filter_moments
from coterie.theory.spectrum import Spectrum

STANDARD = {"gamma": 2.0, "r2": 1.0, "sigma2": 0.25}
MIXED = {**STANDARD, "rho2": 2.0}
TWO = [0.4, 1.6]
KINDS = {
    "maml": {"method": "maml", "alpha": 0.1},
    "fomaml": {"method": "fomaml", "alpha": 0.1},
    "pfedme": {"method": "pfedme", "lam": 0.5},
    "fedavg, 5 steps": {"steps": 5, "lr": 0.1},
    "fomaml, 3 steps": {"method": "fomaml", "alpha": 0.1, "steps": 3, "lr": 0.2},
    "pfedme, 4 steps": {"method": "pfedme", "lam": 0.5, "steps": 4, "lr": 0.5},
}
FILTERS = {
    "maml": filters.maml(0.1),
    "fomaml": filters.maml(0.1, first_order=True),
    "pfedme": filters.proximal(0.5),
    "fedavg, 5 steps": filters.average(5, 0.1),
    "fomaml, 3 steps": filters.maml(0.1, 3, 0.2, first_order=True),
    "pfedme, 4 steps": filters.proximal(0.5, 4, 0.5),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_covariance_near_the_identity_has_the_identitys_error(name):
    plain = learned_centre.centre_error(**STANDARD, clients=40, **KINDS[name])
    near = learned_centre.centre_error(**STANDARD, clients=40, **KINDS[name], spectrum=[0.999999, 1.000001])
    assert (near.bias, near.variance) == pytest.approx((plain.bias, plain.variance), rel=1e-5)


def test_moments_of_polynomials_are_those_of_wishart_matrices():
    """E S = Sigma and E S^2 = Sigma^2 + gamma mean(Sigma) Sigma for normal rows, as d grows."""
    sigma, values = Spectrum.of(TWO), np.array(TWO)
    for gamma in (0.3, 1.0, 4.0):
        np.testing.assert_allclose(sigma.transformed(gamma, lambda s: s), values, rtol=1e-10)
        np.testing.assert_allclose(
            sigma.transformed(gamma, lambda s: s**2), values**2 + gamma * sigma.mean * values, rtol=1e-10
        )


@pytest.mark.parametrize("gamma", [0.5, 3.0])
@pytest.mark.parametrize("lam", [0.02, 0.5, 20.0])
def test_the_contour_gives_the_closed_form_of_a_ridge(gamma, lam):
    """M(s / (s + lam)) = s v / (1 + s v) with the companion transform v at -lam."""
    sigma = Spectrum.of([0.2, 1.0, 2.5], weights=[0.5, 0.3, 0.2])
    found = filter_moments(sigma, np.array(gamma), Centre("pfedme", lam))[0] / lam  # g = lam s / (s + lam)
    sv = sigma.values * float(sigma.companion(np.array(gamma), np.array(lam)))
    np.testing.assert_allclose(found, sv / (1 + sv), rtol=1e-8)


def simulated_errors(d: int, n: int, clients: int, draws: int) -> dict[str, float]:
    """Mean squared error of every centre over draws of the deviations and the noise, for the same inputs."""
    root, draw = torch.tensor(np.sqrt(np.repeat(TWO, d // 2))), torch.Generator().manual_seed(0)
    xs = [torch.randn(n, d, generator=draw, dtype=torch.float64) * root for _ in range(clients)]
    ys = []  # th_0 = 0: centres are equivariant
    for x in xs:
        off = torch.randn(d, draws, generator=draw, dtype=torch.float64) * np.sqrt(STANDARD["r2"] / d)
        ys.append(x @ off + 0.5 * torch.randn(n, draws, generator=draw, dtype=torch.float64))
    return {name: float(filters.centre(xs, ys, g).square().sum(0).mean()) for name, g in FILTERS.items()}


@pytest.mark.parametrize(
    ("d", "clients", "tolerance"), [(40, 150, 0.1), pytest.param(400, 160, 0.04, marks=pytest.mark.slow)]
)
def test_measured_errors_with_a_covariance(d, clients, tolerance):
    """At finite size the errors are larger by about d / (rows of all clients)."""
    found = simulated_errors(d, n=d // 2, clients=clients, draws=40)
    for name, settings in KINDS.items():
        predicted = learned_centre.centre_error(**STANDARD, clients=clients, **settings, spectrum=TWO).risk
        assert found[name] == pytest.approx(predicted, rel=tolerance), name


@pytest.mark.slow
def test_clients_needed_with_a_covariance_is_where_the_best_risks_meet():
    numbers = {**STANDARD, "centre2": 0.5}
    needed = learned_centre.clients_needed(**numbers, spectrum=TWO)
    assert learned_centre.clients_needed(**numbers, spectrum=[0.999999, 1.000001]) == pytest.approx(
        7.0, rel=1e-4
    )
    alone = risk.ridge_local(gamma=2.0, rho2=1.5, sigma2=0.25, spectrum=TWO).risk
    lams = np.geomspace(0.05, 5, 400)
    for clients, better in ((0.97 * needed, False), (1.03 * needed, True)):
        shared = min(risk.rtfa(**STANDARD, lam=lam, clients=clients, spectrum=TWO).risk for lam in lams)
        assert (shared < alone) == better


def test_flix_is_the_formula_for_the_identity():
    """alpha^2 r2 + 2 alpha (1 - alpha) r2 k + (1 - alpha)^2 (rho2 k + v), k = 1 - 1/gamma, v = s2/(gamma - 1)."""
    for gamma in (1.5, 2.0, 6.0):
        k, v = 1 - 1 / gamma, 0.25 / (gamma - 1)
        numbers = {**MIXED, "gamma": gamma}
        for alpha in (0.0, 0.3, 1.0):
            expected = alpha**2 + 2 * alpha * (1 - alpha) * k + (1 - alpha) ** 2 * (2 * k + v)
            assert flix_risk.flix(**numbers, alpha=alpha).risk == pytest.approx(expected, rel=1e-12)
        c = 2 * k + v
        assert flix_risk.best_alpha(**numbers) == pytest.approx((c - k) / (1 - 2 * k + c), rel=1e-12)
        assert flix_risk.best_alpha(**numbers, own="ftfa") == pytest.approx(v / (1 / gamma + v), rel=1e-12)


@pytest.mark.parametrize("spectrum", [None, TWO], ids=["I", "two"])
def test_flix_lies_between_its_ends(spectrum):
    for gamma in (0.5, 2.0):
        numbers = {**MIXED, "gamma": gamma, "spectrum": spectrum, "clients": 50}
        ends = [flix_risk.flix(**numbers, alpha=alpha).risk for alpha in (0.0, 1.0)]
        local = risk.local(gamma=gamma, rho2=2.0, sigma2=0.25, spectrum=spectrum).risk
        shared = risk.fedavg(gamma=gamma, r2=1.0, sigma2=0.25, spectrum=spectrum, clients=50).risk
        assert ends == pytest.approx([local, shared], rel=1e-9)
        assert flix_risk.flix(**numbers).risk < min(ends)
        best = flix_risk.best_alpha(**numbers)
        for other in (best - 0.01, best + 0.01):
            assert flix_risk.flix(**numbers, alpha=other).risk > flix_risk.flix(**numbers).risk
    rtfa = risk.rtfa(**STANDARD, spectrum=spectrum).risk
    tuned = flix_risk.flix(**MIXED, own="ftfa", spectrum=spectrum).risk
    assert (
        rtfa
        < tuned
        < min(risk.ftfa(**STANDARD, spectrum=spectrum).risk, risk.fedavg(r2=1.0, spectrum=spectrum).risk)
    )


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_flix_with_a_ridge_against_simulation(gamma):
    d, clients, l2, alpha = 120, 60, 0.3, 0.6
    n, root = int(d / gamma), torch.tensor(np.sqrt(np.repeat(TWO, d // 2)))
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(4):
        centre = torch.randn(d, generator=draw, dtype=torch.float64)
        truth = (
            centre / centre.norm() + torch.randn(clients + 8, d, generator=draw, dtype=torch.float64) / d**0.5
        )
        xs = [torch.randn(n, d, generator=draw, dtype=torch.float64) * root for _ in truth]
        ys = [
            x @ t + 0.5 * torch.randn(n, generator=draw, dtype=torch.float64)
            for x, t in zip(xs, truth, strict=True)
        ]
        matrix = sum(x.T @ x / n for x in xs[8:]) / clients + l2 * torch.eye(d, dtype=torch.float64)
        shared = torch.linalg.solve(
            matrix, sum(x.T @ y / n for x, y in zip(xs[8:], ys[8:], strict=True)) / clients
        )
        for x, y, t in zip(xs[:8], ys[:8], truth[:8], strict=True):
            gap = (
                alpha * shared
                + (1 - alpha) * filters.personal(x, y, torch.zeros_like(t), filters.ridge(l2))
                - t
            )
            found.append(float((root * gap).square().sum()))
    predicted = flix_risk.flix(
        gamma=gamma, r2=1.0, rho2=2.0, sigma2=0.25, alpha=alpha, l2=l2, spectrum=TWO, clients=clients
    ).risk
    assert abs(np.mean(found) - predicted) <= 3 * np.std(found) / len(found) ** 0.5 + 0.01


def test_converged_ditto_is_rtfa_and_stopped_ditto_gets_there():
    assert risk.ditto(**STANDARD, lam=0.7).risk == risk.rtfa(**STANDARD, lam=0.7).risk
    late = risk.ditto(**STANDARD, lam=0.7, steps=4000, lr=0.1, clients=30)
    assert late.risk == pytest.approx(risk.rtfa(**STANDARD, lam=0.7, clients=30).risk, rel=1e-9)
    assert risk.ditto(**STANDARD, lam=0.7, steps=0, lr=0.1).risk == pytest.approx(1.0)


def test_crossings_are_where_risks_are_equal():
    for over in ("sigma2", "gamma", "r2"):
        for first, second in (("ftfa", "fedavg"), ("local", "fedavg"), ("flix", "ftfa")):
            for value in crossover.crossings(first, second, over, MIXED, 0.05, 20.0):
                at = crossover.varied(MIXED, over, value)
                one, two = (crossover.predict(name, at).risk for name in (first, second))
                assert one == pytest.approx(two, rel=1e-6), (over, first, second)
    noise = crossover.crossings("ftfa", "fedavg", "sigma2", MIXED, 0.01, 10.0, spectrum=TWO)
    assert noise == pytest.approx([risk.crossover_noise(gamma=2.0, r2=1.0, spectrum=TWO)], rel=1e-6)
    assert crossover.crossings("rtfa", "fedavg", "sigma2", MIXED, 0.01, 10.0) == []


def test_crossing_over_clients_is_near_the_clients_needed():
    numbers = {**STANDARD, "rho2": 1.5, "clients": 10}
    best = ridge_limits.optimal_lambda(gamma=2.0, r2=1.5, sigma2=0.25)  # the best where they meet
    assert best > 0
    found = crossover.crossings("rtfa", "ridge-local", "clients", numbers, 1.0, 1000.0)
    assert len(found) == 1 and found[0] == pytest.approx(7.0, rel=0.15)


def test_wrong_names_and_numbers_are_named():
    with pytest.raises(SettingError, match="no centre"):
        learned_centre.centre_error(**STANDARD, clients=10, method="best")
    with pytest.raises(SettingError, match="cannot vary"):
        crossover.crossings("ftfa", "fedavg", "noise", MIXED, 0.1, 1.0)
    with pytest.raises(SettingError, match="needs rho2"):
        crossover.predict("flix", STANDARD)
    with pytest.raises(SettingError, match="rho2 >= r2"):
        flix_risk.flix(gamma=2.0, r2=2.0, rho2=1.0, sigma2=1.0)
