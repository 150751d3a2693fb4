"""Experiment asymptotics/last-layer: the last layer of a pretrained network, trained by every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch

from coterie import models
from coterie.algorithms.base import Algorithm
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.ftfa import FTFA
from coterie.algorithms.local import Local
from coterie.algorithms.maml_fl import MamlFL
from coterie.algorithms.pfedme import PFedMe
from coterie.algorithms.rtfa import RTFA
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.experiments.pretrained_features import Features, Source, features
from coterie.experiments.spec import Experiment, Table

METHODS = ("local", "fedavg", "ftfa", "rtfa", "maml-fl", "pfedme")
TUNED = ("ftfa", "rtfa", "maml-fl")
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)  # local step sizes of FedAvg and MAML-FL
TUNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # step sizes of fine-tuning
PENALTIES = (0.01, 0.1, 1.0)  # lam of RTFA
LOCAL_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PROXIMAL = ((0.05, 1.0), (0.05, 2.0), (0.005, 2.0))  # step size and beta of pFedMe, as in the paper
PROXIMAL_LARGER = ((0.15, 1.0), (0.5, 1.0), (1.5, 1.0))
EPOCHS = (0, 1, 2, 5, 10, 20)  # of fine-tuning in the figure on personalisation; for pFedMe, steps
PAPER_EPOCHS = 10
Curve = dict[int, float]
Kind = TypeVar("Kind", bound=Algorithm)


@dataclass(frozen=True)
class Dimensions:
    """Amount of training; the paper has 400 rounds, 20 clients a round, 20 steps of batch 32, 10 epochs of tuning."""

    rounds: int = 400
    every: int = 50
    asked: int = 20
    steps: int = 20
    trial: int = 50  # rounds after which validation rows choose the settings
    repeats: int = 3  # seeds, and splits


@dataclass(frozen=True)
class Repeat:
    """One repeat: test accuracy in percent by rounds, and by epochs of fine-tuning."""

    curves: dict[str, Curve]
    steps: dict[str, Curve]


def last_layer(experiment: Experiment, seed: int) -> Table:
    """Return the test accuracy in percent of every method by rounds, the gains, and the claims of the paper.

    The features of the pretrained network are computed once. Settings are chosen on the first split and seed. Then
    every method trains on the first split with every seed, and on every split with the first seed. The curve is FTFA's.
    """
    settings: dict[str, Any] = dict(experiment.plans[0].settings)
    given = {name: settings.pop(name) for name in list(settings) if name in Dimensions.__dataclass_fields__}
    given["rounds"] = min(given.get("rounds", 400), experiment.plans[0].rounds)
    size = Dimensions(**given)
    data = features(Source(**settings), seed)
    first = _federation(data, 0, 0)
    chosen = _chosen(first, size)
    runs = {(0, 0): _learned(first, size, chosen)}
    for k in range(1, size.repeats):
        runs[0, k] = _learned(_federation(data, 0, k), size, chosen)
        runs[k, 0] = _learned(_federation(data, k, 0), size, chosen)
    found: Table = {"commonest class": data.commonest, **_summary(runs, size)}
    found |= {f"{name} above the commonest class": found[name] - data.commonest for name in METHODS}
    base = runs[0, 0]
    found |= _with_larger_steps(first, size, base)
    for name, algorithm in chosen.items():
        wanted = ("lr", "tuning_lr", "lam", "beta")
        found |= {f"{name} {key}": value for key, value in algorithm.settings().items() if key in wanted}
    found["steps at the upper end of their grids"] = float(len(at_the_end(chosen)))
    places = list(base.curves["ftfa"])
    average = [float(np.mean([run.curves["ftfa"][t] for run in runs.values()])) for t in places]
    found["curve"] = {"split": "test", "metric": "accuracy of FTFA", "rounds": places, "values": average}
    found["plots"] = {"methods": _plot(runs)}
    return found


def at_the_end(chosen: dict[str, Algorithm]) -> list[str]:
    """Return the step sizes that are the largest of their grids, by method; larger ones might be better.

    pFedMe is left out: its grid is the paper's, and larger steps are measured beside it.
    """
    grids = {"lr": RATES, "tuning_lr": TUNING_RATES}
    found = []
    for name, algorithm in chosen.items():
        values = algorithm.settings()
        for key, grid in grids.items():
            most = max(LOCAL_RATES if name == "local" else grid)
            if name != "pfedme" and values.get(key) == most:
                found.append(f"{name} {key}")
    return found


def _with_larger_steps(fed: Federation, size: Dimensions, base: Repeat) -> Table:
    """Train pFedMe with larger steps than the paper's grid for a quarter of the rounds, to see if steps limit it."""
    t = min(base.curves["ftfa"], key=lambda place: abs(place - size.rounds // 4))
    larger = _best_of_pfedme(fed, size, PROXIMAL_LARGER)
    reached = _accuracy(fed, larger, _states(fed, larger, t, t)[t], "test")
    return {
        "pfedme with larger steps, at a quarter": reached,
        "pfedme, at a quarter": base.curves["pfedme"][t],
        "lowest tuned minus pfedme with larger steps": min(base.curves[name][t] for name in TUNED) - reached,
    }


def _summary(runs: dict[tuple[int, int], Repeat], size: Dimensions) -> Table:
    """Return best, average and worst over seeds and over splits, the gains of fine-tuning, and the claims."""
    groups = {
        "seeds": [run for (split, _), run in runs.items() if split == 0],
        "splits": [run for (_, draw), run in runs.items() if draw == 0],
    }
    everything, last, early = list(runs.values()), size.rounds, min(next(iter(runs.values())).curves["ftfa"])
    found: Table = {}
    for name in METHODS:
        found[name] = float(np.mean([run.curves[name][last] for run in everything]))
        for t in everything[0].curves[name]:
            found[f"{name} at {t}"] = float(np.mean([run.curves[name][t] for run in everything]))
        for word, group in groups.items():
            ends = [run.curves[name][last] for run in group]
            found |= {
                f"{name}, best over {word}": max(ends),
                f"{name}, average over {word}": float(np.mean(ends)),
                f"{name}, worst over {word}": min(ends),
            }
    for name in everything[0].steps:
        for epochs in EPOCHS:
            found[f"{name} after {epochs} epochs"] = float(
                np.mean([run.steps[name][epochs] for run in everything])
            )
        gains = [run.steps[name][PAPER_EPOCHS] - run.steps[name][0] for run in everything]
        found[f"gain of {name}"], found[f"lowest gain of {name}"] = float(np.mean(gains)), min(gains)
        found[f"best gain of {name}"] = (
            max(found[f"{name} after {epochs} epochs"] for epochs in EPOCHS)
            - (found[f"{name} after 0 epochs"])
        )
    claims: dict[str, list[float]] = {"spread of ftfa, rtfa, maml-fl": [], "early lead over pfedme": []}
    claims |= {f"lowest tuned minus {name}": [] for name in ("fedavg", "local", "pfedme")}
    for run in everything:
        ends = [run.curves[name][last] for name in TUNED]
        claims["spread of ftfa, rtfa, maml-fl"].append(max(ends) - min(ends))
        claims["early lead over pfedme"].append(
            min(run.curves[name][early] for name in TUNED) - run.curves["pfedme"][early]
        )
        for name in ("fedavg", "local", "pfedme"):
            claims[f"lowest tuned minus {name}"].append(min(ends) - run.curves[name][last])
    for claim, values in claims.items():
        found[claim] = float(np.mean(values))
        found[f"{claim}, standard deviation"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return found


def _learned(fed: Federation, size: Dimensions, chosen: dict[str, Algorithm]) -> Repeat:
    """Train every method with its settings; methods that fine-tune FedAvg share its training run."""
    trained: dict[Algorithm, dict[int, State]] = {}

    def states(algorithm: Algorithm) -> dict[int, State]:
        kind = _trainer(algorithm)
        if kind not in trained:
            trained[kind] = _states(fed, kind, size.rounds, size.every)
        return trained[kind]

    curves, steps = {}, {}
    marks = list(states(chosen["fedavg"]))
    curves["local"] = dict.fromkeys(marks, _alone(fed, chosen["local"], "test"))
    for name in METHODS[1:]:
        algorithm = chosen[name]
        curves[name] = {t: _accuracy(fed, algorithm, state, "test") for t, state in states(algorithm).items()}
        if name != "fedavg":
            last = states(algorithm)[marks[-1]]
            steps[name] = {p: _accuracy(fed, _tuned_for(algorithm, p), last, "test") for p in EPOCHS}
    return Repeat({name: curves[name] for name in METHODS}, steps)


def _chosen(fed: Federation, size: Dimensions) -> dict[str, Algorithm]:
    """Return every method with the settings of best validation accuracy after a short training run."""
    common: dict[str, Any] = {"steps": size.steps, "batch": 32, "participation": min(1.0, size.asked / fed.n)}
    trial = min(size.trial, size.rounds)

    def ends(algorithms: Sequence[Kind]) -> dict[Kind, State]:
        return {a: _states(fed, a, trial, trial)[trial] for a in algorithms}

    def best(options: Sequence[tuple[Kind, State]]) -> Kind:
        return max(options, key=lambda option: _accuracy(fed, option[0], option[1], "validation"))[0]

    averages = ends([FedAvg(lr=lr, **common) for lr in RATES])
    mamls = ends([_trainer(MamlFL(lr=lr, alpha=0.03, **common)) for lr in RATES])
    tuned = [
        (FTFA(lr=a.lr, tuning_lr=r, **common), s) for (a, s), r in product(averages.items(), TUNING_RATES)
    ]
    ftfa = best(tuned)
    base = averages[FedAvg(lr=ftfa.lr, **common)]
    held = [
        (RTFA(lr=ftfa.lr, tuning_lr=r, lam=lam, **common), base)
        for r, lam in product(TUNING_RATES, PENALTIES)
    ]
    local = [Local(lr=lr, steps=int(10 * -(-float(fed.sizes.mean()) // 32)), batch=32) for lr in LOCAL_RATES]
    return {
        "local": max(local, key=lambda algorithm: _alone(fed, algorithm, "validation")),
        "fedavg": best(list(averages.items())),
        "ftfa": ftfa,
        "rtfa": best(held),
        "maml-fl": best([(a.replace(tuning_lr=r), s) for (a, s), r in product(mamls.items(), TUNING_RATES)]),
        "pfedme": _best_of_pfedme(fed, size, PROXIMAL),
    }


def _best_of_pfedme(fed: Federation, size: Dimensions, pairs: tuple[tuple[float, float], ...]) -> Algorithm:
    """Return pFedMe with the pair of step size and beta of best validation accuracy."""
    trial, share = min(size.trial, size.rounds), min(1.0, size.asked / fed.n)
    options: list[Algorithm] = [
        PFedMe(lr=lr, beta=beta, steps=size.steps, batch=32, participation=share) for lr, beta in pairs
    ]
    return max(options, key=lambda a: _accuracy(fed, a, _states(fed, a, trial, trial)[trial], "validation"))


def _trainer(algorithm: Algorithm) -> Algorithm:
    """Return the method without its fine-tuning, which does not affect the training run."""
    if type(algorithm) in (FTFA, RTFA):
        wanted = FedAvg.__dataclass_fields__
        return FedAvg(**{name: value for name, value in algorithm.settings().items() if name in wanted})
    return algorithm.replace(tuning_lr=TUNING_RATES[0]) if isinstance(algorithm, MamlFL) else algorithm


def _tuned_for(algorithm: Algorithm, epochs: int) -> Algorithm:
    """Return the method with this many epochs of fine-tuning (pFedMe: steps); 0 gives the shared model."""
    if not isinstance(algorithm, PFedMe):
        return algorithm.replace(tuning_epochs=epochs)
    return algorithm.replace(inner_steps=epochs) if epochs else FedAvg(batch=32)


def _states(fed: Federation, algorithm: Algorithm, rounds: int, every: int) -> dict[int, State]:
    """Train, and return the server's state every so many rounds."""
    fed = fed.fresh()
    fed.enter_round(0, None)
    state, found = algorithm.start(fed), {}
    for t in range(1, rounds + 1):
        fed.enter_round(t, state)
        state = algorithm.round(fed, state, t)
        if t % every == 0 or t == rounds:
            found[t] = state
    return found


def _alone(fed: Federation, algorithm: Algorithm, split: str) -> float:
    """Return the accuracy after one round of local training."""
    trial = fed.fresh()
    trial.enter_round(0, None)
    state = algorithm.start(trial)
    trial.enter_round(1, state)
    state = algorithm.round(trial, state, 1)
    return _percent(trial, algorithm, state, split)


def _accuracy(fed: Federation, algorithm: Algorithm, state: State, split: str) -> float:
    """Return the accuracy in percent of what is deployed from a state."""
    fed = fed.fresh()
    fed.enter_round(0, state)
    return _percent(fed, algorithm, state, split)


def _percent(fed: Federation, algorithm: Algorithm, state: State, split: str) -> float:
    """Evaluate the mean accuracy in percent."""
    return 100 * float(fed.evaluate(algorithm, state, split)["accuracy"].nanmean())


def _federation(data: Features, split: int, draw: int) -> Federation:
    """Build the federation with one seed for the split and another for everything else."""
    head = models.softmax(intercept=True, classes=data.classes)
    fed = Federation.from_arrays(
        data.xs, data.ys, head, split=(0.6, 0.2, 0.2), seed=split, dtype=torch.float32
    )
    return fed.fresh(seed=draw)


def _plot(runs: dict[tuple[int, int], Repeat]) -> Table:
    """Return the panels of accuracy by rounds and by epochs of fine-tuning, averaged over the repeats."""

    def mean(curves: list[Curve]) -> list[list[float]]:
        return [list(curves[0]), [float(np.mean([curve[t] for curve in curves])) for t in curves[0]]]

    every = list(runs.values())
    panels = [
        {"x": "rounds", "y": "test accuracy (%)", "log": False},
        {"x": "epochs of fine-tuning (pFedMe: steps)", "y": "test accuracy (%)", "log": False},
    ]
    panels[0]["curves"] = {name: mean([run.curves[name] for run in every]) for name in METHODS}
    panels[1]["curves"] = {name: mean([run.steps[name] for run in every]) for name in every[0].steps}
    return {"title": "The last layer of a pretrained network", "panels": panels}
