"""GPFL: one body whose features serve all clients and each client at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from coterie._core import randomness
from coterie.algorithms.base import Algorithm, Reveals, setting
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.groups import Part
from coterie.models.heads import last_linear
from coterie.models.valve import valve_of
from coterie.models.zoo import mlp

TINY = 1e-12  # least distance between features and an embedding


@dataclass(frozen=True)
class GPFL(Algorithm):
    """Global and personal features from one body (Zhang et al., ICCV 2023, arXiv:2308.10279).

    h_P, h_G = relu(h (1 + gain(c)) + shift(c)) with c = p_i (personal) and c = g (generic),   h the body's features
    loss_i = f_i(head_i on h_P) + mean_b [-log softmax(cos(h_G, E))_{y_b} + lam |h_G - E'_{y_b}|]
    (body, E, gain, shift) <- mean of the clients' after `steps` steps of SGD;   head_i stays at client i

    E has an embedding for each class, E' is E as it came; g is the mean of its rows, p_i their mean weighted by the
    classes of client i's rows. `gain` and `shift` are each a linear layer, ReLU and layer normalisation. `mu` is the
    weight decay of E, gain and shift. Client i predicts with head_i on h_P. Numbers are one class.
    """

    lr: float = setting(0.05, "local step size", above=0, tune=(0.003, 0.01, 0.03, 0.1, 0.3))
    lam: float = setting(0.01, "strength of the pull to the embeddings", low=0, tune=(0.0001, 0.01, 1.0))
    mu: float = setting(0.0, "weight decay of embeddings and valve", low=0)
    steps: int = setting(5, "local steps per round", low=1)
    participation: float = setting(1.0, "fraction of the clients sampled per round", above=0, high=1)
    row_by_row: ClassVar[bool] = True
    reveals: ClassVar[Reveals] = {"train": "model"}

    starts_from: ClassVar[Mapping[str, str]] = {"train": "shared"}
    tolerates_late: ClassVar[frozenset[str]] = frozenset({"train"})

    def start(self, fed: Federation) -> State:
        parts, x = _parts(fed.model, self.name), fed.initial_model()
        keys = randomness.slots(randomness.key(fed.seed, "gpfl"), parts.classes * parts.width + parts.layers)
        embeddings, layers = randomness.normal(keys).to(x).split([parts.classes * parts.width, parts.layers])
        drawn = [  # weights and biases as nn.Linear draws them in spread, then gain and shift of the normalisation
            torch.cat([part[: -2 * parts.width] / (3 * parts.width) ** 0.5, x.new_ones(parts.width)])
            for part in layers.chunk(2)
        ]
        none = x.new_zeros(parts.width)
        return State(shared=torch.cat([parts.body.of(x), embeddings, drawn[0], none, drawn[1], none]))

    def round(self, fed: Federation, s: State, t: int) -> State:
        return State(shared=fed.map(self.train, shared=s.shared, to=fed.sample(t, self.participation)).mean())

    def begin(self, client: Client) -> None:
        client.keep.head = last_linear(client.model, self.name).whole.of(client.initial_model())

    def train(self, client: Client, shared: Tensor) -> Tensor:
        parts = _parts(client.model, self.name)
        x, embeddings, layers = parts.taken(client, shared)
        personal, generic, first = self._conditions(client, embeddings)
        for _ in range(self.steps):
            given = torch.cat([x, embeddings.flatten(-2), layers, personal, generic, first.flatten(-2)], -1)
            slope = client.over_batch(functools.partial(self._slope, parts, client.model), given)
            to_x, to_embeddings, to_layers = slope.split([parts.d, *parts.extra], -1)
            x = x - self.lr * to_x
            embeddings = embeddings - self.lr * (to_embeddings.view_as(embeddings) + self.mu * embeddings)
            layers = layers - self.lr * (to_layers + self.mu * layers)
        client.keep.head = parts.head.of(x)
        return torch.cat([parts.body.of(x), embeddings.flatten(-2), layers], -1)

    def _conditions(self, client: Client, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the personal and the generic condition, [..., width], and the embeddings as they came."""
        share = client.class_counts() / client.size
        return (share.unsqueeze(-2) @ embeddings).squeeze(-2), embeddings.mean(-2), embeddings

    def _slope(
        self, parts: ModelParts, model: Model, given: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor
    ) -> Tensor:
        """Return the gradient of the loss in the model without its valve, the embeddings and the valve's layers."""
        x, embeddings, layers, personal, generic, first = given.split(
            [parts.d, *parts.extra, parts.width, parts.width, parts.extra[0]], -1
        )
        with torch.enable_grad():
            layers = layers.detach().requires_grad_()
            own, shared = parts.settings(layers, personal), parts.settings(layers, generic)
        to_own = model.grad(parts.valve.into(x, own.detach()), inputs, targets, weight)
        at = parts.valve.into(x, shared.detach())
        label, shape = model.labels(targets), (parts.classes, parts.width)
        with torch.enable_grad():
            features = model.hidden_features(at, inputs).detach().requires_grad_()
            embeddings = embeddings.detach().requires_grad_()
            alike = (
                functional.normalize(features, dim=-1)
                @ functional.normalize(embeddings.unflatten(-1, shape), dim=-1).mT
            )
            missed = -alike.log_softmax(-1).gather(-1, label.unsqueeze(-1)).squeeze(-1)
            place = label.unsqueeze(-1).expand(*label.shape, parts.width)
            apart = features - first.unflatten(-1, shape).gather(-2, place)
            away = apart.square().sum(-1).clamp(min=TINY**2).sqrt()
            loss = ((missed + self.lam * away) * weight).sum()
            to_features, to_embeddings = torch.autograd.grad(loss, (features, embeddings))
        to_shared = model.feature_grad(at, inputs, to_features)
        with torch.enable_grad():
            along = (own * parts.valve.of(to_own)).sum() + (shared * parts.valve.of(to_shared)).sum()
            (to_layers,) = torch.autograd.grad(along, layers)
        to_x = to_own + to_shared
        return torch.cat([parts.valve.into(to_x, torch.zeros_like(own)), to_embeddings, to_layers], -1)

    def deploy(self, client: Client, shared: Tensor) -> Tensor:
        parts = _parts(client.model, self.name)
        x, embeddings, layers = parts.taken(client, shared)
        personal, _, _ = self._conditions(client, embeddings)
        return parts.valve.into(x, parts.settings(layers, personal))

    def common(self, fed: Federation, s: State) -> Tensor:
        parts = _parts(fed.model, self.name)
        body, embeddings, layers = s.shared.split([parts.body.size, *parts.extra])
        generic = parts.settings(layers, embeddings.unflatten(-1, (parts.classes, parts.width)).mean(-2))
        return parts.valve.into(parts.body.into(fed.initial_model(), body), generic)

    def traffic(self, d: int) -> dict[str, tuple[int, int]]:
        return {"begin": (0, 0), "train": (d, d)}

    def traffic_of(self, model: Model) -> dict[str, tuple[int, int]]:
        parts = _parts(model, self.name)
        return self.traffic(parts.body.size + sum(parts.extra))

    def own_model(self, rounds: int) -> Model:
        return mlp((64,), valve=True)

    def trial_model(self, rounds: int) -> Model:
        return mlp((4,), valve=True, stacked=False)


@dataclass(frozen=True)
class ModelParts:
    """Where body, valve and head are in a model's parameters, and the sizes of what travels beside the body."""

    body: Part
    valve: Part
    head: Part
    d: int
    classes: int
    width: int

    @property
    def layers(self) -> int:
        """Parameters of the layers behind gain and shift: weights, biases, gain and shift of the normalisation."""
        return 2 * self.width * (self.width + 3)

    @property
    def extra(self) -> list[int]:
        """Sizes of the embeddings and of the valve's layers."""
        return [self.classes * self.width, self.layers]

    def taken(self, client: Client, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the clients' models [..., d], the embeddings [..., classes, width] and the valve's layers."""
        body, embeddings, layers = shared.expand(*client.lead, -1).split([self.body.size, *self.extra], -1)
        x = self.head.into(self.body.into(client.initial_model(), body), client.keep.head)
        return x, embeddings.unflatten(-1, (self.classes, self.width)), layers

    def settings(self, layers: Tensor, condition: Tensor) -> Tensor:
        """Return the valve's gains and shifts under a condition [..., width], [..., 2 width]."""
        found = []
        for part in layers.chunk(2, -1):
            weight, bias, gain, shift = part.split([self.width**2, *[self.width] * 3], -1)
            linear = (weight.unflatten(-1, (self.width, -1)) @ condition.unsqueeze(-1)).squeeze(-1) + bias
            found.append(functional.layer_norm(linear.relu(), (self.width,)) * gain + shift)
        return torch.cat(found, -1)


@functools.lru_cache(maxsize=16)
def _parts(model: Model, method: str) -> ModelParts:
    """Return the parts of a model; raise `SettingError` if it has no valve or no last layer with biases."""
    valve, layer = valve_of(model, method), last_linear(model, method)
    body = Part(~(valve.mask | layer.whole.mask))
    return ModelParts(body, valve, layer.whole, model.d, model.classes_known, layer.width)
