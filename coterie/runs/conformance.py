"""The conformance suite: what any algorithm, ours or a plugin's, must do. One function per promise."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from coterie import models
from coterie.algorithms.base import Algorithm
from coterie.federation import randomness
from coterie.federation.federation import Federation
from coterie.federation.state import State
from coterie.runs import files
from coterie.runs.fit import fit, resume
from coterie.runs.run import Run
from coterie.runtime import shard as shard_module
from coterie.runtime.loopback import Nodes
from coterie.runtime.shard import Shard
from coterie.runtime.visits import Answer, Call, Visits

ROUNDS = 4
TOLERANCE = 1e-12


def check_algorithm(algorithm: Algorithm) -> list[str]:
    """Run every check and return their names; the first promise that is broken raises AssertionError.

    >>> import coterie
    >>> len(coterie.check_algorithm(coterie.algorithms.FedAvg(lr=0.1))) >= 10
    True
    """
    algorithm = algorithm.replace(batch=algorithm.batch and min(algorithm.batch, 4))
    for check in CHECKS:
        try:
            check(algorithm)
        except Exception as broken:
            raise AssertionError(f"{algorithm.name}: {check.__name__}: {broken}") from broken
    return [check.__name__ for check in CHECKS]


def federation(
    sizes: tuple[int, ...] = (1, 2, 5, 9, 30, 14), model: models.Model | None = None, **options: Any
) -> Federation:
    """A small ragged federation with two clusters; the first client has one row."""
    d = 3
    keys = randomness.key(7, "conformance", torch.arange(sum(sizes)))
    x = randomness.normal(randomness.slots(keys, d))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    slope = randomness.normal(randomness.slots(randomness.key(8, "slope", torch.arange(len(sizes)) % 2), d))
    y = (x * slope[owner]).sum(-1) + 0.1 * randomness.normal(
        randomness.key(9, "noise", torch.arange(sum(sizes)))
    )
    return Federation.from_arrays(
        x.split(sizes),
        y.split(sizes),
        model or models.linear(l2=0.1),
        torch.arange(len(sizes)) % 2,
        **options,
    )


def stacked_equals_one_by_one(algorithm: Algorithm) -> None:
    """All clients in one tensor operation give what each gives alone."""
    for model in (None, models.linear(l2=0.1, reduction="sum", intercept=True)):
        _same(_run(federation(model=model), algorithm), _run(federation(model=model, loop=True), algorithm))


def chunks_do_not_matter(algorithm: Algorithm) -> None:
    """Stacking two clients at a time gives what stacking all gives."""
    whole = _run(federation(), algorithm)
    with patch.object(shard_module, "STACK_ELEMENTS", 2 * (4 * whole.fed.d + 3 * algorithm.batch)):
        _same(whole, _run(federation(), algorithm))


def messages_equal_memory(algorithm: Algorithm) -> None:
    """Spread over three nodes that speak bytes, the result and the ledger are the same."""
    here, there = _run(federation(), algorithm), _run(Nodes.split(federation(), 3), algorithm)
    _same(here, there)
    assert here.fed.ledger.entries == there.fed.ledger.entries, "the ledger differs from the local one"


def killed_and_resumed_equals_uninterrupted(algorithm: Algorithm) -> None:
    """Stopped after any round and resumed from its folder, a run gives the same bits."""
    for stop in range(1, ROUNDS + 1):
        fed = federation(split=(0.6, 0.2, 0.2))
        with tempfile.TemporaryDirectory() as folder:
            whole = fit(fed, algorithm, ROUNDS, Path(folder) / "whole", checkpoint_every=1)
            broken = Path(folder) / "broken"
            try:
                fit(fed, algorithm, ROUNDS, broken, checkpoint_every=1, watch=_stopper(stop))
            except _Stopped:
                pass
            with patch("coterie.runs.folder.make", lambda name, **settings: type(algorithm)(**settings)):
                again = resume(broken, fed)
            assert torch.equal(again.personal, whole.personal), f"models differ after a stop in round {stop}"
            assert again.state.equal(whole.state), f"the state differs after a stop in round {stop}"
            for name in ("metrics.parquet", "ledger.parquet", "models/models.safetensors"):
                same = files.sha256(broken / name) == files.sha256(Path(folder) / "whole" / name)
                assert same, f"{name} differs after a stop in round {stop}"


def any_subset_may_answer(algorithm: Algorithm) -> None:
    """Clients that drop out shorten the replies and nothing more, even when nobody is left."""
    for dropout in (0.3, 0.7, 0.95):
        run = _run(federation(dropout=dropout), algorithm)
        assert torch.isfinite(run.personal).all(), f"models are not finite with {dropout:.0%} dropout"
    for size in (1, 20):
        run = _run(federation((size,)), algorithm)
        assert run.personal.shape == (1, run.fed.d), f"one client with {size} rows gets no model"


def a_client_that_answers_nan_is_left_out(algorithm: Algorithm) -> None:
    """One client whose numbers overflow does not spoil the models of the others."""
    fed = federation()
    fed.runtime.train.y[0] = math.nan
    fed.runtime._statistics = None
    run = _run(fed, algorithm)
    others = run.personal[1:]
    assert torch.isfinite(others).all(), "NaN reached the models of other clients"


def inputs_are_not_changed(algorithm: Algorithm) -> None:
    """Phases leave what they receive, what clients keep, and the state they are given as they were."""
    fed = federation()
    fed.runtime = _Watchful(fed.runtime)
    _run(fed, algorithm)


def evaluation_leaves_no_trace(algorithm: Algorithm) -> None:
    """Scoring every round or never trains the same models."""
    often = fit(federation(split=(0.6, 0.2, 0.2)), algorithm, ROUNDS, evaluate_every=1)
    never = fit(federation(split=(0.6, 0.2, 0.2)), algorithm, ROUNDS, evaluate_every=0)
    assert torch.equal(often.personal, never.personal), "evaluation changes training"


def leaping_equals_stepping(algorithm: Algorithm) -> None:
    """Rounds taken at once give the bits and the ledger of rounds taken one by one."""
    leapt = fit(federation(), algorithm, 5 * ROUNDS, evaluate_every=0)
    with patch.object(type(algorithm), "leap", Algorithm.leap):
        stepped = fit(federation(), algorithm, 5 * ROUNDS, evaluate_every=0)
    assert torch.equal(leapt.personal, stepped.personal), "models differ"
    assert leapt.state.equal(stepped.state), "the state differs"
    ledgers = [list(run.fed.ledger.entries.items()) for run in (leapt, stepped)]
    assert ledgers[0] == ledgers[1], "the ledger differs"


def ledger_equals_declaration(algorithm: Algorithm) -> None:
    """Every phase sends what `traffic` declares: floats down and up per visit."""
    fed = federation()
    counter = _Watchful(fed.runtime)
    fed.runtime = counter
    run = _run(fed, algorithm)
    declared = algorithm.traffic(run.fed.d)
    for phase, visits in run.fed.runtime.visits.items():
        if phase == "deploy":
            continue
        assert phase in declared, f"traffic() does not declare phase {phase!r}"
        down = run.fed.ledger.total("floats_down", phase=phase)
        up = run.fed.ledger.total("floats_up", phase=phase)
        expected = (declared[phase][0] * visits, declared[phase][1] * visits)
        assert (down, up) == expected, (
            f"{phase}: ledger {(down, up)}, declared {expected} for {visits} visits"
        )


def documentation_names_its_source(algorithm: Algorithm) -> None:
    """The docstring says what the method does and cites where it is from, with a year."""
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


CHECKS: tuple[Callable[[Algorithm], None], ...] = (
    stacked_equals_one_by_one,
    chunks_do_not_matter,
    messages_equal_memory,
    killed_and_resumed_equals_uninterrupted,
    any_subset_may_answer,
    a_client_that_answers_nan_is_left_out,
    inputs_are_not_changed,
    evaluation_leaves_no_trace,
    leaping_equals_stepping,
    ledger_equals_declaration,
    documentation_names_its_source,
    settings_survive_a_file,
    theory_is_finite,
)


def _run(fed: Federation, algorithm: Algorithm) -> Run:
    return fit(fed, algorithm, ROUNDS, evaluate_every=2)


def _same(one: Run, other: Run) -> None:
    _close(one.personal, other.personal, "personal models")
    for name, value in one.state.tensors().items():
        _close(value, other.state.tensors()[name], f"state field {name!r}")


def _close(one: Tensor, other: Tensor, what: str) -> None:
    gap = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    scale = max(1.0, float(one.double().abs().max())) if one.numel() else 1.0
    assert gap <= TOLERANCE * scale, f"{what} differ by {gap:.1e}"


class _Stopped(Exception):
    pass


def _stopper(stop: int) -> Callable[[int, int], None]:
    def watch(t: int, rounds: int) -> None:
        if t == stop:
            raise _Stopped

    return watch


class _Watchful(Shard):
    """A shard that counts visits and sees whether a phase changed its inputs or what clients keep."""

    leaps = False  # every round is to be seen

    def __init__(self, shard: Shard) -> None:
        super().__init__(
            shard.splits, shard.model, shard.seed, shard.dtype, shard.clusters, shard.ids, shard.loop
        )
        self.visits: dict[str, int] = {}

    def fresh(self, seed: int | None = None) -> _Watchful:
        return _Watchful(super().fresh(seed))

    def run(self, call: Call, visits: Visits, *rest: Any, **named: Any) -> Answer:
        count = len(self.ids) if visits.at is None else len(visits.at)
        self.visits[call.phase] = self.visits.get(call.phase, 0) + count
        given = {**State(**call.shared).tensors(), **call.each}
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
