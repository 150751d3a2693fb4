"""What methods have in common whose clients send some groups of parameters and keep the others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.groups import Part
from coterie.models.linear import linear

ONE_LAYER = {"head": "intercept", "body": "weights"}  # what the words mean where there is no hidden layer
MAY_LACK = ("norm", "lora_A", "lora_B", "store")  # groups that some models have
NETWORK = "use a network (--model mlp), or a linear model with an intercept (no --l2)"
ADAPTERS = (
    "use a model with low-rank adapters of rank 2 or more: causal_lm(...), or network(low_rank(module))"
)


@dataclass(frozen=True)
class PartlyShared(Algorithm):
    """Base class: of the parameters (u, v_i) everybody shares u, and client i keeps v_i, the groups `personal`.

    A linear model has one layer: its head is the intercept and its body the weights. Only u travels.
    """

    name: ClassVar[str] = ""
    remedy: ClassVar[str] = NETWORK  # for a model that cannot be parted so

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    personal: str = setting("head", "parameter groups that stay at the clients, joined with +")
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    weighting: str = setting(
        "size", "weight clients by their rows (size) or equally (uniform)", options=("size", "uniform")
    )
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "shared"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        return State(shared=self.shared_part(fed.model).of(fed.initial_model()))

    def round(self, fed: Federation, s: State, t: int) -> State:
        r = fed.map(self.train, shared=s.shared, to=fed.sample(t, self.participation))
        return State(shared=r.mean(uniform=self.weighting == "uniform"))

    def begin(self, client: Client) -> None:
        client.keep.own = self.own_part(client.model).of(client.initial_model())

    def train(self, client: Client, shared: Tensor) -> Tensor:
        """Return the shared part after training; `_parted` keeps the other."""
        raise NotImplementedError

    def deploy(self, client: Client, shared: Tensor) -> Tensor:
        return self._whole(client, shared)

    def common(self, fed: Federation, s: State) -> Tensor:
        return self.shared_part(fed.model).into(fed.initial_model(), s.shared)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (d, d)}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        return self.traffic(self.shared_part(model).size)

    def trial_model(self, rounds: int) -> Model | None:
        return linear(l2=1e-3, intercept=True)

    def kept_groups(self, model: Model) -> str:
        """Return the parameter groups that stay at the clients, joined with +."""
        return self.personal

    def own_part(self, model: Model) -> Part:
        """Return the parameters that stay at the clients; raise `SettingError` if the model has none."""
        return _parts(model, self.kept_groups(model), self.name, self.remedy)[0]

    def shared_part(self, model: Model) -> Part:
        """Return the parameters that travel: all others."""
        return _parts(model, self.kept_groups(model), self.name, self.remedy)[1]

    def _whole(self, client: Client, shared: Tensor) -> Tensor:
        """Return all parameters of the clients, [..., d]: the shared ones and their own."""
        whole = self.shared_part(client.model).into(client.initial_model(), shared)
        own = self.own_part(client.model)
        return own.into(whole, client.keep.own) if own.size else whole

    def _parted(self, client: Client, whole: Tensor) -> Tensor:
        """Keep the clients' own parameters and return the shared ones."""
        client.keep.own = self.own_part(client.model).of(whole)
        return self.shared_part(client.model).of(whole)


@functools.lru_cache(maxsize=32)
def _parts(model: Model, names: str, method: str, remedy: str) -> tuple[Part, Part]:
    """Return the parameters in these groups, joined with +, and the others."""
    groups, mask = model.groups, torch.zeros(model.d, dtype=torch.bool)
    one_layer = "intercept" in groups and not groups["body"].any()
    wanted = [part.strip() for part in names.split("+") if part.strip()]
    for name in wanted:
        known = ONE_LAYER.get(name, name) if one_layer else name
        if known in groups or known not in MAY_LACK:
            mask |= groups[known]
    if wanted and not mask.any():
        raise SettingError(f"{method}: this model has no parameters in the group {names!r}; {remedy}")
    if mask.all():
        raise SettingError(
            f"{method}: {names!r} are all parameters of this model, so nothing would be shared; {remedy}"
        )
    return Part(mask), Part(~mask)
