"""`coterie reproduce`: what a TOML file may say, how jobs are run and resumed, and what `ok` means."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie._core.errors import CoterieError, DataError, RunError, SettingError
from coterie.data.generate import hierarchical_linear
from coterie.experiments import jobs, spec
from coterie.experiments import reproduce as carrying_out
from coterie.experiments.__main__ import main as run_one_job
from coterie.experiments.jobs import load
from coterie.experiments.reproduce import reproduce
from coterie.experiments.spec import shared_data

TINY = """
title = "Tiny"
source = "nobody"
seeds = [0, 1]

[data]
split = [0.6, 0.2, 0.2]

[data.generate]
name = "hierarchical_linear"
clusters = 2
clients = 2
features = 3
rows = 20

[model]
name = "linear"

[[runs]]
key = "local"
algorithm = "local"
settings = { lr = 0.1, batch = 0 }
rounds = 30

[[runs]]
key = "single"
algorithm = "fedavg"
settings = { lr = 0.1, batch = 0 }
rounds = 20

[[rows]]
label = "alone"
run = "local"
metric = "distance"
paper = 1.0
tolerance = 2.0

[[rows]]
label = "helped"
run = "single"
metric = "improved"
at_most = 100.0

[[claims]]
label = "one model is further off"
larger = ["single", "local"]
metric = "distance"
paper = "as they say"

[quick]
seeds = [3]
rounds = 5
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def run(path: Path, **options: Any) -> carrying_out.Reproduction:
    options = {"out": path.parent / "out", "jobs": 1, **options}
    return reproduce(str(path), **options)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Key and seed of every job that is run in this process."""
    seen: list[tuple[str, int]] = []

    def spy(experiment: Any, plan: Any, seed: int, folder: Path) -> None:
        seen.append((plan.key, seed))
        jobs.run_job(experiment, plan, seed, folder)

    monkeypatch.setattr(carrying_out, "run_job", spy)
    return seen


def offer(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Measures in a module that counts as part of the package."""
    module = types.ModuleType("coterie.pretended")
    for name, function in functions.items():
        function.__module__ = "coterie.pretended"
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "coterie.pretended", module)


@pytest.mark.slow
def test_shipped_experiments_are_listed_and_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = spec.experiments()
    found = dict(listed)
    monkeypatch.setattr(spec, "experiments", lambda: listed)  # which reads every file
    assert {"known-clusters/baselines", "cobo/digits-baselines"} <= set(found)
    for name, title in found.items():
        assert title
        for quick in (False, True):
            assert load(name, quick).name == name


def test_unknown_experiment_suggests_the_nearest() -> None:
    with pytest.raises(SettingError, match="Did you mean 'known-clusters/baselines'"):
        load("known-cluster/baseline")
    with pytest.raises(SettingError, match=r"nowhere.toml cannot be read"):
        load("nowhere.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Tiny"', "titel = 1", "unknown key 'titel'. Did you mean 'title'"),
        ('title = "Tiny"', "", "'title' is missing"),
        ('title = "Tiny"', "title = 3", "title = 3 is not of the type str"),
        ('title = "Tiny"', "title = ", "tiny.toml: "),
        ("seeds = [0, 1]", "seeds = [0, 0]", "all different"),
        ("seeds = [0, 1]", "seeds = [0.5]", "seeds"),
        ('algorithm = "local"', 'algoritm = "local"', "'local': unknown key 'algoritm'. Did you mean 'algorithm'"),
        ('algorithm = "local"', 'algorithm = "lokal"', "'local': no algorithm 'lokal'. Did you mean 'local'"),
        ('algorithm = "local"', "", "'local': give either an algorithm or a measure"),
        ('key = "single"', 'key = "local"', "'local' must be unique"),
        ('key = "single"', 'key = "../x"', "must be unique, of letters"),
        ("{ lr = 0.1, batch = 0 }\nrounds = 30", "{ lr = -1.0 }", "'local': local: lr = -1.0 is outside"),
        ("{ lr = 0.1, batch = 0 }\nrounds = 30", "{ rl = 1.0 }", "no hyperparameter 'rl'"),
        ("rounds = 30", "grid = { lam = [1.0] }", "'local': local has no hyperparameter 'lam'"),
        ("rounds = 30", "grid = { lr = 1.0 }", "grid"),
        ("rounds = 30", "grid = { lr = [1.0] }\nbudget = 2", "either a grid or a budget"),
        ("rounds = 30", 'select = "worst"', "select = 'worst'"),
        ("features = 3", "feature = 3", "no argument 'feature'. Did you mean 'features'"),
        ('name = "hierarchical_linear"', 'name = "linear"', "no generate with name = 'linear'"),
        ("[data.generate]", "[data.generat]", "unknown key 'generat'. Did you mean 'generate'"),
        ("split = [0.6", 'dtype = "float23"\nsplit = [0.6', "dtype = 'float23'. Did you mean 'float32'"),
        ('name = "linear"', 'name = "liner"', "no model with name = 'liner'. Did you mean 'linear'"),
        ('name = "linear"', 'name = "linear"\nl3 = 1.0', "model of [[runs]] 'local': linear has no argument 'l3'"),
        ("tolerance = 2.0", "", "[[rows]] 'alone': nothing is checked"),
        ("tolerance = 2.0", "shown = true\ntolerance = 2.0", "'alone': shown = true is for rows without"),
        ("paper = 1.0", "", "[[rows]] 'alone': a tolerance needs the number of the paper, or a reference"),
        ('metric = "distance"', 'metric = "distanse"', "'alone': no metric 'distanse'. Did you mean 'distance'"),
        ('run = "single"', 'run = "singel"', "[[rows]] 'helped': no run 'singel'. Did you mean 'single'"),
        ('["single", "local"]', '["single"]', "name two runs"),
        ('["single", "local"]', '["single", "lokal"]', "[[claims]] 'one model is further off': no run 'lokal'"),
        ("rounds = 5", "round = 5", "[quick]: unknown key 'round'. Did you mean 'rounds'"),
    ],
)  # fmt: skip
def test_errors_name_file_and_key(tiny: Path, old: str, new: str, message: str) -> None:
    assert TINY.count(old) >= 1
    tiny.write_text(TINY.replace(old, new, 1))
    with pytest.raises(CoterieError) as caught:
        load(str(tiny))
    assert "tiny.toml" in str(caught.value)
    assert message in str(caught.value)


def test_quick_run_writes_everything(tiny: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    result = run(tiny, quick=True, watch=lambda *step: seen.append(step))
    out = tiny.parent / "out"
    assert seen == [("local, seed 3", 1, 2), ("single, seed 3", 2, 2)]
    assert json.loads((out / "table.json").read_text()) == result.json()
    assert [row["label"] for row in result.rows] == ["alone", "helped", "one model is further off"]
    assert set(result.rows[0]) == {"label", "metric", "paper", "reference", "ours", "sd", "ok"}
    assert result.json()["name"] == "tiny" and result.rows[2]["paper"] is None
    assert result.table().row_count == 3 and "as they say" in (out / "table.md").read_text()
    settings = tomllib.loads((out / "settings.toml").read_text())
    assert settings["seeds"] == [3] and settings["runs"]["local"]["rounds"] == 5
    assert settings["runs"]["single"]["data"]["generate"]["features"] == 3
    assert "torch" in json.loads((out / "environment.json").read_text())
    assert 'src="plotly.min.js"' in (out / "plot.html").read_text()
    assert (out / "plotly.min.js").stat().st_size > 1e6
    assert not list(out.rglob("*.tmp"))


@pytest.mark.slow
def test_only_a_check_ends_with_1_where_a_row_is_not_ok(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ok in (True, False):
        result = types.SimpleNamespace(ok=ok, table=lambda: "table", json=dict)
        monkeypatch.setattr(
            "coterie.cli.catalogue.run_experiment", lambda name, result=result, **rest: result
        )
        assert command("reproduce", "tiny").code == 0
        assert command("reproduce", "tiny", "--check").code == (0 if ok else 1)


def test_parallel_is_sequential(tiny: Path) -> None:
    tiny.write_text(TINY.replace("seeds = [0, 1]", "seeds = [1]"))
    alone, together = run(tiny, out=tiny.parent / "a"), run(tiny, out=tiny.parent / "b", jobs=2)
    assert alone.rows == together.rows
    for job, record in alone.records.items():
        for part in ("metrics", "clients", "curve", "settings", "hash"):
            assert record[part] == together.records[job][part]


def test_finished_jobs_are_skipped_and_changed_ones_rerun(tiny: Path, ran: list[tuple[str, int]]) -> None:
    first = run(tiny)
    assert ran == [("local", 0), ("single", 0), ("local", 1), ("single", 1)]
    ran.clear()
    assert run(tiny).rows == first.rows and ran == []
    tiny.write_text(TINY.replace("tolerance = 2.0", "tolerance = 1e-9"))
    assert not run(tiny).ok and ran == []
    tiny.write_text(TINY.replace("rounds = 20", "rounds = 10"))
    run(tiny)
    assert ran == [("single", 0), ("single", 1)]
    ran.clear()
    tiny.write_text(TINY)
    assert run(tiny).rows == first.rows and ran == []
    next((tiny.parent / "out" / "jobs").glob("local-0-*")).write_text("{")
    assert run(tiny).rows == first.rows and ran == [("local", 0)]


def test_goes_on_after_an_interruption(tiny: Path, ran: list[tuple[str, int]]) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny, watch=interrupt)
    assert len(ran) == 3 and not (tiny.parent / "out" / "table.json").exists()
    ran.clear()
    assert run(tiny).ok and ran == [("single", 1)]


MEASURED = """
title = "Measured"
seeds = [1, 3]
scale = { share = 100 }
[[runs]]
key = "a"
measure = "coterie.pretended:a"
[[runs]]
key = "b"
measure = "coterie.pretended:b"
"""


@pytest.mark.parametrize(
    ("row", "ok"),
    [
        ("paper = 2.5\ntolerance = 0.5", True),
        ("paper = 2.6\ntolerance = 0.5", False),
        ('paper = "what it found"\nat_least = 2.0', True),
        ("at_least = 2.0", True),
        ("at_least = 2.1", False),
        ("at_most = 2.0", True),
        ("at_most = 1.9", False),
        ("paper = 2.0\ntolerance = 0.1\nat_most = 1.0", False),
        ("shown = true", None),
    ],
)
def test_when_a_row_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, ok: bool | None) -> None:
    offer(monkeypatch, a=lambda experiment, seed: {"x": seed}, b=lambda experiment, seed: {"x": 0})
    path = tmp_path / "measured.toml"
    path.write_text(f'{MEASURED}\n[[rows]]\nlabel = "r"\nrun = "a"\nmetric = "x"\n{row}\n')
    result = run(path)
    assert (result.rows[0]["ours"], result.rows[0]["ok"], result.ok) == (2.0, ok, ok is not False)
    assert result.results[0].cells()["ok"] == {True: "yes", False: "no", None: "shown"}[ok]
    assert result.rows[0]["sd"] == pytest.approx(2**0.5)


@pytest.mark.parametrize(("number", "ok"), [(2.4, True), (2.6, False)])
def test_numbers_that_the_paper_does_not_print_have_a_column_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float, ok: bool
) -> None:
    offer(monkeypatch, a=lambda experiment, seed: {"x": seed}, b=lambda experiment, seed: {"x": 0})
    row = f'[[rows]]\nlabel = "r"\nrun = "a"\nmetric = "x"\nreference = {number}\ntolerance = 0.5\n'
    path = tmp_path / "measured.toml"
    path.write_text(f"{MEASURED}\n{row}")
    with pytest.raises(SettingError, match="where such numbers are from"):
        run(path)
    path.write_text(f'reference = "somebody else"\n{MEASURED}\n{row}')
    found = run(path)
    assert found.rows[0]["ok"] is ok and found.rows[0]["paper"] is None
    page = found.markdown()
    assert f"| r | x |  | {number} |" in page and "Reference: somebody else." in page
    path.write_text(f'reference = "somebody else"\n{MEASURED}\n{row}paper = 2.0\n')
    with pytest.raises(SettingError, match="does not print"):
        run(path)


@pytest.mark.parametrize(("margin", "ok"), [(-1.0, True), (99.9, True), (100.0, False), (150.0, False)])
def test_when_a_claim_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margin: float, ok: bool) -> None:
    """Scaled differences, paired by seed; equality is not enough."""
    offer(
        monkeypatch,
        a=lambda experiment, seed: {"share": seed + 1.0},
        b=lambda experiment, seed: {"share": float(seed)},
    )
    path = tmp_path / "measured.toml"
    claim = f'[[claims]]\nlabel = "c"\nlarger = ["a", "b"]\nmetric = "share"\nmargin = {margin}'
    path.write_text(f"{MEASURED}\n{claim}\n")
    result = run(path)
    assert result.rows == [
        {
            "label": "c",
            "metric": "gap in share",
            "paper": None,
            "ours": 100.0,
            "sd": 0.0,
            "ok": ok,
            "reference": None,
        }
    ]


def test_measure_sees_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(
        monkeypatch,
        a=lambda experiment, seed: {"n": len(experiment.plans), experiment.plans[0].key: 1},
        b=lambda experiment, seed: {"x": float("nan")},
    )
    path = tmp_path / "measured.toml"
    path.write_text(MEASURED)
    with pytest.raises(RunError, match="2 of 4 jobs failed"):
        run(path)
    record = json.loads(next((tmp_path / "out" / "jobs").glob("a-1-*")).read_text())
    assert record["metrics"] == {"n": 1.0, "a": 1.0}


def test_a_measure_may_bring_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = {
        "x": "rounds",
        "y": "loss",
        "log": True,
        "curves": {"slow": [[0, 1], [1.0, 0.5]], "zero": [[0], [0.0]]},
    }
    plots = {"loss": {"title": "Down it goes", "panels": [panel, {**panel, "x": "floats"}, panel]}}
    offer(
        monkeypatch,
        a=lambda experiment, seed: {"x": 1, "plots": plots},
        b=lambda experiment, seed: {"x": 2},
    )
    path = tmp_path / "measured.toml"
    path.write_text(MEASURED)
    run(path)
    pages = sorted(page.name for page in (tmp_path / "out" / "plots").glob("*.html"))
    assert pages == ["a-1-loss.html", "a-3-loss.html"]
    page = (tmp_path / "out" / "plots" / "a-1-loss.html").read_text()
    assert "Down it goes" in page and "loss against floats" in page and "slow" in page


def test_plots_name_their_axes_and_show_numbers_without_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = {"split": "mean", "metric": "distance", "x": "rows per client", "rounds": [1, 5]}
    path = tmp_path / "measured.toml"
    path.write_text(
        MEASURED + '[[rows]]\nlabel = "one"\nrun = "a"\nmetric = "x"\npaper = 2.5\ntolerance = 2\n'
    )
    offer(
        monkeypatch,
        a=lambda experiment, seed: {"x": 1, "curve": {**curve, "values": [2.0 + seed, 1.0]}},
        b=lambda experiment, seed: {"x": 2},
    )
    drawn = run(path)._plot()
    assert (drawn.layout.xaxis.title.text, drawn.layout.yaxis.title.text) == (
        "rows per client",
        "mean distance",
    )
    assert [trace.name for trace in drawn.data] == ["a"]
    assert list(drawn.data[0].error_y.array) == [pytest.approx(2**0.5), 0.0]  # seeds 1 and 3
    shutil.rmtree(tmp_path / "out")
    offer(monkeypatch, a=lambda experiment, seed: {"x": seed}, b=lambda experiment, seed: {"x": 2})
    found = run(path)
    drawn = found._plot()
    assert drawn.layout.xaxis.title.text and drawn.layout.yaxis.title.text
    assert list(drawn.data[0].x) == [result.ours for result in found.results] == [2.0]
    assert list(drawn.data[1].x) == [2.5]


def test_numbers_of_other_sizes_have_an_axis_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = '[[rows]]\nlabel = "{0}"\nrun = "a"\nmetric = "{0}"\nat_least = -1e9\n'
    path = tmp_path / "measured.toml"
    path.write_text(MEASURED + "".join(row.format(name) for name in ("sd", "deviance", "slope")))
    found = {"sd": 0.5, "deviance": -2e5, "slope": -0.1}
    offer(monkeypatch, a=lambda experiment, seed: found, b=lambda experiment, seed: found)
    drawn = run(path)._plot()
    assert [list(trace.y) for trace in drawn.data] == [["deviance"], ["sd", "slope"]]
    assert [trace.xaxis for trace in drawn.data] == ["x", "x2"]
    assert (drawn.layout.xaxis.title.text, drawn.layout.xaxis2.title.text) == ("deviance", "sd / slope")
    assert [trace.showlegend for trace in drawn.data] == [True, False]


@pytest.mark.parametrize(
    "reference", ["os:getcwd", "subprocess:run", "coterie_evil:run", "coterie.experiments.jobs:fit",
                  "coterie.nothing:run", "coterie.experiments.jobs:math", ":x", "coterie"]
)  # fmt: skip
def test_measure_refuses_what_is_not_ours(tmp_path: Path, reference: str) -> None:
    path = tmp_path / "foreign.toml"
    path.write_text(f'title = "x"\nseeds = [0]\n[[runs]]\nkey = "a"\nmeasure = "{reference}"\n')
    with pytest.raises(SettingError, match=r"foreign.toml, \[\[runs\]\] 'a': measure = "):
        load(str(path))


def test_measure_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = types.SimpleNamespace(name="mine", value="plugin.part:go", load=lambda: print)
    monkeypatch.setattr(jobs, "entry_points", lambda group: [entry] if group == "coterie.experiments" else [])
    assert jobs.measure("plugin.part:go") is print and jobs.measure("mine") is print
    with pytest.raises(SettingError):
        jobs.measure("plugin.part:other")


@pytest.mark.quick("1")
@pytest.mark.parametrize("count", [1, 2])
def test_a_failing_job_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COTERIE_SHARED", str(tmp_path))
    path = tmp_path / "failing.toml"
    start, rest = TINY.split("[data.generate]")
    read = '[data.read]\nname = "libsvm"\npath = "../shared/data/nothing.bz2"\n'
    read += '[data.partition]\nname = "equal_shares"\nn = 2\n'
    keep = rest[rest.index("[model]") : rest.index("[[rows]]")]
    path.write_text(
        start.replace("seeds = [0, 1]", "seeds = [7]") + read + keep.split('[[runs]]\nkey = "single"')[0]
    )
    with pytest.raises(RunError) as caught:
        run(path, jobs=count)
    message = str(caught.value)
    assert message.startswith("1 of 1 jobs failed:\nlocal, seed 7")
    assert "failing.toml" in message and "nothing.bz2 is missing" in message and "COTERIE_SHARED" in message
    if count == 1:
        order = ["--job", "local", "--seed", "7", "--out", str(tmp_path / "out")]
        assert run_one_job([str(path), *order]) == 2
        assert "nothing.bz2 is missing" in capfd.readouterr().err


def test_a_broken_setting_of_a_reader_is_not_a_traceback(tiny: Path) -> None:
    tiny.write_text(TINY.replace("features = 3", 'features = "three"'))
    with pytest.raises(RunError, match=r"'hierarchical_linear'"):
        run(tiny)


def test_shared_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("")
    monkeypatch.setenv("COTERIE_SHARED", str(tmp_path))
    assert shared_data("a.txt") == tmp_path / "data" / "a.txt"
    with pytest.raises(DataError, match=r"b\.txt is missing"):
        shared_data("b.txt")


def test_tuning_follows_validation_loss_and_survives_divergence(tiny: Path) -> None:
    grid = "settings = { batch = 0 }\ngrid = { lr = [1e9, 1e-6, 0.1] }\nrounds = 30"
    tiny.write_text(TINY.replace("settings = { lr = 0.1, batch = 0 }\nrounds = 30", grid))
    result = run(tiny)
    assert [result.records["local", seed]["settings"]["lr"] for seed in (0, 1)] == [0.1, 0.1]
    settings = tomllib.loads((tiny.parent / "out" / "settings.toml").read_text())
    assert settings["runs"]["local"]["chosen"]["seed-1"]["lr"] == 0.1
    tiny.write_text(tiny.read_text().replace("split = [0.6, 0.2, 0.2]", "split = [1.0, 0.0, 0.0]"))
    with pytest.raises(RunError, match="tuning needs validation rows"):
        run(tiny)


def test_metrics_of_a_run(tiny: Path) -> None:
    record = run(tiny).records["single", 0]
    experiment = load(str(tiny))
    fed = jobs.federation(experiment, experiment.plan("single"), 0)
    assert fed.truth is not None and fed.truth.shape == (4, 3)
    assert {"rmse", "loss", "train_loss", "validation_loss", "mb_up", "mb_down"} <= set(record["metrics"])
    assert record["metrics"]["worst"] == max(record["clients"]["values"]) > record["metrics"]["rmse"]
    improved = carrying_out._improved(
        {"values": [1.0, 2.0, None, 4.0], "higher": False}, {"values": [2.0, 2.0, 9.0, 5.0], "higher": False}
    )
    assert improved == {"improved": pytest.approx(200 / 3)}


def test_table_and_pooled_data(tmp_path: Path) -> None:
    """A bundled table with its default model, and digits dealt out to clusters."""
    path = tmp_path / "table.toml"
    path.write_text(
        'title = "Hearts"\nseeds = [0]\n[data.table]\npath = "heart_disease"\nclient = "hospital"\n'
        'target = "sick"\n[[runs]]\nkey = "local"\nalgorithm = "local"\nrounds = 3\n'
        '[[rows]]\nlabel = "some"\nrun = "local"\nmetric = "accuracy"\nat_least = 0.5\n'
    )
    assert run(path).ok
    path.write_text(path.read_text().replace('target = "sick"', 'targett = "sick"'))
    with pytest.raises(SettingError, match=r"no argument 'targett'\. Did you mean 'target'"):
        load(str(path))
    experiment = load("cobo/digits-baselines")
    fed = jobs.federation(experiment, experiment.plan("local"), 10)
    assert fed.n == 8 and fed.clusters is not None and fed.clusters.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(fed.rows["train"].tolist()) <= {43, 44}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["local-10", "single-10", "local-100", "single-100"])
def test_known_clusters_reach_least_squares(tmp_path: Path, key: str) -> None:
    """Gradient descent ends at pinv(X) y, and at the least squares of everybody's rows."""
    experiment = load("known-clusters/baselines")
    plan = experiment.plan(key)
    data = hierarchical_linear(rows=plan.data["generate"]["rows"], seed=0)
    xs, ys = torch.stack(data.xs), torch.stack(data.ys)
    if plan.algorithm == "local":
        exact = (torch.linalg.pinv(xs) @ ys.unsqueeze(-1)).squeeze(-1)
        steepest = torch.linalg.matrix_norm(xs, 2).square().max()
    else:
        exact = torch.linalg.lstsq(xs.flatten(0, 1), ys.flatten()).solution
        steepest = torch.linalg.eigvalsh((xs.mT @ xs).mean(0)).max()
    assert plan.settings["lr"] * float(steepest) < 1
    jobs.run_job(experiment, plan, 0, tmp_path)
    record = jobs.finished(experiment, (plan, 0), tmp_path)
    assert data.truth is not None and record is not None
    distance = float((exact - data.truth).norm(dim=1).mean())
    assert record["metrics"]["distance"] == pytest.approx(distance, rel=1e-6)


DIFFERENCES = ("gain", "lead", "over_", "saves")
ENDS = {"dcgd_end": "a logarithm"}


@pytest.mark.parametrize("name", [name for name, _ in spec.experiments()])
def test_every_bar_of_an_experiment_could_be_missed(name: str) -> None:
    for row in spec.read(name).rows:
        alone = row.at_least is not None and row.tolerance is None and row.at_most is None
        if alone and not any(word in row.metric for word in DIFFERENCES) and row.metric not in ENDS:
            assert row.at_least > 0, (
                f"{row.label}: {row.metric} is never below 0; give a bar, or shown = true"
            )


@pytest.mark.parametrize("name", [name for name, _ in spec.experiments()])
def test_no_claim_of_an_order_holds_where_the_paper_has_the_other_one(name: str) -> None:
    """A table that says "yes" beside a gap of the paper with the other sign would hide that orders differ."""
    for claim in spec.read(name).claims:
        if claim.margin == 0 and isinstance(claim.paper, int | float):
            assert claim.paper > 0, f"{claim.label}: the paper's gap is {claim.paper}; claim its order"
