"""Kill -9 at any moment, `coterie resume`, and the files are those of a run that was never killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Command

RESULTS = ("models/models.safetensors", "models/model.json", "metrics.parquet", "ledger.parquet")
ROUNDS = 300
COTERIE = (sys.executable, "-m", "coterie")
PATIENCE = 60.0

# The command with one change: the process kills itself just before a file gets its final name.
KILLED_AT = """
import os, signal, sys
from coterie.cli import main
rename, name, times = os.replace, sys.argv.pop(1), int(sys.argv.pop(1))
def replace(source, destination):
    global times
    times -= os.path.basename(destination).startswith(name)
    if times == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, destination)
os.replace = replace
main()
"""


def fit(out: Path, *more: object, rounds: int = ROUNDS) -> list[str]:
    """A run with everything that lasts: personal models, clients that are away, models chosen by score."""
    options = ("--client", "hospital", "--target", "sick", "--rounds", rounds, "--out", out)
    chance = ("--algorithm", "ditto", "--set", "participation=0.5", "--dropout", 0.4, "--select", "best")
    return [str(part) for part in ("fit", "heart_disease", *options, *chance, *more)]


def results(folder: Path) -> dict[str, Any]:
    assert not list(folder.rglob("*.tmp"))
    counts = json.loads((folder / "result.json").read_text())
    assert counts["lost_rounds"] > 0
    del counts["seconds"]
    return counts | {name: (folder / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run([*COTERIE, *fit(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return results(out)


@pytest.fixture(scope="module")
def expected_short(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("short") / "run"
    assert command(*fit(out, rounds=20)).code == 0
    return results(out)


def kill_when(moment: Callable[[], bool], arguments: Sequence[str]) -> None:
    """Start the command and kill -9 it at the moment."""
    process = subprocess.Popen([*COTERIE, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE
    try:
        while process.poll() is None and not moment() and time.monotonic() < deadline:
            time.sleep(0.0005)
    finally:
        process.kill()
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"the run was over before the moment: {errors.decode()}"


def saved_round(run: Path) -> int:
    """The round of the last checkpoint; 0 before the first."""
    try:
        return int(json.loads((run / "checkpoint" / "checkpoint.json").read_text())["round"])
    except FileNotFoundError:
        return 0


def test_killed_before_the_first_checkpoint(
    tmp_path: Path, command: Command, expected: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    kill_when((run / "config.toml").exists, fit(run, "--checkpoint-every", ROUNDS))
    assert saved_round(run) == 0
    assert command("resume", run).code == 0
    assert results(run) == expected


def test_killed_twice_in_the_middle_and_resumed_by_a_new_process(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    kill_when(lambda: saved_round(run) >= 50, fit(run, "--checkpoint-every", 10))
    first = saved_round(run)
    kill_when(lambda: saved_round(run) >= first + 50, ["resume", str(run)])
    assert first < saved_round(run) < ROUNDS
    done = subprocess.run([*COTERIE, "resume", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert results(run) == expected


def test_killed_near_the_end_while_a_checkpoint_is_written(
    tmp_path: Path, command: Command, expected: dict[str, Any]
) -> None:
    """With so many checkpoints the run is nearly always writing one when it is killed."""
    run = tmp_path / "run"
    late, checkpoints = ROUNDS - 100, run / "checkpoint"

    def writing() -> bool:
        return saved_round(run) >= late and any(checkpoints.glob("*.tmp"))

    kill_when(writing, fit(run, "--checkpoint-every", 2))
    assert late <= saved_round(run) < ROUNDS
    assert command("resume", run).code == 0
    assert results(run) == expected


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("round-", 1),
        ("checkpoint.json", 3),
        ("models.safetensors", 1),
        ("metrics.parquet", 1),
        ("result.json", 1),
    ],
)
def test_killed_just_before_a_file_is_complete(
    tmp_path: Path, command: Command, expected_short: dict[str, Any], name: str, times: int
) -> None:
    run = tmp_path / "run"
    arguments = fit(run, "--checkpoint-every", 4, rounds=20)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT, name, str(times), *arguments], capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in run.rglob("*.tmp")], "it was killed at another moment than meant"
    assert not (run / "result.json").exists()
    assert command("resume", run).code == 0
    assert results(run) == expected_short


class TestAFinishedOrForeignRun:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        rows = [f"{'ab'[k % 2]},{k * 37 % 101},{int(k * 37 % 101 > 50)}" for k in range(60)]
        (tmp_path / "table.csv").write_text("\n".join(("who,x,y", *rows)) + "\n")
        return tmp_path / "table.csv"

    @pytest.fixture
    def run(self, command: Command, table: Path) -> Path:
        columns = ("--client", "who", "--target", "y")
        out = table.with_name("run")
        done = command("fit", table, *columns, "--rounds", 6, "--checkpoint-every", 4, "--out", out)
        assert done.code == 0
        return out

    def files(self, run: Path) -> dict[str, tuple[bytes, int]]:
        found = [path for path in run.rglob("*") if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    def test_resume_of_a_finished_run_leaves_it_alone(self, command: Command, run: Path) -> None:
        before = self.files(run)
        shown = command("resume", run, "--json", run.with_name("again.json"))
        assert shown.code == 0
        assert "mean" in shown.out
        assert self.files(run) == before

    @pytest.mark.parametrize(
        "edit",
        [
            "a class",
            "a row less",
            "a client's name",
            "one cell",
        ],
    )
    def test_other_data_are_refused(self, command: Command, run: Path, table: Path, edit: str) -> None:
        text = table.read_text()
        changed = {
            "a class": text.replace(",1\n", ",2\n"),
            "one cell": text.replace("b,37,", "b,38,", 1),
            "a row less": text.rsplit("\n", 2)[0] + "\n",
            "a client's name": text.replace("a,", "c,"),
        }[edit]
        assert changed != text
        table.write_text(changed)
        (run / "result.json").unlink()
        before = self.files(run)
        for more in ((), ("--anyway",)):
            refused = command("resume", run, *more)
            assert refused.code == 2
            assert "have changed" in refused.err
            assert "start a new run" in refused.err
        assert self.files(run) == before

    def test_other_threads_are_refused_unless_anyway(self, command: Command, run: Path) -> None:
        (run / "result.json").unlink()
        environment = json.loads((run / "environment.json").read_text())
        threads = environment["threads"]
        (run / "environment.json").write_text(json.dumps({**environment, "threads": threads + 1}))
        refused = command("resume", run)
        assert refused.code == 2
        assert f"threads: {threads + 1} then, {threads} now" in refused.err
        assert "--anyway" in refused.err
        assert not (run / "result.json").exists()
        assert command("resume", run, "--anyway").code == 0
        assert (run / "result.json").exists()

    def test_stopping_by_hand_says_how_to_go_on(
        self, command: Command, table: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from coterie.runs import checkpoint

        def stop(*arguments: object) -> None:
            raise KeyboardInterrupt

        out = table.with_name("stopped")
        options = ("--client", "who", "--target", "y", "--checkpoint-every", 2, "--out", out)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save", stop)
            stopped = command("fit", table, *options)
        assert stopped.code not in (0, 2)
        assert f"coterie resume {out}" in stopped.err
        assert command("resume", out).code == 0


def test_the_killing_is_real(tmp_path: Path) -> None:
    """Without the name it waits for, the changed command is the command."""
    script = [sys.executable, "-c", KILLED_AT, "no such file", "1", "--version"]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert (done.returncode, done.stdout.split()[0]) == (0, "coterie")
