"""One model for everybody is held once, and scored as if it were held by each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie._core import broadcast
from coterie.algorithms import make
from coterie.engine.local_runtime import LocalRuntime
from coterie.engine.state import State
from coterie.models.network import Network


def federation(model: object = None) -> Federation:
    torch.manual_seed(0)
    sizes = torch.tensor([3, 40, 5, 17, 90, 8])
    x, y = torch.randn(int(sizes.sum()), 6), torch.randint(0, 3, (int(sizes.sum()),))
    return Federation.from_rows(x, y, sizes, model=model or models.mlp((5,), classes=3), names=list("abcdef"))


def test_rows_of_a_shared_stack() -> None:
    row = torch.arange(3.0)
    stack, own = row.expand(4, 3), torch.randn(4, 3)
    at = torch.tensor([2, 0, 2])
    for stacked in (stack, own):
        assert torch.equal(broadcast.index(stacked, at), stacked[at]) and torch.equal(
            broadcast.to(stacked, "cpu"), stacked
        )
        assert torch.equal(broadcast.compact(stacked), stacked) and torch.equal(
            broadcast.cat([stacked, stacked[:2]])[4:], stacked[:2]
        )
    assert all(
        broadcast.is_broadcast(part)
        for part in (broadcast.index(stack, at), broadcast.to(stack, "cpu"), broadcast.compact(stack))
    )
    assert (
        broadcast.is_broadcast(broadcast.cat([stack, stack[:2]]))
        and len(broadcast.cat([stack, stack[:2]])) == 6
    )
    assert not broadcast.is_broadcast(
        broadcast.cat([stack, row.clone().expand(2, 3)])
    ) and not broadcast.is_broadcast(own)
    remembered = broadcast.compact(stack)
    row += 1
    assert torch.equal(remembered[0], row - 1)


@pytest.mark.parametrize("model", [None, models.softmax(classes=3)])
def test_a_run_holds_one_model_for_everybody(model: object) -> None:
    run = fit(federation(model), make("fedavg", batch=4), 3)
    assert broadcast.is_broadcast(run.personal) and run.personal.shape == (6, run.fed.d)
    each = run.fed.score(run.personal.clone(memory_format=torch.contiguous_format), "train")
    for name, value in run.fed.score(run.personal, "train").items():
        torch.testing.assert_close(value, each[name])


def test_personal_models_are_everybodys_own() -> None:
    run = fit(federation(), make("ditto", batch=4), 3)
    assert not broadcast.is_broadcast(run.personal) and len(run.personal.unique(dim=0)) == 6


def test_it_is_written_out_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for clients of different sizes, nor for stacks that are computed one after the other."""
    scored = []
    measure = Network.measure

    def watched(self: Network, w: Tensor, *rows: Tensor) -> dict[str, Tensor]:
        scored.append(len(w) == 1 or broadcast.is_broadcast(w))
        return measure(self, w, *rows)

    monkeypatch.setattr(Network, "measure", watched)
    monkeypatch.setattr(LocalRuntime, "stack_size", lambda self, batch: 4)
    run = fit(federation(), make("fedavg", batch=4), 3)
    assert len(scored) > 4 and all(scored) and broadcast.is_broadcast(run.personal)


def test_it_does_not_change_with_the_state() -> None:
    fed, algorithm = federation(), make("fedavg", batch=4)
    state = State(x=fed.initial_model())
    personal = fed.personal(algorithm, state)
    state.x.zero_()
    assert personal.abs().sum() > 0
