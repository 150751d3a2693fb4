"""Every command on its happy path, as a user would give it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pytest
import torch
from safetensors.torch import load_file

import coterie

if TYPE_CHECKING:
    from tests.conftest import Command, Outcome, WriteTable

HEART = ("heart_disease", "--client", "hospital", "--target", "sick")
TINY = ("--rounds", 5, "--budget", 2, "--seeds", 2)
KINDS = {"binary": "csv", "multiclass": "csv.gz", "regression": "parquet"}
ROW = (
    "algorithm validation_cost mean sd worst q25 median q75 over_rows improved harmed gain gain_low gain_high "
    "client_gain client_gain_low client_gain_high rounds mb_up mb_down seconds"
).split()
COMMANDS = (
    "demo",
    "adapters",
    "advise",
    "compare",
    "fit",
    "plan",
    "privacy",
    "tune",
    "resume",
    "predict",
    "report",
    "export",
    "adapt",
    "algorithms",
    "reproduce",
    "data",
    "data describe",
    "data recipes",
    "leaderboard",
    *(f"leaderboard {verb}" for verb in ("run", "add", "cell", "show")),
    "theory",
    *(f"theory {verb}" for verb in ("risk", "rounds", "crossover")),
    "federate",
    *(f"federate {verb}" for verb in ("init", "server", "node", "run", "attach", "demo")),
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def table(tmp_path: Path, write_table: WriteTable, kind: str) -> Path:
    return write_table(tmp_path / f"table.{KINDS[kind]}", kind)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


class TestStart:
    @pytest.mark.parametrize(
        "statement",
        ["import coterie", *(f"main({[*name.split(), '--help']})" for name in ("", "--version"))],
    )
    def test_nothing_heavy_is_imported_without_need(self, statement: str) -> None:
        heavy = {"torch", "numpy", "polars", "sklearn", "scipy", "plotly"}
        script = (
            "import sys\nfrom coterie.cli import main\n"
            f"try:\n    {statement}\nexcept SystemExit: pass\n"
            f"print('found', sorted({heavy} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "found []"

    def test_version(self, command: Command) -> None:
        assert command("--version").out == f"coterie {coterie.__version__}\n"

    @pytest.mark.parametrize("name", ["", *COMMANDS])
    def test_help_has_an_example_and_fits(self, command: Command, name: str) -> None:
        shown = command(*name.split(), "--help")
        assert shown.code == 0
        assert f"Example: coterie {name}".strip() in shown.out
        assert max(map(len, shown.out.splitlines())) <= 80

    def test_every_command_is_checked_here(self, command: Command) -> None:
        listed = command("--help").out.partition("─ Train ─")[2]
        names = re.findall(r"^│ (\w+)", listed, re.MULTILINE)
        assert set(names) == {name for name in COMMANDS if " " not in name}


@pytest.fixture(scope="module")
def heart(command: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Any]:
    """What `compare` printed, and the JSON it wrote."""
    path = tmp_path_factory.mktemp("compare") / "new" / "result.json"
    shown = command("compare", *HEART, *TINY, "--json", path)
    assert shown.code == 0, shown.err
    return shown, read(path)


class TestCompare:
    def test_json(self, heart: tuple[Outcome, Any]) -> None:
        _, result = heart
        assert list(result) == "metric gains clients folds seeds chosen verdict rows".split()
        assert result["metric"] == "accuracy (higher is better)"
        assert result["clients"] == 4
        assert [row["algorithm"] for row in result["rows"]] == ["local", "fedavg", "fine-tuned", "ditto"]
        for row in result["rows"]:
            assert list(row) == ROW
            assert 0 <= row["worst"] <= row["q25"] <= row["median"] <= row["q75"] <= 1
            assert row["improved"] + row["harmed"] <= 100
            assert row["gain_low"] <= row["gain_high"]
        free, *others = result["rows"]
        assert free["mb_up"] == free["mb_down"] == 0
        assert all(row["mb_up"] > 0 and row["rounds"] > 0 for row in others)

    def test_table_shows_every_number_in_80_columns(self, heart: tuple[Outcome, Any]) -> None:
        shown, result = heart
        (note,) = shown.err.splitlines()
        assert note.startswith("Note: Client 'switzerland', column 'chol': every value is 0")
        lines = shown.out.splitlines()
        assert max(len(line) for line in lines if not line.startswith("Validation")) <= 80
        for row in result["rows"]:
            own = " ".join(line for line in lines if row["algorithm"] in line.split())
            for name in ("mean", "sd", "worst", "q25", "median", "q75", "mb_up", "mb_down"):
                assert f"{row[name]:.3f}" in own, (name, row, own)

    def test_same_command_same_numbers_and_python_agrees(
        self, command: Command, tmp_path: Path, heart: tuple[Outcome, Any]
    ) -> None:
        def timeless(result: dict[str, Any]) -> dict[str, Any]:
            rows = [{name: row[name] for name in row if name != "seconds"} for row in result["rows"]]
            return {**result, "rows": rows}

        from coterie.data import bundled

        assert command("compare", *HEART, *TINY, "--json", tmp_path / "again.json").code == 0
        assert timeless(read(tmp_path / "again.json")) == timeless(heart[1])
        source = bundled.path("heart_disease")
        same = coterie.compare(source, client="hospital", target="sick", rounds=5, budget=2, seeds=2)
        assert timeless(same.json()) == timeless(heart[1])

    def test_kinds_of_tables(self, command: Command, tmp_path: Path, table: Path, kind: str) -> None:
        columns = ("--client", "site", "--target", "y", "--cluster", "region")
        more = ("--algorithms", "oracle,fedavg", "--json", tmp_path / "result.json")
        shown = command("compare", table, *columns, *TINY, *more)
        assert shown.code == 0, shown.err
        result = read(tmp_path / "result.json")
        assert result["metric"].startswith("rmse (lower" if kind == "regression" else "accuracy (higher")
        assert [row["algorithm"] for row in result["rows"]] == ["local", "fine-tuned", "oracle", "fedavg"]
        assert all(row["mean"] > 0 for row in result["rows"])

    def test_folder(self, command: Command, tmp_path: Path, heart: tuple[Outcome, Any]) -> None:
        assert command("compare", *HEART, *TINY, "--out", tmp_path / "all").code == 0
        clients = polars.read_parquet(tmp_path / "all" / "clients.parquet")
        mean = clients.filter(algorithm="ditto").group_by("client").agg(polars.col("accuracy").mean())
        ditto = next(row for row in heart[1]["rows"] if row["algorithm"] == "ditto")
        assert mean["accuracy"].mean() == pytest.approx(ditto["mean"])
        for name in ("local", "fedavg", "fine-tuned", "ditto"):
            assert command("predict", tmp_path / "all" / name, HEART[0]).code == 0
        assert not list(tmp_path.glob("*.tmp"))


class TestFit:
    def test_run_folder_and_summary(self, command: Command, tmp_path: Path, table: Path, kind: str) -> None:
        run, summary = tmp_path / "run", tmp_path / "summary.json"
        options = ("--set", "lam=0.3", "--set", "steps=2", "--rounds", 5, "--select", "best", "--seed", 7)
        places = ("--out", run, "--json", summary)
        shown = command("fit", table, "--client", "site", "--target", "y", *options, *places)
        assert shown.code == 0, shown.err
        written = read(summary)
        assert {name: written[name] for name in ("algorithm", "rounds", "folder")} == {
            "algorithm": "ditto",
            "rounds": 5,
            "folder": str(run),
        }
        assert written["settings"]["lam"] == 0.3
        assert "[red]north" in shown.out
        metric = "rmse" if kind == "regression" else "accuracy"
        assert written["metric"].startswith(f"test {metric}")
        metrics = polars.read_parquet(run / "metrics.parquet").filter(split="test", metric=metric)
        assert metrics["round"].unique().to_list() == [written["deployed_round"]]
        assert dict(metrics.select("client", "value").iter_rows()) == written["clients"]
        assert written["mean"] == pytest.approx(metrics["value"].mean())

    def test_resume_writes_the_same_summary(self, command: Command, tmp_path: Path) -> None:
        first, again = tmp_path / "first.json", tmp_path / "again.json"
        assert command("fit", *HEART, "--rounds", 5, "--out", tmp_path / "run", "--json", first).code == 0
        shown = command("resume", tmp_path / "run", "--json", again)
        assert shown.code == 0, shown.err
        assert read(again) | {"seconds": 0} == read(first) | {"seconds": 0}

    def test_state_on_disk_changes_nothing(self, command: Command, tmp_path: Path) -> None:
        for name, more in (("inside", ()), ("outside", ("--state-memory", 0))):
            run = command("fit", *HEART, "--rounds", 3, "--out", tmp_path / name, *more)
            assert run.code == 0, run.err
        inside, outside = ((tmp_path / name / "models").iterdir() for name in ("inside", "outside"))
        assert {p.name: p.read_bytes() for p in inside} == {p.name: p.read_bytes() for p in outside}
        refused = command(
            "fit", *HEART, "--algorithm", "auto", "--state-memory", 1, "--out", tmp_path / "auto"
        )
        assert refused.code == 2 and "leave out" in refused.err

    @pytest.mark.parametrize("step", ["1e30", "1000"])
    def test_a_run_that_diverges_ends_with_code_2_and_names_the_step(
        self, command: Command, tmp_path: Path, write_table: WriteTable, step: str
    ) -> None:
        table = write_table(tmp_path / "table.csv", "regression")
        places = ("--out", tmp_path / "run", "--json", tmp_path / "run.json")
        fast = ("--set", f"lr={step}", "--rounds", 30)
        shown = command("fit", table, "--client", "site", "--target", "y", *fast, *places)
        assert shown.code == 2
        assert "ditto diverged" in shown.err and "is too large" in shown.err
        assert not (tmp_path / "run").exists() and not (tmp_path / "run.json").exists()
        allowed = shown.err.rpartition("--set lr=")[2].split()[0]
        again = command(
            "fit",
            table,
            "--client",
            "site",
            "--target",
            "y",
            "--set",
            f"lr={allowed}",
            "--rounds",
            30,
            *places,
        )
        assert again.code == 0, again.err

    @pytest.mark.slow
    def test_model_and_device_by_name(self, command: Command, tmp_path: Path) -> None:
        run = tmp_path / "run"
        shown = command("fit", *HEART, "--model", "mlp", "--rounds", 2, "--out", run)
        assert shown.code == 0, shown.err
        assert read(run / "models" / "model.json")["model"]["model"] == "mlp"
        assert command("resume", run).code == 0
        for words, said in ((("--model", "mpl"), "Did you mean 'mlp'"), (("--device", "gpu"), "unknown")):
            refused = command("fit", *HEART, *words, "--out", tmp_path / "no")
            assert refused.code == 2 and said in refused.err and not (tmp_path / "no").exists()

    @pytest.mark.slow
    def test_classes_are_weighed_as_asked(self, command: Command, tmp_path: Path) -> None:
        run, no = tmp_path / "run", tmp_path / "no"
        shown = command("fit", *HEART, "--class-weights", "balanced", "--rounds", 2, "--out", run)
        assert shown.code == 0, shown.err
        low, high = read(run / "models" / "model.json")["model"]["class_weights"]
        assert low != high and 1 / low + 1 / high == pytest.approx(2)
        assert command("resume", run).code == 0
        wrong = {"even": "give 'balanced'", "2=3": "no class '2'", "1=x": "write balanced", "1=0": "positive"}
        for text, said in wrong.items():
            refused = command("fit", *HEART, "--class-weights", text, "--out", no)
            assert refused.code == 2 and said in refused.err and not no.exists()
        refused = command("fit", *HEART, "--model", "mlp", "--class-weights", "balanced", "--out", no)
        assert refused.code == 2 and "no class weights" in refused.err

    @pytest.mark.slow
    def test_progress_is_on_standard_error_and_only_on_terminals(self, tmp_path: Path) -> None:
        arguments = [*HEART, "--rounds", "5", "--out", str(tmp_path / "run")]
        pty = pytest.importorskip("pty", reason="needs a terminal, as POSIX has them")
        screen, terminal = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-m", "coterie", "fit", *arguments],
            stdout=subprocess.PIPE,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(terminal)
        drawn = os.read(screen, 100_000).decode(errors="replace")
        os.close(screen)
        assert done.returncode == 0
        assert "5/5" in drawn
        assert b"\x1b" not in done.stdout
        assert b"5/5" not in done.stdout


class TestPredict:
    @pytest.fixture
    def run(self, command: Command, tmp_path: Path, table: Path) -> Path:
        columns = ("--client", "site", "--target", "y", "--drop", "region")
        assert command("fit", table, *columns, "--rounds", 5, "--out", tmp_path / "run").code == 0
        return tmp_path / "run"

    @pytest.fixture
    def new(self, tmp_path: Path, table: Path) -> Path:
        """Rows of known clients and, in the middle, of one that was not in training; without the target."""
        frame = polars.read_parquet(table) if table.suffix == ".parquet" else polars.read_csv(table)
        stranger = frame.head(3).with_columns(site=polars.lit("[blue]moon"))
        rows = polars.concat([frame.head(20), stranger, frame.tail(20)]).drop("y")
        rows.write_csv(tmp_path / "new.csv")
        return tmp_path / "new.csv"

    def scores(self, run: Path, new: Path) -> tuple[list[str], torch.Tensor, Any]:
        """Clients, scores by hand (features and a one, times the client's weights), and the encoding."""
        from coterie.data import tables
        from coterie.data.preprocess import Preprocessor

        note, models = read(run / "models" / "model.json"), load_file(run / "models" / "models.safetensors")
        preprocessor, frame = Preprocessor.from_json(note["preprocessor"]), tables.read(new)
        features = preprocessor.encode(frame)
        x = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)
        own = {name: models["personal"][k] for k, name in enumerate(note["clients"])}
        weights = torch.stack([own.get(name, models["common"]) for name in frame["site"]])
        outputs = weights.shape[1] // x.shape[1]
        weights = weights.view(len(x), outputs, x.shape[1])
        return frame["site"].to_list(), (weights * x.unsqueeze(1)).sum(-1), preprocessor

    def test_each_row_by_its_clients_model(
        self, command: Command, tmp_path: Path, run: Path, new: Path, kind: str
    ) -> None:
        shown = command("predict", run, new, "--out", tmp_path / "p.csv")
        assert shown.code == 0, shown.err
        assert "43 predictions" in shown.out
        assert "'[blue]moon'" in shown.err and "common model" in shown.err and "3 row(s)" in shown.err
        predicted = polars.read_csv(tmp_path / "p.csv")
        sites, scores, preprocessor = self.scores(run, new)
        assert predicted["site"].to_list() == sites
        strange = [name == "[blue]moon" for name in sites]
        assert predicted["warning"].is_not_null().to_list() == strange
        if kind == "regression":
            values = (scores.squeeze(-1) * preprocessor.target_sd + preprocessor.target_mean).tolist()
            assert predicted["prediction"].to_list() == pytest.approx(values)
            return
        if kind == "binary":
            scores = torch.cat([torch.zeros_like(scores), scores], 1)
        expected = scores.softmax(-1)
        classes = {"binary": ["no", "yes"], "multiclass": ["high", "low", "middle"]}[kind]
        shares = predicted.select(f"probability_{name}" for name in classes).to_numpy()
        assert shares == pytest.approx(expected.numpy())
        assert predicted["prediction"].to_list() == [classes[k] for k in expected.argmax(-1)]

    def test_models_differ_between_clients(self, run: Path) -> None:
        personal = load_file(run / "models" / "models.safetensors")["personal"]
        assert len(personal.unique(dim=0)) == 4

    def test_ways_out_agree(self, command: Command, tmp_path: Path, run: Path, new: Path, kind: str) -> None:
        places = ("--out", tmp_path / "p.parquet", "--json", tmp_path / "p.json")
        assert command("predict", run, new, *places).code == 0
        frame = polars.read_parquet(tmp_path / "p.parquet")
        assert read(tmp_path / "p.json") == frame.to_dicts()
        piped = command("predict", run, new)
        assert piped.code == 0
        assert piped.out == frame.write_csv()


class TestAlgorithms:
    def test_list(self, command: Command, tmp_path: Path) -> None:
        shown = command("algorithms", "--json", tmp_path / "all.json")
        listed = read(tmp_path / "all.json")
        assert shown.code == 0
        assert {"local", "fedavg", "fine-tuned", "ditto", "oracle"} <= {entry["name"] for entry in listed}
        for entry in listed:
            assert f"│ {entry['name']} " in shown.out
            assert entry["summary"]
        assert max(map(len, shown.out.splitlines())) <= 80

    def test_page(self, command: Command, tmp_path: Path) -> None:
        shown = command("algorithms", "ditto", "--json", tmp_path / "ditto.json")
        page = read(tmp_path / "ditto.json")
        assert shown.code == 0
        assert "Li et al., ICML 2021" in shown.out
        lam = next(setting for setting in page["settings"] if setting["name"] == "lam")
        assert (lam["default"], lam["low"]) == (1.0, 0)
        assert all(f"│ {setting['name']} " in shown.out for setting in page["settings"])


class TestDescribe:
    def test_heart(self, command: Command, tmp_path: Path) -> None:
        shown = command("data", "describe", *HEART, "--json", tmp_path / "heart.json")
        assert shown.code == 0, shown.err
        assert shown.out.startswith(
            "920 rows of 4 clients (123 to 303 rows, median 247); target sick: binary\n"
        )
        assert "0: 54.1 %, 1: 45.9 %" in shown.out
        assert max(map(len, shown.out.splitlines())) <= 80
        clients = read(tmp_path / "heart.json")["per_client"]
        assert {client["client"]: client["rows"] for client in clients} == {
            "cleveland": 303,
            "hungarian": 294,
            "switzerland": 123,
            "va": 200,
        }

    def test_kinds_of_tables(self, command: Command, tmp_path: Path, table: Path, kind: str) -> None:
        options = ("--client", "site", "--target", "y", "--drop", "region")
        shown = command("data", "describe", table, *options, "--json", tmp_path / "d.json")
        assert shown.code == 0, shown.err
        assert f"target y: {kind}" in shown.out
        assert "[red]north" in shown.out
        described = read(tmp_path / "d.json")
        assert described["task"] == kind
        assert [column["column"] for column in described["columns"]] == ["age", "colour", "score"]
        assert described["columns"][0]["missing_percent"] == pytest.approx(100 * 15 / 160)


class TestWidth:
    @pytest.mark.parametrize("columns", ["40", "80", "200"])
    def test_large_numbers_are_never_cut(
        self,
        command: Command,
        tmp_path: Path,
        write_table: WriteTable,
        monkeypatch: pytest.MonkeyPatch,
        columns: str,
    ) -> None:
        monkeypatch.setenv("COLUMNS", columns)
        table, path = write_table(tmp_path / "table.csv", "regression"), tmp_path / "result.json"
        few = ("--rounds", 2, "--budget", 1, "--seeds", 1, "--json", path)
        shown = command("compare", table, "--client", "site", "--target", "y", *few)
        assert shown.code == 0, shown.err
        for row in read(path)["rows"]:
            assert f"{row['mean']:.0f} ± {row['sd']:.0f}" in shown.out
            assert " ".join(f"{row[name]:.0f}" for name in ("q25", "median", "q75")) in shown.out
            if row["algorithm"] != "local":
                assert f"{row['gain_low']:+.0f} … {row['gain_high']:+.0f}" in shown.out
