"""Search for good settings with Optuna: declared spaces, validation rows only, pruned, resumable, in parallel.

`python -m coterie.runs.search FOLDER` is one worker of `coterie tune`: it takes trials from the study in the folder
until the number asked for is reached.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.algorithms import Algorithm, make
from coterie.errors import CoterieError, DataError, RunError, SettingError
from coterie.federation.federation import Federation
from coterie.runs import files
from coterie.runs.fit import Contestant

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "grid")
LOOKS = 10  # times a trial is scored, and may be stopped
SETTINGS, STUDY = "tune.toml", "study.log"

Watch = Callable[[str, int, int], None]
Space = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Search:
    """What was tried, best first, and the best settings."""

    algorithm: Algorithm
    loss: float
    trials: list[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        return {
            "method": self.algorithm.name,
            "settings": self.algorithm.settings(),
            "validation_loss": self.loss,
            "trials": self.trials,
        }


def space(algorithm: Algorithm) -> Space:
    """The hyperparameters worth searching, with the values declared for them."""
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
) -> Search:
    """The settings with the lowest mean validation loss over the clients; test rows are not read.

    "tpe" draws between the smallest and the largest declared value, "grid" tries the declared ones. With `folder`
    the study is kept there, and a second call goes on until `trials` are done.
    """
    algorithm = make(algorithm) if isinstance(algorithm, str) else algorithm
    _check(fed, algorithm, trials, rounds, sampler)
    study = _study(algorithm, sampler, None if folder is None else Path(folder))
    _work(study, fed, algorithm, trials, rounds, sampler, watch)
    return found(study, algorithm)


def _check(fed: Federation, algorithm: Algorithm, trials: int, rounds: int, sampler: str) -> None:
    if trials < 1 or rounds < 1:
        raise SettingError(f"trials and rounds must be at least 1 (got {trials}, {rounds})")
    if sampler not in SAMPLERS:
        raise SettingError(f"sampler = {sampler!r}; choose from {', '.join(SAMPLERS)}")
    space(algorithm)
    if not fed.has_rows("validation"):
        raise DataError("tuning needs validation rows; build the federation with split=(0.6, 0.2, 0.2)")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SettingError("tuning needs Optuna: pip install 'coterie[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(algorithm: Algorithm, sampler: str, folder: Path | None, worker: int = 0) -> optuna.Study:
    optuna = _optuna()
    samplers = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=worker, multivariate=True),
        "grid": lambda: optuna.samplers.GridSampler(
            {k: list(v) for k, v in space(algorithm).items()}, seed=worker
        ),
    }
    storage = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(folder / STUDY))
        storage = optuna.storages.JournalStorage(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(
            study_name=algorithm.name,
            storage=storage,
            load_if_exists=True,
            sampler=samplers[sampler](),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
        )


def _work(
    study: optuna.Study,
    fed: Federation,
    algorithm: Algorithm,
    trials: int,
    rounds: int,
    sampler: str,
    watch: Watch | None = None,
) -> None:
    """Trials until so many are done, whoever does them."""
    state, pruned = _optuna().trial.TrialState, _optuna().TrialPruned
    if sampler == "grid":
        trials = min(trials, math.prod(len(values) for values in space(algorithm).values()))
    over = (state.COMPLETE, state.PRUNED, state.FAIL)

    def objective(trial: optuna.Trial) -> float:
        contestant = Contestant(fed, suggested(trial, algorithm, sampler), rounds, max(1, rounds // LOOKS))
        for look in range(1, LOOKS + 1):
            contestant.advance(rounds * look // LOOKS)
            if math.isfinite(contestant.loss):
                trial.report(contestant.loss, look)
            if look < LOOKS and (trial.should_prune() or not math.isfinite(contestant.loss)):
                raise pruned
        return contestant.loss

    def tell(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        done = len(study.get_trials(deepcopy=False, states=over))
        if watch is not None:
            watch(f"tuning {algorithm.name}", min(done, trials), trials)
        if done >= trials:
            study.stop()

    if len(study.get_trials(deepcopy=False, states=over)) < trials:
        study.optimize(objective, n_trials=trials, callbacks=[tell], catch=(CoterieError,))


def suggested(trial: optuna.Trial, algorithm: Algorithm, sampler: str) -> Algorithm:
    """Settings of a trial: a declared value, or for TPE a number between the declared ones, by ratio."""
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


def found(study: optuna.Study, algorithm: Algorithm) -> Search:
    """The trials so far, best first."""
    finished = [t for t in study.get_trials() if t.state.name == "COMPLETE" and math.isfinite(_last(t))]
    if not finished:
        raise RunError(
            f"no setting of {algorithm.name} gave a finite validation loss in {len(study.get_trials())} trials; "
            "give more trials or more rounds"
        )
    best = min(finished, key=_last)
    ranked = sorted(study.get_trials(), key=lambda t: (t.state.name != "COMPLETE", _last(t)))
    rows = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "validation_loss": _last(trial) if math.isfinite(_last(trial)) else None,
            "settings": trial.params,
        }
        for trial in ranked
    ]
    return Search(algorithm.replace(**best.params), _last(best), rows)


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
) -> Search:
    """As `search`, on a table, with `jobs` processes that share the study in `folder`."""
    from coterie.data.load import load_table

    settings = {name: value for name, value in algorithm.settings().items() if value is not None}
    wanted = {
        "method": {"name": algorithm.name, **settings},
        "table": {name: _plain(value) for name, value in table.items() if value is not None},
        "search": {"rounds": rounds, "sampler": sampler},
    }
    path = folder / SETTINGS
    if path.exists():
        if files.read_toml(path) != wanted:
            raise RunError(f"{folder} holds a search with other settings ({path}); choose another folder")
    else:
        if folder.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} exists already and holds no search; choose another folder")
        fed = load_table(**table)
        _check(fed, algorithm, trials, rounds, sampler)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_toml(path, wanted)
    study = _study(algorithm, sampler, folder)
    if jobs == 1:
        _work(study, load_table(**table), algorithm, trials, rounds, sampler, watch)
    else:
        _in_parallel(study, folder, algorithm, trials, jobs, watch)
    return found(study, algorithm)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def _in_parallel(
    study: optuna.Study, folder: Path, algorithm: Algorithm, trials: int, jobs: int, watch: Watch | None
) -> None:
    command = [sys.executable, "-P", "-m", "coterie.runs.search", str(folder), str(trials)]
    logs = [folder / f"worker-{k}.log" for k in range(jobs)]
    workers = []
    for k, log in enumerate(logs):
        with log.open("w") as stream:
            workers.append(subprocess.Popen([*command, str(k)], stderr=stream))
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.2)
            if watch is not None:
                done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
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
    from coterie.data.load import load_table

    wanted = files.read_toml(folder / SETTINGS)
    method = dict(wanted["method"])
    algorithm = make(method.pop("name"), **method)
    sampler, rounds = wanted["search"]["sampler"], wanted["search"]["rounds"]
    study = _study(algorithm, sampler, folder, worker=number + 1)
    _work(study, load_table(**wanted["table"]), algorithm, trials, rounds, sampler)


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
