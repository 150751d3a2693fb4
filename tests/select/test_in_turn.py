"""A comparison with `auto` chooses by rows held out in turn where validation rows are few, and says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import coterie
from coterie.models.metrics import find
from coterie.select.auto import choose
from coterie.select.compare import compare
from coterie.select.cross_validation import folds
from coterie.select.held_out import HeldOutRows, choosing_metric

ROUNDS = 6


def federation(rows: int = 60, task: str = "binary") -> coterie.Federation:
    torch.manual_seed(5)
    xs = [torch.randn(rows + 3 * k, 3) for k in range(5)]
    slopes = [x @ torch.tensor([1.5, -1.0, 0.3 * k]) for k, x in enumerate(xs)]
    noisy = [slope + torch.randn(len(slope)) for slope in slopes]
    if task == "binary":
        model, ys = coterie.models.logistic(), [(value > 0).long() for value in noisy]
    else:
        model, ys = coterie.models.linear(), noisy
    return coterie.Federation.from_arrays(xs, ys, model, split=(0.6, 0.2, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "regression"])
def test_the_cost_of_a_method_is_that_of_rows_held_out_in_turn(task: str) -> None:
    fed = federation(task=task)
    found = compare(fed, algorithms=["auto"], rounds=ROUNDS, budget=2, folds=1)
    assert found.in_turn and found.verdict().startswith("Rows held out in turn prefer")
    for trial in found.trials:
        if trial.algorithm == "auto":
            continue
        losses: list[list[float]] = [[] for _ in range(fed.n)]
        for part in [fed, *folds(fed, 3)]:
            run = coterie.fit(part, trial.run.algorithm, rounds=trial.run.deployed_round, score_test=False)
            held = part.runtime.rows("validation")
            start = 0
            for k, size in enumerate(held.size.tolist()):
                x, y = held.x[start : start + size], held.y[start : start + size]
                score = part.model.scores(run.personal[k], x).squeeze(-1)
                if task == "binary":
                    loss = torch.nn.functional.softplus(torch.where(y > 0, -score, score))
                else:
                    loss = (score - y).square() * fed.unit_of(find("rmse")) ** 2
                losses[k] += loss.tolist()
                start += size
        assert sum(map(len, losses)) == int(fed.rows["train"].sum() + fed.rows["validation"].sum())
        assert trial.validation_cost == pytest.approx(np.mean([np.mean(one) for one in losses]), rel=1e-4)


@pytest.mark.slow
def test_auto_is_judged_on_the_same_rows() -> None:
    fed = federation()
    found = compare(fed, algorithms=["auto"], rounds=ROUNDS, budget=2, folds=1)
    choice = choose(fed, ROUNDS)
    assert choice.held_out is not None
    assert len(choice.held_out.client) == int(fed.rows["train"].sum() + fed.rows["validation"].sum())
    cost = choice.held_out.cost(find("loss"), find("loss"), fed.n)
    assert found.of("auto")[0].validation_cost == pytest.approx(cost)


@pytest.mark.slow
def test_one_split_decides_among_methods_that_all_go_by_it() -> None:
    fed = federation()
    assert not compare(fed, algorithms=[], rounds=3, budget=1, folds=1).in_turn
    assert not compare(fed, algorithms=["auto"], rounds=3, budget=1, folds=1, metric="auc").in_turn
    found = compare(fed, algorithms=["auto"], rounds=3, budget=1, folds=3)
    assert not found.in_turn and found.verdict().startswith("Validation rows prefer")


def test_costs_are_means_over_clients_and_roots_of_them() -> None:
    rows = HeldOutRows(torch.tensor([0, 2, 0, 2, 2]), {"rmse": torch.tensor([1.0, 4.0, 7.0, 9.0, 14.0])})
    assert rows.cost(find("rmse"), find("loss"), 3) == pytest.approx((4 + 9) / 2)
    assert rows.cost(find("rmse"), find("rmse"), 3) == pytest.approx((2 + 3) / 2)
    assert choosing_metric(find("loss"), coterie.models.linear()).name == "rmse"
    assert choosing_metric(find("loss"), coterie.models.logistic()).name == "loss"
    assert choosing_metric(find("accuracy"), coterie.models.logistic()).name == "accuracy"
