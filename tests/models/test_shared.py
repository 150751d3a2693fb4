"""One model for everybody is held once, and scored as if it were held by each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.federation.build import from_rows
from coterie.federation.state import State
from coterie.models.network import Network
from coterie.models.shared import is_shared, joined, kept, moved, picked
from coterie.runtime.shard import Shard


def federation(model: object = None) -> Federation:
    torch.manual_seed(0)
    sizes = torch.tensor([3, 40, 5, 17, 90, 8])
    x, y = torch.randn(int(sizes.sum()), 6), torch.randint(0, 3, (int(sizes.sum()),))
    return from_rows(x, y, sizes, model=model or models.mlp((5,), classes=3), names=list("abcdef"))


def test_rows_of_a_shared_stack() -> None:
    row = torch.arange(3.0)
    stack, own = row.expand(4, 3), torch.randn(4, 3)
    at = torch.tensor([2, 0, 2])
    for stacked in (stack, own):
        assert torch.equal(picked(stacked, at), stacked[at]) and torch.equal(moved(stacked, "cpu"), stacked)
        assert torch.equal(kept(stacked), stacked) and torch.equal(
            joined([stacked, stacked[:2]])[4:], stacked[:2]
        )
    assert all(is_shared(part) for part in (picked(stack, at), moved(stack, "cpu"), kept(stack)))
    assert is_shared(joined([stack, stack[:2]])) and len(joined([stack, stack[:2]])) == 6
    assert not is_shared(joined([stack, row.clone().expand(2, 3)])) and not is_shared(own)
    remembered = kept(stack)
    row += 1
    assert torch.equal(remembered[0], row - 1)


@pytest.mark.parametrize("model", [None, models.softmax(classes=3)])
def test_a_run_holds_one_model_for_everybody(model: object) -> None:
    run = fit(federation(model), make("fedavg", batch=4), 3)
    assert is_shared(run.personal) and run.personal.shape == (6, run.fed.d)
    each = run.fed.score(run.personal.clone(memory_format=torch.contiguous_format), "train")
    for name, value in run.fed.score(run.personal, "train").items():
        torch.testing.assert_close(value, each[name])


def test_personal_models_are_everybodys_own() -> None:
    run = fit(federation(), make("ditto", batch=4), 3)
    assert not is_shared(run.personal) and len(run.personal.unique(dim=0)) == 6


def test_it_is_written_out_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for clients of different sizes, nor for stacks that are computed one after the other."""
    scored = []
    measure = Network.measure

    def watched(self: Network, w: Tensor, *rows: Tensor) -> dict[str, Tensor]:
        scored.append(len(w) == 1 or is_shared(w))
        return measure(self, w, *rows)

    monkeypatch.setattr(Network, "measure", watched)
    monkeypatch.setattr(Shard, "stack_size", lambda self, batch: 4)
    run = fit(federation(), make("fedavg", batch=4), 3)
    assert len(scored) > 4 and all(scored) and is_shared(run.personal)


def test_it_does_not_change_with_the_state() -> None:
    fed, algorithm = federation(), make("fedavg", batch=4)
    state = State(x=fed.initial_model())
    personal = fed.personal(algorithm, state)
    state.x.zero_()
    assert personal.abs().sum() > 0
