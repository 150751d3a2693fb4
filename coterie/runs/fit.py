"""The training loop: one for every algorithm, exact when interrupted and resumed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import Algorithm, make
from coterie.errors import NobodyAnswered, RunError, SettingError
from coterie.federation.federation import Federation
from coterie.models.shared import moved
from coterie.runs import checkpoint
from coterie.runs.ahead import rounds_ahead, unwatched
from coterie.runs.checkpoint import Best, Progress
from coterie.runs.folder import RunFolder
from coterie.runs.history import History, mean_over_clients
from coterie.runs.run import Run
from coterie.runs.track import Tracker, tracker
from coterie.runtime.workers import helped

CHECKPOINT_SECONDS = 10.0
CHECKPOINT_SHARE = 0.05  # at most this share of the time goes into checkpoints
LEAP = 1000  # rounds taken at once at most

Watch = Callable[[int, int], None]


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
) -> Run:
    """Train, and return personal models, metrics and ledger; `fed` itself is left as it was.

    `out` makes a run folder that `resume` can go on from. `evaluate_every` rounds the validation rows (the
    training rows if there are none) are scored, by default about twenty times; 0 scores only the end. Test
    rows are scored once, at the end, or not at all (`score_test`). `select="best"` deploys the models of the
    scored round with the lowest mean validation loss instead of the last ones. "auto" races the sensible methods
    on validation rows (`coterie.choose`); it scores at its own rounds, always deploys the best one and writes no
    checkpoints, so `evaluate_every`, `select` and `checkpoint_every` do not apply. `track` is "tensorboard",
    "mlflow" or a tracker of your own. What clients keep stays in memory up to `state_memory` MB (None: all of it) and
    beyond that in a temporary file.
    """
    if algorithm == "auto":
        from coterie.runs.auto import fit_chosen

        if track is not None:
            raise SettingError("a race has many runs; fit the method it chose with track= instead")
        return fit_chosen(fed, rounds, out, score_test=score_test, watch=watch)
    algorithm = make(algorithm) if isinstance(algorithm, str) else algorithm
    if rounds < 0:
        raise SettingError(f"rounds is {rounds}; it must not be negative")
    if select not in ("last", "best"):
        raise SettingError(f"select is {select!r}; it is 'last' or 'best'")
    plan = {
        "rounds": rounds,
        "evaluate_every": max(1, rounds // 20) if evaluate_every is None else evaluate_every,
        "select": select,
        "score_test": score_test,
        "checkpoint_every": checkpoint_every or 0,
    }
    if out is not None:
        RunFolder.require_free(Path(out))
    follower = tracker(track, None if out is None else Path(out)) if isinstance(track, str) else track
    fed = fed.fresh()
    _limit_state(fed, state_memory)
    started = time.perf_counter()
    with _threads(fed, algorithm):
        progress = _begin(fed, algorithm, plan)
        folder = RunFolder.create(Path(out), fed, algorithm, plan) if out is not None else None
        if follower is None:
            return _train(fed, algorithm, progress, plan, folder, watch, started)
        follower.begin(fed, algorithm, plan)
        follower.scored(fed, 0, progress.history)
        run = _train(
            fed, algorithm, progress, plan, folder, _followed(follower, fed, progress, watch), started
        )
        follower.end(run)
        return run


def _limit_state(fed: Federation, megabytes: float | None) -> None:
    """How much of what clients keep stays in memory, where they are in this process."""
    if megabytes is None:
        return
    if not megabytes >= 0:
        raise SettingError(f"state_memory is {megabytes}; give megabytes, 0 or more")
    if not hasattr(fed.runtime, "store"):
        raise SettingError(
            "state_memory is for clients in this process; nodes keep their state on their own disks"
        )
    fed.runtime.store.memory = int(megabytes * 1e6)


def _followed(follower: Tracker, fed: Federation, progress: Progress, watch: Watch | None) -> Watch:
    """`watch`, and the tracker told of every round that was scored."""
    known = len(progress.history.blocks)

    def both(t: int, rounds: int) -> None:
        nonlocal known
        if len(progress.history.blocks) > known:
            known = len(progress.history.blocks)
            follower.scored(fed, t, progress.history)
        if watch is not None:
            watch(t, rounds)

    return both


def resume(
    path: str | Path,
    fed: Federation | None = None,
    *,
    watch: Watch | None = None,
    anyway: bool = False,
    state_memory: float | None = None,
) -> Run:
    """Go on from the last checkpoint of a run folder; the result has the bytes of an uninterrupted run.

    `fed` must be given for a run that was not made from a table. `anyway` goes on although threads, device,
    dtype or versions differ from what the run recorded. `state_memory` as in `fit`.
    """
    folder = RunFolder.open(Path(path))
    if "adapt" in folder.config:
        raise RunError(f"{path} holds adapted models; there is nothing to resume")
    algorithm, plan = folder.algorithm(), folder.plan()
    fed = (folder.federation() if fed is None else fed).fresh()
    _limit_state(fed, state_memory)
    started = time.perf_counter()
    with _threads(fed, algorithm):
        folder.check_same(fed, anyway)
        progress = checkpoint.load(folder.checkpoints, fed) or _begin(fed, algorithm, plan)
        if folder.finished():
            run = _train(fed, algorithm, progress, plan, None, watch, started)
            run.folder = folder.path
            return run
        folder.sweep()
        return _train(fed, algorithm, progress, plan, folder, watch, started)


class Contestant:
    """A run under way that is taken further piece by piece; it deploys the best round it was scored at."""

    def __init__(self, fed: Federation, algorithm: Algorithm, rounds: int, evaluate_every: int) -> None:
        self.algorithm, self.started = algorithm, time.perf_counter()
        self.plan = {
            "rounds": rounds,
            "evaluate_every": evaluate_every,
            "select": "best",
            "score_test": False,
            "checkpoint_every": 0,
        }
        self.fed = fed.fresh()
        with _threads(self.fed, algorithm):
            self.progress = _begin(self.fed, algorithm, self.plan)

    def advance(self, until: int, watch: Watch | None = None) -> None:
        """The rounds up to `until`; the last round of all is scored like those before it."""
        with _threads(self.fed, self.algorithm):
            _advance(self.fed, self.algorithm, self.progress, self.plan, until, watch=watch)
            if self.progress.round == self.plan["rounds"]:
                _score_end(self.fed, self.algorithm, self.progress, self.plan)

    @property
    def loss(self) -> float:
        """The lowest mean validation loss so far; infinite for a run that diverged."""
        return self.progress.best.loss

    def validation(self, metric: str) -> Tensor:
        """A validation metric [n] at the best round so far."""
        value = self.progress.history.at(self.progress.best.round, "validation", metric)
        assert value is not None
        return value

    @property
    def done(self) -> bool:
        """Whether further rounds would change nothing, as of methods that solve instead of stepping."""
        return bool(getattr(self.progress.state, "done", False))

    def scores(self) -> dict[str, Tensor]:
        """All validation metrics [n] at the best round so far."""
        blocks, best = self.progress.history.blocks, self.progress.best.round
        return {metric: value for t, split, metric, value in blocks if (t, split) == (best, "validation")}

    def megabytes(self) -> float:
        """Sent up and down so far, evaluation not counted."""
        counts = [counts for entry, counts in self.fed.ledger.entries.items() if entry.kind != "evaluate"]
        return sum(count[2] + count[5] for count in counts) / 1e6

    def finish(self) -> Run:
        with _threads(self.fed, self.algorithm):
            return _finish(self.fed, self.algorithm, self.progress, self.plan, None, self.started)


@contextmanager
def _threads(fed: Federation, algorithm: Algorithm) -> Iterator[None]:
    """Run with as many threads as the work is worth, then give torch its setting back."""
    before = torch.get_num_threads()
    own = fed.runtime.threads(algorithm.batch, getattr(algorithm, "participation", 1.0))
    torch.set_num_threads(own)
    hands = max(1, before // own) if torch.device(fed.device).type == "cpu" else 1
    try:
        with helped(hands):
            yield
    finally:
        torch.set_num_threads(before)


def _begin(fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> Progress:
    """Before the first round; an algorithm that cannot run on this federation says so here."""
    fed.enter_round(0, None)
    progress = Progress(0, algorithm.start(fed), History(), Best())
    _score(fed, algorithm, progress, plan)
    return progress


def _train(
    fed: Federation,
    algorithm: Algorithm,
    progress: Progress,
    plan: dict[str, Any],
    folder: RunFolder | None,
    watch: Watch | None,
    started: float,
) -> Run:
    _advance(fed, algorithm, progress, plan, plan["rounds"], folder, watch)
    return _finish(fed, algorithm, progress, plan, folder, started)


def _advance(
    fed: Federation,
    algorithm: Algorithm,
    progress: Progress,
    plan: dict[str, Any],
    until: int,
    folder: RunFolder | None = None,
    watch: Watch | None = None,
) -> None:
    """The rounds up to `until`."""
    rounds, every = plan["rounds"], plan["evaluate_every"]
    clock, stride = _Clock(plan["checkpoint_every"]), rounds_ahead(fed)
    while progress.round < until:
        before = progress.round
        last = min(until, *(_next(before, n) for n in (every, clock.every, LEAP) if n))
        if stride == 1 or before == 0:  # the first round measures how networks are computed
            _move(fed, algorithm, progress, last)
        else:
            last = min(last, before + stride)
            unwatched(fed, progress, functools.partial(_move_to, fed, algorithm, progress, last))
        t = progress.round
        if watch is not None:
            for unseen in range(before + 1, t):
                watch(unseen, rounds)
        if t < rounds and every and t % every == 0:
            _score(fed, algorithm, progress, plan)
        if watch is not None:
            watch(t, rounds)
        measured = t == 1 and bool(fed.model.measured())
        if folder is not None and (measured or clock.due(t) if t < rounds else not folder.can_write_tables()):
            with clock.saving():
                checkpoint.save(folder.checkpoints, fed, progress)


def _move(fed: Federation, algorithm: Algorithm, progress: Progress, until: int) -> None:
    """One round, or rounds up to `until` at once as far as the algorithm can."""
    t = progress.round + 1
    if until > t:
        progress.state, progress.round = algorithm.leap(fed, progress.state, progress.round, until)
        if progress.round >= t:
            fed.enter_round(progress.round, progress.state)
            return
    fed.enter_round(t, progress.state)
    try:
        progress.state = algorithm.round(fed, progress.state, t)
    except NobodyAnswered:
        progress.lost_rounds += 1
    progress.round = t


def _move_to(fed: Federation, algorithm: Algorithm, progress: Progress, until: int) -> None:
    while progress.round < until:
        _move(fed, algorithm, progress, until)


def _next(t: int, every: int) -> int:
    """The first multiple of `every` after t."""
    return (t // every + 1) * every


def _finish(
    fed: Federation,
    algorithm: Algorithm,
    progress: Progress,
    plan: dict[str, Any],
    folder: RunFolder | None,
    started: float,
) -> Run:
    """Score the end, once, on the models that are deployed."""
    t = progress.round
    _score_end(fed, algorithm, progress, plan)
    chosen = progress.best.personal if plan["select"] == "best" else None
    deployed_round = progress.best.round if chosen is not None else t
    state = progress.state if chosen is None or progress.best.state is None else progress.best.state
    personal = fed.personal(algorithm, progress.state) if chosen is None else chosen
    progress.history.add(deployed_round, "train", fed.score(personal, "train"))
    run = Run(
        fed=fed,
        algorithm=algorithm,
        personal=moved(personal, "cpu"),
        state=state,
        history=progress.history,
        rounds=plan["rounds"],
        deployed_round=deployed_round,
        lost_rounds=progress.lost_rounds,
        seconds=time.perf_counter() - started,
    )
    if plan["score_test"] and fed.has_rows("test"):
        run.score_test()
    if folder is not None:
        folder.finish(run)
        run.folder = folder.path
    return run


def _score_end(fed: Federation, algorithm: Algorithm, progress: Progress, plan: dict[str, Any]) -> None:
    """The score after the last round, unless it was taken already."""
    t = progress.round
    fed.enter_round(t, progress.state)
    if t > 0 and progress.history.at(t, "validation", "loss") is None:
        _score(fed, algorithm, progress, plan)


def _score(fed: Federation, algorithm: Algorithm, progress: Progress, plan: dict[str, Any]) -> None:
    """Validation metrics of this round and what the algorithm shows; remembers the models if the best so far."""
    t, ends = progress.round, progress.round == plan["rounds"]
    validated = fed.has_rows("validation")
    if plan["select"] == "best" and not validated:
        raise RunError("select='best' needs validation rows; give a split with some")
    if not ends and not plan["evaluate_every"]:
        return
    progress.history.add(t, "server", algorithm.observe(fed, progress.state))
    if not validated:
        if not ends:
            progress.history.add(t, "train", fed.evaluate(algorithm, progress.state, "train"))
        return
    values = fed.evaluate(algorithm, progress.state, "validation")
    progress.history.add(t, "validation", values)
    loss = mean_over_clients(values["loss"])
    if plan["select"] == "best" and loss < progress.best.loss:
        progress.best = Best(t, loss, fed.personal(algorithm, progress.state), progress.state)


class _Clock:
    """When to write a checkpoint: every so many rounds if asked, else by time spent."""

    def __init__(self, every: int) -> None:
        self.every, self.wait, self.last = every, CHECKPOINT_SECONDS, time.monotonic()

    def due(self, t: int) -> bool:
        if self.every:
            return t % self.every == 0
        return time.monotonic() - self.last >= self.wait

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The next wait follows from the time that this checkpoint takes."""
        started = time.monotonic()
        yield
        self.last = time.monotonic()
        self.wait = max(CHECKPOINT_SECONDS, (self.last - started) / CHECKPOINT_SHARE)
