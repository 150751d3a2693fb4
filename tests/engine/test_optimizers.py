"""Optimisers of local steps are torch's, and what they remember stays with the client."""

import pytest
import torch

from coterie import Federation, check_algorithm, fit, models
from coterie.algorithms import make
from coterie.engine.optimizers import memory_like, step

TORCH = {
    "momentum": lambda x: torch.optim.SGD([x], lr=0.05, momentum=0.9),
    "adam": lambda x: torch.optim.Adam([x], lr=0.05),
    "adamw": lambda x: torch.optim.AdamW([x], lr=0.05, weight_decay=0.01),
}


@pytest.mark.parametrize("name", TORCH)
def test_steps_are_those_of_torch(name):
    start = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, memory = start.clone(), memory_like(name, start)
    theirs = start.clone().requires_grad_()
    optimizer = TORCH[name](theirs)
    for _ in range(12):
        x, memory = step(name, x, 2 * x + x.sin(), 0.05, memory)
        optimizer.zero_grad()
        (theirs.square() - theirs.cos()).sum().backward()
        optimizer.step()
    torch.testing.assert_close(x, theirs.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TORCH)
def test_rounds_go_on_where_the_last_one_ended(name):
    """Three rounds of four steps alone are twelve steps of torch's optimiser on all rows."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(9, 3, generator=draw, dtype=torch.float64) for _ in range(2)]
    ys = [x.sum(1) for x in xs]
    fed = Federation.from_arrays(xs, ys, models.linear())
    run = fit(fed, make("local", lr=0.05, steps=4, optimizer=name, batch=0), rounds=3)
    theirs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = TORCH[name](theirs)
    for _ in range(12):
        optimizer.zero_grad()
        (0.5 * (xs[1] @ theirs - ys[1]).square().mean()).backward()
        optimizer.step()
    torch.testing.assert_close(run.personal[1], theirs.detach(), rtol=0, atol=1e-10)


def test_ditto_remembers_its_two_descents_apart():
    xs, ys = [torch.ones(2, 1).double()] * 2, [torch.zeros(2).double(), 4 * torch.ones(2).double()]
    run = fit(Federation.from_arrays(xs, ys, models.linear()), make("ditto", optimizer="adam", batch=0), 3)
    kept = run.fed.runtime.snapshot()
    assert {name for name in kept if "adam" in name} >= {"adam", "adam personal"} or any(
        "adam personal" in name for name in kept
    )
    assert torch.isfinite(run.personal).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        make("fedavg", optimizer="adamw"),
        pytest.param(make("ditto", optimizer="momentum"), marks=pytest.mark.slow),
        pytest.param(make("cobo", optimizer="adam"), marks=pytest.mark.slow),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_conformance_with_other_optimizers(algorithm):
    check_algorithm(algorithm)
