"""Step sizes of FLIX by hand: two clients, curvatures alpha^2 L of 1 and 3, so L_alpha = 2."""

import pytest
import torch

from coterie.theory import flix, flix_rates, flix_steps

MIXTURE = flix.Mixture(torch.tensor([0.5, 1.0]), torch.tensor([4.0, 3.0]), torch.tensor([0.4, 0.2]))


def test_step_sizes_are_the_formulas():
    assert flix_steps.dgd_step(MIXTURE) == pytest.approx(1 / 2)
    assert flix_steps.dcgd_step(MIXTURE, 5.0) == pytest.approx(1 / (2 + 2 * 5 * 3 / 2))
    assert flix_steps.diana_step(MIXTURE, 5.0) == pytest.approx(1 / (2 + 6 * 5 * 3 / 2))
    assert flix_steps.diana_beta(5.0) == pytest.approx(1 / 6)
    assert (
        flix_steps.diana_step(MIXTURE, 0.0)
        == flix_steps.dcgd_step(MIXTURE, 0.0)
        == flix_steps.dgd_step(MIXTURE)
    )


def test_a_solver_takes_its_own_step_size():
    for solver, size in (("dgd", 1 / 2), ("dcgd", 1 / 17), ("diana", 1 / 47)):
        assert flix_steps.step(solver, MIXTURE, 5.0) == pytest.approx(size)


def test_rates_follow_from_step_sizes():
    """mu_alpha = (0.1 + 0.2) / 2."""
    assert flix_rates.dgd_rate(MIXTURE) == pytest.approx(1 - 0.15 / 2)
    assert flix_rates.diana_rate(MIXTURE, 5.0) == pytest.approx(1 - 0.15 / 47)
    assert flix_rates.diana_rate(MIXTURE, 0.0) == pytest.approx(1 - 0.15 / 2)
