from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie._core.errors import NobodyAnswered
from coterie.algorithms import Algorithm, make
from coterie.engine.client import Client
from coterie.engine.state import State
from coterie.train import deferred_finite_check


@dataclass(frozen=True)
class Stumbling(Algorithm):
    """Client 1 answers NaN in round 11; in rounds 20 and 21 nobody gives a number, and the server would choke on it."""

    def start(self, fed: Federation) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.step, x=s.x, t=t)
        if len(r) == 0:
            raise NobodyAnswered("nobody")
        if not torch.isfinite(r.values).all():
            raise ZeroDivisionError("a NaN got through")
        return State(x=r.mean())

    def begin(self, client: Client) -> None:
        client.keep.visits = torch.zeros(*client.lead, 1)

    def step(self, client: Client, x: Tensor, t: int) -> Tensor:
        client.keep.visits = client.keep.visits + 1
        broken = (client.uniform("client") > 2) | (t in (20, 21))
        if t == 11 and client.lead:
            broken = torch.arange(client.lead[0]).unsqueeze(-1) == 1
        return torch.where(broken, torch.nan, x - 0.1 * client.grad(x))

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x + 0.01 * client.keep.visits

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        return {}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "step": (d + 1, d)}


def federation() -> Federation:
    torch.manual_seed(3)
    xs = [torch.randn(12, 3, dtype=torch.float64) for _ in range(4)]
    ys = [x @ torch.ones(3, dtype=torch.float64) for x in xs]
    return Federation.from_arrays(xs, ys, models.linear(), split=(0.5, 0.25, 0.25))


def told(run: Any) -> tuple[Any, ...]:
    blocks = [(t, split, name, value.tolist()) for t, split, name, value in run.history.blocks]
    return blocks, run.fed.ledger.entries, run.fed.left_out, run.lost_rounds, run.personal.tolist()


@pytest.mark.parametrize("algorithm", [Stumbling(), make("ditto", batch=3), make("cobo", batch=2)])
@pytest.mark.parametrize("stride", [3, 64])
def test_rounds_without_a_look_change_nothing(monkeypatch, algorithm: Algorithm, stride: int) -> None:
    def trained() -> tuple[Any, list[int]]:
        seen: list[int] = []
        run = fit(federation(), algorithm, 40, evaluate_every=15, watch=lambda t, _: seen.append(t))
        return told(run), seen

    careful, each = trained()
    monkeypatch.setattr(deferred_finite_check, "DEVICES", ["cpu"])
    monkeypatch.setattr(deferred_finite_check, "ROUNDS", stride)
    quick, seen = trained()
    assert quick == careful
    assert each == list(range(1, 41)) and sorted(set(seen)) == each
    if isinstance(algorithm, Stumbling):
        assert careful[2] == [(11, 1, "step: not finite")] + [
            (t, k, "step: not finite") for t in (20, 21) for k in range(4)
        ]
        assert careful[3] == 2


def test_answers_are_not_looked_at_on_the_way(monkeypatch) -> None:
    looks = 0
    true = torch.Tensor.item

    def counted(tensor: Tensor) -> Any:
        nonlocal looks
        looks += 1
        return true(tensor)

    monkeypatch.setattr(torch.Tensor, "item", counted)
    fit(federation(), "fedavg", 60, evaluate_every=0)
    careful, looks = looks, 0
    monkeypatch.setattr(deferred_finite_check, "DEVICES", ["cpu"])
    fit(federation(), "fedavg", 60, evaluate_every=0)
    assert careful - looks == 59


def test_errors_that_are_no_fault_of_a_number_are_raised(monkeypatch) -> None:
    monkeypatch.setattr(deferred_finite_check, "DEVICES", ["cpu"])

    def watch(t: int, rounds: int) -> None:
        if t == 7:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fit(federation(), "fedavg", 60, watch=watch)
