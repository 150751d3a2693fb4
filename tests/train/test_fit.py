import json

import polars
import pytest
import torch

from coterie import Federation, fit, models, resume
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import make
from coterie.conformance import federation
from coterie.report.tables import run_notes, run_summary
from coterie.train import checkpoint

SPLIT = (0.6, 0.2, 0.2)


def test_metrics_are_those_of_the_deployed_models():
    run = fit(federation((30, 40, 50), split=SPLIT), make("ditto", lr=0.1), rounds=7, evaluate_every=3)
    for split in ("train", "validation", "test"):
        rows = run.fed.runtime.splits[split]
        for k in range(3):
            x, y = rows.of(k)
            error = x @ run.personal[k] - y
            assert float(run.score(split, "rmse")[k]) == pytest.approx(float(error.square().mean().sqrt()))
            assert float(run.score(split, "loss")[k]) == pytest.approx(float(0.5 * error.square().mean()))
    frame = run.metrics
    assert frame.columns == ["round", "client", "split", "metric", "value"]
    assert sorted(frame.filter(polars.col("split") == "validation")["round"].unique()) == [0, 3, 6, 7]
    assert frame.filter(polars.col("split") == "test")["round"].unique().to_list() == [7]


def test_clients_without_rows_in_a_split_have_no_line():
    run = fit(federation((1, 40), split=SPLIT), make("fedavg"), rounds=2)
    test = run.metrics.filter(polars.col("split") == "test")
    assert test["client"].unique().to_list() == ["1"]
    summary = run_summary(run)
    assert summary["clients"]["0"] is None and summary["mean"] == summary["clients"]["1"]


def test_best_round_is_the_one_with_the_lowest_validation_loss():
    fed = federation((12, 12, 12), split=SPLIT)
    run = fit(fed, make("local", lr=0.5, steps=20, batch=0), rounds=40, evaluate_every=1, select="best")
    rounds, losses = run.history.curve("validation", "loss")
    assert run.deployed_round == rounds[losses.index(min(losses))] < 40
    short = fit(fed, make("local", lr=0.5, steps=20, batch=0), rounds=run.deployed_round)
    assert torch.equal(short.personal, run.personal)


def test_state_and_common_model_are_those_of_the_deployed_round():
    fed, method = federation((12, 12, 12), split=SPLIT), make("fedavg", lr=0.5, steps=20, batch=0)
    run = fit(fed, method, rounds=40, evaluate_every=1, select="best")
    assert run.deployed_round < 40
    assert torch.equal(run.state.x, fit(fed, method, rounds=run.deployed_round).state.x)
    assert torch.equal(run.common(), run.personal[0])


def test_fit_leaves_the_federation_as_it_was_and_repeats_itself():
    fed = federation()
    one, two = fit(fed, make("ditto"), rounds=3), fit(fed, make("ditto"), rounds=3)
    assert torch.equal(one.personal, two.personal) and not fed.ledger.entries and not fed.begun.any()
    other = fit(fed.fresh(seed=1), make("ditto", batch=4), rounds=3)
    assert not torch.equal(other.personal, fit(fed, make("ditto", batch=4), rounds=3).personal)


def test_a_client_does_not_depend_on_the_others_when_alone():
    xs = [torch.randn(20, 3, dtype=torch.float64) for _ in range(5)]
    ys = [torch.randn(20, dtype=torch.float64) for _ in range(5)]
    few = fit(Federation.from_arrays(xs[:2], ys[:2], models.linear()), make("local", batch=4), rounds=4)
    all_five = fit(Federation.from_arrays(xs, ys, models.linear()), make("local", batch=4), rounds=4)
    torch.testing.assert_close(few.personal, all_five.personal[:2], rtol=0, atol=1e-14)


def test_lost_rounds_are_counted_and_leave_the_state():
    run = fit(federation((5, 5), dropout=0.9), make("fedavg"), rounds=30)
    assert 10 < run.lost_rounds < 30


def test_lost_rounds_are_counted_across_a_resume(tmp_path):
    def stop(done, rounds):
        if done == 20:
            raise KeyboardInterrupt

    def world():
        return federation((5, 5), dropout=0.9)

    whole = fit(world(), make("fedavg"), rounds=30)
    with pytest.raises(KeyboardInterrupt):
        fit(world(), make("fedavg"), 30, tmp_path / "run", checkpoint_every=4, watch=stop)
    again = resume(tmp_path / "run", world())
    assert again.lost_rounds == whole.lost_rounds and again.fed.left_out == whole.fed.left_out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["lost_rounds"] == whole.lost_rounds


def test_run_folder_holds_what_it_should(tmp_path):
    run = fit(federation(split=SPLIT), make("ditto"), 5, tmp_path / "run", checkpoint_every=2)
    files = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
    assert {"config.toml", "environment.json", "metrics.parquet", "ledger.parquet", "result.json"} <= files
    assert {"models/models.safetensors", "models/model.json", "checkpoint/checkpoint.json"} <= files
    assert not [name for name in files if name.endswith(".tmp")]
    assert polars.read_parquet(run.folder / "metrics.parquet").equals(run.metrics)
    assert json.loads((run.folder / "environment.json").read_text())["torch"] == torch.__version__


def test_folders_are_not_overwritten_and_strangers_are_refused(tmp_path):
    fed = federation(split=SPLIT)
    fit(fed, make("fedavg"), 2, tmp_path / "run")
    with pytest.raises(RunError, match="exists already"):
        fit(fed, make("fedavg"), 2, tmp_path / "run")
    with pytest.raises(RunError, match="not a run folder"):
        resume(tmp_path)
    with pytest.raises(RunError, match="data must be given again"):
        resume(tmp_path / "run")
    with pytest.raises(RunError, match="have changed"):
        resume(tmp_path / "run", federation((3, 4), split=SPLIT))


def test_settings_are_checked():
    with pytest.raises(SettingError, match="rounds is -1"):
        fit(federation(), make("fedavg"), rounds=-1)
    with pytest.raises(SettingError, match="'last' or 'best'"):
        fit(federation(), make("fedavg"), select="first")
    with pytest.raises(RunError, match="needs validation rows"):
        fit(federation(), make("fedavg"), select="best")
    with pytest.raises(SettingError, match="Did you mean 'ditto'"):
        fit(federation(), "dito")
    with pytest.raises(SettingError, match=r"lr = -1.* above 0"):
        make("ditto", lr=-1)
    with pytest.raises(SettingError, match="Did you mean 'lam'"):
        make("ditto", lamb=1)
    with pytest.raises(SettingError, match="not a whole number"):
        make("ditto", steps="2.5")
    with pytest.raises(SettingError, match="whole number"):
        make("ditto", steps=2.5)
    with pytest.raises(SettingError, match="not one of size, uniform"):
        make("fedavg", weighting="equal")


def test_model_of_a_client_predicts():
    run = fit(federation(split=SPLIT), make("ditto"), rounds=3)
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(run.model("2")(x).reshape(-1), x @ run.personal[2])
    with pytest.raises(SettingError, match="no client '9'"):
        run.model("9")


def test_a_network_that_chose_by_measuring_repeats_its_choice_when_resumed(tmp_path):
    from coterie._core import files
    from coterie.train import checkpoint

    fed = federation((20, 30), model=models.mlp(hidden=(4,)), split=SPLIT)
    fit(fed, make("fedavg", batch=4), 3, tmp_path / "run", checkpoint_every=2)
    pointer = files.read_json(tmp_path / "run" / "checkpoint" / checkpoint.POINTER)
    _, note = files.read_tensors(tmp_path / "run" / "checkpoint" / pointer["file"])
    assert note["decisions"] == fed.model.decisions and note["decisions"]
    again = federation((20, 30), model=models.mlp(hidden=(4,)), split=SPLIT)
    opposite = {
        key: {"looped": "stacked", "stacked": "looped"}[way] for key, way in note["decisions"].items()
    }
    again.model.decisions.update(opposite)
    resume(tmp_path / "run", again)
    assert {key: again.model.decisions[key] for key in note["decisions"]} == note["decisions"]


def test_a_module_of_the_user_is_saved_and_predicts_when_given_again(tmp_path, write_table):
    from coterie.train.predict import Predictor

    table = write_table(tmp_path / "t.csv", "binary")
    width = Federation.from_table(table, client="site", target="y").d - 1

    def own() -> models.Model:
        return models.network(lambda: torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, 2)))

    fed = Federation.from_table(table, client="site", target="y", model=own())
    run = fit(fed, make("fedavg", batch=8), 2, tmp_path / "run")
    expected = run.predict(table)
    with pytest.raises(RunError, match="module of your own"):
        Predictor.load(tmp_path / "run")
    with pytest.raises(RunError, match="module of your own"):
        resume(tmp_path / "run")
    assert Predictor.load(tmp_path / "run", model=own())(table).equals(expected)


def test_what_an_algorithm_sees_at_the_end_is_noted():
    run = fit(federation(), make("pfl-tc", clusters=2), rounds=3)
    assert {"clusters_found", "ari", "purity"} <= set(run_summary(run)["observed"])
    assert "clusters_found 2" in run_notes(run)[-1]
    (note,) = run_notes(fit(federation(), make("fedavg"), rounds=3))
    assert note.startswith("No rows were held out")


def test_a_slow_first_round_does_not_put_checkpoints_off(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    clock = checkpoint.Clock(0)
    now = 45.0  # compiling, say
    with clock.saving():
        now = 45.2
    assert clock.wait == checkpoint.SECONDS and not clock.due(2)
    now = 55.3
    assert clock.due(3)
    with clock.saving():
        now = 56.3
    assert clock.wait == pytest.approx(20.0) and not clock.due(4)
    now = 76.4
    assert clock.due(5)
