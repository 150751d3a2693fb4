"""`coterie.fit`: train one method, or let `auto` choose it first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coterie._core.errors import SettingError
from coterie.algorithms import Algorithm, make
from coterie.engine.aggregate import Aggregate
from coterie.engine.federation import Federation
from coterie.engine.late import Lateness
from coterie.engine.privacy import Privacy
from coterie.engine.worker_links import Crew
from coterie.models.metrics import Metric
from coterie.select.auto import fit_chosen
from coterie.select.grid import suited
from coterie.train import fit as training
from coterie.train.rounds import Watch
from coterie.train.run import Run
from coterie.train.track import Tracker
from coterie.train.workers import come_home, sharded


def fit(
    fed: Federation,
    algorithm: Algorithm | str,
    rounds: int = 100,
    out: str | Path | None = None,
    *,
    evaluate_every: int | None = None,
    select: str = "last",
    score_test: bool = True,
    checkpoint_every: int | None = None,
    watch: Watch | None = None,
    track: str | Tracker | None = None,
    state_memory: float | None = None,
    metric: str | Metric | None = None,
    metrics: Sequence[str | Metric] = (),
    refit: str | None = None,
    target: float | None = None,
    aggregate: str | Aggregate | None = None,
    privacy: Privacy | None = None,
    workers: int | str | Crew | None = None,
    exact: bool = False,
    late: Lateness | None = None,
    ensemble: bool = True,
    budget_mb: float | None = None,
    budget_seconds: float | None = None,
) -> Run:
    """Train, and return personal models, metrics and ledger; `fed` itself is left as it was.

    `out` makes a run folder that `resume` can go on from. `evaluate_every` rounds the validation rows (the
    training rows if there are none) are scored, by default about twenty times; 0 scores only the end. Test
    rows are scored once, at the end, or not at all (`score_test`). `select="best"` deploys the models of the
    scored round with the lowest mean validation loss instead of the last ones. "auto" races the sensible methods
    on validation rows (`coterie.choose`); it scores at its own rounds, always deploys the best one and writes no
    checkpoints, so `evaluate_every`, `select` and `checkpoint_every` do not apply. `track` is "tensorboard",
    "mlflow" or a tracker of your own. What clients keep stays in memory up to `state_memory` MB (None: all of it) and
    beyond that in a temporary file. `metric` (a name such as "auc", or a `coterie.metrics.Metric`) is what "auto" and
    `select="best"` go by instead of the loss, and what reports show; `metrics` are recorded beside it. `refit`
    trains the deployed models again, for as many rounds: "validation" on training and validation rows, as "auto" does
    unless told otherwise, "all" on test rows too, "none"; scores stay those of the models before. With a `target`
    training stops as soon as the method proves that its objective is at most that far above the minimum (`flix`).
    `aggregate` ("median", "trimmed:0.1", "clip,cap") averages answers so that a few wrong ones cannot move them far.
    `privacy` (`coterie.Privacy(epsilon=4, delta=1e-5)`) adds noise to what leaves a client. `workers` shares the
    clients over processes: a number of them on this machine, "torchrun", "slurm" or "ray:N"; with `exact` the result
    has the same bits whatever their number is. With `late` (`coterie.Lateness(buffer=8)`) a round ends before all have
    answered, and answers that come later are used then. With `ensemble` "auto" deploys a weighted mean of finalists
    where that is better on rows held out; `budget_mb` and `budget_seconds` cut its race short.
    """
    if algorithm == "auto":
        if target is not None:
            raise SettingError("auto chooses on validation rows; an accuracy is a target for flix")
        if aggregate is not None or privacy is not None or late is not None:
            raise SettingError(
                "a race takes no aggregate=, privacy= or late=; fit the method it chose with them"
            )
        if track is not None:
            raise SettingError("a race has many runs; fit the method it chose with track= instead")
        with sharded(fed, workers, exact) as spread:
            run = fit_chosen(
                spread,
                rounds,
                out,
                score_test=score_test,
                watch=watch,
                metric=metric,
                metrics=metrics,
                refit=refit or "validation",
                ensemble=ensemble,
                budget_mb=budget_mb,
                budget_seconds=budget_seconds,
            )
            return run if spread is fed else come_home(run)
    if budget_mb is not None or budget_seconds is not None:
        raise SettingError("budget_mb and budget_seconds are for auto; give one method its number of rounds")
    method = make(algorithm) if isinstance(algorithm, str) else algorithm
    return training.fit(
        fed,
        suited(method, fed),
        rounds,
        out,
        evaluate_every=evaluate_every,
        select=select,
        score_test=score_test,
        checkpoint_every=checkpoint_every,
        watch=watch,
        track=track,
        state_memory=state_memory,
        metric=metric,
        metrics=metrics,
        refit=refit or "none",
        target=target,
        aggregate=aggregate,
        privacy=privacy,
        workers=workers,
        exact=exact,
        late=late,
    )
