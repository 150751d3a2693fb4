"""FOMAML and Reptile against the least-squares solutions they converge to."""

import torch
from torch import Tensor

import coterie
from coterie import Federation, models
from coterie.algorithms import make


def clients() -> tuple[Federation, list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(3)
    xs = [torch.randn(rows, 4, generator=draw, dtype=torch.float64) for rows in (6, 9, 30, 12)]
    ys = [x @ torch.randn(4, generator=draw, dtype=torch.float64) for x in xs]
    return Federation.from_arrays(xs, ys, models.linear()), xs, ys


def centre(xs: list[Tensor], ys: list[Tensor], h) -> Tensor:
    """(sum_i h(S_i) S_i)^-1 sum_i h(S_i) X_i'y_i / n_i for a matrix function h."""
    left, right = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for x, y in zip(xs, ys, strict=True):
        s = x.T @ x / len(y)
        left, right = left + h(s) @ s, right + h(s) @ (x.T @ y / len(y))
    return torch.linalg.solve(left, right)


EYE = torch.eye(4, dtype=torch.float64)


def test_fomaml_converges_to_its_filtered_least_squares():
    fed, xs, ys = clients()
    run = coterie.fit(
        fed, make("fomaml", lr=0.3, inner_lr=0.1, tuning_steps=0, batch=0), 1500, evaluate_every=0
    )
    torch.testing.assert_close(run.state.x, centre(xs, ys, lambda s: EYE - 0.1 * s), rtol=0, atol=1e-8)


def test_reptile_converges_to_its_filtered_least_squares():
    fed, xs, ys = clients()

    def after_five_steps(s: Tensor) -> Tensor:
        return sum(torch.linalg.matrix_power(EYE - 0.1 * s, k) for k in range(5))

    run = coterie.fit(fed, make("reptile", lr=0.1, steps=5, tuning_steps=0, batch=0), 1000, evaluate_every=0)
    torch.testing.assert_close(run.state.x, centre(xs, ys, after_five_steps), rtol=0, atol=1e-8)


def test_both_deploy_the_shared_model_after_steps_at_home():
    fed, xs, ys = clients()
    for name, settings in (("fomaml", {"inner_lr": 0.1}), ("reptile", {"lr": 0.1})):
        run = coterie.fit(fed, make(name, batch=0, tuning_steps=3, **settings), 4)
        for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
            w = run.state.x
            for _ in range(3):
                w = w - 0.1 * x.T @ (x @ w - y) / len(y)
            torch.testing.assert_close(run.personal[k], w)


def test_reptile_with_a_whole_move_is_fedavg_with_equal_weights():
    fed, _, _ = clients()
    one = coterie.fit(fed, make("reptile", meta_lr=1.0, tuning_steps=0), 5)
    other = coterie.fit(fed, make("fedavg", weighting="uniform"), 5)
    assert torch.equal(one.state.x, other.state.x)
