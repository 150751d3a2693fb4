"""`auto`: what it chooses where the truth is known, what it spends, what it never looks at, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import coterie
from coterie import models
from coterie.errors import DataError, SettingError
from coterie.federation.federation import Federation
from coterie.runs import auto
from coterie.runs.compare import compare
from coterie.runs.fit import fit, resume

SPLIT = (0.6, 0.2, 0.2)


def world(rows: int, spread: float, clients: int = 8, d: int = 6, seed: int = 0) -> Federation:
    """Linear clients whose parameters differ by `spread` around a common one."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(d, generator=draw, dtype=torch.float64)
    xs = torch.randn(clients, rows, d, generator=draw, dtype=torch.float64)
    own = common + spread * torch.randn(clients, d, generator=draw, dtype=torch.float64)
    noise = torch.randn(clients, rows, generator=draw, dtype=torch.float64)
    ys = torch.einsum("crd,cd->cr", xs, own) + noise
    return Federation.from_arrays(list(xs), list(ys), models.linear(), split=SPLIT)


def rmse(fed: Federation, algorithm: str, **settings: float) -> float:
    from coterie.algorithms import make

    return float(fit(fed, make(algorithm, **settings), 60, select="best").score("test", "rmse").mean())


@pytest.mark.parametrize(
    ("rows", "spread", "better", "worse"), [(20, 0.02, "fedavg", "local"), (200, 2.0, "local", "fedavg")]
)
def test_the_choice_is_as_good_as_the_better_extreme(
    rows: int, spread: float, better: str, worse: str
) -> None:
    fed = world(rows, spread)
    choice = coterie.choose(fed, rounds=60, effort=6)
    test = float(choice.run.score_test()["rmse"].mean())
    good, bad = (rmse(fed, name, lr=0.1, batch=0) for name in (better, worse))
    assert good < bad
    assert test < good + 0.2 * (bad - good)


def test_test_rows_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = world(30, 0.3)
    real = Federation._scores
    rows = fed.runtime.splits["test"]
    spoiled = type(rows)(rows.x * torch.nan, rows.y * torch.nan, rows.start, rows.size)
    monkeypatch.setitem(fed.runtime.splits, "test", spoiled)
    choice = coterie.choose(fed, rounds=30, effort=3)
    assert choice.run.personal.isfinite().all() and real is Federation._scores


def test_the_budget_is_kept() -> None:
    fed = world(20, 0.3)
    for effort in (4, 12):
        choice = coterie.choose(fed, rounds=27, effort=effort)
        assert sum(row["rounds"] for row in choice.rows) <= effort * 27
    free = sum(row["megabytes"] for row in choice.rows)
    tight = coterie.choose(fed, rounds=27, budget_mb=free / 4)
    one_more = max(row["megabytes"] for row in choice.rows)
    assert sum(row["megabytes"] for row in tight.rows) <= free / 4 + one_more
    assert all(row["rounds"] <= 27 for row in tight.rows)


def test_the_race_is_the_same_every_time_and_equals_the_run_alone() -> None:
    fed = world(20, 0.3)
    first, second = (coterie.choose(fed, rounds=18, effort=3) for _ in range(2))
    assert first.json() == second.json()
    again = fit(fed, first.run.algorithm, 18, evaluate_every=1, select="best")
    assert torch.equal(again.personal, first.run.personal)


def test_fit_auto_writes_a_run_folder_with_the_reasons(tmp_path: Path) -> None:
    fed = world(20, 0.3)
    run = fit(fed, "auto", 18, tmp_path / "run")
    assert run.choice is not None and run.choice.why
    note = json.loads((tmp_path / "run" / "choice.json").read_text())
    assert note["method"] == run.algorithm.name and len(note["race"]) > 6
    assert torch.equal(resume(tmp_path / "run", fed).personal, run.personal)
    with pytest.raises(coterie.CoterieError):
        fit(fed, "auto", 18, tmp_path / "run")


def test_compare_takes_auto() -> None:
    comparison = compare(world(30, 0.3), algorithms=["auto"], seeds=1, rounds=18, budget=2)
    assert [row["algorithm"] for row in comparison.rows] == ["local", "fedavg", "fine-tuned", "auto"]


def test_what_cannot_be_raced_is_said() -> None:
    fed = world(20, 0.3)
    with pytest.raises(SettingError, match="effort must be at least 1"):
        coterie.choose(fed, effort=0)
    no_validation = Federation.from_arrays([torch.randn(9, 2)] * 2, [torch.randn(9)] * 2, models.linear())
    with pytest.raises(DataError, match="auto chooses on validation rows"):
        coterie.choose(no_validation)
    choice = coterie.choose(fed, rounds=9, methods=["oracle", "fedavg"], effort=2)
    assert any("Could not take part: oracle" in line and "clusters" in line for line in choice.why)


class Stub:
    """A contestant with known validation metrics."""

    def __init__(self, accuracy: list[float]) -> None:
        self.accuracy = accuracy

    def validation(self, metric: str) -> Tensor:
        return torch.tensor(self.accuracy, dtype=torch.float64)


def test_gains_are_told_by_name() -> None:
    names = ["basel", "bern", "va", "zug"]
    alone = Stub([0.80, 0.70, 0.90, 0.60])
    said = auto._gains(names, Stub([0.83, 0.74, 0.88, 0.62]), alone, "accuracy")  # type: ignore[arg-type]
    assert said.startswith("va is better off alone (-2 points); the other 3 gain 3 ± ")
    said = auto._gains(names, Stub([0.83, 0.74, 0.92, 0.62]), alone, "accuracy")  # type: ignore[arg-type]
    assert said.startswith("Every client is as well off or better: 2.7 ± ")
    said = auto._gains(names, Stub([0.7, 0.6, 0.8, 0.5]), alone, "rmse")  # type: ignore[arg-type]
    assert said.startswith("Every client is as well off or better: 0.1") and "in rmse" in said


def test_a_simpler_method_wins_a_draw() -> None:
    fed = world(20, 0.0)
    race = auto.Race(fed, 9, None, None)
    race.enter([coterie.algorithms.make("ditto", lam=1.0), coterie.algorithms.make("fedavg")])
    ditto, fedavg = race.everybody
    for contestant in (ditto, fedavg):
        contestant.advance(9)
    values = torch.linspace(0.9, 1.1, fed.n, dtype=torch.float64)

    def spoil(shift: Tensor) -> auto.Contestant:
        for contestant, loss in ((ditto, values), (fedavg, values + shift)):
            contestant.progress.history.add(contestant.progress.best.round, "validation", {"loss": loss})
            contestant.progress.best.loss = float(loss.mean())
        return race._winner([ditto, fedavg])

    wide = 0.3 * torch.tensor([1.0, -1.0] * (fed.n // 2), dtype=torch.float64)
    assert spoil(wide + 0.01) is fedavg
    assert spoil(0.01 * torch.ones(fed.n, dtype=torch.float64) + 1e-4 * wide) is ditto
