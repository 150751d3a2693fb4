"""With a guard no method harms a client whose validation rows speak against it, and the report says what that cost."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from coterie import Federation, compare, load, models, resume
from coterie._core.errors import RunError
from coterie.algorithms import make
from coterie.engine.resplit import merged
from coterie.models.metrics import find
from coterie.report.page import report
from coterie.select.comparison import Comparison
from coterie.select.guard import GuardEffect, can_guard, guarded_cost, harmed, held_out_verdict, let_keep_own
from coterie.train.fit import fit
from coterie.train.own_models import keep_own

if TYPE_CHECKING:
    from tests.conftest import Command

STRANGER = 3


def with_strangers(
    seed: int,
    clients: int = 14,
    rows: int = 60,
    strangers: tuple[int, ...] = (STRANGER,),
    split=(0.4, 0.2, 0.4),
) -> Federation:
    """Clients with the same coefficients but for strangers, who have the opposite."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(6, generator=draw, dtype=torch.float64)
    xs = [torch.randn(rows, 6, generator=draw, dtype=torch.float64) for _ in range(clients)]
    signs = [-1 if k in strangers else 1 for k in range(clients)]
    noise = [1.5 * torch.randn(rows, generator=draw, dtype=torch.float64) for _ in range(clients)]
    ys = [x @ (sign * w) + e for x, sign, e in zip(xs, signs, noise, strict=True)]
    return Federation.from_arrays(xs, ys, models.linear(), split=split, seed=seed)


@functools.cache
def compared(guard: bool) -> Comparison:
    return compare(with_strangers(2), algorithms=["ditto"], rounds=18, budget=3, guard=guard)


def test_a_stranger_keeps_its_own_model_and_scores_are_those_of_deployed_models() -> None:
    free, guarded = compared(False), compared(True)
    for name in ("fedavg", "fine-tuned", "ditto"):
        before, after = free.of(name)[0].run, guarded.of(name)[0].run
        alone = guarded.of("local")[0].run
        kept = [] if after.own is None else after.own.clients
        others = [k for k in range(14) if k not in kept]
        assert torch.equal(after.personal[others], before.personal[others])
        assert torch.equal(after.personal[kept], alone.personal[kept])
        for split in ("train", "validation", "test"):
            again = after.fed.score(after.personal.to(after.fed.dtype), split)["rmse"].cpu().double()
            recorded = after.history.at(after.deployed_round, split, "rmse")
            assert recorded is None or torch.allclose(recorded, again, atol=1e-9), (name, split)
        assert not guarded.against_alone(name).called[kept].any()
    run = guarded.of("fedavg")[0].run
    assert run.own is not None and STRANGER in run.own.clients
    worse, better = (one.of("fedavg")[0].test[STRANGER] for one in (free, guarded))
    assert float(better) < 0.7 * float(worse)


def test_methods_are_chosen_by_what_clients_deploy_without_flattering_the_guard() -> None:
    free, guarded = compared(False), compared(True)
    cost = {row["algorithm"]: row["validation_cost"] for row in guarded.rows}
    unguarded = {row["algorithm"]: row["validation_cost"] for row in free.rows}
    assert cost["local"] == unguarded["local"] and cost["fedavg"] < unguarded["fedavg"]


def test_a_guard_with_nothing_to_guard_costs_what_the_method_costs() -> None:
    fed = with_strangers(1, clients=4, strangers=())
    run, alone = (fit(fed, name, rounds=4) for name in ("fedavg", "local"))
    for metric in ("loss", "rmse", "mae"):
        mine = float(run.score("validation", metric).mean())
        assert np.isclose(guarded_cost(run, run, find(metric), find("rmse")), mine, rtol=1e-6)
    assert guarded_cost(run, alone, find("r2"), find("rmse")) is None


def test_the_cost_is_not_that_of_the_better_model_on_the_same_rows() -> None:
    """Two models that differ by noise alone: taking the better one of each client would look like a gain."""
    fed = with_strangers(7, clients=200, rows=20, strangers=())
    draw = torch.Generator().manual_seed(0)
    run, alone = (fit(fed, "fedavg", rounds=2) for _ in range(2))
    run.personal, alone.personal = (
        one.personal + 0.5 * torch.randn(one.personal.shape, generator=draw, dtype=torch.float64)
        for one in (run, alone)
    )
    losses = [fed.score(one.personal, "validation")["loss"] for one in (run, alone)]
    means, best = [float(one.mean()) for one in losses], float(torch.minimum(*losses).mean())
    cost = guarded_cost(run, alone, find("loss"), find("rmse"))
    assert cost is not None and cost - best > 0.5 * (min(means) - best)
    run.own = None
    clients = harmed(held_out_verdict([(run, alone)], find("rmse")))
    fresh = with_strangers(7, clients=200, rows=2000, strangers=())
    keep_own(run, alone, clients)
    truth = float(fresh.score(run.personal, "validation")["loss"].mean())
    assert abs(cost - truth) < 0.1 * truth


def test_saving_and_cost_are_paired_differences_of_test_rows() -> None:
    found = compared(True)
    trial = found.of("fedavg")[0]
    effect = found.guard_effect("fedavg")
    assert effect is not None and trial.run.own is not None and effect.verdict is not None
    whose = torch.repeat_interleave(trial.run.fed.rows["test"])
    errors = [
        trial.run.fed.row_values(models_, "test", [find("rmse")])["rmse"]
        for models_ in (trial.run.own.without(trial.run.personal), trial.run.personal)
    ]
    at = torch.isin(whose, torch.tensor(trial.run.own.clients))
    saved = float((errors[0] - errors[1])[at].mean())
    assert np.isclose(effect.verdict.judged.by_rows.value, saved, rtol=1e-9)
    assert effect.saved >= 1 and effect.names == [str(k) for k in trial.run.own.clients]
    row = next(row for row in found.json()["rows"] if row["algorithm"] == "fedavg")
    assert row["guard"]["text"] == effect.sentence() in " ".join(found.json()["guard"])
    assert "guard" not in found.rows[0] and "guard" not in compared(False).json()


def test_the_guard_holds_after_refitting_is_written_down_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "compared"
    fed = with_strangers(2)
    found = compare(fed, algorithms=[], rounds=18, budget=3, guard=True, out=out)
    name = found.chosen()
    run, mine, alone = load(out / name), found.of(name)[0].run, found.of("local")[0].run
    assert name != "local" and mine.own is not None and mine.refit == "validation"
    kept = json.loads((out / name / "result.json").read_text())["guard"]["clients"]
    assert kept == [fed.names[k] for k in mine.own.clients]
    assert torch.equal(run.personal, mine.personal)
    again = fit(merged(alone.fed, ("train", "validation")), alone.algorithm, alone.deployed_round)
    assert torch.equal(run.personal[mine.own.clients], again.personal[mine.own.clients])
    assert alone.refit == "none"
    with pytest.raises(RunError, match=r"coterie\.load"):
        resume(out / name, fed)
    page = report([out])
    assert "keep the model that they trained alone" in page or "keeps the model that it trained" in page


def test_folds_decide_together_who_keeps_its_own(tmp_path: Path) -> None:
    fed = with_strangers(3, clients=10, rows=25, split=(0.6, 0.2, 0.2))
    found = compare(fed, algorithms=[], rounds=9, budget=2, guard=True, folds=3, out=tmp_path / "folds")
    effect = found.guard_effect("fedavg")
    assert effect is not None and str(STRANGER) in effect.names
    deployed = json.loads((tmp_path / "folds" / "fedavg" / "result.json").read_text())["guard"]
    assert str(STRANGER) in deployed["clients"]


def test_another_kind_of_model_cannot_be_kept() -> None:
    table = Federation.from_table("heart_disease", client="hospital", target="sick")
    alone = fit(table, "local", rounds=1)
    assert not can_guard(fit(table.with_model(models.trees(trees=1)), "trees", rounds=1), alone)
    assert can_guard(fit(table, "fedavg", rounds=1), alone) and not can_guard(alone, alone)


def test_a_guard_that_lets_everybody_through_says_so() -> None:
    fed = with_strangers(1, clients=4, strangers=())
    run = fit(fed, "fedavg", rounds=2)
    effect = GuardEffect.of("fedavg", [run], find("rmse"))
    assert (
        effect.sentence() == "The guard lets all 4 clients deploy fedavg." and effect.json()["gain"] is None
    )
    run.own = None
    alone = fit(fed, "local", rounds=2, score_test=False)
    keep_own(run, alone, [0])
    assert GuardEffect.of("fedavg", [run], find("rmse")).sentence().startswith("1 of 4 clients ('0') keeps")


@pytest.mark.slow
def test_the_command_shows_who_keeps_its_own(command: Command, tmp_path: Path) -> None:
    shown = command("compare", "heart_disease", "--client", "hospital", "--target", "sick", "--rounds", 2)
    assert "keep own" not in shown.out and "Guard" not in shown.out
    arguments = ("--client", "hospital", "--target", "sick", "--rounds", 2, "--budget", 1, "--guard")
    shown = command("compare", "heart_disease", *arguments, "--json", tmp_path / "found.json")
    assert shown.code == 0 and "keep own" in shown.out and "Guard: " in shown.out
    told = json.loads((tmp_path / "found.json").read_text())
    assert all(text in " ".join(shown.out.split()) for text in told["guard"])


def true_harm(run, alone, w: torch.Tensor) -> np.ndarray:
    """How much more squared error each client has than alone, in expectation: features have variance 1."""
    mine, own = (((one.personal - w) ** 2).sum(1) for one in (run, alone))
    return (mine - own).numpy()


@pytest.mark.slow
def test_no_client_is_harmed_by_more_than_its_rows_can_show() -> None:
    """Worlds drawn for this test: strangers among alike clients, and clients that differ all over."""
    beyond: dict[bool, list[np.ndarray]] = {False: [], True: []}
    mean: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(5000, 5060):
        draw = torch.Generator().manual_seed(seed)
        n, d, rows = 20, 5, (30, 60, 150)[seed % 3]
        centre, far = (
            torch.randn(d, generator=draw, dtype=torch.float64),
            torch.zeros(n, 1, dtype=torch.float64),
        )
        far[: seed % 4] = 1.5
        w = centre + (far + 0.1 * (seed % 2)) * torch.randn(n, d, generator=draw, dtype=torch.float64)
        xs = [torch.randn(rows, d, generator=draw, dtype=torch.float64) for _ in range(n)]
        noise = [torch.randn(rows, generator=draw, dtype=torch.float64) for _ in range(n)]
        ys = [x @ one + e for x, one, e in zip(xs, w, noise, strict=True)]
        fed = Federation.from_arrays(xs, ys, models.linear(intercept=False), split=(0.5, 0.3, 0.2), seed=seed)
        run, alone = (fit(fed, make(name, lr=0.1), 40) for name in ("fedavg", "local"))
        verdict = held_out_verdict([(run, alone)], find("rmse"))
        error = np.sqrt(verdict.judged.evidence.variance)
        for guard in (False, True):
            if guard:
                let_keep_own(run, alone, [(run, alone)], find("rmse"))
            harm = true_harm(run, alone, w)
            beyond[guard].append(harm > 2 * error)
            mean[guard].append(float(harm.mean()))
    free, guarded = (float(np.mean(np.concatenate(beyond[guard]))) for guard in (False, True))
    assert free > 0.05 and guarded < 0.01, (free, guarded)
    assert np.mean(mean[True]) < np.mean(mean[False]) and np.mean(mean[True]) < 0, (mean[True], mean[False])
