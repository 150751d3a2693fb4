import math

import numpy as np
import polars as pl
import pytest
import torch

import coterie
from coterie import compare, models
from coterie._core import files
from coterie._core.errors import DataError, SettingError
from coterie.algorithms import make
from coterie.conformance import federation
from coterie.engine.federation import Federation
from coterie.report.comparison_tables import comparison_tables
from coterie.report.page import contents
from coterie.select.auto_race import every
from coterie.select.entrants import Tuned
from coterie.select.grid import candidates
from coterie.select.tune import search
from coterie.train.contestant import Contestant
from coterie.train.fit import resume

FIELDS = [
    "algorithm", "validation_cost", "mean", "sd", "worst", "q25", "median", "q75", "over_rows", "improved", "harmed",
    "gain", "gain_low", "gain_high", "client_gain", "client_gain_low", "client_gain_high",
    "rounds", "mb_up", "mb_down", "seconds",
]  # fmt: skip


@pytest.fixture(scope="module")
def comparison():
    fed = federation((10, 20, 30, 40, 25), split=(0.6, 0.2, 0.2))
    return compare(fed, algorithms=["ditto", "oracle"], seeds=3, rounds=12, budget=3, folds=1)


def test_baselines_are_always_there(comparison):
    names = [row["algorithm"] for row in comparison.rows]
    assert names == ["local", "fedavg", "fine-tuned", "ditto", "oracle"]
    assert all(list(row) == FIELDS for row in comparison.rows)
    assert comparison.json()["metric"] == "rmse (lower is better)"


def test_rows_are_the_summaries_of_the_clients(comparison):
    """Every number of a row, computed once more from the per-client table."""
    frame = comparison.per_client()
    for row in comparison.rows:
        mine = frame.filter(algorithm=row["algorithm"]).sort("seed", "client")
        by_client = mine.group_by("client").agg(pl.col("rmse").mean()).sort("client")["rmse"].to_numpy()
        by_seed = mine.group_by("seed").agg(pl.col("rmse").mean())["rmse"].to_numpy()
        assert row["mean"] == pytest.approx(by_client.mean()) and row["sd"] == pytest.approx(
            by_seed.std(ddof=1)
        )
        assert row["worst"] == pytest.approx(by_client.max())


def test_gains_are_those_of_the_same_rows(comparison):
    """The gain over rows is the difference of root mean squares; rows that are scored thrice count once."""
    rows = comparison.per_row()
    alone = rows["local/rmse"].to_numpy()
    for row in comparison.rows:
        mine = rows[f"{row['algorithm']}/rmse"].to_numpy()
        assert row["gain"] == pytest.approx(np.sqrt(alone.mean()) - np.sqrt(mine.mean()))
        assert row["gain_low"] <= row["gain"] <= row["gain_high"]
        verdict = comparison.against_alone(row["algorithm"])
        assert verdict.judged.evidence.rows.sum() == len(alone) / 3 == rows["row"].n_unique()
        assert row["improved"] == 100 * (verdict.called > 0).mean()


def test_folds_score_every_row_once():
    fed = federation((8, 9, 7, 1), split=(0.6, 0.2, 0.2))
    result = compare(fed, algorithms=[], rounds=4, budget=1)
    assert result.folds == 5, "the median client has two test rows"
    rows = result.per_row()
    assert sorted(zip(rows["client"], rows["row"], strict=True)) == [
        (k, m) for k, size in enumerate((8, 9, 7)) for m in range((0, 8, 17)[k], (0, 8, 17)[k] + size)
    ]
    assert len(result.trials) == 3 * 5
    assert compare(fed, algorithms=[], rounds=2, budget=1, folds=1).folds == 1
    large = federation((200, 300), split=(0.6, 0.2, 0.2))
    assert compare(large, algorithms=[], rounds=2, budget=1).folds == 1
    for folds in (0, 2, -1):
        with pytest.raises(SettingError, match="give 1 for a single split, or 3 or more"):
            compare(fed, algorithms=[], rounds=2, budget=1, folds=folds)


def test_the_winner_is_written_refitted(tmp_path):
    fed = federation((8, 9, 7), split=(0.6, 0.2, 0.2))
    for folds, refit in ((5, "all"), (1, "validation"), (1, "none")):
        out = tmp_path / f"{folds}-{refit}"
        result = compare(fed, algorithms=[], rounds=4, budget=2, folds=folds, refit=refit, out=out)
        for name in ("local", "fedavg", "fine-tuned"):
            seen = files.read_json(out / name / "result.json")["trained_on"]
            assert len(seen) == (
                {"none": 1, "validation": 2, "all": 3}[refit] if name == result.chosen() else 1
            )
            run = resume(out / name, fed)
            stored = files.read_tensors(out / name / "models" / "models.safetensors")[0]["personal"]
            assert torch.equal(run.personal, stored)


def test_given_settings_are_not_tuned():
    fed = federation((20, 30), split=(0.6, 0.2, 0.2))
    given = {"ditto": {"lam": "0.25"}, "local": {"steps": 2}}
    result = compare(fed, algorithms=["ditto"], rounds=3, budget=6, settings=given)
    for trial in result.trials:
        settings = trial.run.algorithm.settings()
        assert trial.algorithm != "ditto" or settings["lam"] == 0.25
        assert trial.algorithm != "local" or settings["steps"] == 2
    with pytest.raises(SettingError, match="settings for cobo, which is not compared"):
        compare(fed, algorithms=[], rounds=1, settings={"cobo": {"rho": 1}})


@pytest.mark.slow
def test_hierarchical_needs_no_known_clusters():
    xs = [torch.randn(30, 2, dtype=torch.float64) for _ in range(3)]
    fed = Federation.from_arrays(xs, [x.sum(1) for x in xs], models.linear(), split=(0.6, 0.2, 0.2))
    result = compare(fed, algorithms=["hierarchical"], rounds=2, budget=1)
    assert result.of("hierarchical")[0].run.algorithm.grouping == "one"


def test_traffic_counts_up_to_the_deployed_round(comparison):
    rows = {row["algorithm"]: row for row in comparison.rows}
    assert rows["local"]["mb_up"] == rows["local"]["mb_down"] == 0
    fedavg = rows["fedavg"]
    assert fedavg["mb_up"] == pytest.approx(fedavg["rounds"] * 5 * 3 * 8 / 1e6)


def test_tuning_never_looks_at_test_rows(monkeypatch):
    looks = []
    score = Federation.score

    def counting(self, models, split, metrics=()):
        looks.append(split)
        return score(self, models, split, metrics)

    monkeypatch.setattr(Federation, "score", counting)
    fed = federation((10, 20), split=(0.6, 0.2, 0.2))
    monkeypatch.setattr(Federation, "evaluate", _only_validation(Federation.evaluate))
    compare(fed, algorithms=[], seeds=2, rounds=3, budget=4, folds=1)
    assert looks.count("test") == 3 * 2


def _only_validation(evaluate):
    def guarded(self, algorithm, state, split, metrics=()):
        assert split == "validation"
        return evaluate(self, algorithm, state, split, metrics)

    return guarded


def test_the_chosen_settings_win_every_heat():
    """After a ninth and a third of the rounds the best third goes on; of these the lowest validation loss wins."""
    fed = federation((20, 30, 25), split=(0.6, 0.2, 0.2))
    result = compare(fed, algorithms=["ditto"], rounds=18, budget=9, folds=1)
    trial = next(trial for trial in result.trials if trial.algorithm == "ditto")
    runs = [Contestant(fed.fresh(0), candidate, 18, every(18)) for candidate in candidates(make("ditto"), 9)]
    for stop, keep in ((2, 3), (6, 1), (18, 1)):
        for run in runs:
            run.advance(stop)
        runs = sorted(runs, key=lambda run: run.cost)[:keep]
    assert trial.run.algorithm == runs[0].algorithm
    assert trial.validation_cost == pytest.approx(runs[0].cost)
    assert torch.equal(trial.run.personal, runs[0].finish().personal)
    assert Tuned(make("ditto"), 9).cost(18) == 9 * 2 + 3 * 4 + 1 * 12


def test_settings_that_change_nothing_are_trained_once():
    """Penalties are estimated and steps are Newton's: of 16 settings of hierarchical one is left, unless asked for."""
    fed = federation((10, 20, 30), split=(0.6, 0.2, 0.2))
    for settings, names in (
        ({}, set()),
        ({"choose": "given"}, {"gamma", "lambda_"}),
        ({"solver": "gradient"}, {"lr"}),
    ):
        entrant = Tuned(make("hierarchical", **settings), 16, settings)
        entrant.check(fed)
        tried = {
            name: {getattr(one, name) for one in entrant.settings} for name in ("gamma", "lambda_", "lr")
        }
        assert all(len(tried[name]) > 1 for name in names)
        assert names or len(entrant.settings) == 1


def test_candidates_are_distinct_declared_and_no_more_than_the_budget():
    for name, budget, expected in (
        ("fedavg", 8, 8),
        ("fedavg", 99, 8),
        ("ditto", 8, 8),
        ("ditto", 99, 16),
        ("local", 3, 3),
    ):
        found = candidates(make(name), budget)
        assert len(found) == len(set(found)) == expected
    rates = {candidate.lr for candidate in candidates(make("ditto"), 8)}
    assert rates == {0.01, 0.03, 0.1, 0.3}
    other = candidates(make("ditto"), 99, {"lr": [2.0, 1.0, 2.0], "tuning_lr": [7.0]})
    assert len(other) == len(set(other)) == 8 and {candidate.lr for candidate in other} == {1.0, 2.0}


def test_a_single_client_is_judged_by_its_rows():
    result = compare(federation((40,), split=(0.6, 0.2, 0.2)), algorithms=[], seeds=1, rounds=3, budget=2)
    assert result.rows[1]["gain_low"] < result.rows[1]["gain_high"] and not math.isnan(result.rows[1]["mean"])
    assert "training alone" in result.verdict() and "average client" not in result.verdict()


def test_clients_without_test_rows_are_not_scored():
    result = compare(
        federation((1, 30, 40), split=(0.6, 0.2, 0.2)), algorithms=[], seeds=1, rounds=3, budget=1
    )
    assert set(result.per_client()["client"]) == {"1", "2"}
    assert "over 2 of 3 clients" in str(comparison_tables(result, 100)[0].title)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(DataError, match="needs validation rows"):
        compare(federation(), seeds=1, rounds=1)
    with pytest.raises(SettingError, match="client and target"):
        compare("table.csv")
    with pytest.raises(SettingError, match="at least 1"):
        compare(federation(split=(0.6, 0.2, 0.2)), seeds=0)


def test_hyperparameters_given_by_the_user_are_kept_where_they_are_not_tuned():
    found = candidates(make("ditto", steps=9, batch=0), 4)
    assert {(candidate.steps, candidate.batch) for candidate in found} == {(9, 0)}
    assert torch.tensor([candidate.lr for candidate in found]).unique().numel() > 1


@pytest.fixture(scope="module")
def patients():
    """Two classes, of which one is rare; a client with a single class."""
    draw = torch.Generator().manual_seed(2)
    xs = [torch.randn(size, 3, generator=draw, dtype=torch.float64) for size in (60, 80, 50, 40, 20)]
    ys = [
        (torch.rand(len(x), generator=draw) < torch.sigmoid(2 * x[:, 0] - k / 3)).long()
        for k, x in enumerate(xs)
    ]
    return Federation.from_arrays(
        xs, [*ys[:4], ys[4] * 0], models.logistic(intercept=True), split=(0.5, 0.25, 0.25)
    )


@pytest.mark.slow
def test_a_metric_chooses_settings_and_rounds_and_is_reported(patients):
    """On validation rows settings, round and method; on test rows what is told. A one-class client has no AUC."""
    result = compare(patients, algorithms=["ditto"], rounds=10, budget=4, metric="auc", folds=1)
    assert result.metric == "auc" and result.json()["metric"] == "auc (higher is better)"
    best = {}
    for trial in result.trials:
        tried = {}
        for candidate in candidates(make(trial.algorithm), 4):
            run = coterie.fit(
                patients.fresh(0),
                candidate,
                10,
                evaluate_every=1,
                select="best",
                metric="auc",
                score_test=False,
            )
            tried[candidate] = float(run.score("validation", "auc").nanmean())
        assert tried[trial.run.algorithm] == -trial.validation_cost >= sorted(tried.values())[1]
        best[trial.algorithm] = -trial.validation_cost
        torch.testing.assert_close(trial.test, trial.run.score("test", "auc"), equal_nan=True)
        assert trial.test[4].isnan() and not trial.test[:4].isnan().any()
    assert best[result.chosen()] == max(best.values())
    for row in result.rows:
        values = next(trial.test for trial in result.trials if trial.algorithm == row["algorithm"])[:4]
        assert row["mean"] == pytest.approx(float(values.mean())) and row["worst"] == float(values.min())
    by_loss = compare(patients, algorithms=["ditto"], rounds=10, budget=4, folds=1)
    assert by_loss.metric == "accuracy"
    assert [t.run.algorithm for t in by_loss.trials] != [t.run.algorithm for t in result.trials]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as when the page is written
def test_a_comparison_by_a_metric_is_written_and_reported(patients, tmp_path):
    compare(patients, algorithms=[], seeds=2, rounds=4, budget=1, metric="auc", out=tmp_path / "c")
    assert pl.read_parquet(tmp_path / "c" / "clients.parquet").columns[-1] == "auc"
    page = contents([tmp_path / "c"])
    assert page["direction"] == "higher is better" and page["main"].metric == "auc" and not page["percent"]
    assert any("area under the ROC curve of a client's model is 0." in text for text in page["summary"])
    run = coterie.fit(patients, "fedavg", 4, tmp_path / "c" / "plain")
    assert run.metric is None
    both = contents([tmp_path / "c" / "local", tmp_path / "c" / "plain"])
    assert {run.metric for run in both["runs"]} == {"accuracy"}, "what both have recorded"


@pytest.mark.slow
def test_a_metric_that_is_not_defined_for_anybody_is_said(patients):
    one_class = Federation.from_arrays(
        [torch.randn(20, 2)] * 3, [torch.zeros(20).long()] * 3, models.logistic(), split=(0.5, 0.25, 0.25)
    )
    for given in ([], ["auto"]):
        with pytest.raises(DataError, match="auc is not defined on the validation rows of any client"):
            compare(one_class, algorithms=given, seeds=1, rounds=2, budget=1, metric="auc")
    with pytest.raises(DataError, match="auc is not defined on the validation rows"):
        coterie.choose(one_class, rounds=3, metric="auc")
    with pytest.raises(DataError, match="auc is not defined on the validation rows"):
        search(one_class, "ditto", trials=2, rounds=3, metric="auc")


def test_metrics_that_do_not_apply_are_refused(patients):
    for use in (
        lambda metric: compare(patients, seeds=1, rounds=1, metric=metric),
        lambda metric: coterie.choose(patients, rounds=1, metric=metric),
        lambda metric: coterie.fit(patients, "auto", 1, metrics=[metric]),
        lambda metric: coterie.fit(patients, "fedavg", 1, metric=metric),
        lambda metric: search(patients, "ditto", trials=1, rounds=1, metric=metric),
    ):
        with pytest.raises(
            SettingError, match="'rmse' does not apply to binary targets; choose from loss, accuracy"
        ):
            use("rmse")
        with pytest.raises(SettingError, match=r"no metric 'aux'\. Did you mean 'auc'"):
            use("aux")
