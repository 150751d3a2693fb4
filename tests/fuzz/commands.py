"""Give commands to random tables: each ends in time, with 0 or 2, no traceback, and nothing half-written."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from coterie.algorithms import all_algorithms
from tests.fuzz import tables

SECONDS = 120  # of computing, after which a command hangs; a busy machine makes none hang
USUAL = ("ditto", "fedavg", "local", "cobo", "ifca", "hierarchical", "flix", "fine-tuned", "pfedme", "pfl-tc")
FIT_OPTIONS = (
    ("--model", "mlp"),
    ("--model", "trees"),
    ("--metric", "auc"),
    ("--metric", "mae"),
    ("--metric", "brier"),
    ("--split", "1,0,0"),
    ("--split", "0.8,0,0.2"),
    ("--split", "0.5,0.5,0"),
    ("--refit", "all"),
    ("--refit", "none"),
    ("--cluster", "f0"),
    ("--select", "best"),
    ("--aggregate", "median"),
    ("--l2", "0.1"),
    ("--dropout", "0.5"),
    ("--epsilon", "4"),
    ("--workers", "1"),
    ("--budget-mb", "0.01"),
)
FORMATS = ("safetensors", "csv", "torchscript", "onnx")
ESCAPES = frozenset("\x1b\x07\x9b\u202e")
COLUMNS = ("--client", "site", "--target", "y")


class Hang(BaseException):
    """A command took too long."""


@dataclass
class Findings:
    """How often each command ended how, and what went wrong."""

    tables: int = 0
    counts: Counter[tuple[str, object]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A line per command, and one per fault."""
        codes = {name: {} for name, _ in sorted(self.counts, key=str)}
        for (name, code), count in self.counts.items():
            codes[name][str(code)] = count
        lines = [
            f"  {name}: {', '.join(f'exit {c} {n}' for c, n in sorted(codes[name].items()))}"
            for name in codes
        ]
        calls = sum(self.counts.values())
        return "\n".join(
            [f"{self.tables} tables, {calls} commands, {len(self.faults)} faults", *lines, *self.faults]
        )


class Fuzzer:
    """Runs commands on tables in a folder of its own.

    Parameters
    ----------
    folder
        An empty folder; the process moves into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, Findings()

    def try_table(self, number: int, processes: bool = False) -> None:
        """Make a table and give it commands; with `processes`, each in a process of its own."""
        draw = random.Random(f"commands {number}")
        self.run = self.in_process if not processes else self.in_new_process
        self.found.tables += 1
        path = tables.make(self.folder, number)
        options = [*COLUMNS]
        if draw.random() < 0.15:
            options += ["--task", draw.choice(("classification", "regression", "binary"))]
        if draw.random() < 0.1:
            options += [draw.choice(("--drop", "--keep")), draw.choice(("f0", "f1", "row"))]
        readable = self.call(number, "data", "describe", path, *options) == 0
        if readable and draw.random() < 0.4:
            self.train(draw, number, path, options)
        elif readable and draw.random() < 0.25:
            self.choose(draw, number, path, options)
        for left in self.folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def train(self, draw: random.Random, number: int, path: Path, options: list[str]) -> None:
        """Fit a method, then use and damage what it left."""
        run = self.folder / "run"
        method = draw.choice(USUAL if draw.random() < 0.6 else list(all_algorithms()))
        arguments = ["--rounds", 2, "--algorithm", method, "--out", run]
        while draw.random() < 0.3:
            name, value = draw.choice(FIT_OPTIONS)
            arguments += [] if name in arguments or name in options else [name, value]
        if self.call(number, "fit", path, *options, *arguments) != 0:
            return
        if self.call(number, "predict", run, path, "--out", self.folder / "p.csv") != 0:
            self.fault(number, "predict", "cannot predict the rows it was trained on")
        other = tables.make(self.folder, number + 10**9)
        self.call(number, "predict", run, other, "--json", self.folder / "p.json")
        self.call(number, "adapt", run, other, "--out", self.folder / "adapted")
        self.call(number, "export", run, "--to", draw.choice(FORMATS[:3] if draw.random() < 0.9 else FORMATS))
        if draw.random() < 0.1:
            self.call(number, "report", run, *(["--by", "f0"] if draw.random() < 0.3 else []))
        files = sorted(one for one in run.rglob("*") if one.is_file() and one.suffix not in (".html", ".js"))
        for target in draw.sample(files, min(3, len(files))):
            whole = target.read_bytes()
            target.write_bytes(tables.damaged(draw, whole) if draw.random() < 0.9 else b"")
            self.call(number, "predict", run, path)
            self.call(number, "export", run, "--to", "csv")
            slow = draw.random()
            if slow < 0.3:
                self.call(number, "resume", run)
            elif slow < 0.4:
                self.call(number, "report", run, "--out", self.folder / "r.html")
            target.write_bytes(whole)

    def choose(self, draw: random.Random, number: int, path: Path, options: list[str]) -> None:
        """Commands that train several models or none."""
        out = self.folder / "all"
        few = ["--rounds", 2, "--seeds", 1]
        name, *arguments = draw.choice(
            (
                ("advise", "--probe", 2),
                ("plan", "--accuracy", 0.01, "--rounds", 5),
                ("plan", "--accuracy", 0.01, "--budget-mb", 0.1),
                ("compare", *few, "--budget", 1, "--out", out),
                (
                    "compare",
                    *few,
                    "--budget",
                    2,
                    "--out",
                    out,
                    "--algorithms",
                    draw.choice(USUAL),
                    "--folds",
                    3,
                ),
                ("fit", "--rounds", 2, "--algorithm", "auto", "--out", out),
                ("tune", "--rounds", 2, "--trials", 2, "--algorithm", draw.choice(USUAL), "--out", out),
                ("privacy", *few, "--epsilons", "1", "--algorithms", "fedavg"),
            )
        )
        done = self.call(number, name, path, *options, *arguments) == 0
        if done and name == "compare" and draw.random() < 0.3:
            self.call(number, "report", out, *(["--by", "f0"] if draw.random() < 0.3 else []))
            self.call(number, "predict", out / "local", path)

    def call(self, number: int, *arguments: object) -> object:
        """Run a command and check what it left."""
        out = next((Path(str(arguments[k + 1])) for k, one in enumerate(arguments) if one == "--out"), None)
        code, err, shown = self.run([str(argument) for argument in arguments])
        name = " ".join(arguments[:2]) if arguments[0] == "data" else str(arguments[0])
        self.found.counts[name, code] += 1
        if code not in (0, 2) or "Traceback" in err or ("panicked" in err and code != 2):
            self.fault(number, name, f"{code}: {err.strip()[-1500:]}")
        if ESCAPES & {*err, *("" if name == "predict" else shown)}:  # predictions are data, others read them
            self.fault(number, name, "sent control characters of the table to the terminal")
        if code == 2 and not err.strip():
            self.fault(number, name, "refused without a word")
        if code == 2 and out is not None and out.exists() and arguments[0] not in ("report", "tune"):
            self.fault(
                number, name, f"left {[one.name for one in (out, *out.rglob('*'))][:5]}: {err.strip()[-300:]}"
            )
        if any(self.folder.rglob("*.tmp")):
            self.fault(number, name, "left half-written files")
        return code

    def fault(self, number: int, name: str, what: str) -> None:
        """Remember what went wrong."""
        self.found.faults.append(f"table {number}, {name}: {what}")

    def in_process(self, arguments: list[str]) -> tuple[object, str, str]:
        """Exit code, standard error and standard output of a command in this process."""
        from coterie import cli

        def late(_: int, __: FrameType | None) -> None:
            raise Hang

        out, err = io.StringIO(), io.StringIO()
        before = signal.signal(signal.SIGPROF, late)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                cli.main(arguments)
            return 0, err.getvalue(), out.getvalue()
        except SystemExit as end:
            return end.code or 0, err.getvalue(), out.getvalue()
        except Hang:
            return "hang", " ".join(arguments), ""
        except BaseException:
            return "traceback", traceback.format_exc(), ""
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def in_new_process(self, arguments: list[str]) -> tuple[object, str, str]:
        """Exit code, standard error and standard output of a command in a process of its own."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "coterie", *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=5 * SECONDS, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return "hang", " ".join(arguments), ""
        return done.returncode, done.stderr.decode("utf-8", "replace"), done.stdout.decode("utf-8", "replace")
