"""Find, read and check the TOML files of experiments; `docs/reproduce.md` describes the format."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

import coterie
from coterie._core.errors import CoterieError, DataError, SettingError, nearest

METRICS = "accuracy loss rmse distance worst improved train_loss validation_loss mb_up mb_down".split()
SHARED = "../shared/data/"
RESULTS = "results"  # the folder beside the experiments that holds ours
Table = dict[str, Any]
Watch = Callable[[str, int, int], None]  # job, jobs done, jobs in total
Part = TypeVar("Part")


@dataclass(frozen=True)
class Data:
    """The table [data]: one of generate, read (with or without partition) and table."""

    generate: Table = field(default_factory=dict)
    read: Table = field(default_factory=dict)
    partition: Table = field(default_factory=dict)
    table: Table = field(default_factory=dict)
    take: int | None = None  # number of rows to draw from those read
    split: tuple[float, ...] | None = None
    dtype: str | None = None
    dropout: float = 0.0
    augment: Table = field(default_factory=dict)  # augmentation of minibatches
    device: str | None = None  # "auto": a GPU if there is one


@dataclass(frozen=True)
class RunPlan:
    """An entry of [[runs]]: an algorithm at fixed or tuned settings, or a `measure` function."""

    key: str
    algorithm: str | None = None
    measure: str | None = None
    settings: Table = field(default_factory=dict)
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    budget: int | None = None
    tries: int | None = None  # settings of the grid, at most
    rounds: int = 100
    select: str | None = None
    evaluate_every: int | None = None
    keep: bool = False  # keep the run folder, from which a killed job resumes
    data: Table = field(default_factory=dict)
    model: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """An entry of [[rows]]: the paper's number or finding for a metric of a run, and how close ours must be.

    A number that the paper does not print, such as another implementation's, is a `reference`.
    """

    label: str
    run: str
    metric: str
    paper: float | str | None = None
    reference: float | None = None
    tolerance: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    shown: bool = False  # printed and not judged
    against: str = "local"

    @property
    def expected(self) -> float | None:
        """The number that a tolerance is around."""
        return self.reference if isinstance(self.paper, str | None) else self.paper


@dataclass(frozen=True)
class Claim:
    """An entry of [[claims]]: the first run's metric exceeds the second's by more than a margin."""

    label: str
    larger: tuple[str, ...]
    metric: str
    margin: float = 0.0
    paper: float | str | None = None
    reference: float | None = None
    against: str = "local"


@dataclass(frozen=True)
class Quick:
    """The table [quick]: what the small version changes; rounds and settings to try are capped."""

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
    reference: str = ""  # where the numbers `reference` of rows are from
    notes: str = ""
    data: Table = field(default_factory=dict)
    model: Table = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    rows: tuple[Table, ...] = ()
    claims: tuple[Table, ...] = ()
    quick: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A checked TOML file, with `quick` applied and common data and model filled into every plan."""

    name: str
    path: Path
    file: File
    seeds: tuple[int, ...]
    plans: tuple[RunPlan, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]

    def plan(self, key: str) -> RunPlan:
        """Return the run with this key."""
        known = {plan.key: plan for plan in self.plans}
        if key not in known:
            raise SettingError(f"no run {key!r}.{nearest(key, known)}")
        return known[key]

    def only(self, key: str) -> Experiment:
        """Return the experiment with this one run, as a `measure` function gets it."""
        return dataclasses.replace(self, plans=(self.plan(key),))

    def hash(self, plan: RunPlan, seed: int) -> str:
        """Return a hash of everything that determines the result of a job."""
        settings = [coterie.__version__, dataclasses.asdict(plan), seed]
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def experiments() -> list[tuple[str, str]]:
    """Return names and titles of the experiments that come with the library.

    Examples
    --------
    >>> from coterie.experiments.spec import experiments
    >>> dict(experiments())["cobo/digits"].startswith("CoBo")
    True
    """
    folder = experiments_folder()
    paths = sorted(path for path in folder.rglob("*.toml") if path.relative_to(folder).parts[0] != RESULTS)
    return [
        (path.relative_to(folder).with_suffix("").as_posix(), str(_read(path).get("title", "")))
        for path in paths
    ]


def experiments_folder() -> Path:
    """Return the folder of TOML files: beside this module when installed, experiments/ in a checkout."""
    installed = Path(__file__).parent / "files"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "experiments"


def shared_data(path: str = "") -> Path:
    """Return the path of a shared data file: in $COTERIE_SHARED/data, or ../shared/data beside the checkout."""
    root = os.environ.get("COTERIE_SHARED") or Path(coterie.__file__).parents[2] / "shared"
    found = Path(root, "data", path)
    if not found.exists():
        raise DataError(
            f"{found} is missing; put the data there, or set COTERIE_SHARED to the folder above data/"
        )
    return found


def read(name: str, quick: bool = False) -> Experiment:
    """Read an experiment and check its seeds, keys, rows and claims; `jobs.load` also checks its runs."""
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
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise SettingError(f"{path} cannot be read: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SettingError(f"{path}: {problem}") from None


def _find(name: str) -> Path:
    """Return the file of an experiment."""
    if name.endswith(".toml"):
        return Path(name)
    known = [known for known, _ in experiments()]
    if name not in known:
        raise SettingError(f"no experiment {name!r}.{nearest(name, known)}")
    return experiments_folder() / f"{name}.toml"


@contextmanager
def naming(path: Path, where: str) -> Iterator[None]:
    """Prefix errors raised inside with the file and the key."""
    try:
        yield
    except CoterieError as problem:
        raise type(problem)(f"{path}, {where}: {problem}") from problem


def build(kind: type[Part], path: Path, where: str, values: Table) -> Part:
    """Build a dataclass from a TOML table; raise SettingError for unknown or missing keys and wrong types."""
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
    """Return True if a value is of the declared type."""
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
    """Replace lists by tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _plan(path: Path, file: File, short: Quick, values: Table) -> RunPlan:
    """Build a run, with common data and model filled in and `quick` applied."""
    plan = build(RunPlan, path, f"[[runs]] {values.get('key')!r}", values)
    return dataclasses.replace(
        plan,
        rounds=plan.rounds if short.rounds is None else min(plan.rounds, short.rounds),
        tries=plan.tries if short.tries is None else short.tries,
        data=_merged(_merged(file.data, plan.data), short.data),
        model=_merged(file.model, plan.model),
    )


def _merged(base: Table, changes: Table) -> Table:
    """Merge nested tables; values of `changes` win."""
    merged = dict(base)
    for name, value in changes.items():
        inner = base.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _check(experiment: Experiment) -> None:
    """Check seeds, keys, rows and claims."""
    path, keys = experiment.path, [plan.key for plan in experiment.plans]
    if not experiment.seeds or len(set(experiment.seeds)) < len(experiment.seeds):
        raise SettingError(f"{path}: seeds = {list(experiment.seeds)}; give one or more, all different")
    for plan in experiment.plans:
        if keys.count(plan.key) > 1 or not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]*", plan.key):
            raise SettingError(
                f"{path}: [[runs]] key {plan.key!r} must be unique, of letters, digits, - and _"
            )
    for row in experiment.rows:
        with naming(path, f"[[rows]] {row.label!r}"):
            _check_metric(experiment, row, (row.run,))
            judged = any(bar is not None for bar in (row.tolerance, row.at_least, row.at_most))
            if not judged and not row.shown:
                raise SettingError(
                    "nothing is checked; give a tolerance, at_least or at_most, or shown = true for a row that is "
                    "printed and not judged"
                )
            if judged and row.shown:
                raise SettingError("shown = true is for rows without tolerance, at_least and at_most")
            if row.tolerance is not None and row.expected is None:
                raise SettingError("a tolerance needs the number of the paper, or a reference")
            _check_reference(experiment, row)
    for claim in experiment.claims:
        with naming(path, f"[[claims]] {claim.label!r}"):
            if len(claim.larger) != 2:
                raise SettingError(f"larger = {list(claim.larger)}; name two runs")
            _check_metric(experiment, claim, claim.larger)
            _check_reference(experiment, claim)


def _check_reference(experiment: Experiment, row: Row | Claim) -> None:
    """Check that a reference is the only number, and that the file says where it is from."""
    if row.reference is not None and (isinstance(row.paper, float | int) or not experiment.file.reference):
        raise SettingError(
            "a reference stands for a number that the paper does not print; say at the top of the file where such "
            'numbers are from: reference = "an independent implementation"'
        )


def _check_metric(experiment: Experiment, row: Row | Claim, keys: tuple[str, ...]) -> None:
    """Check that the runs exist and have the metric."""
    plans = [experiment.plan(key) for key in keys]
    if row.metric == "improved":
        experiment.plan(row.against)
    if row.metric not in METRICS and not any(plan.measure for plan in plans):
        raise SettingError(f"no metric {row.metric!r}.{nearest(row.metric, METRICS)}")
