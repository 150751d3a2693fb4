"""Server state: named tensors and numbers, nothing else, so that a checkpoint can hold all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.errors import SettingError

Value = Tensor | int | float | bool | str


class State:
    """What the server remembers between rounds: `State(x=x, centres=c)`, then `s.x`, `s.centres`."""

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
        """All fields by name."""
        return dict(self.__dict__)

    def replace(self, **changes: Value) -> State:
        """The same state with some fields changed or added."""
        changed = State(**changes)
        changed.__dict__.update({**self.__dict__, **changes})
        return changed

    def tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.__dict__.items() if isinstance(v, Tensor)}

    def equal(self, other: State) -> bool:
        """Same fields, same bits."""
        mine, theirs = self.fields(), other.fields()
        return mine.keys() == theirs.keys() and all(
            torch.equal(v, theirs[k]) if isinstance(v, Tensor) else v == theirs[k]  # type: ignore[arg-type]
            for k, v in mine.items()
        )
