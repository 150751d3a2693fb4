"""The leaderboard: what a cell says, what is cached, what goes on after a kill, and what a user can add."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie._core.errors import DataError, RunError, SettingError
from coterie.cli import main
from coterie.leaderboard import board as boards
from coterie.leaderboard import summary
from coterie.leaderboard.cell import TIMES, federations, measure
from coterie.leaderboard.entries import DataSet, Method, own_method, own_table
from coterie.leaderboard.plan import Budget, Plan
from coterie.models.metrics import find as find_metric
from coterie.select.entrants import Tuned

BUDGET = Budget(rounds=3, trials=2, seeds=2)
OWN = '''
"""A method of mine."""
from dataclasses import dataclass
from coterie import Algorithm, State, setting

@dataclass(frozen=True)
class GradientDescent(Algorithm):
    """x <- x - lr mean_i grad f_i(x)."""
    reveals = {"gradient": "gradient"}
    lr: float = setting(0.5, "step size", above=0)
    def start(self, fed):
        return State(x=fed.initial_model())
    def round(self, fed, s, t):
        return State(x=s.x - self.lr * fed.map(self.gradient, x=s.x).mean())
    def gradient(self, client, x):
        return client.full_grad(x)
    def deploy(self, client, x):
        return x
    def traffic(self, d):
        return {"gradient": (d, d)}
'''


def plan(methods=("local", "fedavg"), data=("heart", "diabetes"), budget=BUDGET):
    return Plan(budget, tuple(map(Method, methods)), tuple(map(DataSet, data)))


def job(method="fedavg", data="diabetes", seed=0):
    (found,) = (one for one in plan((method,), (data,)).jobs() if one.seed == seed)
    return found


def cells(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime_ns for path in folder.glob("cells/*/*.json")}


def without_times(result):
    return {
        name: [{k: v for k, v in one.items() if k not in TIMES} for one in result[name]]
        for name in ("cells", "lines", "overall")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two methods on two data sets, and oracle, which does not apply to either."""
    place = tmp_path_factory.mktemp("leaderboard") / "board"
    boards.run(place, methods=["fedavg", "oracle"], data=["heart", "diabetes"], budget=BUDGET)
    return place


# One cell


def test_a_cell_is_the_tuned_method_tested_once():
    record = measure(job())
    fed, late = federations(job(), None)
    assert fed.n == 8 and late.n == 2 and not set(fed.names) & set(late.names)
    run = Tuned(coterie.algorithms.FedAvg(), 2).best(fed, 3, lambda *_: None).run
    test = run.score_test()
    assert record["test"] == pytest.approx(test["rmse"].tolist(), rel=1e-8)
    assert record["mb_up"] + record["mb_down"] == sum(run.traffic())
    assert record["settings"] == run.algorithm.settings()
    sizes = np.cumsum(record["test_rows"])[:-1]
    by_client = [math.sqrt(np.mean(part)) for part in np.split(np.array(record["row_values"]), sizes)]
    assert by_client == pytest.approx(record["test"], rel=1e-6)  # rows of rmse are squared errors, in units


def test_newcomers_are_those_that_were_held_out():
    record = measure(job("local"))
    assert len(record["newcomers"]["test"]) == 2 and None not in record["newcomers"]["test"]
    assert measure(job("fedavg", "heart"))["newcomers"] is None  # four hospitals: nobody to hold out


@pytest.mark.slow
def test_a_cell_is_the_same_when_it_runs_alone(folder, capsys):
    assert boards.recheck(folder, "fedavg", "diabetes", 1) == {}
    main_ok(["leaderboard", "cell", str(folder), "fedavg", "heart", "0"])
    assert "the same digits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_changed_digit_is_noticed(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (place,) = (copy / "cells" / "heart").glob("fedavg-0-*.json")
    record = json.loads(place.read_text())
    record["test"][0] += 1e-7
    place.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as end:
        main(["leaderboard", "cell", str(copy), "fedavg", "heart", "0"])
    assert end.value.code == 1 and "test: stored" in capsys.readouterr().out


def test_a_method_that_breaks_is_a_result_and_stops_nobody(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(OWN.replace("client.full_grad(x)", "1 / 0"))
    broken = own_method(file)
    (found,) = Plan(Budget(2, 1, 1), (broken,), (DataSet("heart"),)).jobs()
    record = measure(found)
    assert record["status"] == "failed" and "ZeroDivisionError" in record["why"]
    assert summary.lines([summary.cell(record, None)]) == []


# Keys: what a cell depends on


def test_keys_change_with_what_a_cell_depends_on_and_with_nothing_else(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    table = tmp_path / "mine.csv"
    shutil.copy(coterie.data.bundled.path("clinics"), table)

    def key(budget=BUDGET, seed=0, **table_options):
        made = own_table(table, "clinic", "readmitted", **table_options)
        jobs = Plan(budget, (Method("gradient-descent", str(file)),), (made,)).jobs()
        return [one.key for one in jobs][seed]

    first = key()
    assert key() == first and key(Budget(3, 2, 5)) == first  # more seeds leave those that are there
    others = {key(seed=1), key(Budget(4, 2, 2)), key(Budget(3, 1, 2)), key(model="mlp"), key(drop=["ward"])}
    table.write_bytes(table.read_bytes().replace(b",46,", b",47,", 1))
    others.add(key())
    table.write_bytes(table.read_bytes().replace(b",47,", b",46,", 1))
    sys.modules.pop(next(name for name in sys.modules if name.startswith("coterie_own_")))
    file.write_text(OWN.replace("0.5", "0.4"))
    others.add(key())
    assert first not in others and len(others) == 7


def test_code_follows_the_files_that_a_method_imports():
    assert Method("fine-tuned").code() != Method("fedavg").code()
    from coterie.leaderboard.entries import _sources

    texts = _sources(coterie.algorithms.find("ftfa"))
    assert any("class FedAvg" in text for text in texts) or len(texts) > 2
    assert any("class Algorithm" in text for text in texts)


# The whole


@pytest.mark.slow
def test_the_result_is_as_documented(folder):
    result = json.loads((folder / boards.RESULT).read_text())
    assert result["format"] == "coterie-leaderboard/1"
    assert {one["method"] for one in result["overall"]} == {"fedavg", "local"}
    assert result["ranking"]["applies"] is False and "three methods" in result["ranking"]["why_not"]
    status = {(one["data"], one["method"]): one["status"] for one in result["cells"]}
    assert status["heart", "oracle"] == "does not apply" and status["heart", "fedavg"] == "ok"
    assert "known clusters" in next(one["why"] for one in result["cells"] if one["method"] == "oracle")
    page = (Path(__file__).parents[2] / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    for part in ("cells", "lines", "overall", "data", "methods"):
        for field in {name for one in result[part] for name in one}:
            assert f"`{field}`" in page, f"docs/leaderboard.md says nothing of {field} in {part}"


@pytest.mark.slow
def test_finished_cells_are_not_run_again(folder, monkeypatch):
    before = cells(folder)
    monkeypatch.setattr(boards, "carry_out", lambda *_: pytest.fail("a cell ran again"))
    board = boards.run(folder, methods=["fedavg"], data=["heart"])
    assert cells(folder) == before and len(board.result["cells"]) == len(before) == 12


@pytest.mark.slow
def test_gained_and_lost_are_those_of_the_verdict(folder):
    (place,) = (folder / "cells" / "diabetes").glob("fedavg-0-*.json")
    record = json.loads(place.read_text())
    reference = dict(record, method="local", row_values=[4 * value for value in record["row_values"]])
    found = summary.cell(record, reference)
    assert (found["improved"], found["harmed"], found["sign"]) == (8, 0, 1)
    found = summary.cell(dict(reference, method="x"), dict(record, method="local"))
    assert (found["improved"], found["harmed"], found["sign"]) == (0, 8, -1)


def test_the_worst_tenth_and_ranks_know_the_direction():
    accuracy, rmse = find_metric("accuracy"), find_metric("rmse")
    values = np.arange(30) / 30
    assert summary.worst_decile(values, accuracy) == pytest.approx(1 / 30)
    assert summary.worst_decile(values, rmse) == pytest.approx(28 / 30)

    def one(method, mean, metric):
        told = {"data": metric, "method": method, "seed": 0, "status": "ok", "metric": metric, "mean": mean}
        told |= {
            "worst_decile": mean,
            "clients": 5,
            "improved": None,
            "harmed": None,
            "sign": None,
            "mb": 1.0,
        }
        return told | {"seconds": 1.0, "cpu_seconds": 1.0, "trials": 1, "newcomers": None}

    scores = {"accuracy": {"local": 0.8, "a": 0.9}, "rmse": {"local": 2.0, "a": 3.0}}
    made = [one(method, mean, metric) for metric, known in scores.items() for method, mean in known.items()]
    lines = {(line["data"], line["method"]): line for line in summary.lines(made)}
    assert lines["accuracy", "a"]["rank"] == 1 and lines["rmse", "a"]["rank"] == 2
    assert lines["accuracy", "a"]["error_ratio"] == pytest.approx(0.5)
    assert lines["rmse", "a"]["error_ratio"] == pytest.approx(1.5)
    (total,) = (line for line in summary.overall(list(lines.values())) if line["method"] == "a")
    assert total["error_ratio"] == pytest.approx(math.sqrt(0.75)) and total["wins"] == 1


# What a user adds


@pytest.mark.slow
def test_a_method_is_added_to_published_results(folder, tmp_path):
    """From leaderboard.json alone: only the new method and training alone run."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    published = shutil.copy(folder / boards.RESULT, tmp_path / "leaderboard.json")
    board = boards.add(published, methods=[own_method(file)], out=tmp_path / "out")
    ran = {path.name.rsplit("-", 2)[0] for path in (tmp_path / "out").glob("cells/*/*.json")}
    assert ran == {"local", "gradient-descent"}
    assert {one["method"] for one in board.result["overall"]} == {"local", "fedavg", "gradient-descent"}
    old = json.loads((folder / boards.RESULT).read_text())
    kept = [one for one in board.result["cells"] if one["method"] == "fedavg"]
    assert kept == [one for one in old["cells"] if one["method"] == "fedavg"]
    mine = next(one for one in board.result["cells"] if one["method"] == "gradient-descent")
    assert mine["status"] == "ok" and mine["harmed"] is not None
    assert str(tmp_path) not in json.dumps(board.result)  # no path of this machine is published


@pytest.mark.slow
def test_a_table_is_added_to_a_folder(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    table = tmp_path / "wards.csv"
    shutil.copy(coterie.data.bundled.path("clinics"), table)
    before = cells(copy)
    board = boards.add(copy, data=[own_table(table, "clinic", "readmitted")])
    assert before.items() <= cells(copy).items()
    assert {one["name"] for one in board.result["data"]} == {"heart", "diabetes", "wards"}
    assert {line["method"] for line in board.result["lines"] if line["data"] == "wards"} == {
        "local",
        "fedavg",
    }


@pytest.mark.slow
def test_errors_have_exit_code_2_and_a_remedy(folder, tmp_path, capsys):
    two, taken = tmp_path / "two.py", tmp_path / "taken.py"
    two.write_text(OWN + OWN.replace("GradientDescent", "Other"))
    taken.write_text(OWN.replace('"""x <-', 'name = "ditto"\n    """x <-'))
    board = str(folder)
    for arguments, said in (
        (["run", "--out", board, "--rounds", "9"], "another --out"),
        (["run", "--out", str(tmp_path / "a"), "--data", "digit-alike"], "digits-alike"),
        (["run", "--out", str(tmp_path / "a"), "--methods", "fedavgg"], "fedavg"),
        (["run", "--out", str(tmp_path / "a"), "--data", "adult"], "--files FOLDER"),
        (["add", board], "nothing to add"),
        (["add", board, "--table", "no.csv"], "--client COLUMN"),
        (["add", board, "--table", "no.csv", "--client", "a", "--target", "b"], "no such table"),
        (["add", board, "--method", "no.py"], "no such file"),
        (["add", board, "--method", str(two)], "2 subclasses"),
        (["add", board, "--method", str(taken)], "name = 'my-ditto'"),
        (["add", str(folder / boards.RESULT), "--method", str(tmp_path / "x.py")], "no such file"),
        (["cell", board, "ditto", "heart", "0"], "no cell"),
        (["show", str(tmp_path)], "does not exist"),
        (["show", board, "--data", "hart"], "heart"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["leaderboard", *arguments])
        assert end.value.code == 2, arguments
        assert said in " ".join(capsys.readouterr().err.split()), arguments
    assert not (tmp_path / "a").exists()


def test_damaged_and_foreign_files_are_named(tmp_path):
    (tmp_path / "plan.json").write_text('{"budget": 3}')
    with pytest.raises(RunError, match="not the plan"):
        boards.run(tmp_path, data=["heart"])
    (tmp_path / "leaderboard.json").write_text('{"format": "other"}')
    with pytest.raises(RunError, match="not a leaderboard"):
        boards.read(tmp_path)
    with pytest.raises(SettingError, match="at least 1"):
        Budget(rounds=0)
    with pytest.raises(DataError):
        own_table(tmp_path / "none.csv", "a", "b")


@pytest.mark.slow
def test_show_prints_the_tables(folder, capsys):
    main_ok(["leaderboard", "show", str(folder)])
    main_ok(["leaderboard", "show", str(folder), "--data", "diabetes"])
    told = capsys.readouterr().out
    assert "errors relative to training alone" in told and "diabetes: test rmse" in told and "fedavg" in told


def main_ok(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0


# Processes


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path):
    """Kill the command and its worker in the middle; what was finished stays, the rest is run, digits are the same."""
    budget = Budget(rounds=4, trials=2, seeds=6)
    options = ["--data", "heart,diabetes", "--methods", "fedavg,ditto,ifca", "--rounds", "4", "--trials", "2"]
    command = [sys.executable, "-m", "coterie", "leaderboard", "run", "--out", str(tmp_path / "a"), *options]
    process = subprocess.Popen([*command, "--seeds", "6"], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while len(cells(tmp_path / "a")) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = cells(tmp_path / "a")
    assert 3 <= len(before) < 48 and not (tmp_path / "a" / boards.RESULT).exists()
    for path in before:
        json.loads(Path(path).read_text())
    second = boards.run(
        tmp_path / "a", methods=["fedavg", "ditto", "ifca"], data=["heart", "diabetes"], workers=2
    )
    assert before.items() <= cells(tmp_path / "a").items() and len(cells(tmp_path / "a")) == 48
    whole = boards.run(
        tmp_path / "b", methods=["fedavg", "ditto", "ifca"], data=["heart", "diabetes"], budget=budget
    )
    assert without_times(second.result) == without_times(whole.result)


@pytest.mark.slow
def test_workers_end_when_their_command_is_killed(tmp_path):
    command = [sys.executable, "-m", "coterie", "leaderboard", "run", "--out", str(tmp_path / "a")]
    process = subprocess.Popen(
        [*command, "--data", "heart", "--seeds", "40", "--rounds", "4"], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not cells(tmp_path / "a"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        children = _children(process.pid)
        assert children
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a worker outlived its command"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(place.parent.name))
    return found


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_cell_alone(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.replace("return client.full_grad(x)", "import os; os._exit(7)"))
    boards.run(tmp_path / "a", methods=["local"], data=["heart", "diabetes"], budget=Budget(2, 1, 1))
    with pytest.raises(RunError, match=r"(?s)2 of 2 cells were not done.*exit code 7"):
        boards.add(tmp_path / "a", methods=[own_method(file)])
    assert len(cells(tmp_path / "a")) == 2
