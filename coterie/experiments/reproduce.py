"""Reproduce an experiment: run its jobs, several in parallel, and compare its numbers with the paper's."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from coterie._core import files
from coterie._core.errors import RunError, SettingError, nearest
from coterie.experiments.jobs import Job, finished, load, run_job
from coterie.experiments.spec import Claim, Experiment, Row, Table, Watch
from coterie.report.plots import Dot, dot_plot, line_plot, panel_plot, save_plot
from coterie.report.weights import weights_plot

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Records = dict[tuple[str, int], Table]  # by key and seed
HEADER = ("label", "metric", "paper", "reference", "ours ± sd", "ok")
APART = 50.0  # times; numbers further apart have axes of their own
STDERR_LINES = 12  # of a failed job, shown to the user


@dataclass(frozen=True)
class Result:
    """One row of the table: a number or claim of the paper, and ours (mean and sd over seeds).

    `ok` is None for a row that is shown and not judged. `reference` is a number that the paper does not print.
    """

    label: str
    metric: str
    paper: float | str | None
    ours: float
    sd: float
    ok: bool | None
    reference: float | None = None

    def json(self) -> Table:
        """Return the row as JSON values; a finding in words has no number."""
        return {**dataclasses.asdict(self), "paper": None if isinstance(self.paper, str) else self.paper}

    def cells(self) -> dict[str, str]:
        """Return the row as text, by the names of `HEADER`."""
        paper = f"{self.paper:.4g}" if isinstance(self.paper, int | float) else self.paper or ""
        reference = "" if self.reference is None else f"{self.reference:.4g}"
        verdict = {True: "yes", False: "no", None: "shown"}[self.ok]
        cells = (self.label, self.metric, paper, reference, f"{self.ours:.4g} ± {self.sd:.2g}", verdict)
        return dict(zip(HEADER, cells, strict=True))


@dataclass(frozen=True)
class Reproduction:
    """Result of `coterie reproduce`.

    Attributes
    ----------
    experiment
        What ran.
    results
        Rows of the table.
    seconds
        Duration, without jobs that were finished before.
    folder
        Where the results are.
    records
        Saved result of every job, by key and seed.
    """

    experiment: Experiment
    results: list[Result]
    seconds: float
    folder: Path
    records: Records = field(repr=False)

    @property
    def rows(self) -> list[Table]:
        """Rows of the table as JSON values: label, metric, paper, reference, ours, sd, ok."""
        return [result.json() for result in self.results]

    @property
    def ok(self) -> bool:
        """Whether every row that is judged is as close to the paper as the experiment demands."""
        return all(result.ok is not False for result in self.results)

    def json(self) -> Table:
        """Return what table.json holds."""
        return {"name": self.experiment.name, "seconds": round(self.seconds, 3), "rows": self.rows}

    def table(self) -> RichTable:
        """Return the table for the terminal."""
        from rich.table import Table as RichTable

        table, columns = RichTable(title=self.experiment.file.title), self._columns()
        for name in columns:
            table.add_column(name, justify="left" if name in ("label", "metric") else "right")
        for result in self.results:
            cells = result.cells()
            table.add_row(*(cells[name] for name in columns), style="red" if result.ok is False else None)
        return table

    def _columns(self) -> list[str]:
        """Return the columns of the table; that of references only if there are some."""
        known = any(result.reference is not None for result in self.results)
        return [name for name in HEADER if name != "reference" or known]

    def markdown(self) -> str:
        """Return what table.md holds."""
        file = self.experiment.file
        lines = [f"# {file.title}", "", f"Source: {file.source}", "", file.notes.strip(), ""]
        columns = self._columns()
        lines += ["| " + " | ".join(columns) + " |", f"|---|---|{'--:|' * (len(columns) - 3)}---|"]
        lines += [
            "| " + " | ".join(cells[name] for name in columns) + " |"
            for cells in (result.cells() for result in self.results)
        ]
        seeds = ", ".join(map(str, self.experiment.seeds))
        origin = f" Reference: {file.reference}." if "reference" in columns else ""
        return "\n".join([*lines, "", f"Mean ± standard deviation over the seeds {seeds}.{origin}", ""])

    def save(self, jobs: int) -> None:
        """Write settings.toml, environment.json, plot.html, plots/, table.md and, last, table.json."""
        folder, first = self.folder, next(iter(self.records.values()))
        files.write_toml(folder / "settings.toml", self._settings())
        files.write_json(folder / "environment.json", {**first["environment"], "jobs": jobs})
        save_plot(folder / "plot.html", self._plot())
        for (key, seed), record in self.records.items():
            for name, plot in record.get("plots", {}).items():
                figure = panel_plot(**plot) if "panels" in plot else weights_plot(**plot)
                save_plot(folder / "plots" / f"{key}-{seed}-{name}.html", figure)
        files.write_text(folder / "table.md", self.markdown())
        files.write_json(folder / "table.json", self.json())

    def _settings(self) -> Table:
        """Return every run with its data and model, and the settings chosen on each seed."""
        file, seeds = self.experiment.file, list(self.experiment.seeds)
        tables: Table = {
            "name": self.experiment.name,
            "title": file.title,
            "source": file.source,
            "seeds": seeds,
        }
        for plan in self.experiment.plans:
            chosen = {f"seed-{seed}": self.records[plan.key, seed]["settings"] for seed in seeds}
            tuned = {"chosen": chosen} if plan.grid or plan.budget else {}
            _flatten(f"runs.{plan.key}", {**dataclasses.asdict(plan), **tuned}, tables)
        return tables

    def _plot(self) -> Any:
        """Plot the curve of every run, mean and standard deviation over seeds; without curves, the table's numbers."""
        curves: dict[str, tuple[list[int], list[float | None]]] = {}
        errors: dict[str, list[float | None]] = {}
        titles: set[str] = set()
        across: set[str] = set()
        linear = False
        for plan in self.experiment.plans:
            found = [self.records[plan.key, seed]["curve"] for seed in self.experiment.seeds]
            if all(found):
                points = list(zip(*(curve["values"] for curve in found), strict=True))
                means = [None if None in point else statistics.fmean(point) for point in points]
                curves[plan.key] = (found[0]["rounds"], means)
                if len(found) > 1:
                    errors[plan.key] = [
                        None if None in point else statistics.stdev(point) for point in points
                    ]
                titles.add(f"{found[0]['split']} {found[0]['metric']}")
                across.add(found[0].get("x", "round"))
                linear = linear or not found[0].get("log", "accuracy" not in found[0]["metric"])
        title = self.experiment.file.title
        if not curves:
            return dot_plot(self._dots(), title=title)
        measured = " / ".join(sorted(titles))
        return line_plot(
            curves,
            title=title,
            x=" / ".join(sorted(across)),
            y=measured,
            log=not linear,
            errors=errors,
        )

    def _dots(self) -> dict[str, list[Dot]]:
        """Return the table's numbers by what is measured; metrics of one order of magnitude share an axis."""
        largest: dict[str, float] = {}
        for one in self.results:
            largest[one.metric] = max(abs(one.ours), largest.get(one.metric, 0.0))
        axes: list[list[str]] = []
        for metric in sorted(largest, key=lambda name: -largest[name]):
            if axes and largest[axes[-1][0]] <= APART * largest[metric]:
                axes[-1].append(metric)
            else:
                axes.append([metric])
        dots: dict[str, list[Dot]] = {}
        for metrics in axes:
            named = " / ".join(metrics[:4]) + (" / …" if len(metrics) > 4 else "")
            dots[named] = [
                (
                    one.label,
                    one.ours,
                    one.sd,
                    one.reference if isinstance(one.paper, str | None) else one.paper,
                )
                for one in self.results
                if one.metric in metrics
            ]
        return dots


def reproduce(
    name: str,
    quick: bool = False,
    out: str | Path | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Reproduction:
    """Run an experiment and compare its numbers with the paper's.

    Parameters
    ----------
    name
        One of `coterie.experiments.spec.experiments()`, or a TOML file.
    quick
        Whether to run the small version.
    out
        Folder for the results; results/<name> if not given. Jobs finished there are not repeated.
    jobs
        Jobs run in parallel; the number of cores if not given.
    watch
        Called with a job's name, the number of finished jobs, and their total.

    Returns
    -------
    Reproduction

    Raises
    ------
    SettingError
        If the file is invalid.
    RunError
        If jobs failed; the message has the end of their output.
    """
    experiment = load(name, quick)
    return carry_out(
        experiment, Path("results", experiment.name) if out is None else Path(out), quick, jobs, watch
    )


def carry_out(
    experiment: Experiment,
    folder: Path,
    quick: bool = False,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Reproduction:
    """Run the jobs that are not finished, compare with the paper, and write the results."""
    started = time.perf_counter()
    jobs = _cores() if jobs is None else jobs
    if jobs < 1:
        raise SettingError(f"jobs = {jobs}; it must be at least 1")
    every: list[Job] = [(plan, seed) for seed in experiment.seeds for plan in experiment.plans]
    pending = [job for job in every if finished(experiment, job, folder) is None]
    meter = _JobProgress(watch, len(every) - len(pending), len(every))
    if jobs == 1:
        failures = _one_by_one(experiment, pending, folder, meter)
    else:
        failures = _several(experiment, pending, folder, quick, jobs, meter)
    if failures:
        raise RunError(f"{len(failures)} of {len(every)} jobs failed:\n" + "\n".join(failures))
    records: Records = {}
    for plan, seed in every:
        record = finished(experiment, (plan, seed), folder)
        if record is None:
            raise RunError(f"{experiment.path} was changed while it ran; run it again")
        records[plan.key, seed] = record
    results = [_row(experiment, row, records) for row in experiment.rows]
    results += [_claim(experiment, claim, records) for claim in experiment.claims]
    reproduction = Reproduction(experiment, results, time.perf_counter() - started, folder, records)
    reproduction.save(jobs)
    return reproduction


class _JobProgress:
    """Count finished jobs for a progress bar."""

    def __init__(self, watch: Watch | None, done: int, total: int) -> None:
        self._watch, self._done, self._total = watch, done, total

    def step(self, job: Job) -> None:
        """Count one more job."""
        self._done += 1
        if self._watch is not None:
            self._watch(_name(job), self._done, self._total)


def _name(job: Job) -> str:
    """Return the name of a job for people."""
    return f"{job[0].key}, seed {job[1]}"


def _cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_by_one(experiment: Experiment, pending: list[Job], folder: Path, meter: _JobProgress) -> list[str]:
    """Run the jobs in this process; return what failed."""
    failures = []
    for job in pending:
        try:
            run_job(experiment, *job, folder)
        except Exception as problem:
            failures.append(f"{_name(job)}: {type(problem).__name__}: {problem}")
        meter.step(job)
    return failures


@dataclass
class _Child:
    """A job in a process of its own."""

    job: Job
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def end(self) -> list[str]:
        """Return nothing if the job succeeded, else its name and the end of its output."""
        with self.output:
            self.output.seek(0)
            lines = self.output.read().decode(errors="replace").strip().splitlines()[-STDERR_LINES:]
        if self.process.returncode == 0:
            return []
        return [f"{_name(self.job)} (exit code {self.process.returncode}):\n  " + "\n  ".join(lines)]


def _several(
    experiment: Experiment, pending: list[Job], folder: Path, quick: bool, jobs: int, meter: _JobProgress
) -> list[str]:
    """Run each job in a process of its own, at most `jobs` at a time; none outlives this call."""
    waiting, failures = deque(pending), []
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_spawn(experiment, waiting.popleft(), folder, quick, jobs))
            time.sleep(0.02)
            for child in [child for child in running if child.process.poll() is not None]:
                running.remove(child)
                failures += child.end()
                meter.step(child.job)
    finally:
        for child in running:
            child.process.kill()
            child.process.wait()
            child.output.close()
    return failures


def _spawn(experiment: Experiment, job: Job, folder: Path, quick: bool, jobs: int) -> _Child:
    """Start a job in a process of its own."""
    name = str(experiment.path) if experiment.path.stem == experiment.name else experiment.name
    command = [sys.executable, "-P", "-m", "coterie.experiments", name, "--out", str(folder)]
    command += ["--job", job[0].key, "--seed", str(job[1]), *(["--quick"] if quick else [])]
    threads = str(max(1, _cores() // jobs))
    settings = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    output = tempfile.TemporaryFile()
    process = subprocess.Popen(command, env=settings, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return _Child(job, process, output)


def _values(experiment: Experiment, run: str, row: Row | Claim, records: Records) -> list[float]:
    """Return a metric of a run for each seed, in the paper's unit."""
    scale = experiment.file.scale.get(row.metric, 1.0)
    values = []
    for seed in experiment.seeds:
        found = dict(records[run, seed]["metrics"])
        if row.metric == "improved" and "improved" not in found:
            found |= _improved(records[run, seed]["clients"], records[row.against, seed]["clients"])
        if row.metric not in found:
            hint = nearest(row.metric, found)
            raise SettingError(
                f"{experiment.path}, {row.label!r}: run {run!r} has no metric {row.metric!r}.{hint}"
            )
        values.append(scale * found[row.metric])
    return values


def _improved(mine: Table, other: Table) -> dict[str, float]:
    """Return the percentage of clients that are better off, if both runs recorded clients."""
    if not mine or not other:
        return {}
    sign = 1 if mine["higher"] else -1
    pairs = [pair for pair in zip(mine["values"], other["values"], strict=True) if None not in pair]
    return {"improved": 100.0 * sum(sign * (a - b) > 0 for a, b in pairs) / len(pairs)}


def _spread(values: list[float]) -> float:
    """Return the standard deviation, 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _row(experiment: Experiment, row: Row, records: Records) -> Result:
    """Compare a number of the paper with ours."""
    values = _values(experiment, row.run, row, records)
    ours = statistics.fmean(values)
    near = row.tolerance is None or row.expected is None or abs(ours - row.expected) <= row.tolerance
    inside = (row.at_least is None or ours >= row.at_least) and (row.at_most is None or ours <= row.at_most)
    ok = None if row.shown else near and inside
    return Result(row.label, row.metric, row.paper, ours, _spread(values), ok, row.reference)


def _claim(experiment: Experiment, claim: Claim, records: Records) -> Result:
    """Check a claim on the difference of two runs, paired by seed."""
    first, second = (_values(experiment, run, claim, records) for run in claim.larger)
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    ours = statistics.fmean(gaps)
    words, ok = f"gap in {claim.metric}", ours > claim.margin
    return Result(claim.label, words, claim.paper, ours, _spread(gaps), ok, claim.reference)


def _flatten(name: str, values: Table, tables: Table) -> None:
    """Put nested tables under dotted names, as in TOML."""
    tables[name] = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for inner, value in values.items():
        if isinstance(value, dict) and value:
            _flatten(f"{name}.{inner}", value, tables)
