"""Equality of server states: same fields, same types, same bits."""

from __future__ import annotations

import torch

from coterie.engine.state import State


def test_states_are_equal_when_fields_types_and_bits_are() -> None:
    state = State(x=torch.tensor([1.0, 2.0]), t=3)
    assert state.equal(State(t=3, x=torch.tensor([1.0, 2.0])))
    assert not state.equal(State(x=torch.tensor([1.0, 2.5]), t=3))
    assert not state.equal(State(x=torch.tensor([1.0, 2.0]), t=4))
    assert not state.equal(State(x=torch.tensor([1.0, 2.0])))


def test_a_number_is_not_a_tensor() -> None:
    assert not State(x=1.0).equal(State(x=torch.tensor(1.0)))
    assert not State(x=torch.tensor(1.0)).equal(State(x=1.0))
