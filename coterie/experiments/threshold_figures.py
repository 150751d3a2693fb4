"""Experiments threshold/*: many methods on the same data sets, seed by seed."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie._core.randomness import key, permutation
from coterie.algorithms import Algorithm, make
from coterie.data.clients import Clients
from coterie.data.generate import clustered_regression
from coterie.data.leaf_files import leaf
from coterie.engine.federation import Federation
from coterie.experiments.spec import Experiment, Table, shared_data
from coterie.models import linear, softmax
from coterie.train.fit import fit
from coterie.train.run import Run


def section_four(experiment: Experiment, seed: int) -> dict[str, float]:
    """Run every method on `tries` data sets of the paper's section 4; the loss is mean_i |x_i - x*_k(i)|^2.

    A slow method may set fewer `trials` (the first data sets) or fewer `rounds`. Returns mean, sd, median and best of
    each method; for each of `pairs` the share of data sets on which the first is below the second; for each of
    `spreads` the ratio of their sds.
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
    """Return the loss by number of clients per cluster, and its log-log slope (figure 2)."""
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
    """Train on FEMNIST writers in four clusters, their images rotated by 0, 90, 180 and 270 degrees.

    Returns test accuracy in percent, and adjusted Rand index, purity and number of the clusters found at the end.
    """
    plan = experiment.plans[0]
    options = plan.settings
    clients = rotated_clients(
        options["archive"], options["writers"], options["pixels"], options["rows"], seed
    )
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


def rotated_clients(archive: str, writers: int, pixels: int, rows: int, seed: int) -> Clients:
    """Draw writers with at least `rows` images, and rotate those of the k-th by 90 (k mod 4) degrees."""
    everyone = leaf(shared_data(archive))
    busy = (everyone.sizes >= rows).nonzero().squeeze(1)
    if len(busy) < writers:
        raise SettingError(f"{archive} has {len(busy)} writers with {rows} images; {writers} are needed")
    chosen = busy[permutation(key(seed, "writers"), len(busy))[:writers]].tolist()
    xs = [_rotated(everyone.xs[writer], k % 4, pixels) for k, writer in enumerate(chosen)]
    return Clients(
        xs,
        [everyone.ys[writer] for writer in chosen],
        [everyone.names[writer] for writer in chosen],
        torch.arange(writers) % 4,
        ["0", "90", "180", "270"][: min(4, writers)],
    )


def _rotated(images: Tensor, quarter_turns: int, pixels: int) -> Tensor:
    """Return the ink (paper is 1 in the files) at a lower resolution, rotated."""
    small = functional.adaptive_avg_pool2d(1.0 - images.float(), pixels)
    return torch.rot90(small, quarter_turns, (-2, -1)).reshape(len(images), -1)


def _method(settings: Table) -> Algorithm:
    """Build the algorithm of a method's settings."""
    return make(**{name: value for name, value in settings.items() if name not in ("trials", "rounds")})


def _world(data: Table, seed: int, **changes: int) -> Federation:
    """Generate a data set of section 4."""
    options = {name: value for name, value in data["generate"].items() if name != "name"}
    clients = clustered_regression(**{**options, **changes}, seed=seed)
    return Federation.from_clients(clients, linear(), seed=seed)


def _loss(run: Run) -> float:
    """Return mean_i |x_i - x*_k(i)|^2."""
    assert run.fed.truth is not None
    return float(((run.personal - run.fed.truth) ** 2).sum(1).mean())
