"""What clients expect to be asked may be computed early, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.algorithms.base import Algorithm
from coterie.federation.client import Client
from coterie.federation.state import State
from coterie.runtime import workers
from coterie.runtime.early import Early


def federation(**options: Any) -> Federation:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(6, 5, generator=generator) for _ in range(9)]
    ys = [torch.randint(0, 3, (6,), generator=generator) for _ in range(9)]
    return Federation.from_arrays(xs, ys, model=models.mlp(hidden=(8,), stacked=True), **options)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The phases whose early replies were taken; small work is begun early as well."""
    taken: list[str] = []
    original = Early.reply

    def noted(self: Early, call: Any, client: Client) -> Any:
        reply = original(self, call, client)
        taken.extend([call.phase] if reply is not None else [])
        return reply

    monkeypatch.setattr(Early, "reply", noted)
    monkeypatch.setattr(workers, "SHARED_PRODUCTS", 1)
    return taken


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"loop": True}, {"byzantine": {"0": "sign-flip"}}])
@pytest.mark.parametrize("settings", [{}, {"batch": 3}, {"participation": 0.5}, {"momentum": 0.5}])
def test_early_replies_change_nothing(
    options: dict[str, Any], settings: dict[str, Any], early: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = make("cobo", lr=0.1, rho=1.0, rate=4.0, **settings)
    found = fit(federation(**options), algorithm, 5)
    expected_early = not (
        options.keys() & {"dropout", "loop"} or settings.keys() & {"batch", "participation"}
    )
    assert early == (["slope"] * 4 if expected_early else [])
    monkeypatch.setattr(Federation, "expect", lambda *_, **__: None)
    plain = fit(federation(**options), algorithm, 5)
    torch.testing.assert_close(found.personal, plain.personal, rtol=1e-5, atol=1e-6)
    assert found.fed.ledger.entries == plain.fed.ledger.entries
    assert found.fed.left_out == plain.fed.left_out


@dataclass(frozen=True)
class Wrong(Algorithm):
    """Expects one thing and asks for another, never asks, or asks for something that is kept."""

    batch: int = 0
    how: str = "other"

    def start(self, fed: Federation) -> State:
        return State(x=torch.zeros(fed.n, fed.d))

    def round(self, fed: Federation, s: State, t: int) -> State:
        asked = {"x": s.x}
        fed.expect(self.step, asked if self.how == "keeps" else {"x": s.x + 5})
        if self.how == "never":
            return s
        return State(x=fed.map(self.step, each=asked).values)

    def step(self, client: Client, x: Tensor) -> Tensor:
        if self.how == "raises" and (x > 4).any():
            raise ZeroDivisionError
        if self.how == "keeps":
            client.keep.x = x
        return x - 0.1 * client.grad(x)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def handout(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": s.x}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("how", ["other", "never", "raises", "keeps"])
def test_what_was_not_asked_for_is_not_used(how: str, early: list[str]) -> None:
    found = fit(federation(), Wrong(how=how), 4)
    assert not early
    if how != "never":
        x = torch.zeros(9, found.fed.d)
        for _ in range(4):
            x = found.fed.fresh().map(Wrong().step, each={"x": x}).values
        torch.testing.assert_close(found.personal, x)
    assert bool(found.fed.runtime.store.snapshot()) == (how == "keeps")
    assert workers.spare_hands() == 1, "a thread has helpers during a run only"
