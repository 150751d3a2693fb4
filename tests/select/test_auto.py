"""`auto`: what it chooses where the truth is known, what it spends, what it never looks at, what it says."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import coterie
from coterie import models
from coterie._core.errors import CoterieError, DataError, SettingError
from coterie.algorithms import make
from coterie.data import tables
from coterie.engine.federation import Federation
from coterie.models.metrics import find
from coterie.select import auto, auto_explain, auto_field, auto_race, cross_validation
from coterie.select import entrant as entrant_module
from coterie.select.auto_networks import NETWORK
from coterie.select.auto_race import Race, clearly
from coterie.select.compare import compare
from coterie.select.cross_validation import folds
from coterie.select.entrant import Entrant
from coterie.train.contestant import Contestant
from coterie.train.fit import fit, resume
from coterie.train.predict import Predictor

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
    return float(fit(fed, make(algorithm, **settings), 60, select="best").score("test", "rmse").mean())


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_budget_is_kept() -> None:
    fed = world(20, 0.3)
    for effort in (6, 20):
        choice = coterie.choose(fed, rounds=27, effort=effort)
        assert sum(row["rounds"] for row in choice.rows) <= effort * 27 * 4, "four divisions of the rows"
    free = sum(row["megabytes"] for row in choice.rows)
    tight = coterie.choose(fed, rounds=27, budget_mb=free / 4)
    one_more = max(row["megabytes"] for row in choice.rows)
    # beyond it: the entrant with which it ended, and one that goes on so that somebody wins
    assert sum(row["megabytes"] for row in tight.rows) <= free / 4 + 2 * one_more
    assert all(row["rounds"] <= 4 * 27 for row in tight.rows)


def test_a_race_ends_when_its_seconds_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()  # a second for every look at the clock
    monkeypatch.setattr(auto_race, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    fed, methods = world(20, 0.3), ["fedavg", "ditto", "rtfa"]
    whole, short = (
        auto.choose(fed, rounds=18, methods=methods, cross_fit=False, budget_seconds=seconds)
        for seconds in (None, 3.0)
    )
    trained = [sum(row["rounds"] > 0 for row in one.rows) for one in (whole, short)]
    assert 0 < trained[1] <= 4 < trained[0] and short.run.personal.isfinite().all()
    with pytest.raises(SettingError, match="must be positive"):
        auto.choose(fed, rounds=18, budget_seconds=0.0)
    with pytest.raises(SettingError, match="for auto"):
        coterie.fit(fed, "ditto", 3, budget_seconds=1.0)


def test_the_race_is_the_same_every_time_and_equals_the_run_alone() -> None:
    fed = world(20, 0.3)
    first, second = (coterie.choose(fed, rounds=18, effort=3) for _ in range(2))
    assert first.json() == second.json()
    again = fit(fed, first.run.algorithm, first.run.deployed_round, evaluate_every=1)
    assert torch.equal(again.personal, first.run.personal)


@pytest.mark.slow
def test_fit_auto_writes_a_run_folder_with_the_reasons(tmp_path: Path) -> None:
    fed = world(20, 0.3)
    run = coterie.fit(fed, "auto", 18, tmp_path / "run")
    assert run.choice is not None and 3 <= len(run.choice.text().splitlines()) <= 5
    note = json.loads((tmp_path / "run" / "choice.json").read_text())
    assert note["method"] == run.algorithm.name and len(note["race"]) > 6
    assert torch.equal(resume(tmp_path / "run", fed).personal, run.personal)
    with pytest.raises(coterie.CoterieError):
        coterie.fit(fed, "auto", 18, tmp_path / "run")


@pytest.mark.slow
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


def entrant(name: str, **metrics: list[float]) -> Entrant:
    """Somebody with known validation metrics."""
    scores = {metric: torch.tensor(values, dtype=torch.float64) for metric, values in metrics.items()}
    found = Entrant(make(name), scores=scores)
    if "loss" in scores:
        found.cost = float(scores["loss"].mean())
    return found


@pytest.mark.parametrize(("few", "rows"), [(1000, "all"), (0, "validation")])
def test_the_verdict_is_on_rows_held_out(monkeypatch: pytest.MonkeyPatch, few: int, rows: str) -> None:
    """Every row that is no test row, held out once, where validation rows are few; else validation rows."""
    monkeypatch.setattr(cross_validation, "FEW_ROWS", few)
    fed = world(20, 0.3)
    race = Race(fed, 18)
    winner = race.run([make("local", lr=0.1), make("fedavg", lr=0.1), make("ditto", lr=0.1)])
    alone = race.alone()
    assert alone is not None
    verdict = race.verdict(winner, alone)
    held_out = {"all": ("train", "validation"), "validation": ("validation",)}[rows]
    assert verdict.judged.evidence.rows.sum() == sum(int(fed.rows[split].sum()) for split in held_out)
    assert ("rows held out in turn" in verdict.sentence("a", "b")) == (rows == "all")


def test_the_chosen_settings_are_told_where_they_are_not_the_usual_ones() -> None:
    assert auto_explain._described(make("ditto", lam=0.25, steps=7)) == "ditto (lam = 0.25, steps = 7)"
    assert auto_explain._described(make("ditto")) == "ditto"


def finalist(name: str, values: torch.Tensor, metric: torch.Tensor | None = None) -> Entrant:
    return entrant(name, loss=values.tolist(), rmse=(values if metric is None else metric).tolist())


def test_the_lowest_loss_wins_and_a_simpler_method_a_draw() -> None:
    """However noisy the difference is, a lower loss is not passed over; within 0.2 % the simpler method wins."""
    race = Race(world(20, 0.0), 9)
    values = torch.linspace(0.9, 1.1, 8, dtype=torch.float64)
    wide = 0.3 * torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    ditto = finalist("ditto", values)
    for off, winner in ((0.001, "fedavg"), (0.003, "ditto"), (0.1, "ditto")):
        race.finalists = [ditto, finalist("fedavg", values + wide + off)]
        assert race._winner().algorithm.name == winner
    race.finalists = [finalist("cobo", values), finalist("ifca", values + wide + 0.01, values - 0.2)]
    assert race._winner().algorithm.name == "cobo", "a better metric does not make up for a higher loss"


STEPS = [("fedavg", 0.75, 0.2), ("fedavg", 0.03, 0.5), ("local", 0.375, 0.6), ("local", 0.01, 0.7)]


def test_heats_keep_every_method_once_and_few_settings_of_one() -> None:
    race = Race(world(20, 0.0), 9)
    field = [entrant("ditto", loss=[k / 10]) for k in range(6)]
    field += [entrant("fedavg", loss=[0.9]), entrant("fedavg", loss=[1.0]), entrant("local", loss=[2.0])]
    slow, alone = field[6], field[8]
    assert race._best_of(field, 3, heat=0) == [field[0], slow, alone]
    assert race._best_of(field, 4, heat=0) == [*field[:2], slow, alone]
    grown = [entrant("trees", loss=[k / 10]) for k in (1, 2, 8)]
    for tree in grown:
        tree.on = "trees"
    kept = race._best_of([*grown, *field[6:]], 2, heat=0)
    assert kept == [*grown[:2], slow, alone], "settings of another model stay if they are among the best"
    assert race._best_of(field, 3, heat=1) == [*field[:2], slow, alone]
    assert race._best_of(field[:6], 3, heat=1) == field[:2]
    ahead, behind = entrant("fedper", loss=[0.1]), entrant("fedper", loss=[2.5])
    ahead.on = behind.on = NETWORK
    assert ahead in race._best_of([*field[6:], ahead], 1, heat=1)
    assert behind not in race._best_of([*field[6:], behind], 1, heat=1), (
        "a network has to beat the given model"
    )
    assert behind in race._best_of([*field[6:], behind], 1, heat=0)


@pytest.mark.slow
def test_losers_keep_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time are there more runs under way than the heat keeps, and one."""
    fed, most = world(20, 0.3), 0
    race = Race(fed, 18)
    real = Entrant.advance

    def counted(self: Entrant, until: int) -> None:
        nonlocal most
        real(self, until)
        most = max(most, sum(bool(e.parts) for e in race.everybody))

    monkeypatch.setattr(Entrant, "advance", counted)
    field = auto_field.Field.of(fed, None, coterie.advise(fed), 24, 18)
    winner = race.run(field.first, field.more)
    solved = sum(
        getattr(e.algorithm, "exact", False) or e.algorithm.name == "hierarchical" for e in race.everybody
    )
    assert most <= field.places / 3 + 2 + solved < len(race.everybody)
    assert winner.running is not None
    assert all(e.running is None and not e.scores for e in race.everybody if e not in race.finalists)


def test_few_rows_are_held_out_in_turn() -> None:
    """The loss of an entrant is the mean over divisions of the rows at one round, the same for all of them."""
    fed = world(20, 0.3)
    choice = coterie.choose(fed, rounds=18, methods=["fedavg", "ditto"], effort=8)
    assert any("trained 4 times" in line for line in choice.why)
    by_hand = []
    for fold in [fed, *folds(fed, 3)]:
        run = fit(fold, choice.run.algorithm, choice.run.deployed_round, evaluate_every=0, score_test=False)
        by_hand.append(run.score("validation", "loss"))
    expected = float(torch.stack(by_hand).nanmean(0).mean())
    assert choice.rows[0]["validation_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_method_that_stops_by_itself_stops_by_the_mean_over_divisions() -> None:
    fed = Federation.from_table(steps_table(rows=200), "site", "y", model=models.trees(60, 4))
    one = Entrant(make("trees", lr=0.5, leaves=4))
    one.start(cross_validation.in_turn(fed), 60, 3, None)
    one.advance(60)
    assert one.done and one.round == one.best_round + 3 * entrant_module.PATIENCE < 60
    means = [
        float(torch.stack([part.scores(t)["loss"] for part in one.parts]).mean())
        for t in range(0, one.round + 1, 3)
    ]
    assert means.index(min(means)) * 3 == one.best_round and one.cost == pytest.approx(min(means))


def test_hierarchical_models_take_part_where_they_can() -> None:
    fed = world(20, 0.3)
    (model,) = auto_field.estimated(fed)
    assert model.settings()["grouping"] == "one" and model.settings()["choose"] == "reml"
    known = Federation.from_arrays(
        [torch.randn(9, 2)] * 4, [torch.randn(9)] * 4, models.linear(), clusters=[0, 0, 1, 1], split=SPLIT
    )
    assert [a.settings()["grouping"] for a in auto_field.estimated(known)] == ["known", "one"]
    with_intercept = Federation.from_arrays(
        [torch.randn(9, 2)] * 4, [torch.randn(9)] * 4, models.linear(intercept=True), split=SPLIT
    )
    assert [a.settings()["effects"] for a in auto_field.estimated(with_intercept)] == ["auto", "intercept"]
    net = models.network(lambda: torch.nn.Linear(6, 1))
    wide = Federation.from_arrays([torch.randn(9, 6)] * 4, [torch.randn(9)] * 4, net, split=SPLIT)
    assert auto_field.estimated(wide) == []


def test_slopes_do_not_differ_where_that_is_too_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts a matrix of each client in each division of the rows; here there are four."""
    xs, ys = [torch.randn(9, 2)] * 4, [torch.randn(9)] * 4
    fed = Federation.from_arrays(xs, ys, models.linear(intercept=True), split=SPLIT)
    found = {}
    for bound in (4 * 4 * 3**3, 4 * 4 * 3**3 - 1):
        monkeypatch.setattr(auto_field, "SLOPES_WORK", bound)
        found[bound] = [one.settings()["effects"] for one in auto_field.estimated(fed)]
    assert list(found.values()) == [["auto", "intercept"], ["intercept"]]
    without = Federation.from_arrays(xs, ys, models.linear(), split=SPLIT)
    monkeypatch.setattr(auto_field, "SLOPES_WORK", 0.0)
    assert len(auto_field.estimated(without)) == 1, "nothing else to vary"


def test_step_sizes_are_settled_with_the_simplest_methods() -> None:
    fed = world(20, 0.3)
    field = auto_field.Field.of(fed, ["local", "fedavg", "ditto", "rtfa"], None, 24, 90)
    tried = {(a.name, a.settings()["lr"]) for a in field.first}
    assert {lr for name, lr in tried if name == "fedavg"} == {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0}
    left = [Entrant(make(name, lr=lr), cost=cost) for name, lr, cost in STEPS]
    added = field.more(left)
    assert {a.name for a in added} == {"ditto", "rtfa"} and len(field.first) + len(added) <= field.places
    assert {a.settings()["lr"] for a in added} == {0.75, 0.25, 0.375, 0.125}, (
        "both methods' best steps and a third of them"
    )
    assert {a.settings()["lr"] for a in field.more([])} > {0.01, 0.03, 0.1}, "without any, those declared"


def test_few_places_are_shared() -> None:
    """Half for the simplest, training alone first, and a place for each of the others while they last."""
    fed = world(20, 0.3)
    for effort in (1, 3, 6, 24):
        field = auto_field.Field.of(fed, ["local", "fedavg", "ditto", "cobo", "ifca"], None, effort, 90)
        added = field.more([])
        assert field.first[0].name == "local" and len(field.first) + len(added) <= field.places
        assert len({a.name for a in added}) == min(3, field.places - len(field.first))


def test_whoever_fails_on_the_way_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, real = world(20, 0.3), Contestant.advance

    def advance(self: Contestant, until: int, watch: None = None) -> None:
        if self.algorithm.name == "ditto" and not self.fed.has_rows("test"):
            raise CoterieError("no solution on other rows")
        if self.algorithm.name == "fedavg" and until > 6:
            raise CoterieError("no way on")
        real(self, until, watch)

    monkeypatch.setattr(Contestant, "advance", advance)
    choice = coterie.choose(fed, rounds=18, methods=["fedavg", "ditto"], effort=24)
    assert any("fedavg: no way on" in line for line in choice.why)
    assert any("ditto: no solution on other rows" in line for line in choice.why)
    assert choice.run.algorithm.name == "local"


def test_methods_that_solve_at_once_stay_at_no_cost() -> None:
    fed = world(20, 0.3)
    race = Race(fed, 18)
    steps = [make("fedavg", lr=lr) for lr in (0.1, 0.2, 0.3, 0.4)]
    race.run([make("local", lr=1e-9), make("local", exact=True, ridge=100.0), *steps])
    solved = race.everybody[1]
    assert solved.done and solved in race.finalists and solved.rounds <= 2 * 4
    assert solved.best_round <= 2 and math.isfinite(solved.cost)


def test_a_metric_that_is_asked_for_decides() -> None:
    """It takes the place of the loss: the highest wins a clear race, the simpler one a draw."""
    race = Race(world(20, 0.0), 9, metric="r2")
    values = torch.linspace(0.5, 0.7, 8, dtype=torch.float64)

    def rival(name: str, r2: torch.Tensor, loss: float) -> Entrant:
        found = entrant(name, r2=r2.tolist(), loss=[loss] * 8)
        found.judge, found.cost = find("r2"), -float(r2.mean())
        return found

    low_loss, high_r2 = rival("cobo", values, 0.1), rival("ifca", values + 0.1, 0.9)
    race.finalists = [low_loss, high_r2]
    assert race._winner() is high_r2 and clearly(high_r2, low_loss) and not clearly(low_loss, high_r2)
    wide = 0.3 * torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    as_good = rival("fedavg", values + 0.0995 + wide, 0.9)
    race.finalists = [high_r2, as_good]
    assert race._winner() is as_good
    assert high_r2.row()["validation_r2"] == pytest.approx(float(values.mean()) + 0.1)


@pytest.mark.slow
def test_auto_by_a_metric_says_so_and_keeps_it(tmp_path: Path) -> None:
    fed = world(30, 0.3)
    run = coterie.fit(fed, "auto", 18, tmp_path / "run", metric="mae", metrics=["r2"])
    assert run.choice is not None and run.metric == "mae"
    said = run.choice.text()
    assert "validation mae" in said and "loss" not in said.partition("Chosen")[2]
    assert all("validation_mae" in row and "validation_loss" not in row for row in run.choice.rows)
    assert set(run.metrics.filter(split="test")["metric"]) == {"loss", "rmse", "mae", "r2"}
    again = resume(tmp_path / "run", fed)
    assert again.metric == "mae" and torch.equal(again.personal, run.personal)
    assert run.deployed_round in run.history.curve("validation", "mae")[0]


def steps_table(effect: float = 3.0, rows: int = 400) -> dict[str, list]:
    """A table in which a step and an interaction matter, and an intercept of each client."""
    draw = torch.Generator().manual_seed(5)
    x = torch.rand(rows, 3, generator=draw, dtype=torch.float64)
    site = torch.randint(0, 5, (rows,), generator=draw)
    y = 4 * (x[:, 0] > 0.5) * (x[:, 1] > 0.5) + effect * site + 0.2 * torch.randn(rows, generator=draw)
    columns = {f"x{k}": x[:, k].tolist() for k in range(3)}
    return {"site": [f"s{k}" for k in site.tolist()], **columns, "y": y.tolist()}


@pytest.mark.slow
def test_trees_race_beside_linear_models_and_win_where_effects_are_not_linear(tmp_path: Path) -> None:
    fed = Federation.from_table(steps_table(), "site", "y")
    run = coterie.fit(fed, "auto", 30, tmp_path / "run", refit="validation", ensemble=False)
    assert run.algorithm.name == "trees" and run.refit == "validation"
    assert {"local", "fedavg", "hierarchical"} < {row["method"] for row in run.choice.rows}
    linear = coterie.fit(fed, make("hierarchical", grouping="one"), 30)
    assert run.pooled("test", "rmse") < 0.6 * linear.pooled("test", "rmse")
    assert torch.equal(resume(tmp_path / "run", run.fed).personal, run.personal)
    assert len(Predictor.load(tmp_path / "run")(tables.read(steps_table()))) == 400


@pytest.mark.slow
def test_linear_models_win_where_effects_are_linear() -> None:
    draw = torch.Generator().manual_seed(6)
    x = torch.randn(240, 3, generator=draw, dtype=torch.float64)
    y = x.sum(1) + 0.5 * torch.randn(240, generator=draw)
    site = [f"s{k % 6}" for k in range(240)]
    columns = {f"x{k}": x[:, k].tolist() for k in range(3)}
    fed = Federation.from_table({"site": site, **columns, "y": y.tolist()}, "site", "y")
    choice = coterie.choose(fed, rounds=27, effort=8)
    assert choice.run.algorithm.name != "trees"
    assert any(row["method"] == "trees" and row["rounds"] > 4 * 9 for row in choice.rows), "to the last heat"


def test_auto_needs_no_model_of_trees() -> None:
    fed = Federation.from_table(steps_table(rows=60), "site", "y", model="trees")
    with pytest.raises(SettingError, match="by itself"):
        coterie.choose(fed, rounds=9)


def test_checks_do_not_stop_by_the_rows_that_they_are_judged_on() -> None:
    fed = Federation.from_table(steps_table(rows=120), "site", "y", model=models.trees(30, 4))
    run = fit(fed, make("trees", leaves=4, lr=0.5, least=0.1).without_stopping(), 30, evaluate_every=0)
    assert run.state.best == run.state.planted == 30
    assert make("ditto").without_stopping() == make("ditto")


@pytest.mark.parametrize(("trees", "chosen"), [(0.995, "ditto"), (0.98, "trees")])
def test_trees_must_be_better_by_more_than_chance(trees: float, chosen: str) -> None:
    race = Race(world(20, 0.0), 9, others={"trees": world(20, 0.0)})
    race.finalists = [
        Entrant(
            make(name),
            cost=cost,
            scores={"loss": torch.full((8,), cost)},
            on="trees" if name == "trees" else "",
        )
        for name, cost in (("trees", trees), ("ditto", 1.0), ("local", 1.5))
    ]
    assert race._winner().algorithm.name == chosen
