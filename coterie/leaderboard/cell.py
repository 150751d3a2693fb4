"""One cell of the leaderboard: tune on validation rows, test once, then let clients join that were held out."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import CoterieError
from coterie._core.randomness import key, permutation
from coterie.engine.federation import Federation
from coterie.engine.from_recipe import from_recipe
from coterie.engine.resplit import only
from coterie.leaderboard.plan import FEWEST_CLIENTS, SHARE, Job
from coterie.models.metrics import main_metric
from coterie.select.entrants import Tuned, validation_cost
from coterie.select.grid import trained_by
from coterie.select.verdict import row_metric
from coterie.train.adapt import personal_models
from coterie.train.folder import environment, fingerprint
from coterie.train.run import Run

DIGITS = 9  # significant digits that are stored; sums over rows may differ in the last ones
TIMES = ("seconds", "cpu_seconds", "environment")  # what differs when a cell is run again

_last: dict[str, Federation] = {}


def measure(job: Job, folder: str | Path | None = None) -> dict[str, Any]:
    """Run a cell and return its record, as JSON values.

    Parameters
    ----------
    job
        The cell.
    folder
        Folder of data files.

    Returns
    -------
    dict
        `status` is "ok", "does not apply" if the method cannot be run on this data set, or "failed"; `why` says why.
    """
    fed, newcomers = federations(job, folder)
    record: dict[str, Any] = {
        "key": job.key,
        "method": job.method.name,
        "data": job.data.name,
        "seed": job.seed,
        "status": "ok",
        "why": None,
        "rows_digest": fingerprint(fed)[:16],
        "task": fed.model.task,
        "clients": fed.n,
        "rows": sum(int(size.sum()) for size in fed.rows.values()),
        "parameters": fed.model.d,
        "environment": environment(fed),
    }
    started = time.process_time()
    try:
        entrant = Tuned(job.method.algorithm(), job.trials)
        entrant.check(fed)
    except (CoterieError, NotImplementedError) as problem:
        return record | {"status": "does not apply", "why": str(problem) or type(problem).__name__}
    try:
        run = entrant.best(fed, job.rounds, lambda *_: None).run
        found = _scores(run) | {"cpu_seconds": round(time.process_time() - started, 3)}
    except Exception as problem:  # a method's own mistake is its result; the others go on
        return record | {"status": "failed", "why": f"{type(problem).__name__}: {problem}"}
    record |= found | {"trials": len(entrant.settings)}
    return record | {"newcomers": None if newcomers is None else _joined(run, newcomers, entrant)}


def federations(job: Job, folder: str | Path | None) -> tuple[Federation, Federation | None]:
    """Return the clients that train, and those that join afterwards; None for fewer than ten clients."""
    whole = _whole(job, folder)
    if whole.n < FEWEST_CLIENTS:
        return whole, None
    order = permutation(key(job.seed, "newcomers"), whole.n)
    late = order[: whole.n // SHARE].sort().values
    early = order[whole.n // SHARE :].sort().values
    return only(whole, early), only(whole, late)


def _whole(job: Job, folder: str | Path | None) -> Federation:
    """Return the federation of a job, or the one that was made for the job before it."""
    name = repr((job.data, job.seed, folder))
    if name not in _last:
        _last.clear()
        _last[name] = from_recipe(job.data.recipe(), job.seed, folder)
    return _last[name]


def _scores(run: Run) -> dict[str, Any]:
    """Score the test rows, once, and return what the cell keeps of the run."""
    task = run.fed.model.task
    metric = main_metric(task)
    test = run.score_test()[metric.name]
    rows = row_metric(metric, task)
    up, down = run.traffic()
    values = run.test_rows.get(rows.name)
    if values is None or not bool(torch.isfinite(values).all()):
        raise ArithmeticError("the chosen model has losses that are not finite: every setting diverged")
    return {
        "metric": metric.name,
        "test": numbers(test),
        "row_metric": rows.name,
        "row_values": numbers(values),
        "test_rows": run.fed.rows["test"].tolist(),
        "names": list(run.fed.names),
        "validation_cost": _rounded(validation_cost(run, None)),
        "settings": run.algorithm.settings(),
        "round": run.deployed_round,
        "mb_up": up,
        "mb_down": down,
        "seconds": round(run.seconds, 3),
    }


def _joined(run: Run, newcomers: Federation, entrant: Tuned) -> dict[str, Any]:
    """Give models to clients that were not in training, and score them on their own test rows."""
    fed = trained_by(entrant.settings, newcomers, run.rounds)
    metric = main_metric(fed.model.task).name
    labels = None if run.fed.clusters is None else run.fed.clusters.cpu()
    try:
        models, how = personal_models(
            run.algorithm, fed, run.state, run.personal, run.common(), run.deployed_round, labels
        )
        return {"test": numbers(fed.score(models, "test")[metric]), "how": how[0], "why": None}
    except Exception as problem:  # the method has no model for newcomers, which is a result too
        return {"test": None, "how": None, "why": f"{type(problem).__name__}: {problem}"}


def numbers(values: Tensor) -> list[float | None]:
    """Return numbers for JSON, with `DIGITS` digits; None for what is not finite."""
    return [_rounded(value) for value in values.double().tolist()]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
