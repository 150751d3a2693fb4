"""The interface of an algorithm: frozen hyperparameters, server logic, and phases that clients run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_type_hints

from torch import Tensor

from coterie._core.errors import SettingError, nearest
from coterie.engine.calls import arguments
from coterie.engine.federation import Federation
from coterie.engine.protocol import Disclosure as Disclosure
from coterie.engine.protocol import Reveals as Reveals
from coterie.engine.state import State
from coterie.models.base import Model

DISCLOSURES: dict[Disclosure, str] = {
    "nothing": "sends nothing",
    "aggregate": "sends a few numbers about all training rows, such as a loss or a curvature",
    "gradient": "sends a gradient (or Hessian) at a point that the server names",
    "model": "sends a shared model after training it on its rows",
    "personal": "sends its personal model, or steps from which the server can follow it",
    "values": "sends values of single rows, or sums over so few rows that they can be told apart",
    "peers": "sends its answers to the other nodes, encrypted, in a relayed run, and nothing of them to the server",
}


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
    """Declare a hyperparameter of an algorithm.

    Parameters
    ----------
    default
        Its default value.
    help
        What it means, in a few words; the command line shows it.
    low
        Smallest allowed value.
    above
        Bound that values must exceed.
    high
        Largest allowed value.
    options
        Allowed values of a text.
    tune
        Values that `coterie tune` tries.
    **more
        Arguments of `dataclasses.field`.

    Returns
    -------
    Any
        A field of a dataclass.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from coterie import Algorithm, setting
    >>> @dataclass(frozen=True)
    ... class Mine(Algorithm):
    ...     lr: float = setting(0.1, "step size", above=0)
    >>> Mine(lr=0.3).settings()
    {'batch': 32, 'lr': 0.3}
    """
    limits = {"help": help, "low": low, "above": above, "high": high, "options": options, "tune": tune}
    return dataclasses.field(default=default, metadata=limits, **more)


@dataclass(frozen=True)
class Algorithm:
    """Base class of all algorithms: a frozen dataclass of hyperparameters, server logic, and client phases.

    Write `start` and `round` for the server, phases for the clients, and `deploy` for the model that a client uses. A
    phase is a method `(self, client, ...)` that `round` runs on clients with `fed.map`. A method
    `begin(self, client, <state fields by name>)`, if there is one, runs once on every client before its first phase and
    sends nothing. `reveals` says of every other phase what it sends, in the words of `DISCLOSURES`; a node runs no
    phase that is not in it, and its policy can forbid a word.

    Parameters
    ----------
    batch
        Rows per stochastic gradient; 0 means all rows.

    Examples
    --------
    A complete algorithm, gradient descent on the average loss:

    >>> import torch, coterie
    >>> from dataclasses import dataclass
    >>> from coterie import Algorithm, State, setting
    >>> @dataclass(frozen=True)
    ... class GradientDescent(Algorithm):
    ...     '''x <- x - lr mean_i grad f_i(x) (Cauchy, 1847).'''
    ...     reveals = {"gradient": "gradient"}
    ...     lr: float = setting(0.1, "step size", above=0)
    ...     def start(self, fed):
    ...         return State(x=fed.initial_model())
    ...     def round(self, fed, s, t):
    ...         return State(x=s.x - self.lr * fed.map(self.gradient, x=s.x).mean())
    ...     def gradient(self, client, x):
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
    reveals: ClassVar[Reveals] = {}
    optional: ClassVar[frozenset[str]] = frozenset()  # phases that some settings or commands do without
    sentinels: ClassVar[frozenset[float]] = (
        frozenset()
    )  # numbers in its messages that stand for something else
    in_units: ClassVar[bool] = False  # its messages hold numbers in the units of the table, of any size
    begin: ClassVar[Callable[..., None] | None] = None  # a method of those that have this phase
    starts_from: ClassVar[Mapping[str, str]] = {}  # by phase: the argument that a reply is a moved copy of
    row_by_row: ClassVar[bool] = False  # it asks for more than losses and gradients of all rows of a client
    stays: ClassVar[frozenset[str]] = frozenset()  # phases and streams whose results never reach the server
    relays: ClassVar[bool] = False  # nodes can run the server's side among themselves (--relay)
    tolerates_late: ClassVar[frozenset[str]] = (
        frozenset()
    )  # phases whose answers may be used in a later round

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
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
            _check(self.name, field, getattr(self, field.name))

    def start(self, fed: Federation) -> State:
        """Return the server's state before the first round.

        Parameters
        ----------
        fed
            The federation.

        Returns
        -------
        State
            Named tensors, numbers and text.
        """
        raise NotImplementedError

    def round(self, fed: Federation, s: State, t: int) -> State:
        """Run one round and return the server's new state.

        Parameters
        ----------
        fed
            The federation, whose `map` runs phases on clients.
        s
            State after the round before.
        t
            Number of the round, 1, 2, ...

        Returns
        -------
        State
            The new state.
        """
        raise NotImplementedError

    def fast_forward(self, fed: Federation, s: State, after: int, until: int) -> tuple[State, int]:
        """Run several rounds at once, with the same bits and the same ledger as `round` for each of them.

        Parameters
        ----------
        fed
            The federation.
        s
            State after round `after`.
        after
            Last round that has been run.
        until
            Last round that may be run.

        Returns
        -------
        tuple of State and int
            The new state and its round. By default `s` and `after`: no round is run.
        """
        return s, after

    def deploy(self, *client_and_state_fields: Any, **kwargs: Any) -> Tensor:
        """Return the model that a client uses.

        Parameters
        ----------
        *client_and_state_fields
            The client, then state fields: `deploy(self, client, x)` receives the field `x` of the state.
        **kwargs
            State fields by name.

        Returns
        -------
        Tensor
            [..., d].
        """
        raise NotImplementedError

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the arguments of `deploy`: those common to all clients, and those with a row for each.

        Parameters
        ----------
        fed
            The federation.
        s
            State of the server.

        Returns
        -------
        tuple of dict
            By default the state fields that `deploy` names, common to all.
        """
        return arguments(self.deploy, s), {}

    def common(self, fed: Federation, s: State) -> Tensor | None:
        """Return the model for a client that was not in training.

        Parameters
        ----------
        fed
            The federation.
        s
            State of the server.

        Returns
        -------
        Tensor or None
            By default the shared model `x` [d], or None if the state has none.
        """
        return s.x if "x" in s else None

    def require_certificate(self, fed: Federation) -> None:
        """Raise SettingError unless `certificate` will bound the distance to the best value on this federation."""
        raise SettingError(
            f"{self.name} has no certificate, so no accuracy can be the target of its training; flix with dgd has one"
        )

    def sharpen(self, fed: Federation, s: State, target: float) -> State:
        """Return the state with a smaller `certificate` where clients can give one that may prove `target`."""
        return s

    def rounds_left(self, s: State, target: float) -> int | None:
        """Return the rounds after which `certificate` is sure to be at most `target`; None if that is not known."""
        return None

    def observe(self, fed: Federation, s: State) -> dict[str, Tensor]:
        """Return values to record whenever models are scored.

        Parameters
        ----------
        fed
            The federation.
        s
            State of the server.

        Returns
        -------
        dict of Tensor
            By name: [n] with a value for each client, [] for all of them, or a matrix.
        """
        return {}

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        """Declare the communication, which the ledger is checked against.

        Parameters
        ----------
        d
            Length of the parameter vector.

        Returns
        -------
        dict of str to tuple of int
            Numbers sent to and by a client per visit, by phase.
        """
        raise NotImplementedError

    def certificate(self, s: State) -> float:
        """Return a proven bound on how far the objective is above its minimum; inf where theory has none.

        Parameters
        ----------
        s
            The server's state after a round.

        Returns
        -------
        float
            The bound.
        """
        return math.inf

    @property
    def optimizer(self) -> str:
        """Optimiser of the steps of `client.sgd`; a setting of methods that let their users choose it."""
        return "sgd"

    varying: ClassVar[frozenset[str]] = frozenset()
    """Phases whose messages may be shorter than `traffic` declares, because what is asked depends on the data."""

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        """Declare the communication for a model, where more of it matters than its number of parameters.

        Parameters
        ----------
        model
            The model that is trained.

        Returns
        -------
        dict of str to tuple of int
            As `traffic`, which it is by default.
        """
        return self.traffic(model.d)

    def plain(self, fed: Federation) -> Algorithm:
        """Return the method with the settings that change nothing on this federation as they are by default.

        Two settings that are the same then train the same models, and a search trains one of them.

        Parameters
        ----------
        fed
            The federation.

        Returns
        -------
        Algorithm
            By default the method itself.
        """
        return self

    def for_model(self, model: Model) -> Algorithm:
        """Return the method as it trains a model: with all rows in every gradient where the model needs them.

        Parameters
        ----------
        model
            The model that is trained.

        Returns
        -------
        Algorithm
            By default the method itself.

        Raises
        ------
        SettingError
            The method looks at rows one by one, and the loss of a row depends on the others.
        """
        if not model.whole_clients:
            return self
        if self.row_by_row:
            raise SettingError(
                f"{self.name} looks at rows one by one, and in survival data a row's loss depends on the rows at risk "
                "with it. Choose a method that takes gradients: local, fedavg, fine-tuned, ditto, rtfa"
            )
        return self.replace(batch=0) if self.batch else self

    def own_model(self, rounds: int) -> Model | None:
        """Return the model that this method trains, if it is not for any model.

        Parameters
        ----------
        rounds
            Number of rounds it is to be trained for.

        Returns
        -------
        Model or None
            None, by default: the method trains the model that it is given.
        """
        return None

    def trial_model(self, rounds: int) -> Model | None:
        """Return a small model to try this method with, where it cannot train every model.

        Parameters
        ----------
        rounds
            Number of rounds it is to be trained for.

        Returns
        -------
        Model or None
            By default its own model, if it has one. The conformance suite and the curves of the documentation train it.
        """
        return self.own_model(rounds)

    def without_stopping(self) -> Algorithm:
        """Return the settings that train up to the last round, whatever validation rows say.

        Returns
        -------
        Algorithm
            The settings themselves, by default: few methods stop by themselves.
        """
        return self

    def allowed_steps(self, fed: Federation, curvature: float) -> dict[str, float]:
        """Return the largest step sizes at which gradient steps do not diverge.

        Parameters
        ----------
        fed
            The federation.
        curvature
            Largest curvature L of a client's loss.

        Returns
        -------
        dict of str to float
            By hyperparameter: 2 / (L + lam + ridge) for those that are step sizes of the loss, where `lam` and `ridge`
            are the pulls of this method, if it has any.
        """
        pulls = sum(float(getattr(self, name, 0.0) or 0.0) for name in ("lam", "ridge"))
        steps = [name for name in ("lr", "tuning_lr", "inner_lr", "local_lr") if hasattr(self, name)]
        return {name: 2.0 / max(curvature + pulls, 1e-300) for name in steps}

    def replace(self, **changes: Any) -> Self:
        """Return the same algorithm with some hyperparameters changed.

        Parameters
        ----------
        **changes
            New values; text is converted, as from a command line.

        Returns
        -------
        Algorithm
            A new object.

        Examples
        --------
        >>> from coterie import Algorithm
        >>> Algorithm(batch=8).replace(batch="16").batch
        16
        """
        return type(self)(**{**self.settings(), **parse(type(self), changes)})

    def settings(self) -> dict[str, Any]:
        """Return the hyperparameters by name.

        Returns
        -------
        dict
            Values of all fields.

        Examples
        --------
        >>> from coterie import Algorithm
        >>> Algorithm(batch=8).settings()
        {'batch': 8}
        """
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}


def parse(cls: type[Algorithm], values: dict[str, Any]) -> dict[str, Any]:
    """Return values for an algorithm's hyperparameters, with text converted to the declared type."""
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    texts = any(isinstance(value, str) for value in values.values())
    hints = get_type_hints(cls) if texts else {}  # which take longer than all else
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
    if "tuple" in str(kind) and ("," in text or text.startswith("[")):
        return _numbers(algorithm, name, text)
    if "str" in str(kind):
        return text
    if "None" in str(kind) and text.lower() == "none":
        return None
    raise SettingError(f"{algorithm}: {name} = {text!r} is not a {'whole ' if kind is int else ''}number")


def _plain(value: Any) -> Any:
    """Return numbers of numpy and torch as Python's, and lists and arrays of numbers as tuples."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(_plain(one) for one in value) if isinstance(value, list | tuple) else value


def _numbers(algorithm: str, name: str, text: str) -> tuple[float, ...]:
    """Return a list of numbers such as [0.5, 1, 2], with or without brackets."""
    try:
        return tuple(float(part) for part in text.strip().removeprefix("[").removesuffix("]").split(","))
    except ValueError:
        raise SettingError(f"{algorithm}: {name} = {text!r} is not a list such as [0.5,1,2]") from None


def _check(algorithm: str, field: dataclasses.Field[Any], value: Any) -> None:
    if isinstance(value, tuple):
        for one in value:
            _check(algorithm, field, one)
        return
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
