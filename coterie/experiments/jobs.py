"""Run the jobs of an experiment: one run on one seed, from names in a TOML file to numbers saved as JSON."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import platform
import time
import typing
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import coterie
from coterie._core import files
from coterie._core.errors import RunError, SettingError, nearest
from coterie._core.randomness import choose, key
from coterie.algorithms import Algorithm, make
from coterie.data import bundled
from coterie.data.augment import CropFlip
from coterie.data.clients import Clients, Pool
from coterie.data.rows import Augment
from coterie.engine.federation import Federation
from coterie.engine.from_table import from_table
from coterie.experiments.spec import Data, Experiment, RunPlan, Table, build, naming, read, shared_data
from coterie.models.base import Model
from coterie.models.metrics import main_metric
from coterie.select.grid import candidates
from coterie.train.fit import fit, resume
from coterie.train.folder import environment
from coterie.train.history import mean_over_clients
from coterie.train.run import Run

Job = tuple[RunPlan, int]
SHARED = "../shared/data/"
DTYPES = {"float32": torch.float32, "float64": torch.float64}
AUGMENTS = {"crop-flip": CropFlip}
HOMES = {
    "generate": ("coterie.data.generate",),
    "partition": ("coterie.data.partition",),
    "read": (
        "coterie.data.readers",
        "coterie.data.images",
        "coterie.data.small_images",
        "coterie.data.leaf_files",
        "coterie.data.xml_texts",
    ),
    "model": ("coterie.models",),
}


def load(name: str, quick: bool = False) -> Experiment:
    """Read an experiment and check everything that can be checked before it runs; raise SettingError."""
    experiment = read(name, quick)
    for plan in experiment.plans:
        check_plan(experiment.path, plan)
    return experiment


def finished(experiment: Experiment, job: Job, folder: Path) -> Table | None:
    """Return the saved result of a job at these settings, or None."""
    path = record_path(experiment, job, folder)
    try:
        record = files.read_json(path)
    except RunError:
        return None
    return record if record.get("hash") == experiment.hash(*job) else None


def record_path(experiment: Experiment, job: Job, folder: Path) -> Path:
    """Return the file of a job's result; a hash of the settings in its name keeps results of other settings."""
    return folder / "jobs" / f"{job[0].key}-{job[1]}-{experiment.hash(*job)[:12]}.json"


def run_job(experiment: Experiment, plan: RunPlan, seed: int, folder: Path) -> None:
    """Run a job and save its result as JSON."""
    started = time.perf_counter()
    with naming(experiment.path, f"run {plan.key!r}, seed {seed}"):
        home = record_path(experiment, (plan, seed), folder).with_suffix("") if plan.keep else None
        if plan.measure:
            record = _measured(experiment, plan, seed, home)
        else:
            record = _trained(experiment, plan, seed, home)
        broken = [name for name, value in record["metrics"].items() if not math.isfinite(value)]
        if broken:
            raise RunError(f"{broken[0]} is not finite: the run diverged")
    record |= {"key": plan.key, "seed": seed, "hash": experiment.hash(plan, seed)}
    record["seconds"] = round(time.perf_counter() - started, 3)
    files.write_json(record_path(experiment, (plan, seed), folder), record)


def _measured(experiment: Experiment, plan: RunPlan, seed: int, home: Path | None) -> Table:
    """Call a job's `measure` function."""
    function = measure(plan.measure or "")
    options = {"home": home} if "home" in inspect.signature(function).parameters else {}
    found = dict(function(experiment.only(plan.key), seed, **options))
    curve, plots, clients = found.pop("curve", None), found.pop("plots", {}), found.pop("clients", {})
    versions = {
        "coterie": coterie.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    metrics = {str(name): float(value) for name, value in found.items()}
    return {
        "metrics": metrics,
        "clients": clients,
        "curve": curve,
        "plots": plots,
        "settings": {},
        "environment": versions,
    }


def _trained(experiment: Experiment, plan: RunPlan, seed: int, home: Path | None) -> Table:
    """Train a job's algorithm and collect its metrics."""
    fed = federation(experiment, plan, seed)
    run = _best(fed, plan) if home is None else _continued(fed, plan, home)
    split = "validation" if fed.has_rows("validation") else "train"
    main = main_metric(fed.model.task).name
    rounds, values = run.history.curve(split, main)
    metrics, judged, higher = _metrics(run)
    return {
        "metrics": metrics,
        "clients": {"values": _finite(judged.tolist()), "higher": higher},
        "curve": {"split": split, "metric": main, "rounds": rounds, "values": _finite(values)},
        "settings": run.algorithm.settings(),
        "environment": environment(fed),
    }


def _finite(values: list[float]) -> list[float | None]:
    """Replace NaN (a client without rows) and infinities, which JSON has not, by None."""
    return [value if math.isfinite(value) else None for value in values]


def _best(fed: Federation, plan: RunPlan) -> Run:
    """Return the run with the lowest validation loss over the settings to try, scored once on test rows."""
    tuned = bool(plan.grid or plan.budget)
    if tuned and not fed.has_rows("validation"):
        raise SettingError("tuning needs validation rows; set split = [train, validation, test] in [data]")
    best, lowest = None, math.inf
    for algorithm in _settings_to_try(plan):
        run = fit(
            fed,
            algorithm,
            plan.rounds,
            evaluate_every=plan.evaluate_every,
            select=plan.select or ("best" if tuned else "last"),
            score_test=False,
        )
        loss = mean_over_clients(run.score("validation", "loss")) if tuned else 0.0
        if best is None or loss < lowest:
            best, lowest = run, loss if loss == loss else math.inf
    assert best is not None
    if fed.has_rows("test"):
        best.score_test()
    return best


def _continued(fed: Federation, plan: RunPlan, home: Path) -> Run:
    """Train at fixed settings, or resume the run if it was interrupted."""
    (algorithm,) = _settings_to_try(plan)
    return continued(fed, algorithm, plan, home)


def continued(fed: Federation, algorithm: Algorithm, plan: RunPlan, home: Path) -> Run:
    """Train `algorithm` with its run folder in `home`, or resume the run if it was interrupted."""
    if home.exists():
        return resume(home, fed)
    home.parent.mkdir(parents=True, exist_ok=True)
    select = plan.select or "last"
    return fit(fed, algorithm, plan.rounds, home, evaluate_every=plan.evaluate_every, select=select)


def _settings_to_try(plan: RunPlan) -> list[Algorithm]:
    """Return the algorithm at every setting of the grid or the budget."""
    algorithm = make(plan.algorithm or "", **plan.settings)
    if plan.budget is not None:
        return candidates(algorithm, min(plan.budget, plan.tries or plan.budget))
    points = itertools.product(*plan.grid.values())
    return [algorithm.replace(**dict(zip(plan.grid, point, strict=True))) for point in points][: plan.tries]


def _metrics(run: Run) -> tuple[dict[str, float], Tensor, bool]:
    """Return means over clients, the value by which each client is judged, and whether higher is better."""
    fed, found = run.fed, {}
    main, higher = main_metric(fed.model.task), False
    if fed.truth is not None:
        if fed.truth.shape != run.personal.shape:
            shapes = list(fed.truth.shape), list(run.personal.shape)
            raise SettingError(f"true parameters {shapes[0]} cannot be compared with models {shapes[1]}")
        found["distance"] = torch.linalg.vector_norm(run.personal - fed.truth.to(run.personal), dim=1)
    judged = found.get("distance")
    if fed.has_rows("test"):
        found |= {name: run.score("test", name) for name in ("loss", main.name)}
        judged, higher = found[main.name], main.higher_is_better
    found["train_loss"] = run.score("train", "loss")
    if fed.has_rows("validation"):
        found["validation_loss"] = run.score("validation", "loss")
    judged = found["train_loss"] if judged is None else judged
    known = judged[~judged.isnan()]
    up, down = run.traffic()
    worst = float(known.min() if higher else known.max())
    means = {name: mean_over_clients(value) for name, value in found.items()}
    return {**means, "worst": worst, "mb_up": up, "mb_down": down}, judged, higher


def federation(experiment: Experiment, plan: RunPlan, seed: int) -> Federation:
    """Build the federation of a run; data are generated, partitioned and split anew for each seed."""
    data, folder = Data(**plan.data), experiment.path.parent
    options: Table = {"seed": seed, "dropout": data.dropout}
    options |= {"split": data.split} if data.split is not None else {}
    model: Any = _called("model", plan.model, seed) if plan.model else None
    if data.table:
        table = _located(data.table, folder)
        path = table.pop("path")
        return Federation.from_table(
            bundled.path(path) if path in bundled.names() else path, model=model, **table, **options
        )
    clients = _clients(data, seed, folder)
    options |= {"dtype": DTYPES[data.dtype]} if data.dtype is not None else {}
    options |= {"device": _device(data.device)} if data.device is not None else {}
    options |= {"augment": _augment(data.augment)} if data.augment else {}
    known: Table = {"clusters": clients.clusters, "names": clients.names, "truth": clients.truth}
    return Federation.from_arrays(clients.xs, clients.ys, model=model, **known, **options)


def _device(name: str) -> str:
    """Resolve "auto" to a GPU if there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _augment(values: Table) -> Augment:
    """Build the augmentation a table names."""
    arguments = dict(values)
    name = arguments.pop("name", "")
    if name not in AUGMENTS:
        raise SettingError(f"no augment with name = {name!r}.{nearest(str(name), AUGMENTS)}")
    try:
        return AUGMENTS[name](**arguments)
    except TypeError as problem:
        raise SettingError(f"augment {name!r}: {problem}") from problem


def _clients(data: Data, seed: int, folder: Path) -> Clients:
    """Generate the clients, or read and partition them."""
    if data.generate:
        return cast(Clients, _called("generate", data.generate, seed))
    found = _called("read", _located(data.read, folder), seed)
    if isinstance(found, Pool) and not data.partition:
        raise SettingError("these rows have no clients; give a partition that distributes them")
    if isinstance(found, Clients) and data.partition:
        found = Pool(torch.cat(found.xs), torch.cat(found.ys))
    if data.take is not None:
        if not data.partition or not 0 < data.take <= len(found):
            raise SettingError(f"take = {data.take}: it needs a partition and at least that many rows")
        rows = choose(key(seed, "take"), len(found), data.take)
        found = Pool(found.x[rows], found.y[rows], found.class_names)
    return cast(Clients, _called("partition", data.partition, seed, found) if data.partition else found)


def _called(kind: str, values: Table, seed: int, *given: Any) -> Any:
    """Call the function a table names with the table's arguments, and the seed if it takes one."""
    made, arguments = function(kind, values, len(given))
    if "seed" in inspect.signature(made).parameters:
        arguments.setdefault("seed", seed)
    try:
        return made(*given, **arguments)
    except (TypeError, ValueError) as problem:
        raise SettingError(f"{kind} {values['name']!r}: {problem}") from problem


def _located(values: Table, folder: Path) -> Table:
    """Resolve paths: ../shared/data/ in the folder of shared data, ./ beside the TOML file."""

    def locate(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(locate(item) for item in value)
        if isinstance(value, str) and value.startswith(SHARED):
            return shared_data(value.removeprefix(SHARED))
        return folder / value if isinstance(value, str) and value.startswith("./") else value

    return {name: locate(value) for name, value in values.items()}


def check_plan(path: Path, plan: RunPlan) -> None:
    """Check names, hyperparameters and arguments of a run; raise SettingError."""
    where = f"[[runs]] {plan.key!r}"
    with naming(path, where):
        if (plan.algorithm is None) == (plan.measure is None):
            raise SettingError("give either an algorithm or a measure")
        if plan.measure is not None:
            measure(plan.measure)
            return
        algorithm = make(plan.algorithm or "", **plan.settings)
        for name, values in plan.grid.items():
            for value in values:
                algorithm.replace(**{name: value})
        if plan.grid and plan.budget is not None:
            raise SettingError("give either a grid or a budget for the grid the algorithm declares")
        if plan.select not in (None, "last", "best"):
            raise SettingError(f"select = {plan.select!r}; choose 'last' or 'best'")
    data = build(Data, path, f"data of {where}", plan.data)
    with naming(path, f"data of {where}"):
        if sum(map(bool, (data.generate, data.read, data.table))) != 1:
            raise SettingError("give one of generate, read and table")
        if plan.keep and (plan.grid or plan.budget is not None):
            raise SettingError("keep = true is for runs at fixed settings; drop grid and budget")
        if data.augment:
            _augment(data.augment)
        if data.dtype not in (None, *DTYPES):
            raise SettingError(f"dtype = {data.dtype!r}.{nearest(str(data.dtype), DTYPES)}")
        for kind, given in (("generate", 0), ("read", 0), ("partition", 1)):
            if getattr(data, kind):
                function(kind, getattr(data, kind), given)
        if data.table:
            _check_arguments("table", from_table, {"source" if k == "path" else k for k in data.table})
    with naming(path, f"model of {where}"):
        if plan.model or not data.table:
            _called("model", plan.model, seed=0)


def function(kind: str, values: Table, given: int = 0) -> tuple[Callable[..., Any], Table]:
    """Return the generator, reader, partition or model that a table names, and the table's arguments."""
    arguments = dict(values)
    name = arguments.pop("name", "")
    known = {
        found: value
        for module in map(importlib.import_module, HOMES[kind])
        for found, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__.startswith(module.__name__) and _makes(found, value, kind)
    }
    if name not in known:
        raise SettingError(f"no {kind} with name = {name!r}.{nearest(str(name), known)}")
    _check_arguments(name, known[name], set(arguments), given)
    return known[name], arguments


def _makes(name: str, made: Callable[..., Any], kind: str) -> bool:
    """Return True if a function is public and returns a model, or rows."""
    result = typing.get_type_hints(made).get("return")
    wanted = (Model,) if kind == "model" else (Pool, Clients)
    return (
        not name.startswith("_")
        and inspect.isclass(result)
        and issubclass(result, wanted)
        and result is not Model
    )


def _check_arguments(name: str, made: Callable[..., Any], arguments: set[str], given: int = 0) -> None:
    """Raise SettingError for unknown or missing arguments after the `given` first ones; the job has the seed."""
    accepted = dict(list(inspect.signature(made).parameters.items())[given:])
    others = [name for name, one in accepted.items() if one.kind is inspect.Parameter.VAR_KEYWORD]
    for argument in arguments:
        if argument not in accepted and not others:
            raise SettingError(f"{name} has no argument {argument!r}.{nearest(argument, accepted)}")
    for argument, parameter in accepted.items():
        if argument not in arguments | {"seed", *others} and parameter.default is inspect.Parameter.empty:
            raise SettingError(f"{name} needs the argument {argument!r}")


def measure(reference: str) -> Callable[..., Table]:
    """Return a function of this package, or of an installed entry point of the group `coterie.experiments`."""
    for entry in entry_points(group="coterie.experiments"):
        if reference in (entry.name, entry.value):
            return cast(Callable[..., Table], entry.load())
    module, _, name = reference.partition(":")
    if module.partition(".")[0] != "coterie":
        raise SettingError(
            f"measure = {reference!r} is neither in the coterie package nor an installed entry point of "
            "the group 'coterie.experiments'"
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as problem:
        raise SettingError(f"measure = {reference!r}: {problem}") from None
    if not inspect.isfunction(found) or found.__module__ != module:
        raise SettingError(f"measure = {reference!r}: {module} has no function {name!r} of its own")
    return found
