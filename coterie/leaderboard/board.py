"""Run the cells that are missing, sum up, and write leaderboard.json and the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie._core import files
from coterie._core.errors import RunError, SettingError
from coterie.algorithms import all_algorithms, find
from coterie.data import recipes
from coterie.leaderboard import summary
from coterie.leaderboard.cell import TIMES, measure
from coterie.leaderboard.entries import DataSet, Method
from coterie.leaderboard.page import leaderboard_page
from coterie.leaderboard.plan import PLAN, REFERENCE, SCHEMA, Budget, Job, Plan
from coterie.leaderboard.workers import Watch, carry_out
from coterie.models.metrics import find as find_metric
from coterie.report.catalogue_tables import describe_algorithm

RESULT, PAGE, STORED = "leaderboard.json", "leaderboard.html", "stored.json"
FORMAT = f"coterie-leaderboard/{SCHEMA}"
SHOWN = 6  # significant digits that are published

Result = dict[str, Any]


@dataclass(frozen=True)
class Board:
    """A leaderboard: what leaderboard.json holds, and its folder."""

    result: Result
    folder: Path

    @property
    def page(self) -> Path:
        """The page."""
        return self.folder / PAGE


def run(
    out: str | Path,
    *,
    methods: Sequence[str] | None = None,
    data: Sequence[str] | None = None,
    budget: Budget | None = None,
    data_files: str | Path | None = None,
    workers: int = 1,
    watch: Watch | None = None,
) -> Board:
    """Compare methods on data sets under equal budgets; a run that was stopped goes on.

    Parameters
    ----------
    out
        Folder of the leaderboard. Cells that are finished there and depend on the same code, rows and settings are not
        run again.
    methods
        Names; all registered methods if not given. Training alone takes part always.
    data
        Names of recipes; if not given, all whose files are there.
    budget
        Rounds, settings tried and seeds; those of the folder, else the usual ones, if not given.
    data_files
        Folder of data files, for recipes that need some.
    workers
        Processes that run cells.
    watch
        Called after each cell with its name, the number of cells done, and their total.

    Returns
    -------
    Board

    Raises
    ------
    SettingError
        If a name is not known, or the folder holds a leaderboard with another budget.
    RunError
        If processes ended before their cells were done.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     board = run(folder, methods=["fedavg"], data=["heart"], budget=Budget(2, 1, 1))
    >>> [line["method"] for line in board.result["lines"]]
    ['local', 'fedavg']
    """
    folder, known = Path(out), None if data_files is None else str(Path(data_files).resolve())
    chosen = [Method(find(name).name) for name in (methods or all_algorithms())]
    names = data or [name for name, one in recipes.all_recipes().items() if one.available(known)]
    sets = [DataSet(recipes.find(name).name) for name in names]
    for one in sets:
        one.recipe().places(known)
    if (folder / PLAN).exists():
        plan = Plan.load(folder)
        if budget is not None and budget != plan.budget:
            raise SettingError(
                f"{folder} holds a leaderboard with {_said(plan.budget)}, not {_said(budget)}; give the same, or "
                "another --out"
            )
        plan = Plan(plan.budget, plan.methods, plan.data, known or plan.files)
    else:
        plan = Plan(budget or Budget(), (Method(REFERENCE),), (), known)
    return _completed(plan.with_entries(chosen, sets), folder, workers, watch)


def add(
    to: str | Path,
    *,
    methods: Sequence[Method] = (),
    data: Sequence[DataSet] = (),
    out: str | Path | None = None,
    data_files: str | Path | None = None,
    workers: int = 1,
    watch: Watch | None = None,
) -> Board:
    """Add methods or data sets to a leaderboard, under its budget; nothing that is known is run again.

    Parameters
    ----------
    to
        Folder of a leaderboard, or a leaderboard.json that somebody published.
    methods, data
        What to add: `own_method(file)`, `own_table(file, ...)`, or registered names as `Method` and `DataSet`.
    out
        Folder for the new leaderboard; needed for a leaderboard.json. A folder is added to by default.
    data_files
        Folder of data files, for recipes that need some.
    workers
        Processes that run cells.
    watch
        Called after each cell.

    Returns
    -------
    Board
        With the stored results and the new ones. From a leaderboard.json alone training alone runs again on the data
        sets of new methods, because who gained and who lost is judged row by row.

    Raises
    ------
    SettingError
        If there is nothing to add, or a place for the results is missing.
    RunError
        If `to` holds no leaderboard.
    """
    if not methods and not data:
        raise SettingError("nothing to add; give --method FILE, or --table FILE with --client and --target")
    place = Path(to)
    known = None if data_files is None else str(Path(data_files).resolve())
    if (place / PLAN).exists() and out is None:
        plan = Plan.load(place)
        plan = Plan(plan.budget, plan.methods, plan.data, known or plan.files)
        return _completed(plan.with_entries(methods, data), place, workers, watch)
    stored = read(place)
    if out is None:
        raise SettingError(f"{to} has results without their cells; name a folder for new ones: --out FOLDER")
    folder = Path(out)
    budget = Budget(**stored["settings"])
    registered = [Method(one["name"]) for one in stored["methods"] if one["name"] in all_algorithms()]
    sets = [DataSet(one["name"]) for one in stored["data"] if one["name"] in recipes.all_recipes()]
    usable = [one for one in sets if one.recipe().available(known)] if methods else []
    entrants = registered if data else [Method(REFERENCE)]
    if (folder / PLAN).exists() and Plan.load(folder).budget != budget:
        raise SettingError(f"{folder} holds a leaderboard with another budget than {to}; give another --out")
    base = Plan.load(folder) if (folder / PLAN).exists() else Plan(budget, (), ())
    plan = Plan(budget, base.methods, base.data, known or base.files)
    plan = plan.with_entries([*entrants, *methods], [*usable, *data])
    files.write_json(folder / STORED, stored)
    return _completed(plan, folder, workers, watch)


def recheck(folder: str | Path, method: str, data: str, seed: int) -> dict[str, tuple[Any, Any]]:
    """Run one cell again, alone and in this process, and compare it with the stored one.

    Parameters
    ----------
    folder
        Folder of a leaderboard.
    method, data, seed
        The cell.

    Returns
    -------
    dict
        Stored and new value of every field that differs, times excepted; empty if all digits are the same.

    Raises
    ------
    SettingError
        If the leaderboard has no such cell.
    RunError
        If the cell is not finished.
    """
    place = Path(folder)
    plan = Plan.load(place)
    jobs = [job for job in plan.jobs() if (job.method.name, job.data.name, job.seed) == (method, data, seed)]
    if not jobs:
        raise SettingError(f"{folder} has no cell of {method} on {data} with seed {seed}")
    before = finished(jobs[0], place)
    if before is None:
        raise RunError(f"{jobs[0].title} is not finished in {folder}, or its code has changed; run it first")
    after = measure(jobs[0], plan.files)
    told = [name for name in before.keys() | after.keys() if name not in TIMES]
    plain = {name: _as_stored(after.get(name)) for name in told}
    return {name: (before.get(name), plain[name]) for name in told if before.get(name) != plain[name]}


def read(path: Path) -> Result:
    """Read a leaderboard.json, or the one in a folder; raise `RunError` if it is none."""
    place = path / RESULT if path.is_dir() else path
    found = files.read_json(place)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(f"{place} is not a leaderboard of this version ({FORMAT})")
    return found


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """Return the stored record of a cell, or None if it is not done or is damaged."""
    try:
        record = files.read_json(job.place(folder))
    except RunError:
        return None
    return record if isinstance(record, dict) and record.get("key") == job.key else None


def _completed(plan: Plan, folder: Path, workers: int, watch: Watch | None) -> Board:
    """Run what is missing and write the results."""
    files.require_writable(folder / PLAN)
    stored = files.read_json(folder / STORED) if (folder / STORED).exists() else None
    jobs = [job for job in plan.jobs() if not _known_already(job, stored, plan)]
    plan.save(folder)
    missing = [job for job in jobs if finished(job, folder) is None]
    if missing:
        counted = None if watch is None else _counting(watch, len(jobs) - len(missing), len(jobs))
        carry_out(missing, folder, plan.files, workers, counted)
    records = {}
    for job in jobs:
        record = finished(job, folder)
        if record is None:
            raise RunError(f"{job.title} was changed while it ran; run the command again")
        records[job.data.name, job.method.name, job.seed] = record
    result = _result(plan, records, stored)
    written = json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    files.write_text(folder / RESULT, written + "\n")
    files.write_text(folder / PAGE, leaderboard_page(result))
    return Board(result, folder)


def _counting(watch: Watch, before: int, total: int) -> Watch:
    return lambda what, done, _: watch(what, before + done, total)


def _known_already(job: Job, stored: Result | None, plan: Plan) -> bool:
    """Return True for a stored cell that no new method has to be judged against."""
    if stored is None:
        return False
    published = {(one["data"], one["method"]) for one in stored["cells"]}
    new = any((job.data.name, one.name) not in published for one in plan.methods)
    return (job.data.name, job.method.name) in published and not (new and job.method.name == REFERENCE)


def _result(plan: Plan, records: Mapping[tuple[str, str, int], Any], stored: Result | None) -> Result:
    """Return what leaderboard.json holds."""
    made = {
        place: summary.cell(record, records.get((place[0], REFERENCE, place[2])))
        for place, record in records.items()
    }
    before = {(one["data"], one["method"], one["seed"]): one for one in (stored or {"cells": []})["cells"]}
    cells = list((before | made).values())
    lines = summary.lines(cells)
    methods = {one["name"]: one for one in (stored or {"methods": []})["methods"]}
    methods |= {one.name: _method(one) for one in plan.methods}
    data = {one["name"]: one for one in (stored or {"data": []})["data"]}
    data |= {one.name: _card(one, records) for one in plan.data if one.name not in data}
    found = {
        "format": FORMAT,
        "coterie": __version__,
        "settings": asdict(plan.budget),
        "methods": list(methods.values()),
        "data": list(data.values()),
        "overall": summary.overall(lines),
        "ranking": summary.ranking(lines),
        "lines": lines,
        "cells": cells,
    }
    rounded: Result = _short(found)
    return rounded


def _method(entry: Method) -> dict[str, Any]:
    """Return what is published of a method; of the user's file its name alone."""
    told = describe_algorithm(type(entry.algorithm()))
    own = None if entry.file is None else Path(entry.file).name
    return {"name": entry.name, "summary": told["summary"], "code": entry.code(), "file": own}


def _card(entry: DataSet, records: Mapping[tuple[str, str, int], Any]) -> dict[str, Any]:
    """Return the data card, with what the cells know of clients and rows."""
    recipe = entry.recipe()
    record = records[entry.name, REFERENCE, 0]
    metric = find_metric(record["metric"]) if record["status"] == "ok" else None
    late = record["newcomers"]["test"] if record.get("newcomers") else None
    names = ("name", "title", "model", "client", "heterogeneity", "why", "source", "licence")
    return {name: getattr(recipe, name) for name in names} | {
        "task": record["task"],
        "metric": None if metric is None else metric.name,
        "higher_is_better": None if metric is None else metric.higher_is_better,
        "clients": record["clients"],
        "newcomers": len(late) if late else 0,
        "rows": record["rows"],
        "parameters": record["parameters"],
        "files": list(recipe.files),
    }


def _said(budget: Budget) -> str:
    return f"{budget.rounds} rounds, {budget.trials} trials and {budget.seeds} seeds"


def _as_stored(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    if isinstance(value, dict):
        return {str(name): _as_stored(part) for name, part in value.items()}
    return [_as_stored(part) for part in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> Any:
    """Round numbers to the digits that are published; None for what is not finite."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.{SHOWN}g}") if math.isfinite(value) else None
    return value
