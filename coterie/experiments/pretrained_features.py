"""Data of experiment asymptotics/last-layer: features of a network pretrained on held-out clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie._core.errors import SettingError
from coterie._core.randomness import key, permutation
from coterie.data.clients import Clients
from coterie.data.leaf_files import LETTERS, leaf
from coterie.data.xml_texts import plays
from coterie.experiments.spec import shared_data
from coterie.models.network import seeded


@dataclass(frozen=True)
class Source:
    """Which clients, and the size of the network."""

    name: str
    clients: int = 60
    pretraining: int = 40
    rows: int = 240
    width: int = 32
    epochs: int = 6  # of pretraining


@dataclass(frozen=True)
class Features:
    """Features and classes of every client, on which the last layer is trained."""

    xs: list[Tensor]
    ys: list[Tensor]
    classes: int
    commonest: float  # share of the most frequent class, in percent


def features(source: Source, seed: int) -> Features:
    """Compute features, standardised by the held-out clients and scaled to length width^(1/4)."""
    clients, classes = _read(source)
    if len(clients) < source.clients + source.pretraining:
        raise SettingError(
            f"there are {len(clients)} clients; {source.clients + source.pretraining} are needed"
        )
    order = permutation(key(seed, "held-out clients"), len(clients)).tolist()
    held, ours = order[: source.pretraining], order[source.pretraining :][: source.clients]
    body = _pretrained(source, [clients.xs[k] for k in held], [clients.ys[k] for k in held], classes, seed)
    found = [_apply(body, clients.xs[k]) for k in [*held, *ours]]
    known = torch.cat(found[: len(held)])
    mean, scale = known.mean(0), known.std(0).clamp_min(1e-3)
    xs = [(part - mean) / scale / known.shape[1] ** 0.25 for part in found[len(held) :]]
    ys = [clients.ys[k] for k in ours]
    commonest = torch.cat(ys).bincount().max() / sum(map(len, ys))
    return Features(xs, ys, classes, 100 * float(commonest))


def _read(source: Source) -> tuple[Clients, int]:
    """Read the clients and the number of classes."""
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
    """Map 28 x 28 images to features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.out = nn.Sequential(nn.Linear(32 * 5 * 5, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images, inverted so that ink is 1."""
        found: Tensor = self.out(self.body(1.0 - x))
        return found


class _Recurrent(nn.Module):
    """Map letters to the last state of an LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS) + 1, 16)
        self.memory = nn.LSTM(16, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of rows of letters."""
        states: Tensor = self.memory(self.letters(x))[0]
        return states[:, -1]


def _pretrained(source: Source, xs: list[Tensor], ys: list[Tensor], classes: int, seed: int) -> nn.Module:
    """Train a network on the pooled rows of held-out clients by Adam, and return it without its head."""
    kind = _Convolutions if source.name == "femnist" else _Recurrent
    body = seeded(lambda: kind(source.width), seed)
    network = nn.Sequential(body, seeded(lambda: nn.Linear(source.width, classes), seed))
    x, y = torch.cat(xs), torch.cat(ys)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for epoch in range(source.epochs):
        for rows in torch.split(permutation(key(seed, "pretraining", epoch), len(x)), 64):
            optimiser.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(network(x[rows]), y[rows]))
            optimiser.step()
    return body


def _apply(body: nn.Module, x: Tensor) -> Tensor:
    """Compute features without gradients."""
    with torch.no_grad():
        found: Tensor = body(x)
        return found
