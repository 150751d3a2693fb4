"""The rounds of a run: one loop for every algorithm, which scores, checkpoints and ends as the plan says."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coterie._core import broadcast
from coterie._core.errors import NobodyAnswered, RunError
from coterie._core.threads import helped
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.models.metrics import LOSS, Metric, find
from coterie.train import checkpoint
from coterie.train.checkpoint import Best, Clock, Progress
from coterie.train.deferred_finite_check import deferred_finite_check, rounds_ahead
from coterie.train.divergence import require_convergence
from coterie.train.folder import RunFolder
from coterie.train.history import History, mean_over_clients
from coterie.train.run import Run

FAST_FORWARD_ROUNDS = 1000  # rounds computed at once at most

Watch = Callable[[int, int], None]
log = logging.getLogger(__name__)


@contextmanager
def threads_for(fed: Federation, algorithm: Algorithm) -> Iterator[None]:
    """Run the block with as many threads as the work is worth, then restore torch's setting."""
    before = torch.get_num_threads()
    own = fed.runtime.threads(algorithm.batch, getattr(algorithm, "participation", 1.0))
    torch.set_num_threads(own)
    hands = max(1, before // own) if torch.device(fed.device).type == "cpu" else 1
    try:
        with helped(hands):
            yield
    finally:
        torch.set_num_threads(before)


def begin(fed: Federation, algorithm: Algorithm, plan: dict[str, Any]) -> Progress:
    """Return the progress before the first round; an algorithm that cannot run on this federation raises here."""
    log.info("%s: %d rounds, %d clients, d = %d", algorithm.name, plan["rounds"], fed.n, fed.d)
    fed.enter_round(0, None)
    progress = Progress(0, algorithm.start(fed), History(), Best())
    _score(fed, algorithm, progress, plan)
    return progress


def advance(
    fed: Federation,
    algorithm: Algorithm,
    progress: Progress,
    plan: dict[str, Any],
    until: int,
    folder: RunFolder | None = None,
    watch: Watch | None = None,
) -> None:
    """Run the rounds up to `until`, or until the target is proved."""
    every = plan["evaluate_every"]
    clock, stride = Clock(plan["checkpoint_every"]), rounds_ahead(fed)
    while progress.round < until:
        before = progress.round
        last = min(until, *(_next(before, n) for n in (every, clock.every, FAST_FORWARD_ROUNDS) if n))
        if stride == 1 or before == 0:  # the first round measures how networks are computed
            _move(fed, algorithm, progress, last)
        else:
            last = min(last, before + stride)
            deferred_finite_check(fed, progress, functools.partial(_move_to, fed, algorithm, progress, last))
        t = progress.round
        if "target" in plan:
            progress.state = algorithm.sharpen(fed, progress.state, plan["target"])
            if algorithm.certificate(progress.state) <= plan["target"]:
                plan["rounds"] = until = t  # proved: nothing is left to do
        rounds = _expected(algorithm, progress, plan)
        if watch is not None:
            for unseen in range(before + 1, t):
                watch(unseen, rounds)
        if t < plan["rounds"] and every and t % every == 0:
            _score(fed, algorithm, progress, plan)
        if watch is not None:
            watch(t, rounds)
        measured = t == 1 and bool(fed.model.measured())
        ends = "epsilon" in plan or (folder is not None and not folder.can_write_tables())
        if folder is not None and (measured or clock.due(t) if t < plan["rounds"] else ends):
            with clock.saving():
                checkpoint.save(folder.checkpoints, fed, progress)


def _expected(algorithm: Algorithm, progress: Progress, plan: dict[str, Any]) -> int:
    """Return the number of rounds that is expected now: with a target it falls as rounds come in."""
    left = algorithm.rounds_left(progress.state, plan["target"]) if "target" in plan else None
    return int(plan["rounds"] if left is None else min(plan["rounds"], progress.round + left))


def _move(fed: Federation, algorithm: Algorithm, progress: Progress, until: int) -> None:
    """Run one round, or several up to `until` as far as the algorithm can compute them at once."""
    t, progress.deployed = progress.round + 1, None
    if until > t:
        progress.state, progress.round = algorithm.fast_forward(fed, progress.state, progress.round, until)
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
    """Return the first multiple of `every` after t."""
    return (t // every + 1) * every


def finish(
    fed: Federation,
    algorithm: Algorithm,
    progress: Progress,
    plan: dict[str, Any],
    started: float,
) -> Run:
    """Score the deployed models and return the run."""
    t = progress.round
    score_end(fed, algorithm, progress, plan)
    chosen = progress.best.personal if plan["select"] == "best" else None
    deployed_round = progress.best.round if chosen is not None else t
    state = progress.state if chosen is None or progress.best.state is None else progress.best.state
    personal = deployed(fed, algorithm, progress) if chosen is None else chosen
    if "epsilon" not in plan:  # else the losses of training rows would leave without noise
        trained = fed.score(personal, "train", _further(plan))
        progress.history.add(deployed_round, "train", trained)
        if plan["select"] == "last":
            for name in require_convergence(fed, algorithm, trained["loss"], plan["rounds"]):
                log.warning("%s diverged for client %r: its model is useless", algorithm.name, name)
    run = Run(
        fed=fed,
        algorithm=algorithm,
        personal=broadcast.to(personal, "cpu"),
        state=state,
        history=progress.history,
        rounds=plan["rounds"],
        deployed_round=deployed_round,
        lost_rounds=progress.lost_rounds,
        seconds=time.perf_counter() - started,
        metric=plan.get("metric"),
        further=tuple(_further(plan)),
    )
    if plan["score_test"] and fed.has_rows("test"):
        run.score_test()
    return run


def deployed(fed: Federation, algorithm: Algorithm, progress: Progress) -> Tensor:
    """Return the models that clients deploy after this round."""
    if progress.deployed is None:
        progress.deployed = fed.personal(algorithm, progress.state)
    return progress.deployed


def score_end(fed: Federation, algorithm: Algorithm, progress: Progress, plan: dict[str, Any]) -> None:
    """Score the models after the last round, unless that was done already."""
    t = progress.round
    fed.enter_round(t, progress.state)
    if t > 0 and progress.history.at(t, "validation", "loss") is None:
        _score(fed, algorithm, progress, plan)


def _score(fed: Federation, algorithm: Algorithm, progress: Progress, plan: dict[str, Any]) -> None:
    """Add validation metrics of this round and what the algorithm observes; remember the best models so far."""
    t, ends = progress.round, progress.round == plan["rounds"]
    validated = fed.has_rows("validation")
    if plan["select"] == "best" and not validated:
        raise RunError("select='best' needs validation rows; give a split with some")
    if not ends and not plan["evaluate_every"]:
        return
    progress.history.add(t, "server", algorithm.observe(fed, progress.state))
    if not validated:
        if not ends and "epsilon" not in plan:
            progress.history.add(t, "train", fed.evaluate(algorithm, progress.state, "train", _further(plan)))
        return
    scored = fed.deploy_and_evaluate(algorithm, progress.state, "validation", _further(plan))
    values, progress.deployed = scored
    progress.history.add(t, "validation", values)
    judge = find(plan.get("metric", LOSS.name))
    loss = judge.cost(mean_over_clients(values[judge.name]))
    log.debug("round %d: validation %s %.6g", t, judge.name, mean_over_clients(values[judge.name]))
    if plan["select"] == "best" and loss < progress.best.loss:
        progress.best = Best(t, loss, deployed(fed, algorithm, progress), progress.state)


def _further(plan: dict[str, Any]) -> list[Metric]:
    """Return the metrics that are recorded beside the loss and the main one."""
    names = [plan["metric"]] if "metric" in plan else []
    return [find(name) for name in dict.fromkeys([*names, *plan.get("metrics", ())])]
