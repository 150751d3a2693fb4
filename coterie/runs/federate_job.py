"""One run of a federation, from a request on disk to a run folder; who follows it reads its progress there."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.errors import CoterieError
from coterie.runs import files
from coterie.runs.assemble import Assembly, Wishes, connect, survey
from coterie.runs.fit import fit, resume
from coterie.runtime import keys
from coterie.runtime.post import Desk

if TYPE_CHECKING:
    from coterie.federation.federation import Federation
    from coterie.runs.run import Run
    from coterie.runtime.post import Carrier

REQUEST, PROGRESS, NOTES, SUMMARY = "request.json", "progress.json", "notes.txt", "summary"


@dataclass(frozen=True)
class Request:
    """What is to be run, with whom, and how long anybody is waited for."""

    out: str  # the run folder
    algorithm: dict[str, Any]  # name and settings
    plan: dict[str, Any]  # rounds and what else `fit` takes
    roles: dict[str, Any]
    nodes: dict[str, list[str]]  # clients that each node is expected to have
    seed: int = 0
    l2: float | None = None
    deadline: float = 60.0
    patience: float = 60.0
    run: str = ""

    @classmethod
    def read(cls, job: Path) -> Request:
        return cls(**files.read_json(job / REQUEST))

    def write(self, job: Path) -> None:
        keys.private_folder(job)
        files.write_json(job / REQUEST, {**vars(self), "run": self.run or secrets.token_hex(16)})


class Reporter:
    """Writes down how far a run is, for whoever follows it."""

    def __init__(self, job: Path, rounds: int) -> None:
        self.job = job
        self.told: dict[str, Any] = {"rounds": rounds, "round": 0, "pid": os.getpid(), "nodes": 0, "here": 0}

    def state(self, state: str, **more: Any) -> None:
        self.told |= {"state": state, **more}
        files.write_json(self.job / PROGRESS, self.told)

    def note(self, text: str) -> None:
        with open(self.job / NOTES, "a", encoding="utf-8") as stream:
            stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def work(job: Path, carrier: Carrier) -> None:
    """Do the job, or go on with it where its last checkpoint is."""
    request = Request.read(job)
    reporter = Reporter(job, request.plan["rounds"])
    try:
        reporter.state("gathering")
        _work(job, request, reporter, Desk(carrier, request.deadline, reporter.note))
    except CoterieError as problem:
        reporter.note(str(problem))
        reporter.state("failed", error=str(problem))
    except BaseException as problem:
        reporter.note("".join(traceback.format_exception(problem)))
        reporter.state("failed", error=f"{type(problem).__name__}: {problem}; see {job / NOTES}")
        raise


def _work(job: Path, request: Request, reporter: Reporter, desk: Desk) -> None:
    algorithm = make(request.algorithm["name"], **request.algorithm["settings"])
    out = Path(request.out)
    known = job / "assembly.json"
    if known.exists():
        assembly = Assembly.from_json(files.read_json(known))
    else:
        wishes = Wishes(Roles.from_json(request.roles), request.seed, l2=request.l2)
        assembly = survey(desk, request.nodes, wishes, request.run, request.patience)
        files.write_json(known, assembly.to_json())
    for warning in assembly.warnings:
        reporter.note(warning)
    fed = connect(desk, assembly, algorithm)
    reporter.state("running", nodes=len(assembly.nodes))
    if (out / "result.json").exists():
        _finish_again(fed, out, reporter)
        return

    def watch(t: int, rounds: int) -> None:
        here = len(assembly.nodes) - len(desk.away)
        reporter.state("running", round=t, here=here, seconds=round(time.monotonic() - started, 3))

    started = time.monotonic()
    if (out / "config.toml").exists():
        run = resume(out, fed, watch=watch)
    else:
        run = fit(fed, algorithm, out=out, watch=watch, **request.plan)
    common = algorithm.common(run.fed, run.state)
    done = run.fed.runtime.finish(run.deployed_round, common)
    if len(done) < len(assembly.nodes):
        away = sorted(set(assembly.nodes) - set(done))
        reporter.note(f"{', '.join(away)} was away at the end and has no models of this run")
    _summarise(job, run)
    reporter.state("finished", models_at=done)


def _finish_again(fed: Federation, out: Path, reporter: Reporter) -> None:
    """The run was over, but perhaps not all nodes had heard of it."""
    t = files.read_json(out / "result.json")["deployed_round"]
    stored = out / "models" / "models.safetensors"
    common = files.read_tensors(stored)[0]["common"] if stored.exists() else None
    reporter.state("finished", models_at=fed.runtime.finish(t, common))


def _summarise(job: Path, run: Run) -> None:
    """What a local run prints, as text and as JSON."""
    from rich.console import Console

    from coterie.report.tables import run_notes, run_summary, run_table

    with open(job / f"{SUMMARY}.txt", "w", encoding="utf-8") as stream:
        console = Console(file=stream, width=100, highlight=False, markup=False)
        for note in run_notes(run):
            console.print(f"Note: {note}", soft_wrap=True)
        console.print(run_table(run))
    files.write_json(
        job / f"{SUMMARY}.json",
        {**run_summary(run), "coterie": coterie.__version__, "left_out": run.left_out},
    )
