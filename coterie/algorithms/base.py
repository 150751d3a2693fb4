"""What an algorithm is: frozen hyperparameters, server logic, and phases that clients run."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from torch import Tensor

from coterie.errors import SettingError, nearest
from coterie.federation.calls import arguments
from coterie.federation.federation import Federation
from coterie.federation.state import State


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    options: tuple[str, ...] | None = None,
    tune: tuple[Any, ...] | None = None,
    **more: Any,
) -> Any:
    """A hyperparameter: default, meaning, allowed range (low <= v <= high, v > above) and values worth trying."""
    limits = {"help": help, "low": low, "above": above, "high": high, "options": options, "tune": tune}
    return dataclasses.field(default=default, metadata=limits, **more)


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms.

    Write `start` and `round` for the server, phases for the clients, `deploy` for the model a client uses.
    A method `begin(self, client, <state fields by name>)`, where present, is run once by every client
    before its first phase, whenever it joins.

    Examples:
        A complete algorithm, gradient descent on the average loss:

        >>> import torch, coterie
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class GradientDescent(Algorithm):
        ...     '''x <- x - lr mean_i grad f_i(x) (Cauchy, 1847).'''
        ...     lr: float = setting(0.1, "step size", above=0)
        ...     def start(self, fed):
        ...         return State(x=fed.initial_model())
        ...     def round(self, fed, s, t):
        ...         return State(x=s.x - self.lr * fed.map(self.slope, x=s.x).mean())
        ...     def slope(self, client, x):
        ...         return client.full_grad(x)
        ...     def deploy(self, client, x):
        ...         return x
        >>> xs, ys = [torch.ones(3, 1), torch.ones(1, 1)], [torch.zeros(3), 4 * torch.ones(1)]
        >>> fed = coterie.Federation.from_arrays(xs, ys, model=coterie.models.linear())
        >>> run = coterie.fit(fed, GradientDescent(), rounds=200)
        >>> [round(value, 3) for value in run.personal.squeeze().tolist()]
        [1.0, 1.0]
    """

    batch: int = setting(32, "rows per stochastic gradient; 0 means all rows", low=0, kw_only=True)

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            package, _, file = cls.__module__.rpartition(".")
            own = package == "coterie.algorithms"
            cls.name = (
                file.replace("_", "-")
                if own
                else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
            )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(self.name, field, getattr(self, field.name))

    def start(self, fed: Federation) -> State:
        """The server's state before the first round."""
        raise NotImplementedError

    def round(self, fed: Federation, s: State, t: int) -> State:
        """The server's state after round t = 1, 2, ..."""
        raise NotImplementedError

    def leap(self, fed: Federation, s: State, after: int, until: int) -> tuple[State, int]:
        """Rounds after `after`, at most to `until`, at once: the state then, and the round it has come to.

        Bits and ledger are those of `round` called for one after the other. By default nothing is leapt.
        """
        return s, after

    def deploy(self, *client_and_state_fields: Any, **kwargs: Any) -> Tensor:
        """The model a client uses: `deploy(self, client, x)` takes state fields by name, reads `client.keep`."""
        raise NotImplementedError

    def handout(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `deploy` is sent: (the same for all, a row for each). By default the state fields it names."""
        return arguments(self.deploy, s), {}

    def common(self, fed: Federation, s: State) -> Tensor | None:
        """The model of somebody who was not in training: the shared model `x`, where there is one."""
        return s.x if "x" in s else None

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        """What is worth recording of the state when it is scored: [n] per client, [] for all, or a matrix."""
        return {}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        """Declared communication: floats down and up per visit, by phase. Checked against the ledger."""
        raise NotImplementedError

    def replace(self, **changes: Any) -> Algorithm:
        """The same algorithm with some hyperparameters changed; accepts text, as from a command line."""
        return type(self)(**{**self.settings(), **parse(type(self), changes)})

    def settings(self) -> dict[str, Any]:
        """Hyperparameters by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}


def parse(cls: type[Algorithm], values: dict[str, Any]) -> dict[str, Any]:
    """Values for an algorithm's hyperparameters, text turned into the declared type."""
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    hints = get_type_hints(cls)
    parsed = {}
    for name, value in values.items():
        if name not in known:
            raise SettingError(f"{cls.name} has no hyperparameter {name!r}.{nearest(name, known)}")
        parsed[name] = _from_text(cls.name, name, value, hints[name]) if isinstance(value, str) else value
    return parsed


def _from_text(algorithm: str, name: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool:
        if text.lower() in ("true", "yes", "1", "false", "no", "0"):
            return text.lower() in ("true", "yes", "1")
        raise SettingError(f"{algorithm}: {name} = {text!r} is not true or false")
    for convert in (int, float) if kind is not int else (int,):
        try:
            return convert(text)
        except ValueError:
            continue
    if "str" in str(kind):
        return text
    if "None" in str(kind) and text.lower() == "none":
        return None
    raise SettingError(f"{algorithm}: {name} = {text!r} is not a {'whole ' if kind is int else ''}number")


def _check(algorithm: str, field: dataclasses.Field[Any], value: Any) -> None:
    limits = field.metadata
    where = f"{algorithm}: {field.name} = {value!r}"
    if limits.get("options") and isinstance(value, str) and value not in limits["options"]:
        raise SettingError(f"{where} is not one of {', '.join(limits['options'])}.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if field.type in ("int", int) and not isinstance(value, int):
        raise SettingError(f"{where} must be a whole number")
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    if not math.isfinite(value):
        raise SettingError(f"{where} is not a finite number; its range: {_range(limits)}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise SettingError(f"{where} is outside its range: {_range(limits)}")
    if above is not None and value <= above:
        raise SettingError(f"{where} is outside its range: {_range(limits)}")


def _range(limits: Any) -> str:
    parts = []
    if limits.get("low") is not None:
        parts.append(f"at least {limits['low']}")
    if limits.get("above") is not None:
        parts.append(f"above {limits['above']}")
    if limits.get("high") is not None:
        parts.append(f"at most {limits['high']}")
    return " and ".join(parts) or "any number"
