"""Train one algorithm on a federation, resume it with the same bits, or train it again on more rows."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coterie._core.errors import Diverged, NotReopened, RunError, SettingError
from coterie.algorithms import Algorithm, make
from coterie.engine.aggregate import Aggregate
from coterie.engine.federation import Federation
from coterie.engine.late import LateAnswers, Lateness
from coterie.engine.privacy import Privacy
from coterie.engine.resplit import merged
from coterie.engine.worker_links import Crew
from coterie.models.metrics import Metric, resolve
from coterie.train import checkpoint, private
from coterie.train import rounds as loop
from coterie.train.blend import Blended, joined
from coterie.train.checkpoint import Progress
from coterie.train.folder import RunFolder
from coterie.train.history import History
from coterie.train.own_models import replaced
from coterie.train.rounds import Watch
from coterie.train.run import REFIT, Run, metric_plan
from coterie.train.save import save_run
from coterie.train.track import Tracker, tracker
from coterie.train.workers import come_home, sharded

log = logging.getLogger(__name__)


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
    refit: str = "none",
    target: float | None = None,
    aggregate: str | Aggregate | None = None,
    privacy: Privacy | None = None,
    workers: int | str | Crew | None = None,
    exact: bool = False,
    late: Lateness | None = None,
) -> Run:
    """Train one algorithm on a federation, which is left unchanged.

    Parameters
    ----------
    fed
        The federation.
    algorithm
        An algorithm, or its name.
    rounds
        Number of rounds.
    out
        Run folder to create, from which `resume` can continue.
    evaluate_every
        Score validation rows (training rows if there are none) every so many rounds; None means about twenty times, 0
        only at the end.
    select
        'last' deploys the models of the last round, 'best' those with the lowest mean validation loss.
    score_test
        Score the test rows, once, at the end.
    checkpoint_every
        Write a checkpoint every so many rounds; None goes by time.
    watch
        Called with the round and the number of rounds after each round.
    track
        'tensorboard', 'mlflow', 'wandb' or a tracker of your own.
    metric
        What `select="best"` goes by instead of the loss, and what reports show.
    metrics
        Further metrics to record.
    refit
        'validation' trains the deployed models again, for as many rounds, on training and validation rows together,
        'all' on test rows too. Scores stay those of the models before.
    target
        Stop as soon as the algorithm proves that the training objective is at most this far above its minimum;
        `rounds` is the most it may take.
    state_memory
        Megabytes of clients' state that stay in memory, the rest going to a temporary file; None keeps all of it.
    aggregate
        How answers of clients are averaged, such as 'median', 'trimmed:0.1' or 'clip,cap'; None takes the plain mean,
        and on nodes 'screen,cap'.
    privacy
        What the run may cost of the clients' privacy; None adds no noise.
    workers
        Share the clients over so many processes, or over those of 'torchrun', 'slurm' or 'ray:N'
        (`coterie.train.workers`); None computes all of them in this one.
    exact
        Give the same bits whatever the number of workers is.
    late
        When a round ends before all have answered, and how old an answer may be that is used later; None waits for all.

    Returns
    -------
    Run
        Personal models, metrics and ledger.

    Raises
    ------
    Diverged
        The last models of most clients are far worse than the untrained one. No folder is left behind.

    Examples
    --------
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> run = fit(fed, "fedavg", rounds=2)
    >>> run.personal.shape[0] == fed.n
    True
    """
    algorithm, given = make(algorithm) if isinstance(algorithm, str) else algorithm, fed
    algorithm = fed.runtime.adapted(algorithm.for_model(fed.model))
    if rounds < 0:
        raise SettingError(f"rounds is {rounds}; it must not be negative")
    if select not in ("last", "best"):
        raise SettingError(f"select is {select!r}; it is 'last' or 'best'")
    if privacy is not None and refit != "none":
        raise SettingError("refitting would read the rows again without noise; leave refit out with privacy")
    late_plan = _late_plan(fed, algorithm, late, privacy)
    chosen = None if metric is None else resolve(metric, fed.model.task).name
    further = [resolve(one, fed.model.task) for one in metrics]
    plan = {
        "rounds": rounds,
        "evaluate_every": max(1, rounds // 20) if evaluate_every is None else evaluate_every,
        "select": select,
        "score_test": score_test,
        "checkpoint_every": checkpoint_every or 0,
        **metric_plan(chosen, further),
        **refit_plan(fed, refit),
        **target_plan(fed, algorithm, target, rounds),
        **({} if aggregate is None else {"aggregate": str(_rule(aggregate))}),
        **private.as_plan(privacy),
        **({} if workers is None else {"workers": len(workers) if isinstance(workers, Crew) else workers}),
        **({"exact": True} if exact else {}),
        **late_plan,
    }
    if out is not None:
        RunFolder.require_free(Path(out))
    follower = tracker(track, None if out is None else Path(out)) if isinstance(track, str) else track
    started = time.perf_counter()
    with sharded(fed, workers, exact, algorithm) as spread:
        fed = spread.fresh()
        _limit_state(fed, state_memory)
        with loop.threads_for(fed, algorithm):
            secret = private.new_secret()
            _protect(fed, algorithm, plan, secret)
            progress = loop.begin(fed, algorithm, plan)
            folder = RunFolder.create(Path(out), fed, algorithm, plan) if out is not None else None
            if folder is not None and "epsilon" in plan:
                private.keep_secret(folder.path, secret)
            if follower is not None:
                follower.begin(fed, algorithm, plan)
                follower.scored(fed, 0, progress.history)
                watch = _followed(follower, fed, progress, watch)
            with _removed_if_hopeless(folder):
                loop.advance(fed, algorithm, progress, plan, plan["rounds"], folder, watch)
                run = loop.finish(fed, algorithm, progress, plan, started)
        with _removed_if_hopeless(folder):
            _complete(run, plan, folder)
        if spread is not given:
            come_home(run)
    if follower is not None:
        follower.end(run)
    return run


@contextmanager
def _removed_if_hopeless(folder: RunFolder | None) -> Iterator[None]:
    """Remove the run folder if to go on would end in the same way: in training, or in training again on more rows."""
    try:
        yield
    except (Diverged, SettingError) as problem:
        if folder is not None and (
            isinstance(problem, Diverged) or not (folder.checkpoints / checkpoint.POINTER).exists()
        ):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _rule(given: str | Aggregate) -> Aggregate:
    return Aggregate.parse(given) if isinstance(given, str) else given


def _protect(fed: Federation, algorithm: Algorithm, plan: dict[str, Any], secret: bytes) -> None:
    """Let a federation average and add noise as the plan says."""
    if "aggregate" in plan:
        fed.aggregate = _rule(plan["aggregate"])
    private.set_up(fed, algorithm, plan, secret)
    late = Lateness.from_plan(plan)
    fed.late = None if late is None else LateAnswers(late, fed.seed)


def _late_plan(
    fed: Federation, algorithm: Algorithm, late: Lateness | None, privacy: Privacy | None
) -> dict[str, Any]:
    """Return what the plan of a run says of late answers; raise `SettingError` if the method cannot use them."""
    if late is None:
        return {}
    late.require(algorithm)
    if privacy is not None:
        raise SettingError(
            "noise is for sums of one round, and late answers would join several; leave out buffer, staleness and "
            "delays, or epsilon"
        )
    if late.buffer > fed.n:
        raise SettingError(f"buffer is {late.buffer}, and there are only {fed.n} clients to answer")
    return late.to_plan()


def _limit_state(fed: Federation, megabytes: float | None) -> None:
    """Limit how much of the clients' state stays in memory, where the runtime supports it."""
    if megabytes is None:
        return
    if not megabytes >= 0:
        raise SettingError(f"state_memory is {megabytes}; give megabytes, 0 or more")
    if not fed.runtime.capabilities.memory_limit:
        raise SettingError(
            "state_memory is for clients in this process; nodes keep their state on their own disks"
        )
    fed.runtime.limit_memory(int(megabytes * 1e6))


def _last_scored(history: History) -> int:
    """Return the last round that was scored, -1 if there is none."""
    return history.blocks[-1][0] if history.blocks else -1


def _followed(follower: Tracker, fed: Federation, progress: Progress, watch: Watch | None) -> Watch:
    """Return `watch` with a tracker that hears of every round that was scored."""
    known = _last_scored(progress.history)

    def both(t: int, rounds: int) -> None:
        nonlocal known
        if _last_scored(progress.history) > known:
            known = _last_scored(progress.history)
            follower.scored(fed, t, progress.history)
        if watch is not None:
            watch(t, rounds)

    return both


def resume(
    path: str | Path,
    fed: Federation | None = None,
    *,
    watch: Watch | None = None,
    track: Tracker | None = None,
    anyway: bool = False,
    state_memory: float | None = None,
    workers: int | str | Crew | None = None,
) -> Run:
    """Continue a run from its last checkpoint; the result has the bytes of an uninterrupted run.

    Parameters
    ----------
    path
        The run folder.
    fed
        The federation, where the run was not made from a table.
    watch
        Called with the round and the number of rounds after each round.
    track
        A tracker of your own; those of other dashboards cannot go on with a run.
    anyway
        Continue although threads, device, dtype or versions differ from those that the run recorded.
    state_memory
        As in `fit`.
    workers
        As in `fit`; None means as many as the run began with. Another number gives the same bits if the run is
        `exact`, and otherwise needs `anyway`.

    Returns
    -------
    Run
        Personal models, metrics and ledger.

    Raises
    ------
    RunError
        The folder cannot be read, its data have changed, or the environment differs and `anyway` is False.

    Examples
    --------
    >>> import tempfile
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fit(fed, "fedavg", rounds=2, out=f"{folder}/run")
    ...     resume(f"{folder}/run").personal.equal(run.personal)
    True
    """
    folder = RunFolder.open(Path(path))
    if "adapt" in folder.config:
        raise RunError(f"{path} holds adapted models; there is nothing to resume")
    with folder.reading():
        algorithm, plan = folder.algorithm(), folder.plan()
        if "guarded" in plan or algorithm.name == Blended.name:
            raise RunError(f"{path} is finished, and its models are of several runs; see coterie.load")
        given = folder.federation() if fed is None else fed
    how, exact = plan.get("workers") if workers is None else workers, plan.get("exact", False)
    started = time.perf_counter()
    with sharded(given, how, exact, algorithm) as spread:
        fed = spread.fresh()
        algorithm = fed.runtime.adapted(algorithm)
        _limit_state(fed, state_memory)
        with loop.threads_for(fed, algorithm):
            folder.check_same(fed, anyway)
            secret = private.read_secret(folder.path, folder.finished()) if "epsilon" in plan else b""
            _protect(fed, algorithm, plan, secret)
            with folder.reading():
                progress = checkpoint.load(folder.checkpoints, fed)
            progress = progress or loop.begin(fed, algorithm, plan)
            finished = folder.finished()
            if not finished:
                folder.sweep()
            if track is not None:
                track.begin(fed, algorithm, plan)
                track.scored(fed, progress.round, progress.history)
                watch = _followed(track, fed, progress, watch)
            loop.advance(fed, algorithm, progress, plan, plan["rounds"], None if finished else folder, watch)
            run = loop.finish(fed, algorithm, progress, plan, started)
        _complete(run, plan, None if finished else folder)
        if spread is not given:
            come_home(run)
    run.folder = folder.path
    if track is not None:
        track.end(run)
    return run


def target_plan(fed: Federation, algorithm: Algorithm, target: float | None, rounds: int) -> dict[str, float]:
    """Return what the plan of a run says of its target; nothing if there is none."""
    if target is None:
        return {}
    if not target > 0:
        raise SettingError(f"the target is {target}; it must be positive")
    algorithm.require_certificate(fed)
    return {"target": float(target), "most_rounds": rounds}


def refit_plan(fed: Federation, which: str) -> dict[str, str]:
    """Return what the plan of a run says of refitting; nothing if there are no more rows to train on."""
    if which not in REFIT:
        raise SettingError(f"refit is {which!r}; it is {', '.join(map(repr, REFIT))}")
    if not any(fed.has_rows(split) for split in REFIT[which] if split != "train"):
        return {}
    able = fed.runtime.capabilities
    if not able.rows_visible and not able.reopens:
        raise SettingError("models of these clients cannot be refitted; leave refit out")
    return {"refit": which}


def refit(run: Run, which: str, target: float | None = None, rounds: int | None = None) -> Run:
    """Train the deployed models of a run again, for as many rounds, on more of the rows; scores stay as they are.

    Parameters
    ----------
    run
        The run, which is changed.
    which
        'validation' for training and validation rows, 'all' for all rows, 'none'.
    target
        As in `fit`.
    rounds
        The most rounds it may take, by default as many as the run.

    Returns
    -------
    Run
        The same run.

    Examples
    --------
    >>> from coterie.engine.federation import Federation
    >>> fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> refit(fit(fed, "fedavg", rounds=2), "validation").trained_on
    ('train', 'validation')
    """
    if not refit_plan(run.fed, which):
        return run
    if run.blend is not None:
        for part in run.blend.parts:
            refit(part, which)
        joined(run)
        return run
    try:
        again = _again(run, which, rounds, target)
    except NotReopened as problem:
        log.warning("the models stay those of training rows: %s", problem)
        return run
    personal = again.personal
    if run.own is not None:
        at = torch.tensor(run.own.clients)
        personal = replaced(personal, run.own.clients, _again(run.own.alone, which).personal[at])
    run.scored, run.personal, run.state, run.refit = run.personal, personal, again.state, which
    run.seconds += again.seconds
    run.refitted = again.fed if run.fed.models_stay else None
    for entry, counts in again.fed.ledger.entries.items():
        if entry.kind != "evaluate":
            run.fed.ledger.entries[entry._replace(kind="refit")] = counts
    return run


def _again(run: Run, which: str, rounds: int | None = None, target: float | None = None) -> Run:
    """Train the algorithm of a run on more of the rows."""
    fed, reopens = run.fed, run.fed.runtime.capabilities.reopens
    return fit(
        fed.reopened(which) if reopens else merged(fed, REFIT[which]),
        run.algorithm,
        run.deployed_round if rounds is None else rounds,
        evaluate_every=0,
        score_test=False,
        target=target,
        late=None if fed.late is None else fed.late.settings,
    )


def _complete(run: Run, plan: dict[str, Any], folder: RunFolder | None) -> None:
    """Refit a run if its plan says so, and save it if it has a folder."""
    proof = {"target": plan["target"], "rounds": plan["most_rounds"]} if "target" in plan else {}
    refit(run, plan.get("refit", "none"), **proof)
    if folder is not None:
        save_run(folder, run)
        run.folder = folder.path
        private.forget_secret(folder.path)
    if run.left_out or run.lost_rounds:
        log.warning("%d answers left out, %d rounds lost", len(run.left_out), run.lost_rounds)
    log.info("%s: round %d deployed, %.1f s", run.algorithm.name, run.deployed_round, run.seconds)
