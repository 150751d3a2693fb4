"""pFedHN: a hypernetwork on the server that writes each client's model from a description it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie._core import randomness
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.optimizers import OPTIMIZERS
from coterie.engine.state import State


@dataclass(frozen=True)
class PFedHN(Algorithm):
    """Personalised federated learning by hypernetworks (Shamsian et al., ICML 2021, arXiv:2103.04628).

    theta_i = H(v_i; phi),   client i sends delta_i = theta_i - (theta_i after `steps` of SGD)
    phi <- phi - server_lr mean_i (d theta_i / d phi)' delta_i,   v_i <- v_i - server_lr (d theta_i / d v_i)' delta_i

    H is a perceptron of `layers` hidden layers, whose output starts at the initial model for everybody; v_i has
    `embedding` numbers. Neither phi nor v_i is sent: a client receives its model and answers with d numbers.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    server_lr: float = setting(0.1, "step size of the hypernetwork", above=0, tune=(0.01, 0.1, 1.0))
    embedding: int = setting(0, "length of a client's description; 0: 1 + clients / 4", low=0)
    hidden: int = setting(100, "width of the hypernetwork", low=1)
    layers: int = setting(1, "hidden layers of the hypernetwork; 0: linear in the description", low=0, high=8)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    optimizer: str = setting("sgd", "optimiser of local steps", options=OPTIMIZERS)
    reveals: ClassVar[Reveals] = {"train": "personal"}

    def start(self, fed: Federation) -> State:
        def draw(rows: int, columns: int, name: str) -> Tensor:
            keys = randomness.slots(randomness.key(fed.seed, f"pfedhn {name}"), rows * columns)
            return randomness.normal(keys).view(rows, columns).to(fed.initial_model())

        width = self.embedding or 1 + fed.n // 4
        fields: dict[str, Any] = {"descriptions": draw(fed.n, width, "descriptions")}
        for k in range(self.layers):
            fields |= {f"weight{k}": draw(self.hidden, width, f"layer {k}") / width**0.5}
            fields |= {f"bias{k}": torch.zeros_like(fields[f"weight{k}"][:, 0])}
            width = self.hidden
        fields["weight"] = draw(fed.d, width, "output") * 0.01 / width**0.5
        return State(**fields, bias=fed.initial_model())

    def models(self, fields: dict[str, Any], descriptions: Tensor) -> Tensor:
        """Return what the hypernetwork writes for clients with these descriptions, [k, d]."""
        found = descriptions
        for k in range(self.layers):
            found = torch.relu(functional.linear(found, fields[f"weight{k}"], fields[f"bias{k}"]))
        return functional.linear(found, fields["weight"], fields["bias"])

    def round(self, fed: Federation, s: State, t: int) -> State:
        ids = fed.sample(t, self.participation)
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in s.tensors().items()}
            asked = leaves["descriptions"] if ids is None else leaves["descriptions"][ids]
            written = self.models(leaves, asked)
        r = fed.map(self.train, to=ids, each={"x": written.detach()})
        if not len(r):
            return s
        delta = r.put(torch.zeros(fed.n, fed.d, dtype=fed.dtype, device=fed.device))
        slopes = torch.autograd.grad(written, list(leaves.values()), delta if ids is None else delta[ids])
        step = {name: 1 / len(r) for name in leaves} | {"descriptions": 1.0}
        moved = zip(leaves.items(), slopes, strict=True)
        return State(
            **{name: old.detach() - self.server_lr * step[name] * slope for (name, old), slope in moved}
        )

    def train(self, client: Client, x: Tensor) -> Tensor:
        return x - client.sgd(x, self.lr, self.steps)

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        return x

    def deploy_inputs(self, fed: Federation, s: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"x": self.models(s.fields(), s.descriptions)}

    def common(self, fed: Federation, s: State) -> Tensor:
        return self.models(s.fields(), s.descriptions.mean(0))

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"train": (d, d)}
