"""Kill -9 at any moment, `coterie resume`, and the files are those of a run that was never killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Command

RESULTS = ("models/models.safetensors", "models/model.json", "metrics.parquet", "ledger.parquet")
ROUNDS = 20

# The command with one change: the process kills itself just before a file gets its final name, half of it written.
KILLED_AT = """
import os, signal, sys
from coterie.cli import main
rename, name, times = os.replace, sys.argv.pop(1), int(sys.argv.pop(1))
def replace(source, destination):
    global times
    times -= os.path.basename(destination).startswith(name)
    if times == 0:
        os.truncate(source, os.path.getsize(source) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, destination)
os.replace = replace
main()
"""


def fit(out: Path) -> list[str]:
    """A run with everything that lasts: personal models, clients that are away, models chosen by score."""
    options = ("--client", "hospital", "--target", "sick", "--rounds", ROUNDS, "--out", out)
    chance = ("--algorithm", "ditto", "--set", "participation=0.5", "--dropout", 0.4, "--select", "best")
    return [str(part) for part in ("fit", "heart_disease", *options, *chance, "--checkpoint-every", 4)]


def results(folder: Path) -> dict[str, Any]:
    assert not list(folder.rglob("*.tmp"))
    counts = json.loads((folder / "result.json").read_text())
    assert counts["lost_rounds"] > 0
    del counts["seconds"]
    return counts | {name: (folder / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def expected(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert command(*fit(out)).code == 0
    return results(out)


def killed(name: str, times: int, arguments: Sequence[str], run: Path) -> None:
    """Start the command, which kills itself when a file that begins with `name` is about to be there the nth time."""
    script = [sys.executable, "-c", KILLED_AT, name, str(times), *arguments]
    done = subprocess.run(script, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in run.rglob("*.tmp")], "it was killed at another moment than meant"
    assert not (run / "result.json").exists()


def saved_round(run: Path) -> int:
    """The round of the last checkpoint; 0 before the first."""
    pointer = run / "checkpoint" / "checkpoint.json"
    return int(json.loads(pointer.read_text())["round"]) if pointer.exists() else 0


IN_THE_MIDDLE, AT_THE_END = ("checkpoint.json", 3, 8), ("result.json", 1, 16)
EVERYWHERE = (
    ("round-", 1, 0),
    IN_THE_MIDDLE,
    ("models.safetensors", 1, 16),
    ("metrics.parquet", 1, 16),
    AT_THE_END,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [(IN_THE_MIDDLE, AT_THE_END), EVERYWHERE],
    ids=["twice", "everywhere"],
)
def test_killed_again_and_again(
    tmp_path: Path, command: Command, expected: dict[str, Any], moments: tuple[tuple[str, int, int], ...]
) -> None:
    """Each time a new process goes on and is killed just before a file is complete."""
    run = tmp_path / "run"
    arguments = fit(run)
    for name, times, saved in moments:
        killed(name, times, arguments, run)
        assert saved_round(run) == saved
        arguments = ["resume", str(run)]
    assert command(*arguments).code == 0
    assert results(run) == expected


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
        (run / "manifest.json").unlink()
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
        from coterie.train import checkpoint

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
