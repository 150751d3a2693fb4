"""The top layer's data for asymptotics/last-layer: features of a trunk that held-out clients have trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.data.clients import Clients
from coterie.data.leaf_files import LETTERS, leaf
from coterie.data.xml_texts import plays
from coterie.errors import SettingError
from coterie.federation.randomness import key, permutation
from coterie.models.network import seeded
from coterie.runs.experiments import shared_data


@dataclass(frozen=True)
class Source:
    """Which clients, and how large the trunk is."""

    name: str
    clients: int = 60
    pretraining: int = 40
    rows: int = 240
    width: int = 32
    epochs: int = 6  # of pretraining


@dataclass(frozen=True)
class Features:
    """What the top layer is learned on: features and classes of every client, computed once."""

    xs: list[Tensor]
    ys: list[Tensor]
    classes: int
    commonest: float  # share of the commonest class, in percent


def features(source: Source, seed: int) -> Features:
    """Inputs are standardised by the held-out clients and scaled to length width^(1/4)."""
    clients, classes = _read(source)
    if len(clients) < source.clients + source.pretraining:
        raise SettingError(f"{len(clients)} clients; {source.clients + source.pretraining} are asked for")
    order = permutation(key(seed, "held-out clients"), len(clients)).tolist()
    held, ours = order[: source.pretraining], order[source.pretraining :][: source.clients]
    trunk = _pretrained(source, [clients.xs[k] for k in held], [clients.ys[k] for k in held], classes, seed)
    found = [_apply(trunk, clients.xs[k]) for k in [*held, *ours]]
    known = torch.cat(found[: len(held)])
    mean, scale = known.mean(0), known.std(0).clamp_min(1e-3)
    xs = [(part - mean) / scale / known.shape[1] ** 0.25 for part in found[len(held) :]]
    ys = [clients.ys[k] for k in ours]
    commonest = torch.cat(ys).bincount().max() / sum(map(len, ys))
    return Features(xs, ys, classes, 100 * float(commonest))


def _read(source: Source) -> tuple[Clients, int]:
    wanted = source.clients + source.pretraining
    if source.name == "femnist":
        path = shared_data("femnist/arakotom_flic.tar.xz")
        found = leaf(path, max_clients=wanted)
        xs, ys = [x[: source.rows] for x in found.xs], [y[: source.rows] for y in found.ys]
        return Clients(xs, ys, found.names), 62
    if source.name == "shakespeare":
        path = shared_data("shakespeare.tar.xz")
        return plays(path, max_rows=source.rows, max_clients=wanted), len(LETTERS) + 1
    raise SettingError(f"source = {source.name!r}; it is 'femnist' or 'shakespeare'")


class _Convolutions(nn.Module):
    """28 x 28 images to features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.out = nn.Sequential(nn.Linear(32 * 5 * 5, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(1.0 - x))


class _Recurrent(nn.Module):
    """Letters to the last state of an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, 16)
        self.memory = nn.LSTM(16, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.memory(self.letters(x))[0][:, -1]


def _pretrained(source: Source, xs: list[Tensor], ys: list[Tensor], classes: int, seed: int) -> nn.Module:
    """A trunk trained with a head of its own on the pooled rows of held-out clients (Adam)."""
    kind = _Convolutions if source.name == "femnist" else _Recurrent
    trunk = seeded(lambda: kind(source.width), seed)
    network = nn.Sequential(trunk, seeded(lambda: nn.Linear(source.width, classes), seed))
    x, y = torch.cat(xs), torch.cat(ys)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for epoch in range(source.epochs):
        for rows in permutation(key(seed, "pretraining", epoch), len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return trunk


def _apply(trunk: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return trunk(x)
