"""Server state: named tensors, numbers and text, so that a checkpoint can hold all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie._core.errors import SettingError

Value = Tensor | int | float | bool | str


class State:
    """What the server remembers between rounds: named tensors, numbers and text.

    Parameters
    ----------
    **fields
        Values by name, read as attributes.

    Raises
    ------
    SettingError
        If a value is neither a tensor nor a number nor text, so that it could not be saved and resumed.

    Examples
    --------
    >>> import torch
    >>> from coterie import State
    >>> state = State(x=torch.zeros(3), rounds_won=0)
    >>> state.replace(rounds_won=1)
    State(rounds_won=1, x=(3,))
    >>> state.rounds_won, "x" in state
    (0, True)
    """

    def __init__(self, **fields: Value) -> None:
        for name, value in fields.items():
            if not isinstance(value, Tensor | int | float | bool | str):
                raise SettingError(
                    f"State field {name!r} is a {type(value).__name__}; only tensors, numbers and text can be "
                    "saved and resumed. Put it into a tensor."
                )
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the state has no field {name!r}; it has {sorted(self.__dict__)}")

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __repr__(self) -> str:
        parts = (f"{k}={tuple(v.shape) if isinstance(v, Tensor) else v!r}" for k, v in self.__dict__.items())
        return f"State({', '.join(parts)})"

    def fields(self) -> dict[str, Value]:
        """Return all fields by name."""
        return dict(self.__dict__)

    def replace(self, **changes: Value) -> State:
        """Return the same state with some fields changed or added.

        Parameters
        ----------
        **changes
            New values by name.

        Returns
        -------
        State
            A new state; this one stays as it is.
        """
        changed = State(**changes)
        changed.__dict__.update({**self.__dict__, **changes})
        return changed

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        return {k: v for k, v in self.__dict__.items() if isinstance(v, Tensor)}

    def equal(self, other: State) -> bool:
        """Return True if the other state has the same fields with the same bits.

        Parameters
        ----------
        other
            The state to compare with.

        Returns
        -------
        bool
            Whether both are equal.
        """
        mine, theirs = self.fields(), other.fields()
        return mine.keys() == theirs.keys() and all(_same(v, theirs[k]) for k, v in mine.items())


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other
