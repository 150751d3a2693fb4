"""Measure of asymptotics/last-layer: the top layer of a pretrained network, learned by every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie import models
from coterie.algorithms.base import Algorithm
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.ftfa import FTFA
from coterie.algorithms.local import Local
from coterie.algorithms.maml_fl import MamlFL
from coterie.algorithms.pfedme import PFedMe
from coterie.algorithms.rtfa import RTFA
from coterie.data.clients import Clients
from coterie.data.leaf_files import LETTERS, leaf
from coterie.data.xml_texts import plays
from coterie.errors import SettingError
from coterie.federation.federation import Federation
from coterie.federation.randomness import key, permutation
from coterie.federation.state import State
from coterie.models.network import seeded
from coterie.runs.experiments import Experiment, Table, shared_data

METHODS = ("local", "fedavg", "ftfa", "rtfa", "maml-fl", "pfedme")
RATES = (0.1, 0.3)  # local step sizes of FedAvg and MAML-FL
TUNING = (0.01, 0.03, 0.1)  # step sizes at home
EPOCHS = (0, 1, 2, 5, 10, 20)  # of the figure on personalisation steps
PAPER_EPOCHS = 10
Curve = dict[int, float]
Option = tuple[Algorithm, dict[int, State]]  # how a shared model is deployed, and the shared models by round


@dataclass(frozen=True)
class Size:
    """How large a run is; the paper has 400 rounds, 20 clients a round, 20 steps of batch 32, 10 epochs at home."""

    source: str
    clients: int = 60
    pretraining: int = 40
    rows: int = 240
    width: int = 48
    epochs: int = 6  # of pretraining
    rounds: int = 400
    every: int = 50
    asked: int = 20
    steps: int = 20


def last_layer(experiment: Experiment, seed: int) -> Table:
    """Test accuracy in percent of every method along the rounds, the gains, and the claims of the paper.

    The curve is FTFA's.
    """
    settings: dict[str, Any] = dict(experiment.plans[0].settings)
    size = Size(**{**settings, "rounds": min(settings.get("rounds", 400), experiment.plans[0].rounds)})
    fed, chance = _federation(size, seed)
    curves, steps = _curves(fed, size)
    found: Table = {"commonest class": chance}
    found |= {f"{name} above the commonest class": curves[name][size.rounds] - chance for name in METHODS}
    for name, curve in curves.items():
        found[name] = curve[size.rounds]
        found |= {f"{name} at {t}": value for t, value in curve.items()}
    found |= {f"ftfa after {epochs} epochs": value for epochs, value in steps.items()}
    tuned = [found[name] for name in ("ftfa", "rtfa", "maml-fl")]
    found["spread of ftfa, rtfa, maml-fl"] = max(tuned) - min(tuned)
    found["lowest tuned minus fedavg"] = min(tuned) - found["fedavg"]
    found["lowest tuned minus local"] = min(tuned) - found["local"]
    found["lowest tuned minus pfedme"] = min(tuned) - found["pfedme"]
    early = [curves[name][size.every] for name in ("ftfa", "rtfa", "maml-fl")]
    found["early lead over pfedme"] = min(early) - curves["pfedme"][size.every]
    found["gain from personalisation"] = steps[PAPER_EPOCHS] - steps[0]
    places = list(curves["ftfa"])
    found["curve"] = {
        "split": "test",
        "metric": "accuracy of FTFA",
        "rounds": places,
        "values": [curves["ftfa"][t] for t in places],
    }
    return found


def _curves(fed: Federation, size: Size) -> tuple[dict[str, Curve], Curve]:
    """Every method's test accuracy along the rounds, at the settings that validation prefers at the end."""
    share = min(1.0, size.asked / fed.n)
    common: dict[str, Any] = {"steps": size.steps, "batch": 32, "participation": share}
    averages = [_states(fed, FedAvg(lr=lr, **common), size) for lr in RATES]
    mamls = [_states(fed, MamlFL(lr=lr, alpha=0.03, **common), size) for lr in RATES]
    slow = [PFedMe(lr=lr, beta=beta, **common) for lr, beta in ((0.05, 1.0), (0.05, 2.0), (0.005, 2.0))]
    options: dict[str, list[Option]] = {
        "fedavg": [(FedAvg(**common), states) for states in averages],
        "ftfa": [(FTFA(tuning_lr=a, **common), states) for a in TUNING for states in averages],
        "rtfa": [(RTFA(tuning_lr=a, lam=0.1, **common), states) for a in TUNING for states in averages],
        "maml-fl": [(MamlFL(tuning_lr=a, **common), states) for a in TUNING for states in mamls],
        "pfedme": [(algorithm, _states(fed, algorithm, size)) for algorithm in slow],
    }
    marks = list(averages[0])
    curves = {"local": dict.fromkeys(marks, _alone(fed))}
    best = {name: _chosen(fed, choices, marks[-1]) for name, choices in options.items()}
    for name, (algorithm, states) in best.items():
        curves[name] = {t: _accuracy(fed, algorithm, states[t], t, "test") for t in marks}
    tuned, states = best["ftfa"]
    last = marks[-1]
    steps = {p: _accuracy(fed, tuned.replace(tuning_epochs=p), states[last], last, "test") for p in EPOCHS}
    return {name: curves[name] for name in METHODS}, steps


def _states(fed: Federation, algorithm: Algorithm, size: Size) -> dict[int, State]:
    """The server's state every so many rounds of one training run."""
    fed = fed.fresh()
    fed.enter_round(0, None)
    state, found = algorithm.start(fed), {}
    for t in range(1, size.rounds + 1):
        fed.enter_round(t, state)
        state = algorithm.round(fed, state, t)
        if t % size.every == 0 or t == size.rounds:
            found[t] = state
    return found


def _alone(fed: Federation) -> float:
    """Ten epochs of local training, at the step size that validation prefers."""
    best, score = 0.0, -1.0
    for lr in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0):
        algorithm, trial = (
            Local(lr=lr, steps=int(10 * -(-float(fed.sizes.mean()) // 32)), batch=32),
            fed.fresh(),
        )
        trial.enter_round(0, None)
        state = algorithm.start(trial)
        trial.enter_round(1, state)
        state = algorithm.round(trial, state, 1)
        validation = 100 * float(trial.evaluate(algorithm, state, "validation")["accuracy"].nanmean())
        if validation > score:
            best, score = (
                100 * float(trial.evaluate(algorithm, state, "test")["accuracy"].nanmean()),
                validation,
            )
    return best


def _chosen(fed: Federation, options: list[Option], t: int) -> Option:
    """The setting with the best validation accuracy at round t."""
    if len(options) == 1:
        return options[0]
    return max(options, key=lambda option: _accuracy(fed, option[0], option[1][t], t, "validation"))


def _accuracy(fed: Federation, algorithm: Algorithm, state: State, t: int, split: str) -> float:
    """Percent, mean over clients."""
    fed.enter_round(t, state)
    return 100 * float(fed.evaluate(algorithm, state, split)["accuracy"].nanmean())


def _federation(size: Size, seed: int) -> tuple[Federation, float]:
    """Clients whose inputs are the features of a trunk that other clients have trained."""
    clients, classes = _read(size)
    if len(clients) < size.clients + size.pretraining:
        raise SettingError(f"{len(clients)} clients; {size.clients + size.pretraining} are asked for")
    order = permutation(key(seed, "held-out clients"), len(clients)).tolist()
    held, ours = order[: size.pretraining], order[size.pretraining :][: size.clients]
    trunk = _pretrained(size, [clients.xs[k] for k in held], [clients.ys[k] for k in held], classes, seed)
    features = [_apply(trunk, clients.xs[k]) for k in [*held, *ours]]
    known = torch.cat(features[: len(held)])
    mean, scale = known.mean(0), known.std(0).clamp_min(1e-3)
    xs = [(part - mean) / scale / known.shape[1] ** 0.25 for part in features[len(held) :]]
    ys = [clients.ys[k] for k in ours]
    head = models.softmax(intercept=True, classes=classes)
    fed = Federation.from_arrays(xs, ys, head, split=(0.6, 0.2, 0.2), seed=seed, dtype=torch.float32)
    commonest = torch.cat(ys).bincount().max() / sum(map(len, ys))
    return fed, 100 * float(commonest)


def _read(size: Size) -> tuple[Clients, int]:
    wanted = size.clients + size.pretraining
    if size.source == "femnist":
        path = shared_data("femnist/arakotom_flic.tar.xz")
        found = leaf(path, max_clients=wanted)
        xs, ys = [x[: size.rows] for x in found.xs], [y[: size.rows] for y in found.ys]
        return Clients(xs, ys, found.names), 62
    if size.source == "shakespeare":
        path = shared_data("shakespeare.tar.xz")
        return plays(path, max_rows=size.rows, max_clients=wanted), len(LETTERS) + 1
    raise SettingError(f"source = {size.source!r}; it is 'femnist' or 'shakespeare'")


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


def _pretrained(size: Size, xs: list[Tensor], ys: list[Tensor], classes: int, seed: int) -> nn.Module:
    """A trunk trained with a head of its own on the pooled rows of held-out clients (Adam)."""
    kind = _Convolutions if size.source == "femnist" else _Recurrent
    trunk = seeded(lambda: kind(size.width), seed)
    network = nn.Sequential(trunk, seeded(lambda: nn.Linear(size.width, classes), seed))
    x, y = torch.cat(xs), torch.cat(ys)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for epoch in range(size.epochs):
        for rows in permutation(key(seed, "pretraining", epoch), len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return trunk


def _apply(trunk: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return trunk(x)
