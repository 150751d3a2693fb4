"""Measures of the threshold-clustering experiments: many methods on the same data sets, seed by seed."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from coterie.algorithms import Algorithm, make
from coterie.data.clients import Clients
from coterie.data.generate import clustered_regression
from coterie.data.leaf_files import leaf
from coterie.errors import SettingError
from coterie.federation.federation import Federation
from coterie.federation.randomness import key, permutation
from coterie.models import linear, softmax
from coterie.runs.experiments import Experiment, shared_data
from coterie.runs.fit import fit
from coterie.runs.run import Run

Table = dict[str, Any]


def section_four(experiment: Experiment, seed: int) -> dict[str, float]:
    """Section 4 of the paper: `tries` data sets, every method on each; loss is mean_i |x_i - x*_k(i)|^2.

    A slow method may ask for fewer `trials`, the first ones, or fewer `rounds`. Gives for each method mean, sd,
    median and best, for each pair of `pairs` on what share of the data sets the first is below the second, and for
    each pair of `spreads` the ratio of their sds.
    """
    plan = experiment.plans[0]
    trials = plan.tries or 20
    losses: dict[str, list[float]] = {}
    for name, settings in plan.settings["methods"].items():
        method, count = _method(settings), min(trials, settings.get("trials", trials))
        rounds = min(plan.rounds, settings.get("rounds", plan.rounds))
        losses[name] = [
            _loss(fit(_world(plan.data, 1000 * seed + k), method, rounds, evaluate_every=0))
            for k in range(count)
        ]
    found: dict[str, float] = {}
    for name, values in losses.items():
        found[name] = statistics.fmean(values)
        found[f"{name} sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
        found[f"{name} median"], found[f"{name} best"] = statistics.median(values), min(values)
    for first, second in plan.settings.get("pairs", ()):
        below = [a < b for a, b in zip(losses[first], losses[second], strict=False)]
        found[f"{first} below {second}"] = statistics.fmean(below)
    for first, second in plan.settings.get("spreads", ()):
        found[f"{first} sd / {second} sd"] = found[f"{first} sd"] / max(found[f"{second} sd"], 1e-300)
    return found


def cluster_sizes(experiment: Experiment, seed: int) -> dict[str, float]:
    """Figure 2: the loss against the number of clients per cluster, and its log-log slope."""
    plan = experiment.plans[0]
    sizes = plan.settings["sizes"]
    found: dict[str, float] = {}
    for name, settings in plan.settings["methods"].items():
        method = _method(settings)
        logs = []
        for size in sizes:
            losses = [
                _loss(
                    fit(
                        _world(plan.data, 1000 * seed + k, clients=size),
                        method,
                        plan.rounds,
                        evaluate_every=0,
                    )
                )
                for k in range(plan.tries or 5)
            ]
            found[f"{name} {size}"] = statistics.fmean(losses)
            logs.append(math.log(found[f"{name} {size}"]))
        places = [math.log(size) for size in sizes]
        found[f"{name} slope"] = statistics.linear_regression(places, logs).slope
    return found


def rotated_writers(experiment: Experiment, seed: int) -> dict[str, float]:
    """FEMNIST writers, a quarter of them each with upright images and images turned by 90, 180 and 270 degrees.

    Test accuracy in percent, and the adjusted Rand index and number of the clusters found at the end.
    """
    plan = experiment.plans[0]
    options = plan.settings
    clients = turned(options["archive"], options["writers"], options["pixels"], options["rows"], seed)
    train = options["train"]
    fed = Federation.from_clients(
        clients, softmax(l2=options["l2"]), split=(train, 0.1, 0.9 - train), seed=seed, dtype=torch.float32
    )
    run = fit(fed, _method(options["method"]), plan.rounds, evaluate_every=0)
    found = {"accuracy": 100 * float(run.score("test", "accuracy").nanmean())}
    for metric in ("ari", "purity", "clusters_found"):
        value = run.history.at(plan.rounds, "server", metric)
        found |= {} if value is None else {metric: float(value)}
    return found


def turned(archive: str, writers: int, pixels: int, rows: int, seed: int) -> Clients:
    """Writers with at least `rows` images in an order drawn by the seed; writer k's are turned by 90 (k mod 4)."""
    everyone = leaf(shared_data(archive))
    busy = (everyone.sizes >= rows).nonzero().squeeze(1)
    if len(busy) < writers:
        raise SettingError(f"{archive} has {len(busy)} writers with {rows} images; {writers} were asked for")
    chosen = busy[permutation(key(seed, "writers"), len(busy))[:writers]].tolist()
    xs = [_seen(everyone.xs[writer], k % 4, pixels) for k, writer in enumerate(chosen)]
    return Clients(
        xs,
        [everyone.ys[writer] for writer in chosen],
        [everyone.names[writer] for writer in chosen],
        torch.arange(writers) % 4,
        ["0", "90", "180", "270"][: min(4, writers)],
    )


def _seen(images: Tensor, quarter_turns: int, pixels: int) -> Tensor:
    """Ink (paper is 1 in the files) at a lower resolution, turned."""
    small = functional.adaptive_avg_pool2d(1.0 - images.float(), pixels)
    return torch.rot90(small, quarter_turns, (-2, -1)).reshape(len(images), -1)


def _method(settings: Table) -> Algorithm:
    return make(**{name: value for name, value in settings.items() if name not in ("trials", "rounds")})


def _world(data: Table, seed: int, **changes: int) -> Federation:
    options = {name: value for name, value in data["generate"].items() if name != "name"}
    clients = clustered_regression(**{**options, **changes}, seed=seed)
    return Federation.from_clients(clients, linear(), seed=seed)


def _loss(run: Run) -> float:
    assert run.fed.truth is not None
    return float(((run.personal - run.fed.truth) ** 2).sum(1).mean())
