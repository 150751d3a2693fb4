"""The conformance suite: what every algorithm, ours or a plugin's, must do, on every runtime.

A promise about the algorithm alone is a function in `ALGORITHM_CHECKS`. A promise that must hold wherever clients live
is a function in `RUNTIME_CHECKS` and runs on every entry of `runtimes.RUNTIMES`: a new runtime is one entry there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from coterie import models
from coterie._core import files
from coterie._core.errors import SettingError
from coterie.algorithms.base import DISCLOSURES, Algorithm
from coterie.conformance.runtimes import L2, ROUNDS, RUNTIMES, Open, Options, chunks, federation, maker
from coterie.engine.federation import Federation
from coterie.engine.late import Lateness
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Answer, Call, Visits
from coterie.train import fit as training
from coterie.train.divergence import divergence_ignored
from coterie.train.run import Run

TOLERANCE = 1e-12
SPLIT = (0.6, 0.2, 0.2)
LATE = Lateness(buffer=3, staleness=2, delays="exponential:0.8")
IN_TIME = Lateness(delays="exponential:0")


# Promises hold whatever the step size, and the federations here are steep.
fit, resume = divergence_ignored()(training.fit), divergence_ignored()(training.resume)


def check_algorithm(algorithm: Algorithm) -> list[str]:
    """Check that an algorithm keeps every promise, on every runtime.

    Parameters
    ----------
    algorithm : Algorithm
        The algorithm to check; its `batch` is reduced to at most 4 rows.

    Returns
    -------
    list of str
        The names of the promises, all kept.

    Raises
    ------
    AssertionError
        Names the algorithm and the first promise that is broken.

    Examples
    --------
    >>> import coterie
    >>> kept = coterie.check_algorithm(coterie.algorithms.FedAvg(lr=0.1))
    >>> "ledger_equals_declaration" in kept and "same_as_stacked/remote" in kept
    True
    """
    algorithm = algorithm.replace(batch=algorithm.batch and min(algorithm.batch, 4))
    for name, check in PROMISES.items():
        try:
            check(algorithm)
        except Exception as broken:
            raise AssertionError(f"{algorithm.name}: {name}: {broken}") from broken
    return list(PROMISES)


def same_as_stacked(algorithm: Algorithm, host: Open) -> None:
    """Models, state, metrics and ledger are those of all clients in one tensor operation."""
    expected, expected_models = _scored(algorithm, RUNTIMES["stacked"])
    run, found = _scored(algorithm, host)
    _same(expected, run)
    _close(expected_models, found, "personal models")


def any_subset_may_answer(algorithm: Algorithm, host: Open) -> None:
    """Where clients drop out, models, state, metrics and ledger are those of the same clients stacked."""
    expected = _dropping(algorithm)
    with host(algorithm, Options(dropout=0.5)) as here:
        run = _run(here.fed, algorithm)
        _same(expected, run)
        _close(expected.personal, here.models(run), "personal models")


def killed_and_resumed_equals_uninterrupted(algorithm: Algorithm, host: Open) -> None:
    """Check that a run stopped after a round and resumed from its folder gives the same bits."""
    expected, expected_models = _scored(algorithm, host)
    with tempfile.TemporaryDirectory() as folder, host(algorithm, Options(SPLIT)) as here:
        run = _stopped_and_resumed(here.fed, algorithm, Path(folder) / "run", stop=2)
        assert torch.equal(here.models(run), expected_models), "models differ"
    assert run.state.equal(expected.state), "the state differs"
    assert run.fed.ledger.entries == expected.fed.ledger.entries, "the ledger differs"
    blocks = zip(run.history.blocks, expected.history.blocks, strict=True)
    assert all(one[:3] == other[:3] and _identical(one[3], other[3]) for one, other in blocks), (
        "metrics differ"
    )


def a_client_that_answers_nan_is_left_out(algorithm: Algorithm, host: Open) -> None:
    """One client whose numbers overflow does not spoil the models of the others."""
    with host(algorithm, Options()) as here:
        for home in here.homes:
            rows = home.rows("train")
            rows.y[rows.start[rows.size == 1]] = math.nan  # the first client alone has one row
        found = here.models(_run(here.fed, algorithm))
    assert torch.isfinite(found[1:]).all(), "NaN reached the models of other clients"


def evaluation_leaves_no_trace(algorithm: Algorithm, host: Open) -> None:
    """Scoring every round or never trains the same models."""
    _, often = _scored(algorithm, host)
    with host(algorithm, Options(SPLIT)) as here:
        never = here.models(fit(here.fed, algorithm, ROUNDS, evaluate_every=0))
    assert torch.equal(often, never), "evaluation changes training"


def fast_forward_equals_round_by_round(algorithm: Algorithm, host: Open) -> None:
    """Check that rounds computed at once give the bits and the ledger of rounds computed one by one."""
    if type(algorithm).fast_forward is Algorithm.fast_forward:
        return
    with host(algorithm, Options()) as here:
        if not here.fed.runtime.capabilities.fast_forward:
            return
        quick = fit(here.fed, algorithm, 5 * ROUNDS, evaluate_every=0)
        with patch.object(type(algorithm), "fast_forward", Algorithm.fast_forward):
            slow = fit(here.fed, algorithm, 5 * ROUNDS, evaluate_every=0)
        assert torch.equal(here.models(quick), here.models(slow)), "models differ"
    assert quick.state.equal(slow.state), "the state differs"
    assert list(quick.fed.ledger.entries.items()) == list(slow.fed.ledger.entries.items()), (
        "the ledger differs"
    )


def late_answers_join_later_rounds(algorithm: Algorithm, host: Open) -> None:
    """Check runs in which clients are late: a resumed run has the same bits, and all runtimes the same numbers.

    If nobody is late, the bits are those of a run that waits; a method that does not tolerate late answers refuses.
    """
    if not algorithm.tolerates_late:
        try:
            LATE.require(algorithm)
        except SettingError:
            return
        raise AssertionError("it does not tolerate late answers and does not refuse them")
    expected = _delayed(algorithm, RUNTIMES["stacked"])
    _, in_time = _scored(algorithm, host)
    with tempfile.TemporaryDirectory() as folder, host(algorithm, Options(SPLIT)) as here:
        run = _stopped_and_resumed(here.fed, algorithm, Path(folder) / "run", stop=2, late=LATE)
        found = here.models(run)
        _same(expected[0], run)
        _close(expected[1], found, "models with late answers")
    with host(algorithm, Options(SPLIT)) as here:
        waited = fit(here.fed, algorithm, ROUNDS, evaluate_every=1, late=IN_TIME)
        assert torch.equal(here.models(waited), in_time), "nobody is late, and the models differ"
    if expected[0].fed.late is not None:
        assert expected[0].fed.late.clock < ROUNDS, "the buffer ended no round"


def stacked_equals_one_by_one(algorithm: Algorithm) -> None:
    """All clients in one tensor operation give what each gives alone, also where losses are sums over rows."""
    model = algorithm.trial_model(ROUNDS) or models.linear(l2=L2, reduction="sum", intercept=True)
    one, other = (_run(federation(model=model, loop=loop), algorithm) for loop in (False, True))
    _same(one, other)
    _close(one.personal, other.personal, "personal models")


def chunks_do_not_matter(algorithm: Algorithm) -> None:
    """Stacking two clients at a time gives what stacking all gives."""
    same_as_stacked(algorithm, chunks)
    a_client_that_answers_nan_is_left_out(algorithm, chunks)


def few_may_answer(algorithm: Algorithm) -> None:
    """Models are finite if hardly anybody answers, and a single client gets a model."""
    for dropout in (0.3, 0.95):
        run = _run(federation(model=algorithm.trial_model(ROUNDS), dropout=dropout), algorithm)
        assert torch.isfinite(run.personal).all(), f"models are not finite with {dropout:.0%} dropout"
    for size in (1, 20):
        run = _run(federation((size,), algorithm.trial_model(ROUNDS)), algorithm)
        assert run.personal.shape == (1, run.fed.d), f"one client with {size} rows gets no model"


def resumed_files_are_the_same(algorithm: Algorithm) -> None:
    """Check that a run stopped in its first or last round and resumed leaves the bytes of a whole one."""
    fed = federation(model=algorithm.trial_model(ROUNDS), split=SPLIT)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        fit(fed, algorithm, ROUNDS, whole, evaluate_every=1, checkpoint_every=1)
        for stop in (1, ROUNDS):
            stopped = Path(folder) / str(stop)
            _stopped_and_resumed(fed, algorithm, stopped, stop)
            for name in ("metrics.parquet", "ledger.parquet", "models/models.safetensors"):
                same = files.sha256(stopped / name) == files.sha256(whole / name)
                assert same, f"{name} differs after a stop in round {stop}"


def inputs_are_not_changed(algorithm: Algorithm) -> None:
    """Phases leave what they receive, what clients keep, and the state they are given as they were."""
    _run(_watched(Counter(), algorithm), algorithm)


def ledger_equals_declaration(algorithm: Algorithm) -> None:
    """Every phase sends what `traffic_of` declares: floats down and up per visit, or fewer if it is `varying`."""
    visits: Counter[str] = Counter()
    run = _run(_watched(visits, algorithm), algorithm)
    declared = algorithm.traffic_of(run.fed.model)
    for phase, count in visits.items():
        if phase == "deploy":
            continue
        assert phase in declared, f"traffic() does not declare phase {phase!r}"
        down = run.fed.ledger.total("floats_down", phase=phase)
        up = run.fed.ledger.total("floats_up", phase=phase)
        expected = (declared[phase][0] * count, declared[phase][1] * count)
        if phase in algorithm.varying:
            assert 0 < down <= expected[0] and 0 < up <= expected[1], (
                f"{phase}: ledger {(down, up)}, declared at most {expected} for {count} visits"
            )
            continue
        assert (down, up) == expected, f"{phase}: ledger {(down, up)}, declared {expected} for {count} visits"


def every_phase_says_what_it_reveals(algorithm: Algorithm) -> None:
    """Every phase that clients run is in `reveals`, and those that reveal nothing send nothing."""
    visits: Counter[str] = Counter()
    run = _run(_watched(visits, algorithm), algorithm)
    for phase, disclosure in algorithm.reveals.items():
        assert disclosure in DISCLOSURES, f"{phase} reveals {disclosure!r}: choose one of {list(DISCLOSURES)}"
        assert callable(getattr(algorithm, phase, None)), f"reveals names {phase!r}, which is no phase"
    for phase in visits.keys() | algorithm.traffic_of(run.fed.model).keys():
        if phase not in ("begin", "deploy"):
            assert phase in algorithm.reveals, f"reveals does not say what phase {phase!r} sends"
        if algorithm.reveals.get(phase, "nothing") == "nothing":
            assert not run.fed.ledger.total("floats_up", phase=phase), f"{phase} says nothing, but sends"


def documentation_names_its_source(algorithm: Algorithm) -> None:
    """Check that the docstring says what the method does and cites its source, with a year."""
    text = inspect.getdoc(type(algorithm)) or ""
    assert text != inspect.getdoc(Algorithm), "no docstring of its own"
    assert re.search(r"\b(18|19|20)\d\d\b", text), "the docstring cites no source (author, venue, year)"
    for field in dataclasses.fields(algorithm):
        assert field.metadata.get("help"), f"hyperparameter {field.name!r} is not explained: use setting(...)"


def settings_survive_a_file(algorithm: Algorithm) -> None:
    """Hyperparameters written to TOML and read back give the same algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        files.write_toml(Path(folder) / "a.toml", {"algorithm": algorithm.settings()})
        again = type(algorithm)(**files.read_toml(Path(folder) / "a.toml")["algorithm"])
    assert again == algorithm, f"{again} is not {algorithm}"


def theory_is_finite(algorithm: Algorithm) -> None:
    """`from_theory`, where there is one, gives finite numbers on a smooth convex problem."""
    make = getattr(type(algorithm), "from_theory", None)
    if make is None:
        return
    chosen = make(federation(), **getattr(type(algorithm), "theory_example", {}))
    for name, value in chosen.settings().items():
        assert not isinstance(value, float) or math.isfinite(value), f"from_theory gives {name} = {value}"
    assert torch.isfinite(_run(federation(), chosen).personal).all(), "from_theory's settings diverge"


ALGORITHM_CHECKS: tuple[Callable[[Algorithm], None], ...] = (
    stacked_equals_one_by_one,
    few_may_answer,
    chunks_do_not_matter,
    inputs_are_not_changed,
    resumed_files_are_the_same,
    ledger_equals_declaration,
    every_phase_says_what_it_reveals,
    documentation_names_its_source,
    settings_survive_a_file,
    theory_is_finite,
)
RUNTIME_CHECKS: tuple[Callable[[Algorithm, Open], None], ...] = (
    same_as_stacked,
    any_subset_may_answer,
    killed_and_resumed_equals_uninterrupted,
    a_client_that_answers_nan_is_left_out,
    evaluation_leaves_no_trace,
    fast_forward_equals_round_by_round,
    late_answers_join_later_rounds,
)


def _on(check: Callable[[Algorithm, Open], None], host: Open) -> Callable[[Algorithm], None]:
    return lambda algorithm: check(algorithm, host)


PROMISES: dict[str, Callable[[Algorithm], None]] = {check.__name__: check for check in ALGORITHM_CHECKS}
PROMISES |= {
    f"{check.__name__}/{name}": _on(check, host)
    for name, host in RUNTIMES.items()
    for check in RUNTIME_CHECKS
}


def _run(fed: Federation, algorithm: Algorithm) -> Run:
    return fit(fed, algorithm, ROUNDS, evaluate_every=2)


@functools.lru_cache(maxsize=4)
def _scored(algorithm: Algorithm, host: Open) -> tuple[Run, Tensor]:
    """Return an uninterrupted run that is scored in every round, and its models."""
    with host(algorithm, Options(SPLIT)) as here:
        run = fit(here.fed, algorithm, ROUNDS, evaluate_every=1)
        return run, here.models(run)


@functools.lru_cache(maxsize=1)
def _delayed(algorithm: Algorithm, host: Open) -> tuple[Run, Tensor]:
    """Return a run in which clients are late, and its models."""
    with host(algorithm, Options(SPLIT)) as here:
        run = fit(here.fed, algorithm, ROUNDS, evaluate_every=1, late=LATE)
        return run, here.models(run)


@functools.lru_cache(maxsize=1)
def _dropping(algorithm: Algorithm) -> Run:
    """Return a run of stacked clients of which half drop out."""
    with RUNTIMES["stacked"](algorithm, Options(dropout=0.5)) as here:
        return _run(here.fed, algorithm)


def _same(one: Run, other: Run) -> None:
    for name, value in one.state.tensors().items():
        _close(value, other.state.tensors()[name], f"state field {name!r}")
    assert one.fed.ledger.entries == other.fed.ledger.entries, "the ledger differs"
    assert len(one.history.blocks) == len(other.history.blocks), "metrics of other rounds"
    for (*what, value), (*other_what, other_value) in zip(
        one.history.blocks, other.history.blocks, strict=True
    ):
        assert what == other_what, f"metrics {what} and {other_what}"
        _close(value.nan_to_num(), other_value.nan_to_num(), f"metrics {what}")


def _identical(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _close(one: Tensor, other: Tensor, what: str) -> None:
    gap = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    scale = max(1.0, float(one.double().abs().max())) if one.numel() else 1.0
    assert gap <= TOLERANCE * scale, f"{what} differ by {gap:.1e}"


class _Stopped(Exception):
    pass


def _stopped_and_resumed(
    fed: Federation, algorithm: Algorithm, path: Path, stop: int, late: Lateness | None = None
) -> Run:
    def watch(t: int, rounds: int) -> None:
        if t == stop:
            raise _Stopped

    with suppress(_Stopped):
        fit(fed, algorithm, ROUNDS, path, evaluate_every=1, checkpoint_every=1, watch=watch, late=late)
    with patch("coterie.train.folder.make", maker(algorithm)):
        return resume(path, fed)


class _Watchful(LocalRuntime):
    """A runtime that counts visits and sees whether a phase changed its inputs or what clients keep."""

    capabilities = dataclasses.replace(
        LocalRuntime.capabilities, fast_forward=False
    )  # every round is to be seen
    visits: Counter[str]

    def fresh(self, seed: int | None = None) -> _Watchful:
        runtime = _Watchful(self.splits, self.model, self.seed, self.dtype, self.clusters)
        runtime.visits = self.visits
        return runtime

    def run(self, call: Call, visits: Visits, *rest: Any, **named: Any) -> Answer:
        count = len(self.ids) if visits.at is None else len(visits.at)
        self.visits[call.phase] += count
        shared = {name: value for name, value in call.shared.items() if isinstance(value, Tensor)}
        given = {**shared, **call.each}
        kept = {name: column.rows for name, column in self.store.columns.items()}
        before = {name: value.clone() for name, value in given.items()}
        kept_before = {name: value.clone() for name, value in kept.items()}
        answer = super().run(call, visits, *rest, **named)
        for name, value in given.items():
            assert torch.equal(value, before[name]), (
                f"phase {call.phase!r} changes its input {name!r} in place"
            )
        for name, value in kept.items():
            lent = self.store.columns[name].rows is not value
            assert not lent or torch.equal(value, kept_before[name]), (
                f"phase {call.phase!r} changes kept {name!r}"
            )
        return answer


def _watched(visits: Counter[str], algorithm: Algorithm) -> Federation:
    fed = federation(model=algorithm.trial_model(ROUNDS))
    splits = {split: fed.runtime.rows(split) for split in fed.rows}
    runtime = _Watchful(splits, fed.model, fed.seed, fed.dtype, fed.clusters)
    runtime.visits, fed.runtime = visits, runtime
    return fed
