"""Experiments as TOML files: finding, reading and checking them; `docs/reproduce.md` describes the format.

`python -m coterie.runs.experiments NAME --job KEY --seed S --out DIR` runs a single job, a run on a seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
import os
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar

import coterie
from coterie.errors import CoterieError, DataError, SettingError, nearest

if TYPE_CHECKING:
    from coterie.runs.reproduce import Reproduction

METRICS = "accuracy loss rmse distance worst improved train_loss validation_loss mb_up mb_down".split()
SHARED = "../shared/data/"
RESULTS = "results"  # the folder beside the experiments that holds ours
Table = dict[str, Any]
Watch = Callable[[str, int, int], None]  # what was done, jobs done, jobs in all
Part = TypeVar("Part")


@dataclass(frozen=True)
class Data:
    """[data]: one of generate, read (with or without partition) and table."""

    generate: Table = field(default_factory=dict)
    read: Table = field(default_factory=dict)
    partition: Table = field(default_factory=dict)
    table: Table = field(default_factory=dict)
    take: int | None = None  # rows drawn from what was read
    split: tuple[float, ...] | None = None
    dtype: str | None = None
    dropout: float = 0.0
    augment: Table = field(default_factory=dict)  # what minibatches go through
    device: str | None = None  # "auto": a GPU where there is one


@dataclass(frozen=True)
class Plan:
    """[[runs]]: an algorithm at fixed or tuned settings, or a `measure` function."""

    key: str
    algorithm: str | None = None
    measure: str | None = None
    settings: Table = field(default_factory=dict)
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    budget: int | None = None
    tries: int | None = None  # at most so many settings of the grid
    rounds: int = 100
    select: str | None = None
    evaluate_every: int | None = None
    keep: bool = False  # keep the run folder, from which a killed job goes on
    data: Table = field(default_factory=dict)
    model: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """[[rows]]: the paper's number (or finding) for a metric of a run, and how near ours has to be."""

    label: str
    run: str
    metric: str
    paper: float | str | None = None
    tolerance: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    against: str = "local"


@dataclass(frozen=True)
class Claim:
    """[[claims]]: the first run's metric is larger than the second's by more than a margin."""

    label: str
    larger: tuple[str, ...]
    metric: str
    margin: float = 0.0
    paper: float | str | None = None
    against: str = "local"


@dataclass(frozen=True)
class Quick:
    """[quick]: what the short version changes; rounds and settings tried are capped."""

    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    tries: int | None = None
    data: Table = field(default_factory=dict)


@dataclass(frozen=True)
class File:
    """The top level of a TOML file."""

    title: str
    seeds: tuple[int, ...]
    runs: tuple[Table, ...]
    source: str = ""
    notes: str = ""
    data: Table = field(default_factory=dict)
    model: Table = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    rows: tuple[Table, ...] = ()
    claims: tuple[Table, ...] = ()
    quick: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A TOML file that has been checked, with `quick` applied and common data and model in every plan."""

    name: str
    path: Path
    file: File
    seeds: tuple[int, ...]
    plans: tuple[Plan, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]

    def plan(self, key: str) -> Plan:
        """The run with this key."""
        known = {plan.key: plan for plan in self.plans}
        if key not in known:
            raise SettingError(f"no run {key!r}.{nearest(key, known)}")
        return known[key]

    def only(self, key: str) -> Experiment:
        """The experiment as a `measure` function gets it: with the one run it is to measure."""
        return dataclasses.replace(self, plans=(self.plan(key),))

    def hash(self, plan: Plan, seed: int) -> str:
        """Of all that decides the result of a job."""
        settings = [coterie.__version__, dataclasses.asdict(plan), seed]
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def experiments() -> list[tuple[str, str]]:
    """Names and titles of the experiments that come with the library."""
    folder = experiments_folder()
    paths = sorted(path for path in folder.rglob("*.toml") if path.relative_to(folder).parts[0] != RESULTS)
    return [
        (path.relative_to(folder).with_suffix("").as_posix(), str(_read(path).get("title", "")))
        for path in paths
    ]


def reproduce(
    name: str,
    quick: bool = False,
    out: str | Path | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Reproduction:
    """Run an experiment, or what is left of it, and hold its numbers against the paper's.

    `name` is one of `experiments()` or a TOML file; results go to `out`, by default results/<name>. As many
    jobs run at a time as there are cores, or as `jobs` says; finished ones are not repeated.
    """
    from coterie.runs.reproduce import carry_out

    experiment = load(name, quick)
    return carry_out(
        experiment, Path("results", experiment.name) if out is None else Path(out), quick, jobs, watch
    )


def experiments_folder() -> Path:
    """coterie/experiments in an installed package, experiments/ at the root of a checkout."""
    package = Path(coterie.__file__).parent
    return package / "experiments" if (package / "experiments").is_dir() else package.parent / "experiments"


def shared_data(path: str = "") -> Path:
    """A file of ../shared/data beside the checkout, or of $COTERIE_SHARED/data where that is set."""
    root = os.environ.get("COTERIE_SHARED") or Path(coterie.__file__).parents[2] / "shared"
    found = Path(root, "data", path)
    if not found.exists():
        raise DataError(
            f"{found} is missing; put the data there, or set COTERIE_SHARED to the folder above data/"
        )
    return found


def load(name: str, quick: bool = False) -> Experiment:
    """Read an experiment and check all that can be checked before anything runs."""
    path = _find(name)
    file = build(File, path, "the file", _read(path))
    short = build(Quick, path, "[quick]", file.quick)
    short = short if quick else Quick()
    experiment = Experiment(
        name=path.stem if name.endswith(".toml") else name,
        path=path,
        file=file,
        seeds=file.seeds if short.seeds is None else short.seeds,
        plans=tuple(_plan(path, file, short, run) for run in file.runs),
        rows=tuple(build(Row, path, f"[[rows]] {row.get('label')!r}", row) for row in file.rows),
        claims=tuple(
            build(Claim, path, f"[[claims]] {claim.get('label')!r}", claim) for claim in file.claims
        ),
    )
    _check(experiment)
    return experiment


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise SettingError(f"{path} cannot be read: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SettingError(f"{path}: {problem}") from None


def _find(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    known = [known for known, _ in experiments()]
    if name not in known:
        raise SettingError(f"no experiment {name!r}.{nearest(name, known)}")
    return experiments_folder() / f"{name}.toml"


@contextmanager
def naming(path: Path, where: str) -> Iterator[None]:
    """Put file and key in front of what went wrong inside."""
    try:
        yield
    except CoterieError as problem:
        raise type(problem)(f"{path}, {where}: {problem}") from problem


def build(kind: type[Part], path: Path, where: str, values: Table) -> Part:
    """A dataclass from a TOML table: known names only, values of the declared types, nothing missing."""
    hints, defaults = typing.get_type_hints(kind), inspect.signature(kind).parameters
    with naming(path, where):
        for name, value in values.items():
            if name not in hints:
                raise SettingError(f"unknown key {name!r}.{nearest(name, hints)}")
            if not _fits(value, hints[name]):
                raise SettingError(f"{name} = {value!r} is not of the type {kind.__annotations__[name]}")
        for name in hints:
            if name not in values and defaults[name].default is inspect.Parameter.empty:
                raise SettingError(f"the key {name!r} is missing")
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint is Any or hint is bool:
        return hint is Any or isinstance(value, bool)
    return isinstance(value, (int, float) if hint is float else hint) and not isinstance(value, bool)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _plan(path: Path, file: File, short: Quick, values: Table) -> Plan:
    """A run with what is common to all filled in, and `quick` applied."""
    plan = build(Plan, path, f"[[runs]] {values.get('key')!r}", values)
    return dataclasses.replace(
        plan,
        rounds=plan.rounds if short.rounds is None else min(plan.rounds, short.rounds),
        tries=plan.tries if short.tries is None else short.tries,
        data=_merged(_merged(file.data, plan.data), short.data),
        model=_merged(file.model, plan.model),
    )


def _merged(base: Table, changes: Table) -> Table:
    merged = dict(base)
    for name, value in changes.items():
        inner = base.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _check(experiment: Experiment) -> None:
    from coterie.runs.jobs import check_plan

    path, keys = experiment.path, [plan.key for plan in experiment.plans]
    if not experiment.seeds or len(set(experiment.seeds)) < len(experiment.seeds):
        raise SettingError(f"{path}: seeds = {list(experiment.seeds)}; give one or more, all different")
    for plan in experiment.plans:
        if keys.count(plan.key) > 1 or not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]*", plan.key):
            raise SettingError(
                f"{path}: [[runs]] key {plan.key!r} must be unique, of letters, digits, - and _"
            )
        check_plan(path, plan)
    for row in experiment.rows:
        with naming(path, f"[[rows]] {row.label!r}"):
            _check_metric(experiment, row, (row.run,))
            if row.tolerance is None and row.at_least is None and row.at_most is None:
                raise SettingError("nothing is checked; give a tolerance, at_least or at_most")
            if row.tolerance is not None and isinstance(row.paper, str | None):
                raise SettingError("a tolerance needs the number of the paper")
    for claim in experiment.claims:
        with naming(path, f"[[claims]] {claim.label!r}"):
            if len(claim.larger) != 2:
                raise SettingError(f"larger = {list(claim.larger)}; name two runs")
            _check_metric(experiment, claim, claim.larger)


def _check_metric(experiment: Experiment, row: Row | Claim, keys: tuple[str, ...]) -> None:
    plans = [experiment.plan(key) for key in keys]
    if row.metric == "improved":
        experiment.plan(row.against)
    if row.metric not in METRICS and not any(plan.measure for plan in plans):
        raise SettingError(f"no metric {row.metric!r}.{nearest(row.metric, METRICS)}")


def main(arguments: list[str] | None = None) -> int:
    """Run one job and save its result."""
    from coterie.runs.jobs import run_job

    parser = argparse.ArgumentParser(prog="coterie.runs.experiments", description=main.__doc__)
    parser.add_argument("name")
    parser.add_argument("--job", required=True, help="key of the run")
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    try:
        experiment = load(given.name, given.quick)
        run_job(experiment, experiment.plan(given.job), given.seed, given.out)
    except CoterieError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from coterie.runs.experiments import main as run  # the module under its own name, as others import it

    sys.exit(run())
