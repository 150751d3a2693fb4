"""What was asked in the last round may be computed ahead, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie._core import threads
from coterie.algorithms import make
from coterie.algorithms.base import Algorithm
from coterie.algorithms.cobo import PRINTED
from coterie.engine.client import Client
from coterie.engine.prefetch import Prefetch
from coterie.engine.state import State


def federation(**options: Any) -> Federation:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(6, 5, generator=generator) for _ in range(9)]
    ys = [torch.randint(0, 3, (6,), generator=generator) for _ in range(9)]
    return Federation.from_arrays(xs, ys, model=models.mlp(hidden=(8,), stacked=True), **options)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The phases whose early replies were taken; small work is begun early as well."""
    taken: list[str] = []
    original = Prefetch.reply

    def noted(self: Prefetch, call: Any, client: Client) -> Any:
        reply = original(self, call, client)
        taken.extend([call.phase] if reply is not None else [])
        return reply

    monkeypatch.setattr(Prefetch, "reply", noted)
    monkeypatch.setattr(threads, "SHARED_PRODUCTS", 1)
    return taken


@pytest.mark.quick(
    "settings0-options0",
    "settings0-options2",
    "settings1-options0",
    "settings2-options0",
    "settings2-options2",
    "settings3-options0",
    "settings3-options2",
)
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"loop": True}, {"byzantine": {"0": "sign-flip"}}])
@pytest.mark.parametrize("settings", [{}, {"batch": 3}, {"participation": 0.5}, {"momentum": 0.5}])
def test_early_replies_change_nothing(
    options: dict[str, Any], settings: dict[str, Any], early: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = make("cobo", lr=0.1, rho=1.0, rate=4.0, gamma=0.01, **PRINTED, **settings)
    found = fit(federation(**options), algorithm, 5)
    expected_early = not (options.keys() & {"dropout", "loop"} or settings.keys() & {"participation"})
    assert early == (["slope"] * 4 if expected_early else [])
    monkeypatch.setattr(Prefetch, "begin_round", lambda *_: None)
    plain = fit(federation(**options), algorithm, 5)
    torch.testing.assert_close(found.personal, plain.personal, rtol=1e-5, atol=1e-6)
    assert found.fed.ledger.entries == plain.fed.ledger.entries
    assert found.fed.left_out == plain.fed.left_out


@dataclass(frozen=True)
class Wrong(Algorithm):
    """Asks for something else in the second round, for nothing, or for something that is kept."""

    batch: int = 0
    how: str = "other"

    def start(self, fed: Federation) -> State:
        return State(x=torch.zeros(fed.n, fed.d))

    def round(self, fed: Federation, s: State, t: int) -> State:
        fed.map(self.look, each={"x": s.x})
        if self.how == "never" and t > 1:
            return s
        asked = s.x + 0 if self.how == "other" and t > 1 else s.x
        return State(x=fed.map(self.step, each={"x": asked}).values)

    def look(self, client: Client, x: Tensor) -> None:
        pass

    def step(self, client: Client, x: Tensor) -> Tensor:
        if self.how == "keeps":
            client.keep.x = x
        return x - 0.1 * client.grad(x)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.x}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("how", ["other", "never", "keeps"])
def test_what_was_not_asked_for_is_not_used(how: str, early: list[str]) -> None:
    found = fit(federation(), Wrong(how=how), 4)
    assert not early
    if how != "never":
        x = torch.zeros(9, found.fed.d)
        for _ in range(4):
            x = found.fed.fresh().map(Wrong().step, each={"x": x}).values
        torch.testing.assert_close(found.personal, x)
    assert bool(found.fed.runtime.store.snapshot()) == (how == "keeps")
    assert threads.spare_hands() == 1, "a thread has helpers during a run only"


@dataclass(frozen=True)
class Fails(Wrong):
    """Raises in the second round when it is computed ahead (a test, 2026)."""

    def step(self, client: Client, x: Tensor) -> Tensor:
        if x.abs().sum() > 0:
            raise ZeroDivisionError("on purpose")
        return x - 0.1 * client.grad(x)


@pytest.mark.usefixtures("two_threads", "early")
def test_what_fails_ahead_is_raised_when_it_is_asked_for() -> None:
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        fit(federation(), Fails(how="fine"), 4)
