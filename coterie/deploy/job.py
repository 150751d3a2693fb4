"""One run of a federation, from a request on disk to a run folder; its progress is on disk for others to follow."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coterie
from coterie._core import files
from coterie._core.errors import CoterieError
from coterie._core.printable import printable
from coterie.data.federated import Roles
from coterie.deploy import advice_job, audit, keys
from coterie.deploy.audit import AuditLog
from coterie.deploy.federation_plan import FederationPlan, RunRequest, connect, survey
from coterie.deploy.live import Live
from coterie.deploy.runnable import made
from coterie.deploy.transport import NodeCaller
from coterie.engine import late
from coterie.engine.from_table import SPLIT
from coterie.engine.from_texts import SPLIT as TEXTS
from coterie.models.description import description
from coterie.models.installed import install
from coterie.report.advice import advice_tables
from coterie.report.tables import run_notes, run_summary, run_table, screened
from coterie.select.survey import Survey
from coterie.train.fit import fit, resume
from coterie.train.private import IN_PLAN, from_plan

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.deploy.transport import Transport
    from coterie.engine.federation import Federation
    from coterie.engine.privacy import Privacy
    from coterie.train.run import Run

REQUEST, PROGRESS, NOTES, SUMMARY = "request.json", "progress.json", "notes.txt", "summary"
RESERVE, RESERVED = "reserve", 64 << 10  # a file, and its bytes, that leave room for progress and notes


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
        Built-in model, such as 'mlp', or one that is installed here and at the nodes.
    data : str
        What the nodes have: "table", "images" or "texts".
    models : list of str
        Files and folders of models to install here.
    model_settings : dict or None
        Settings of the model.
    context : int
        Tokens that are predicted per row of texts.
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
    relay : bool
        Nodes run the server's side of the algorithm among themselves.
    """

    out: str  # the run folder
    algorithm: dict[str, Any]  # name and settings
    plan: dict[str, Any]  # rounds and what else `fit` takes
    roles: dict[str, Any]
    nodes: dict[str, list[str]]  # clients that each node is expected to have
    seed: int = 0
    l2: float | None = None
    model: str = "linear"
    data: str = "table"
    models: list[str] = field(default_factory=list)
    model_settings: dict[str, Any] | None = None
    context: int = 64
    deadline: float = 60.0
    patience: float = 60.0
    run: str = ""
    secure: bool = False
    described: dict[str, Any] | None = None
    relay: bool = False

    @classmethod
    def read(cls, job: Path) -> JobRequest:
        """Read the request from a job folder."""
        return cls(**files.read_json(job / REQUEST))

    def write(self, job: Path) -> None:
        """Write the request into a job folder that only its owner can read."""
        keys.private_folder(job)
        files.write_json(job / REQUEST, {**vars(self), "run": self.run or secrets.token_hex(16)})


class Reporter:
    """Writes the progress of a run into its job folder.

    It keeps a small file there, which it gives up when the disk is full, so that there is room to say so.
    """

    def __init__(self, job: Path, rounds: int) -> None:
        self.job = job
        self.told: dict[str, Any] = {"rounds": rounds, "round": 0, "pid": os.getpid(), "nodes": 0, "here": 0}

    def state(self, state: str, **more: Any) -> None:
        """Write the state of the run and further progress."""
        self.told |= {"state": state, **more}
        files.write_json(self.job / PROGRESS, self.told)

    def note(self, text: str) -> None:
        """Add a line to the notes."""
        lines = [f"{time.strftime('%H:%M:%S')} {printable(line, 1000)}\n" for line in text.splitlines()]
        files.append(self.job / NOTES, "".join(lines).encode(), sync=False)

    def reserve(self) -> None:
        """Keep room on the disk."""
        files.write_with(self.job / RESERVE, lambda path: path.write_bytes(bytes(RESERVED)))

    def release(self) -> None:
        """Give up the room that was kept."""
        (self.job / RESERVE).unlink(missing_ok=True)

    def fail(self, error: str, story: str = "") -> None:
        """Write why the run failed, as far as the disk lets one; the server's own output has it in any case."""
        with contextlib.suppress(OSError):  # the output may be a file on the same disk
            print(f"{self.job.name} failed: {printable(error, 1000)}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self.release()
        with contextlib.suppress(OSError, CoterieError):
            self.state("failed", error=error)
        with contextlib.suppress(OSError):
            self.note(story or error)


def work(job: Path, transport: Transport) -> None:
    """Do a job, from its last checkpoint if there is one; failures are written to its progress."""
    request = JobRequest.read(job)
    reporter = Reporter(job, request.plan["rounds"])
    try:
        reporter.reserve()
        reporter.state("gathering")
        log = AuditLog(job / audit.FILE, sync=False)
        caller = NodeCaller(transport, request.deadline, reporter.note)
        authority = job.parents[1] / "server" / keys.CA_CERTIFICATE
        caller.authority = authority.read_text(encoding="ascii") if authority.exists() else None
        caller.audit = lambda node, entry: _write(log, node, entry)
        _work(job, request, reporter, caller)
    except CoterieError as problem:
        reporter.fail(_full(job, request) if files.disk_is_full(problem) else str(problem))
    except BaseException as problem:
        if files.disk_is_full(problem):
            reporter.fail(_full(job, request))
            return
        story = "".join(traceback.format_exception(problem))
        reporter.fail(f"{type(problem).__name__}: {problem}; see {job / NOTES}", story)
        raise


def _full(job: Path, request: JobRequest) -> str:
    """Return what to do about a full disk: that of the job or that of the run, whichever has less room."""
    there = [path for path in (job, Path(request.out)) if path.exists()]
    place = min(there, key=lambda path: shutil.disk_usage(path).free)
    return (
        f"the disk with {place} is full. The run is kept up to its last checkpoint: make room there, then go on with: "
        f"coterie federate run {job.parents[1]} --resume {job.name}"
    )


def _write(log: AuditLog, node: str, entry: dict[str, Any]) -> None:
    log.write(node=node, **entry)


def _work(job: Path, request: JobRequest, reporter: Reporter, caller: NodeCaller) -> None:
    algorithm = made(request.algorithm["name"], **request.algorithm["settings"])
    out = Path(request.out)
    known, privacy = job / "plan.json", from_plan(request.plan)
    for path in request.models:
        install(path)
    if known.exists():
        plan = FederationPlan.from_json(files.read_json(known))
    else:
        own = algorithm.own_model(request.plan["rounds"])
        model = request.described or (None if own is None else description(own))
        proposal = {"algorithm": request.algorithm, "rounds": request.plan["rounds"]}
        proposal |= {"refit": request.plan["refit"]} if request.plan.get("refit", "none") != "none" else {}
        proposal |= {"model": request.model} | ({"secure": True} if request.secure else {})
        proposal |= {"relay": True} if request.relay else {}
        proposal |= {} if privacy is None else {"privacy": privacy.to_json()}
        roles = Roles.from_json(request.roles)
        wishes = RunRequest(
            roles,
            request.seed,
            TEXTS if request.data == "texts" else SPLIT,
            request.l2,
            model,
            request.model,
            request.data,
            request.model_settings,
            request.context,
            proposal=proposal,
            secure=request.secure,
            privacy=None if privacy is None else privacy.to_json(),
        )
        plan = survey(caller, request.nodes, wishes, request.run, request.patience)
        files.write_json(known, plan.to_json())
    for warning in plan.warnings:
        reporter.note(warning)
    fed = connect(caller, plan, algorithm, secure=request.secure, privacy=privacy, relay=request.relay)
    reporter.state("running", nodes=len(plan.nodes))
    if isinstance(algorithm, Survey):
        _advise(job, fed, request, reporter, privacy)
        return
    if (out / "result.json").exists():
        _finish_again(fed, out, reporter, request.plan.get("refit", "none"))
        return

    live = Live(job, caller)

    def watch(t: int, rounds: int) -> None:
        here = len(plan.nodes) - len(caller.away)
        reporter.state("running", round=t, here=here, seconds=round(time.monotonic() - started, 3))
        live.watch(t, rounds)

    started = time.monotonic()
    if (out / "config.toml").exists():
        run = resume(out, fed, watch=watch, track=live)
    else:
        apart = (*IN_PLAN, *late.IN_PLAN)
        options = {name: value for name, value in request.plan.items() if name not in apart}
        options["late"] = late.Lateness.from_plan(request.plan)
        run = fit(fed, algorithm, out=out, watch=watch, track=live, privacy=privacy, **options)
    common = algorithm.common(run.fed, run.state)
    done = run.fed.runtime.finish(run.deployed_round, common)
    if run.refitted is not None:
        others = sorted(set(done) - set(run.refitted.runtime.finish(run.deployed_round, common)))
        if others:
            reporter.note(f"{', '.join(others)}: models of training rows only, not trained again")
    if len(done) < len(plan.nodes):
        away = sorted(set(plan.nodes) - set(done))
        reporter.note(f"{', '.join(away)} was away at the end of the run and has no models of it")
    if screened(run):
        reporter.note(screened(run))
    _summarise(job, run)
    _done(reporter, done)


def _advise(
    job: Path, fed: Federation, request: JobRequest, reporter: Reporter, privacy: Privacy | None
) -> None:
    """Ask for advice, and write it where a run has its result."""
    advice = advice_job.ask(fed, request.secure, privacy)
    done = fed.runtime.finish(0, None)
    out = Path(request.out)
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / advice_job.FILE, advice.json())
    _write_summary(job, advice_tables(advice), advice.json())
    _done(reporter, done)


def _done(reporter: Reporter, nodes: list[str]) -> None:
    reporter.release()
    reporter.state("finished", models_at=nodes)


def _finish_again(fed: Federation, out: Path, reporter: Reporter, refit: str) -> None:
    """Let nodes finish a run that is over, in case not all of them had heard of it."""
    result = files.read_json(out / "result.json")
    t, refitted = result["deployed_round"], result.get("trained_on", ["train"]) != ["train"]
    stored = out / "models" / "models.safetensors"
    common = files.read_tensors(stored)[0]["common"] if stored.exists() else None
    if not (reporter.job / f"{SUMMARY}.json").exists():
        _summarise(reporter.job, resume(out, fed))
    done = fed.runtime.finish(t, common)
    if refitted:
        fed.runtime.reopened(refit)[0].finish(t, common)
    _done(reporter, done)


def _summarise(job: Path, run: Run) -> None:
    """Write what a local run prints, as text and as JSON."""
    parts: list[str | Table] = [*(f"Note: {note}" for note in run_notes(run)), run_table(run)]
    told = {**run_summary(run), "coterie": coterie.__version__, "left_out": run.left_out}
    _write_summary(job, parts, told)


def _write_summary(job: Path, parts: Sequence[str | Table], told: dict[str, Any]) -> None:
    """Write lines and tables as text, and a summary as JSON."""
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=100, highlight=False, markup=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    files.write_text(job / f"{SUMMARY}.txt", stream.getvalue())
    files.write_json(job / f"{SUMMARY}.json", told)
