"""Search for good settings with Optuna: declared spaces, validation rows only, pruned, resumable, in parallel.

`python -m coterie.select.tune FOLDER` is one worker of `coterie tune`: it takes trials from the study in the folder
until the number asked for is reached.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie._core import extras, files, systems
from coterie._core.errors import CoterieError, DataError, RunError, SettingError
from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric, find, resolve
from coterie.select.grid import trained_by
from coterie.train.contestant import Contestant

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "grid")
LOOKS = 10  # times a trial is scored, and may be stopped
SETTINGS, STUDY, LOCK = "tune.toml", "study.log", "lock"
FAILED = "failed"  # user attribute of a trial whose settings cannot be trained with

Watch = Callable[[str, int, int], None]
Space = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Search:
    """What was tried, best first, and the best settings with their mean validation `score` by `metric`."""

    algorithm: Algorithm
    score: float
    trials: list[dict[str, Any]]
    metric: str = LOSS.name

    def json(self) -> dict[str, Any]:
        """Return what `tune --json` writes."""
        return {
            "method": self.algorithm.name,
            "settings": self.algorithm.settings(),
            f"validation_{self.metric}": self.score,
            "trials": self.trials,
        }


def space(algorithm: Algorithm) -> Space:
    """Return the hyperparameters worth searching, with the values declared for them."""
    declared = {f.name: f.metadata["tune"] for f in dataclasses.fields(algorithm) if f.metadata.get("tune")}
    if not declared:
        raise SettingError(f"{algorithm.name} declares no search space: there is nothing to tune")
    return declared


def search(
    fed: Federation,
    algorithm: Algorithm | str,
    *,
    trials: int = 30,
    rounds: int = 100,
    sampler: str = "tpe",
    folder: str | Path | None = None,
    watch: Watch | None = None,
    metric: str | Metric | None = None,
) -> Search:
    """Search the settings with the lowest mean validation loss over clients; test rows are not read.

    Parameters
    ----------
    fed
        Federation with validation rows.
    algorithm
        Method, or its name.
    trials
        Settings tried in all.
    rounds
        Rounds of a trial.
    sampler
        'tpe' draws between the smallest and the largest declared value, 'grid' tries the declared ones.
    folder
        Folder of the study; a second call goes on with it until `trials` are done. In memory if not given.
    watch
        Called with what is being done, trials done and trials in all.
    metric
        Metric that decides instead of the loss, such as 'auc'.

    Returns
    -------
    Search
        The best settings and all trials.

    Examples
    --------
    >>> import torch
    >>> from coterie import Federation, models
    >>> xs = [torch.randn(30, 2) for _ in range(3)]
    >>> fed = Federation.from_arrays(xs, [x.sum(1) for x in xs], models.linear(), split=(0.6, 0.2, 0.2))
    >>> found = search(fed, "ditto", trials=2, rounds=3, metric="mae")
    >>> len(found.trials), found.metric
    (2, 'mae')
    """
    algorithm = make(algorithm) if isinstance(algorithm, str) else algorithm
    asked = _check(fed, algorithm, trials, rounds, sampler, metric)
    with _opened(algorithm, None if folder is None else Path(folder), asked) as study:
        _work(study, fed, algorithm, trials, rounds, sampler, asked, watch)
    return found(study, algorithm, asked)


def _check(
    fed: Federation,
    algorithm: Algorithm,
    trials: int,
    rounds: int,
    sampler: str,
    metric: str | Metric | None,
) -> Metric | None:
    if trials < 1 or rounds < 1:
        raise SettingError(f"trials and rounds must be at least 1 (got {trials}, {rounds})")
    if sampler not in SAMPLERS:
        raise SettingError(f"sampler = {sampler!r}; choose from {', '.join(SAMPLERS)}")
    space(algorithm)
    _optuna()
    if not fed.has_rows("validation"):
        raise DataError("tuning needs validation rows; build the federation with split=(0.6, 0.2, 0.2)")
    return None if metric is None else resolve(metric, fed.model.task)


def _with_room(fed: Federation, algorithm: Algorithm, rounds: int) -> Federation:
    """Return the federation with a model that has room for every setting of the search."""
    tried = [
        algorithm.replace(**{name: value}) for name, values in space(algorithm).items() for value in values
    ]
    return trained_by(tried, fed, rounds)


def _optuna() -> Any:
    extras.require("tune", "tuning")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # warnings are tracebacks of settings that cannot run
    return optuna


@contextmanager
def _opened(algorithm: Algorithm, folder: Path | None, metric: Metric | None) -> Iterator[optuna.Study]:
    """Yield a study that nobody else has open, without what a search that was killed has left."""
    if folder is None:
        yield _study(algorithm, None, metric)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with systems.locked(folder / LOCK) as ours:
        if not ours:
            raise RunError(f"{folder} is in use by another search; --jobs N runs trials in N processes")
        _mend(folder)
        study = _study(algorithm, folder, metric)
        for trial in study.get_trials(deepcopy=False):
            if trial.state.name == "RUNNING":  # samplers would count with it
                study.tell(trial.number, state=_optuna().trial.TrialState.FAIL)
        yield study


def _study(algorithm: Algorithm, folder: Path | None, metric: Metric | None) -> optuna.Study:
    library = _optuna()
    storage = None
    if folder is not None:
        journal = library.storages.journal
        lock = journal.JournalFileOpenLock(
            str(folder / STUDY)
        )  # the usual one is a link, which Windows refuses
        storage = library.storages.JournalStorage(journal.JournalFileBackend(str(folder / STUDY), lock))
    study: optuna.Study = library.create_study(
        study_name=algorithm.name if metric is None else f"{algorithm.name} by {metric.name}",
        storage=storage,
        load_if_exists=True,
        pruner=library.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
    )
    return study


def _sampler(algorithm: Algorithm, sampler: str, worker: int, done: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of one trial.

    Its seed is the number of trials before it, so that a search that was killed goes on as if it had not been.
    """
    library = _optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", library.exceptions.ExperimentalWarning)
        made: optuna.samplers.BaseSampler
        if sampler == "tpe":
            made = library.samplers.TPESampler(seed=1_000_003 * worker + done, multivariate=True)
        else:
            points = {name: list(values) for name, values in space(algorithm).items()}
            made = library.samplers.GridSampler(points, seed=0)  # the seed also numbers the points
    return made


def _work(
    study: optuna.Study,
    fed: Federation,
    algorithm: Algorithm,
    trials: int,
    rounds: int,
    sampler: str,
    metric: Metric | None,
    watch: Watch | None = None,
    worker: int = 0,
) -> None:
    """Run trials until so many are done, whoever does them."""
    pruned = _optuna().TrialPruned
    if sampler == "grid":
        trials = min(trials, math.prod(len(values) for values in space(algorithm).values()))
    fed = _with_room(fed, algorithm, rounds)

    def objective(trial: optuna.Trial) -> float:
        try:
            return tried(trial)
        except CoterieError as problem:
            trial.set_user_attr(FAILED, str(problem))
            raise

    def tried(trial: optuna.Trial) -> float:
        settings = suggested(trial, algorithm, sampler)
        contestant = Contestant(fed, settings, rounds, max(1, rounds // LOOKS), metric)
        for look in range(1, LOOKS + 1):
            contestant.advance(rounds * look // LOOKS)
            if math.isfinite(contestant.cost):
                trial.report(contestant.cost, look)
            if look < LOOKS and (trial.should_prune() or not math.isfinite(contestant.cost)):
                raise pruned
        return contestant.cost

    while (done := len(_ended(study))) < trials:
        study.sampler = _sampler(algorithm, sampler, worker, done)
        study.optimize(objective, n_trials=1, catch=(CoterieError,))
        if watch is not None:
            watch(f"tuning {algorithm.name}", min(done + 1, trials), trials)


def _ended(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that came to an end; one that was killed did not."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name in ("COMPLETE", "PRUNED") or FAILED in trial.user_attrs
    ]


def suggested(trial: optuna.Trial, algorithm: Algorithm, sampler: str) -> Algorithm:
    """Return the settings of a trial: a declared value, or for TPE a number between the declared ones, by ratio."""
    settings: dict[str, Any] = {}
    for name, values in space(algorithm).items():
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if sampler == "grid" or not numbers or len(set(values)) < 2:
            settings[name] = trial.suggest_categorical(name, list(values))
        elif all(isinstance(value, int) for value in values):
            settings[name] = trial.suggest_int(name, min(values), max(values), log=min(values) > 0)
        else:
            settings[name] = trial.suggest_float(name, min(values), max(values), log=min(values) > 0)
    return algorithm.replace(**settings)


def found(study: optuna.Study, algorithm: Algorithm, metric: Metric | None = None) -> Search:
    """Return the trials that came to an end, best first; one that was killed does not count."""
    judge = metric or LOSS
    ended = _ended(study)
    finished = [t for t in ended if t.state.name == "COMPLETE" and math.isfinite(_last(t))]
    if not finished and judge.undefined:
        raise judge.undefined_error("validation")
    if not finished:
        why = next(
            (f". The first problem: {t.user_attrs[FAILED]}" for t in ended if FAILED in t.user_attrs), ""
        )
        raise RunError(
            f"no setting of {algorithm.name} gave a finite validation {judge.name} in {len(ended)} "
            f"trials; give more trials or more rounds{why}"
        )
    best = min(finished, key=_last)
    ranked = sorted(enumerate(ended), key=lambda one: (one[1].state.name != "COMPLETE", _last(one[1])))
    rows = [
        {
            "number": number,
            "state": trial.state.name.lower(),
            f"validation_{judge.name}": judge.cost(_last(trial)) if math.isfinite(_last(trial)) else None,
            "settings": trial.params,
        }
        for number, trial in ranked
    ]
    return Search(algorithm.replace(**best.params), judge.cost(_last(best)), rows, judge.name)


def _last(trial: optuna.trial.FrozenTrial) -> float:
    if trial.value is not None:
        return float(trial.value)
    values = trial.intermediate_values
    return float(values[max(values)]) if values else math.inf


def search_table(
    folder: Path,
    algorithm: Algorithm,
    table: dict[str, Any],
    *,
    trials: int,
    rounds: int,
    sampler: str = "tpe",
    jobs: int = 1,
    watch: Watch | None = None,
    metric: str | None = None,
) -> Search:
    """Search as `search` does, on a table, with `jobs` processes that share the study in `folder`."""
    asked = None if metric is None else find(metric)
    settings = {name: value for name, value in algorithm.settings().items() if value is not None}
    wanted = {
        "method": {"name": algorithm.name, **settings},
        "table": {name: _plain(value) for name, value in table.items() if value is not None},
        "search": {"rounds": rounds, "sampler": sampler} | ({"metric": metric} if metric else {}),
    }
    path = folder / SETTINGS
    if path.exists():
        if files.read_toml(path) != wanted:
            raise RunError(f"{folder} holds a search with other settings ({path}); choose another folder")
    else:
        if folder.exists() and any(entry.suffix != ".tmp" for entry in folder.iterdir()):
            raise RunError(f"{folder} exists already and holds no search; choose another folder")
        fed = Federation.from_table(**table)
        _check(fed, algorithm, trials, rounds, sampler, metric)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_toml(path, wanted)
    with _opened(algorithm, folder, asked) as study:
        if jobs == 1:
            _work(study, Federation.from_table(**table), algorithm, trials, rounds, sampler, asked, watch)
        else:
            _in_parallel(study, folder, algorithm, trials, jobs, watch)
    return found(study, algorithm, asked)


def _mend(folder: Path) -> None:
    """Remove what a search that was killed has left: its lock of the study, and half of a line."""
    for left in [*folder.glob(f"{STUDY}.lock*"), *folder.glob("*.tmp")]:
        left.unlink(missing_ok=True)
    study = folder / STUDY
    content = study.read_bytes() if study.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(study, content.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def _in_parallel(
    study: optuna.Study, folder: Path, algorithm: Algorithm, trials: int, jobs: int, watch: Watch | None
) -> None:
    command = [sys.executable, "-P", "-m", "coterie.select.tune", str(folder), str(trials)]
    logs = [folder / f"worker-{k}.log" for k in range(jobs)]
    workers = []
    for k, log in enumerate(logs):
        with log.open("wb") as stream:
            workers.append(subprocess.Popen([*command, str(k)], stderr=stream, **systems.apart()))
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.2)
            if watch is not None:
                done = len(_ended(study))
                watch(f"tuning {algorithm.name}", min(done, trials), trials)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
    for worker, log in zip(workers, logs, strict=True):
        if worker.returncode not in (0, -signal.SIGTERM):
            raise RunError(f"a tuning process failed; {log} says why")
        log.unlink()


def _worker(folder: Path, trials: int, number: int) -> None:
    wanted = files.read_toml(folder / SETTINGS)
    method = dict(wanted["method"])
    algorithm = make(method.pop("name"), **method)
    sampler, rounds = wanted["search"]["sampler"], wanted["search"]["rounds"]
    metric = find(wanted["search"]["metric"]) if "metric" in wanted["search"] else None
    study, fed = _study(algorithm, folder, metric), Federation.from_table(**wanted["table"])
    _work(study, fed, algorithm, trials, rounds, sampler, metric, worker=number + 1)


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
