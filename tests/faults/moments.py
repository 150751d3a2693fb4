"""Commands that are killed with SIGKILL at random moments and go on: the same bytes, and nothing half-written.

Half of the moments are times of the clock, the others changes of files: just before a file is opened, renamed or
removed, where a random time would hardly ever fall.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie._core import manifest
from coterie._core.errors import RunError
from tests.faults.traced import Process

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds for any one command
TIMES = ("seconds", "time", "at")  # keys of JSON files that hold times
REPORT = "report.html"  # a page beside the files from which it is made
DURATION = re.compile(rb'(?<=class="seconds">)[\d.]+|[\d.]+ (?:seconds|minutes|hours)')  # in a page
PARTIAL = (".tmp", ".part")  # names of what is not complete yet
TINY = """
import sys, pathlib
from coterie.deploy import demo_texts
demo_texts.write_language_model(pathlib.Path(sys.argv[1]))
"""
DATA = ("heart_disease", "--client", "hospital", "--target", "sick")


class Fault(AssertionError):
    """What a command did that it must not do."""


@dataclass(frozen=True)
class Subject:
    """A command that is killed.

    Attributes
    ----------
    name : str
        Name of the command.
    words : callable
        Returns its arguments, given the path of what it makes.
    essential : tuple of str
        Files of which the bytes must be the same, whatever else is in the folder; "" is the path itself.
    resumes : bool
        Whether `coterie resume` goes on with it; otherwise the same command is given again.
    whole : bool
        Whether what it makes appears complete or not at all, but for a page that `coterie report` can write later.
    """

    name: str
    words: Callable[[Path], list[str]]
    essential: tuple[str, ...]
    resumes: bool = False
    whole: bool = False


def subjects(shared: Path) -> Iterator[Subject]:
    """Yield the commands; `shared` is a folder for what they read."""
    run = (
        "models/models.safetensors",
        "models/model.json",
        "metrics.parquet",
        "ledger.parquet",
        "config.toml",
    )
    chance = ("--algorithm", "ditto", "--set", "participation=0.5", "--dropout", "0.4", "--select", "best")
    steps = ("--rounds", "20", "--checkpoint-every", "3")
    yield Subject("fit", lambda out: ["fit", *DATA, *chance, *steps, "--out", str(out)], run, resumes=True)
    few = ("--rounds", "6", "--budget", "2")
    yield Subject(
        "compare",
        lambda out: ["compare", *DATA, *few, "--out", str(out), "--json", f"{out}.json"],
        ("compare.json", "clients.parquet", "rows.parquet", "ditto/models/models.safetensors"),
        whole=True,
    )
    tried = ("--trials", "12", "--rounds", "10")
    yield Subject(
        "tune",
        lambda out: ["tune", *DATA, *tried, "--out", str(out), "--json", str(out / "found.json")],
        ("found.json", "tune.toml"),
    )
    texts, model = shared / "texts", shared / "tiny"
    small = ("--model", str(model), "--context", "16", "--rank", "2", "--set", "batch=2", "--rounds", "6")
    yield Subject(
        "adapters",
        lambda out: ["adapters", str(texts), *small, "--out", str(out)],
        (
            "models/models.safetensors",
            "metrics.parquet",
            "ledger.parquet",
            "adapters/ca/adapter_model.safetensors",
        ),
        resumes=True,
    )
    yield Subject("report", lambda out: ["report", str(shared / "run"), "--out", str(out)], ("",), whole=True)
    for k, kind in enumerate(("csv", "safetensors", "onnx", "torchscript")):
        yield Subject(
            "export" if k == 0 else f"export {kind}",
            lambda out, kind=kind: [
                "export",
                str(shared / "run"),
                "--client",
                "va",
                "--to",
                kind,
                "--out",
                str(out),
            ],
            ("",),
            whole=True,
        )


def prepare(shared: Path) -> None:
    """Make what the commands read: a run, texts and a tiny language model."""
    from tests.language.conftest import WORDS, sentences

    run = ["fit", *DATA, "--algorithm", "ditto", "--rounds", "5", "--out", str(shared / "run")]
    if Process(run, shared / "said").wait(LIMIT):
        raise Fault(f"fit: {(shared / 'said').read_text()}")
    for language in WORDS:
        (shared / "texts" / language).mkdir(parents=True)
        for k, text in enumerate(sentences(language, 24)):
            (shared / "texts" / language / f"{k}.txt").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-c", TINY, str(shared / "tiny")], check=True, cwd=ROOT)


class Trial:
    """Kills one command again and again, each time from the beginning.

    Parameters
    ----------
    subject
        The command.
    folder
        An empty folder to work in.
    seed
        Seed of the moments.
    """

    def __init__(self, subject: Subject, folder: Path, seed: int) -> None:
        self.subject, self.folder, self.seed = subject, folder, seed
        whole, again = (self._undisturbed(name) for name in ("whole", "again"))
        self.expected = {name: value for name, value in whole.items() if again.get(name) == value}
        missing = [name for name in subject.essential if _key(name) not in self.expected]
        if missing:
            raise Fault(f"two undisturbed runs differ in {', '.join(missing)} of {sorted(whole)}")

    def _undisturbed(self, name: str) -> dict[str, Any]:
        place = self._place(name)
        began = time.monotonic()
        self._finish(self._traced(place, 0), "undisturbed")
        self.seconds = time.monotonic() - began
        changes, first = (self.folder / "counts").read_text().split()
        self.changes, self.first = int(changes), float(first)
        return contents(place)

    def _finish(self, process: Process, about: str) -> None:
        """Wait for a process that must end well."""
        code = process.wait(LIMIT)
        if code is None:
            process.kill()
        if code:
            raise Fault(
                f"{about}: exit code {code}: {process.said.read_text(errors='replace').strip()[-2000:]}"
            )
        if code is None:
            raise Fault(f"{about}: it takes more than {LIMIT:g} s")

    def _place(self, name: str) -> Path:
        """Return the path of what is made; its name is the same every time, since files may hold it."""
        place = self.folder / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place / "out"

    def _traced(self, place: Path, nth: int) -> Process:
        words, said = self.subject.words(place), self.folder / "said"
        return Process(words, said, place.parent, nth, self.folder / "counts")

    def kill(self, number: int) -> str:
        """Kill the command at a random moment, let it go on, compare, and return when it was killed."""
        place, draw = self._place("killed"), random.Random(f"{self.subject.name} {self.seed} {number}")
        if number % 2:
            delay = draw.uniform(self.first, 1.05 * self.seconds)
            when = f"after {delay:.2f} of {self.seconds:.2f} s"
            process = self._traced(place, 0)
            code = process.wait(delay)
            code = process.kill() if code is None else code
        else:
            nth = draw.randint(1, self.changes)
            when = f"at change {nth} of {self.changes}"
            code = self._traced(place, draw.choice((-1, 1)) * nth).wait(LIMIT)
        if code not in (0, -signal.SIGKILL):
            raise Fault(f"{when}: exit code {code} before it was killed")
        if self.subject.whole and place.exists():
            if REPORT in self.expected and not (place / REPORT).exists():
                self._finish(
                    Process(["report", str(place)], self.folder / "said"), f"{when}: `coterie report`"
                )
            self._compare(place, f"{when}: it is half-written: ")
        words = self.subject.words(place)
        if self.subject.resumes and (place / "config.toml").exists():
            words = ["resume", str(place)]
        elif self.subject.whole and place.exists():
            return f"{when}, too late"
        self._finish(Process(words, self.folder / "said"), f"{when}: `coterie {words[0]}` afterwards")
        self._compare(place, f"{when}: ")
        return when

    def _compare(self, place: Path, about: str) -> None:
        found = contents(place)
        changed = [name for name, value in self.expected.items() if found.get(name) != value]
        if changed:
            raise Fault(f"{about}other bytes in {', '.join(sorted(changed))}")
        left = [path.name for path in place.parent.rglob("*") if path.name.endswith(PARTIAL)]
        if left and not about.endswith("half-written: "):
            raise Fault(f"{about}left behind: {', '.join(left)}")


def contents(place: Path) -> dict[str, Any]:
    """Return the files of a folder, or a file, with the times left out that JSON files and pages have."""
    paths = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return {_key(str(path.relative_to(place))): _content(path) for path in paths}


def _key(name: str) -> str:
    return "" if name == "." else name


def _content(path: Path) -> Any:
    try:
        manifest.check(path)
    except RunError as problem:
        raise Fault(str(problem)) from None
    if path.name == manifest.MANIFEST:  # hashes of files that hold times
        return sorted(json.loads(path.read_text(encoding="utf-8"))["sha256"])
    if path.suffix == ".json":
        return _timeless(json.loads(path.read_text(encoding="utf-8")))
    return DURATION.sub(b"", path.read_bytes()) if path.suffix == ".html" else path.read_bytes()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(part) for name, part in value.items() if name not in TIMES}
    return [_timeless(part) for part in value] if isinstance(value, list) else value
