"""A runtime says what it can do, and what it cannot do is refused by name."""

import dataclasses

import pytest
import torch

import coterie
from coterie._core.errors import CoterieError
from coterie.algorithms import make
from coterie.conformance import federation
from coterie.deploy.loopback import LoopbackRuntime
from coterie.deploy.remote import RemoteRuntime
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.protocol import Capabilities, Runtime

METHODS = {
    "rows_visible": ("rows", "with_rows"),
    "state_visible": ("kept", "keep"),
    "memory_limit": ("limit_memory",),
    "fast_forward": ("stack",),
    "deferred_checks": ("unchecked", "hold"),
    "models_stay": ("finish",),
    "reopens": ("reopened",),
}


@pytest.mark.parametrize("runtime", [LocalRuntime, LoopbackRuntime, RemoteRuntime])
def test_a_runtime_has_the_methods_of_its_capabilities_and_no_others(runtime):
    assert METHODS.keys() == {field.name for field in dataclasses.fields(Capabilities)}
    for capability, methods in METHODS.items():
        for name in methods:
            overridden = getattr(runtime, name) is not getattr(Runtime, name)
            assert overridden == getattr(runtime.capabilities, capability), (capability, name)


def test_a_missing_capability_is_named():
    runtime = LoopbackRuntime.split(federation(), 2).runtime
    with pytest.raises(CoterieError, match="LoopbackRuntime does not have the capability 'rows_visible'"):
        runtime.rows("train")
    with pytest.raises(CoterieError, match="'memory_limit'"):
        runtime.limit_memory(1)


def test_state_that_is_held_can_be_put_back():
    runtime = federation().runtime
    runtime.keep("w", torch.zeros(6, 2))
    put_back = runtime.hold()
    runtime.keep("w", torch.ones(6, 2))
    runtime.keep("v", torch.ones(6, 2))
    put_back()
    assert torch.equal(runtime.kept("w"), torch.zeros(6, 2))
    with pytest.raises(KeyError):
        runtime.kept("v")


def test_other_rows_come_with_nothing_kept():
    fed = federation(split=(0.5, 0.25, 0.25))
    fed.runtime.keep("w", torch.zeros(6, 2))
    splits = {split: fed.runtime.rows(split) for split in ("train", "validation", "test")}
    swapped = fed.runtime.with_rows(splits | {"train": splits["test"]}, None)
    assert swapped.rows("train") is splits["test"] and not swapped.snapshot()


@pytest.mark.parametrize("name", ["ditto", "fedavg", "fine-tuned", "rtfa"])
def test_one_deployment_gives_the_scores_and_the_models_of_two(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = coterie.fit(
        coterie.Federation.from_table("heart_disease", "hospital", "sick"), make(name), rounds=2
    )
    fed, spent = run.fed, []
    for evaluate in (fed.deploy_and_evaluate, fed.evaluate):
        fed.ledger.entries.clear()
        found = evaluate(run.algorithm, run.state, "validation")
        spent.append(dict(fed.ledger.entries))
        if isinstance(found, tuple):
            values, models = found
    assert models is not None and torch.equal(models, fed.personal(run.algorithm, run.state))
    assert all(torch.equal(values[metric], found[metric]) for metric in found)
    assert spent[0] == spent[1] and spent[0]
    monkeypatch.setattr("coterie.engine.federation.HELD_ELEMENTS", 0)
    assert fed.deploy_and_evaluate(run.algorithm, run.state, "validation")[1] is None
