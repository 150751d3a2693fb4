"""One run of a federation, from a request on disk to a run folder; its progress is on disk for others to follow."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie
from coterie._core import files
from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import audit, keys
from coterie.deploy.audit import AuditLog
from coterie.deploy.federation_plan import FederationPlan, RunRequest, connect, survey
from coterie.deploy.transport import NodeCaller
from coterie.models.description import description
from coterie.report.tables import run_notes, run_summary, run_table
from coterie.train.fit import fit, resume
from coterie.train.private import IN_PLAN, from_plan

if TYPE_CHECKING:
    from coterie.deploy.transport import Transport
    from coterie.engine.federation import Federation
    from coterie.train.run import Run

REQUEST, PROGRESS, NOTES, SUMMARY = "request.json", "progress.json", "notes.txt", "summary"


@dataclass(frozen=True)
class JobRequest:
    """A run to be done.

    Attributes
    ----------
    out : str
        The run folder.
    algorithm : dict
        Name and settings of the algorithm.
    plan : dict
        Rounds and further arguments of `fit`.
    roles : dict
        Which columns of the tables are used, and how.
    nodes : dict of str to list of str
        Clients that each node is expected to have.
    seed : int
        Seed of splits and random draws.
    l2 : float or None
        Ridge penalty of the model; None takes the default model.
    model : str
        Built-in model for tables, such as 'mlp'.
    deadline : float
        Seconds to wait for the reply to a call.
    patience : float
        Seconds to wait for nodes at the start.
    run : str
        Identifier of the run; made when the request is written.
    secure : bool
        Add answers of nodes up under masks.
    described : dict or None
        Description of a model to be trained instead.
    """

    out: str  # the run folder
    algorithm: dict[str, Any]  # name and settings
    plan: dict[str, Any]  # rounds and what else `fit` takes
    roles: dict[str, Any]
    nodes: dict[str, list[str]]  # clients that each node is expected to have
    seed: int = 0
    l2: float | None = None
    model: str = "linear"
    deadline: float = 60.0
    patience: float = 60.0
    run: str = ""
    secure: bool = False
    described: dict[str, Any] | None = None

    @classmethod
    def read(cls, job: Path) -> JobRequest:
        """Read the request from a job folder."""
        return cls(**files.read_json(job / REQUEST))

    def write(self, job: Path) -> None:
        """Write the request into a job folder that only its owner can read."""
        keys.private_folder(job)
        files.write_json(job / REQUEST, {**vars(self), "run": self.run or secrets.token_hex(16)})


class Reporter:
    """Writes the progress of a run into its job folder."""

    def __init__(self, job: Path, rounds: int) -> None:
        self.job = job
        self.told: dict[str, Any] = {"rounds": rounds, "round": 0, "pid": os.getpid(), "nodes": 0, "here": 0}

    def state(self, state: str, **more: Any) -> None:
        """Write the state of the run and further progress."""
        self.told |= {"state": state, **more}
        files.write_json(self.job / PROGRESS, self.told)

    def note(self, text: str) -> None:
        """Add a line to the notes."""
        with open(self.job / NOTES, "a", encoding="utf-8") as stream:
            for line in text.splitlines():
                stream.write(f"{time.strftime('%H:%M:%S')} {printable(line, 1000)}\n")


def work(job: Path, transport: Transport) -> None:
    """Do a job, from its last checkpoint if there is one; failures are written to its progress."""
    request = JobRequest.read(job)
    reporter = Reporter(job, request.plan["rounds"])
    try:
        reporter.state("gathering")
        log = AuditLog(job / audit.FILE, sync=False)
        caller = NodeCaller(transport, request.deadline, reporter.note)
        authority = job.parents[1] / "server" / keys.CA_CERTIFICATE
        caller.authority = authority.read_text(encoding="ascii") if authority.exists() else None
        caller.audit = lambda node, entry: _write(log, node, entry)
        _work(job, request, reporter, caller)
    except CoterieError as problem:
        reporter.note(str(problem))
        reporter.state("failed", error=str(problem))
    except BaseException as problem:
        reporter.note("".join(traceback.format_exception(problem)))
        reporter.state("failed", error=f"{type(problem).__name__}: {problem}; see {job / NOTES}")
        raise


def _write(log: AuditLog, node: str, entry: dict[str, Any]) -> None:
    log.write(node=node, **entry)


def _work(job: Path, request: JobRequest, reporter: Reporter, caller: NodeCaller) -> None:
    algorithm = make(request.algorithm["name"], **request.algorithm["settings"])
    out = Path(request.out)
    known, privacy = job / "plan.json", from_plan(request.plan)
    if known.exists():
        plan = FederationPlan.from_json(files.read_json(known))
    else:
        own = algorithm.own_model(request.plan["rounds"])
        model = request.described or (None if own is None else description(own))
        proposal = {"algorithm": request.algorithm, "rounds": request.plan["rounds"]}
        roles = Roles.from_json(request.roles)
        wishes = RunRequest(
            roles,
            request.seed,
            l2=request.l2,
            model=model,
            kind=request.model,
            proposal=proposal,
            secure=request.secure,
            privacy=None if privacy is None else privacy.to_json(),
        )
        plan = survey(caller, request.nodes, wishes, request.run, request.patience)
        files.write_json(known, plan.to_json())
    for warning in plan.warnings:
        reporter.note(warning)
    fed = connect(caller, plan, algorithm, secure=request.secure, privacy=privacy)
    reporter.state("running", nodes=len(plan.nodes))
    if (out / "result.json").exists():
        _finish_again(fed, out, reporter)
        return

    def watch(t: int, rounds: int) -> None:
        here = len(plan.nodes) - len(caller.away)
        reporter.state("running", round=t, here=here, seconds=round(time.monotonic() - started, 3))

    started = time.monotonic()
    if (out / "config.toml").exists():
        run = resume(out, fed, watch=watch)
    else:
        options = {name: value for name, value in request.plan.items() if name not in IN_PLAN}
        run = fit(fed, algorithm, out=out, watch=watch, privacy=privacy, **options)
    common = algorithm.common(run.fed, run.state)
    done = run.fed.runtime.finish(run.deployed_round, common)
    if len(done) < len(plan.nodes):
        away = sorted(set(plan.nodes) - set(done))
        reporter.note(f"{', '.join(away)} was away at the end of the run and has no models of it")
    _summarise(job, run)
    reporter.state("finished", models_at=done)


def _finish_again(fed: Federation, out: Path, reporter: Reporter) -> None:
    """Let nodes finish a run that is over, in case not all of them had heard of it."""
    t = files.read_json(out / "result.json")["deployed_round"]
    stored = out / "models" / "models.safetensors"
    common = files.read_tensors(stored)[0]["common"] if stored.exists() else None
    reporter.state("finished", models_at=fed.runtime.finish(t, common))


def _summarise(job: Path, run: Run) -> None:
    """Write what a local run prints, as text and as JSON."""
    from rich.console import Console

    with open(job / f"{SUMMARY}.txt", "w", encoding="utf-8") as stream:
        console = Console(file=stream, width=100, highlight=False, markup=False)
        for note in run_notes(run):
            console.print(f"Note: {note}", soft_wrap=True)
        console.print(run_table(run))
    files.write_json(
        job / f"{SUMMARY}.json",
        {**run_summary(run), "coterie": coterie.__version__, "left_out": run.left_out},
    )
