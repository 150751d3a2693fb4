"""FedRoD: a generic head trained on a balanced loss, and a personal one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.heads import last_linear
from coterie.models.linear import linear
from coterie.models.network import Network

NO_ROWS = 1e-9  # share of a class that a client does not have


@dataclass(frozen=True)
class FedRoD(Algorithm):
    """Generic and personal heads on one body (Chen, Chao, ICLR 2022, arXiv:2107.00778).

    x_i <- x_i - lr grad [balanced loss of client i](x_i),   from x = (body, generic head);   x <- mean of the x_i
    p_i <- p_i - lr grad f_i(body of x_i, head of x_i + p_i) in the head alone
    client i deploys (body of x, head of x + p_i)

    The balanced loss is the cross-entropy of scores + log(share of the class among the client's rows), so the generic
    head does not learn how frequent classes are at one client. The sum of two linear heads is a linear head.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "x"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        last_linear(fed.model, self.name)
        return State(x=fed.initial_model())

    def round(self, fed: Federation, s: State, t: int) -> State:
        return State(x=fed.map(self.train, x=s.x, to=fed.sample(t, self.participation)).mean())

    def begin(self, client: Client) -> None:
        client.keep.head = torch.zeros_like(
            last_linear(client.model, self.name).whole.of(client.initial_model())
        )

    def train(self, client: Client, x: Tensor) -> Tensor:
        head, p, shift = last_linear(client.model, self.name).whole, client.keep.head, self._shift(client)
        penalty = client.model.l2 if isinstance(client.model, Network) else 0.0
        x, p, shift = client.along_rows(2 * self.steps, x, p, shift)
        for _ in range(self.steps):
            slope = client.grad(head.into(x, head.of(x) + p))
            x = x - self.lr * (client.grad(x + shift, again=True) - penalty * shift)
            p = p - self.lr * head.of(slope)
        client.keep.head = p
        return x

    def deploy(self, client: Client, x: Tensor) -> Tensor:
        head = last_linear(client.model, self.name).whole
        return head.into(x, head.of(x) + client.keep.head)

    def _shift(self, client: Client) -> Tensor:
        """Return what moves the scores by the logarithms of the classes' shares, [..., d]: biases of the last layer."""
        layer, share = last_linear(client.model, self.name), client.class_counts() / client.size
        logs = share.clamp(min=NO_ROWS).log() / layer.scale
        if client.model.task == "binary":
            logs = logs[..., 1:] - logs[..., :1]
        if client.model.task == "regression":
            logs = torch.zeros_like(logs)
        return layer.bias.into(torch.zeros_like(client.initial_model()), logs)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (d, d)}

    def trial_model(self, rounds: int) -> Model:
        return linear(l2=1e-3, intercept=True)
