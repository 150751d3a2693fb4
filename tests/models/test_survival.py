"""Cox regression and concordance against brute force, automatic differentiation and statsmodels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import coterie
from coterie import metrics, models
from coterie._core.errors import CoterieError, DataError


def rows(seed: int, size: int = 30, features: int = 3, ties: bool = True) -> tuple[Tensor, Tensor]:
    """Return rows with exponential times, a third of them censored, many of them tied."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(size, features))
    time = draw.exponential(np.exp(-x @ np.linspace(0.8, -0.4, features)))
    time = np.ceil(4 * time) if ties else time
    event = draw.random(size) < 0.66
    event[0] = True
    return torch.tensor(x), torch.tensor(np.where(event, time, -time))


def brute_force(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return minus the logarithm of Breslow's partial likelihood, written row by row."""
    z, value = x @ w, torch.zeros((), dtype=w.dtype)
    for i in range(len(y)):
        if y[i] > 0:
            at_risk = [j for j in range(len(y)) if abs(y[j]) >= y[i]]
            value = value + torch.logsumexp(z[at_risk], 0) - z[i]
    return value


def padded(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return clients of different sizes as a stack, padded with rows that would matter if they counted."""
    width = max(len(y) for _, y in parts) + 2
    x = torch.full((len(parts), width, parts[0][0].shape[1]), 7.0, dtype=torch.float64)
    y, weight = (
        torch.full((len(parts), width), 1e6, dtype=torch.float64),
        torch.zeros(len(parts), width).double(),
    )
    for k, (inputs, targets) in enumerate(parts):
        x[k, : len(targets)], y[k, : len(targets)] = inputs, targets
        weight[k, : len(targets)] = 1 / len(targets)
    return x, y, weight


@pytest.mark.parametrize("ties", [True, False])
def test_loss_and_derivatives_are_those_of_the_brute_force_partial_likelihood(ties: bool) -> None:
    parts = [rows(seed, size, ties=ties) for seed, size in enumerate((30, 7, 1))]
    x, y, weight = padded(parts)
    model = models.cox(l2=0.3).fit_to(*parts[0])
    w = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for k, (inputs, targets) in enumerate(parts):

        def loss(w: Tensor, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            share = model.scale / len(targets)
            return share * brute_force(w, inputs, targets) + 0.15 * w.square().sum()

        assert torch.allclose(model.loss(w, x, y, weight)[k], loss(w[k]))
        assert torch.allclose(model.grad(w, x, y, weight)[k], torch.func.grad(loss)(w[k]), atol=1e-12)
        hessian = torch.autograd.functional.hessian(loss, w[k])
        assert torch.allclose(model.hessian(w, x, y, weight)[k], hessian, atol=1e-12)
        assert torch.allclose(model.hvp(w, v, x, y, weight)[k], hessian @ v[k], atol=1e-12)
        alone = torch.full((len(targets),), 1 / len(targets), dtype=torch.float64)
        assert torch.allclose(model.grad(w[k], inputs, targets, alone), model.grad(w, x, y, weight)[k])
    assert torch.allclose(
        model.smoothness(w, x, y, weight), torch.linalg.eigvalsh(model.hessian(w, x, y, weight))[:, -1:]
    )


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    x, y = rows(3)
    model = models.cox().fit_to(x, y)
    w, weight = torch.full((3,), 400.0, dtype=torch.float64), torch.full((30,), 1 / 30, dtype=torch.float64)
    assert torch.allclose(model.loss(w, x, y, weight), model.scale / 30 * brute_force(w, x, y))
    expected = torch.func.grad(lambda w: model.scale / 30 * brute_force(w, x, y))(w)
    assert torch.allclose(model.grad(w, x, y, weight), expected)


def test_a_client_without_rows_or_events_has_no_loss_and_no_gradient() -> None:
    x, y = rows(4, 6)
    model = models.cox().fit_to(x, y)
    w = torch.ones(2, 3, dtype=torch.float64)
    targets = torch.stack([-y.abs(), y])
    weight = torch.stack([torch.full((6,), 1 / 6), torch.zeros(6)]).double()
    assert model.loss(w, x.expand(2, -1, -1), targets, weight).tolist() == [[0.0], [0.0]]
    assert not model.grad(w, x.expand(2, -1, -1), targets, weight).any()
    assert not model.hessian(w, x.expand(2, -1, -1), targets, weight).any()


def test_the_sum_over_clients_is_the_stratified_cox_regression_of_statsmodels() -> None:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    parts = [rows(seed, 25 + 10 * seed, 4) for seed in range(4)]
    x, y, weight = padded(parts)
    model = models.cox(reduction="sum").fit_to(*parts[0])
    ones, w = (weight > 0).double(), torch.zeros(4, dtype=torch.float64)
    for _ in range(20):
        at = w.expand(4, -1)
        w = w - torch.linalg.solve(model.hessian(at, x, y, ones).sum(0), model.grad(at, x, y, ones).sum(0))
    pooled, targets = (torch.cat([part[k] for part in parts]).numpy() for k in (0, 1))
    strata = np.repeat(np.arange(4), [len(part[1]) for part in parts])
    found = phreg(
        np.abs(targets), pooled, status=(targets > 0).astype(int), strata=strata, ties="breslow"
    ).fit()
    assert np.allclose(w.numpy(), found.params, atol=1e-6)
    error = torch.linalg.inv(model.hessian(w.expand(4, -1), x, y, ones).sum(0)).diagonal().sqrt()
    assert np.allclose(error.numpy(), found.bse, atol=1e-6)


def test_federated_averaging_of_gradients_ends_at_the_stratified_estimate() -> None:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    parts = [rows(10 + seed, 40 + 10 * seed, 2) for seed in range(3)]
    fed = coterie.Federation.from_arrays([x for x, _ in parts], [y for _, y in parts], models.cox())
    method = coterie.algorithms.FedAvg(lr=1.0, steps=1, weighting="size")
    run = coterie.fit(fed, method, rounds=400)
    assert run.algorithm.batch == 0  # a row's loss needs all rows at risk
    pooled, targets = (torch.cat([part[k] for part in parts]).numpy() for k in (0, 1))
    strata = np.repeat(np.arange(3), [len(part[1]) for part in parts])
    found = phreg(
        np.abs(targets), pooled, status=(targets > 0).astype(int), strata=strata, ties="breslow"
    ).fit()
    assert np.allclose(run.personal[0].numpy(), found.params, atol=1e-6)


def test_solve_finds_the_minimiser_and_says_when_there_is_none() -> None:
    x, y = rows(5)
    model, weight = models.cox().fit_to(x, y), torch.full((30,), 1 / 30, dtype=torch.float64)
    w = model.solve(torch.zeros(3), x, y, weight, tol=1e-10)
    assert float(model.grad(w.double(), x, y, weight).norm()) < 1e-6
    first = torch.tensor([[3.0], [2.0], [1.0]], dtype=torch.float64)  # the highest always goes first
    with pytest.raises(CoterieError, match="l2 > 0"):
        model = models.cox().fit_to(first, torch.tensor([1.0, 2.0, 3.0]))
        model.solve(torch.zeros(1), first, torch.tensor([1.0, 2.0, -3.0]), torch.full((3,), 1 / 3), tol=1e-9)


def test_concordance_is_that_of_all_pairs() -> None:
    for seed in range(6):
        draw = np.random.default_rng(seed)
        size = int(draw.integers(1, 40))
        z, time = draw.integers(0, 9, size).astype(float), draw.integers(1, 12, size).astype(float)
        y, weight = np.where(draw.random(size) < 0.6, time, -time), (draw.random(size) < 0.8).astype(float)
        concordant = comparable = 0.0
        for i in range(size):
            for j in range(size):
                later = time[j] > time[i] or (time[j] == time[i] and y[j] < 0)
                if i != j and weight[i] and weight[j] and y[i] > 0 and later:
                    comparable += 1
                    concordant += 1.0 if z[i] > z[j] else 0.5 if z[i] == z[j] else 0.0
        tensors = [torch.tensor(part).expand(2, -1) for part in (z, y, weight)]
        found = models.risk_sets.concordance_counts(*tensors)
        assert [part.tolist() for part in found] == [[concordant] * 2, [comparable] * 2]


def test_concordance_over_clients_adds_up_their_pairs() -> None:
    metric = metrics.find("concordance")
    parts = [rows(seed, 20 + seed) for seed in range(3)]
    pairs = [models.risk_sets.concordance_counts(x[:, 0], y, torch.ones_like(y)) for x, y in parts]
    sums = torch.stack(
        [
            metric.sums(metrics.ScoredRows("survival", x[:, :1], y, torch.full_like(y, 1 / len(y))))
            for x, y in parts
        ]
    )
    sizes = torch.tensor([[float(len(y))] for _, y in parts])
    pooled = sum(float(a) for a, _ in pairs) / sum(float(b) for _, b in pairs)
    assert math.isclose(float(metric.pooled(sums, sizes)), pooled)
    assert math.isnan(metric.value("survival", torch.zeros(2, 1), torch.tensor([-1.0, -2.0])))


def test_rows_add_up_to_the_loss() -> None:
    parts = [rows(seed, 15 + seed) for seed in range(3)]
    fed = coterie.Federation.from_arrays(
        [x for x, _ in parts], [y for _, y in parts], models.cox(), split=(0.6, 0.2, 0.2)
    )
    run = coterie.fit(fed, "ditto", rounds=3)
    start = 0
    for k, size in enumerate(fed.rows["test"].tolist()):
        mine = run.test_rows["loss"][start : start + size]
        assert math.isclose(float(mine.mean()), float(run.score("test", "loss")[k]), abs_tol=1e-9)
        start += size


def test_unusable_times_are_named() -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(DataError, match="row 1 is 0"):
        models.cox().fit_to(x, torch.tensor([1.0, 0.0]))
    with pytest.raises(DataError, match="No row has an event"):
        models.cox().fit_to(x, torch.tensor([-1.0, -2.0]))


def test_a_model_is_described_and_made_again() -> None:
    model = models.cox(l2=0.1).fit_to(*rows(1))
    assert models.from_description(model.describe()) == model
