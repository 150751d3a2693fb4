"""Experiments known-clusters/*: estimators on generated data and on tables of ratings and schools."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie import models
from coterie.algorithms import make
from coterie.algorithms.async_al2sgd import AsyncAL2SGD
from coterie.algorithms.async_l2gd import AsyncL2GD
from coterie.data import tables
from coterie.data.generate import hierarchical_linear
from coterie.engine.federation import Federation
from coterie.experiments.mixed_model import mixed_model
from coterie.experiments.spec import Experiment, shared_data
from coterie.theory import hierarchical as exact
from coterie.theory import linear_estimators
from coterie.theory.cluster_penalty import Penalty
from coterie.theory.mixed_likelihood import maximum_likelihood
from coterie.theory.variance_components import Sums
from coterie.train.fit import fit

if TYPE_CHECKING:
    import polars

Numbers = dict[str, Any]
SPLIT = (0.6, 0.2, 0.2)
POINTS = 15  # per curve


def table1(experiment: Experiment, seed: int) -> Numbers:
    """Return the distances of four methods to the true parameters; the one-coin algorithm runs `rounds` rounds."""
    plan = experiment.plans[0]
    data = hierarchical_linear(rows=plan.settings["rows"], seed=seed)
    sums = Sums.of(data.xs, data.ys, known(data.clusters))
    pull = linear_estimators.cross_validated_pull(data.xs, data.ys)
    fed = Federation.from_clients(data, models.linear(reduction="sum"), seed=seed)
    coins = make("async-l2gd", coins="one", lr=1e-4, p0=0.1, gamma=1.0, lambda_=1.0)
    run = fit(fed, coins, rounds=plan.rounds, evaluate_every=0)
    ones = Penalty.of(known(data.clusters), 1.0, lambda_=1.0)
    found = {
        "local": linear_estimators.local_least_squares(sums.xx, sums.xy),
        "single": linear_estimators.single_least_squares(sums.xx, sums.xy).expand(len(data), -1),
        "centre": linear_estimators.one_centre(sums.xx, sums.xy, pull),
        "ours": run.personal,
        "exact": exact.minimiser(sums.xx, sums.xy, ones).models,
    }
    numbers: Numbers = {"pull": pull, "rounds_global": run.state.rounds_global}
    for name, estimate in found.items():
        distance = (estimate - known(data.truth)).norm(dim=1)
        numbers |= {name: distance.mean(), f"{name}_sd": distance.std(), f"{name}_max": distance.max()}
    return {name: float(value) for name, value in numbers.items()}


def over_rows(experiment: Experiment, seed: int) -> Numbers:
    """Return the mean distance of one method (settings: method, rows) for several numbers of rows per client."""
    settings = experiment.plans[0].settings
    distances = []
    for rows in settings["rows"]:
        data = hierarchical_linear(rows=rows, seed=seed)
        sums = Sums.of(data.xs, data.ys, known(data.clusters))
        if settings["method"] == "local":
            estimate = linear_estimators.local_least_squares(sums.xx, sums.xy)
        elif settings["method"] == "single":
            estimate = linear_estimators.single_least_squares(sums.xx, sums.xy).expand(len(data), -1)
        elif settings["method"] == "centre":
            estimate = linear_estimators.one_centre(
                sums.xx, sums.xy, linear_estimators.cross_validated_pull(data.xs, data.ys, min(5, rows))
            )
        else:
            penalty = Penalty.of(known(data.clusters), 1.0, lambda_=1.0)
            estimate = exact.minimiser(sums.xx, sums.xy, penalty).models
        distances.append(float((estimate - known(data.truth)).norm(dim=1).mean()))
    curve = {
        "split": "mean",
        "metric": "distance",
        "x": "rows per client",
        "rounds": list(settings["rows"]),
        "values": distances,
    }
    named = {f"rows_{rows}": value for rows, value in zip(settings["rows"], distances, strict=True)}
    return {**named, "curve": curve}


def pulls(experiment: Experiment, seed: int) -> Numbers:
    """Return the mean distance of the exact minimiser over gamma at one lambda (settings: lambda_, gammas, rows).

    `best` is log10 of the gamma with the smallest distance.
    """
    settings = experiment.plans[0].settings
    data = hierarchical_linear(rows=settings["rows"], seed=seed)
    sums, clusters = Sums.of(data.xs, data.ys, known(data.clusters)), known(data.clusters)
    distances = []
    for gamma in settings["gammas"]:
        penalty = Penalty.of(clusters, gamma, lambda_=settings["lambda_"])
        found = exact.minimiser(sums.xx, sums.xy, penalty).models - known(data.truth)
        distances.append(float(found.norm(dim=1).mean()))
    return {"smallest": min(distances), **over_gammas(settings["gammas"], distances, "mean distance")}


def over_gammas(gammas: list[float], values: list[float], measured: str) -> Numbers:
    """Return log10 of the gamma with the smallest value, and the values as a curve."""
    places = [math.log10(gamma) for gamma in gammas]
    split, metric = measured.split(" ", 1)
    curve = {"split": split, "metric": metric, "x": "log10 of gamma", "rounds": places, "values": values}
    return {"best": places[values.index(min(values))], "curve": curve}


def communications(experiment: Experiment, seed: int) -> Numbers:
    """Measure the error of Async-L2GD or Async-AL2SGD+ (settings: algorithm, step) by rounds with communication."""
    plan = experiment.plans[0]
    data = hierarchical_linear(clusters=4, clients=5, features=5, rows=20, noise=0.5, seed=seed)
    fed = Federation.from_clients(data, models.linear(l2=0.05), seed=seed)
    method: type[AsyncL2GD] = AsyncAL2SGD if plan.settings["algorithm"] == "async-al2sgd+" else AsyncL2GD
    algorithm = method.from_theory(fed, gamma=0.5, lambda_=1.0, batch=0)
    algorithm = algorithm.replace(lr=algorithm.lr * plan.settings.get("step", 1.0))
    sums = Sums.of(data.xs, data.ys, known(data.clusters))
    d = sums.xx.shape[-1]
    a = sums.xx / sums.rows.unsqueeze(-1) + 0.05 * torch.eye(d, dtype=torch.float64)
    best = exact.minimiser(a, sums.xy / sums.rows, algorithm.penalty(fed)).models
    counts, errors = [], []
    for rounds in range(plan.rounds // POINTS, plan.rounds + 1, plan.rounds // POINTS):
        run = fit(fed, algorithm, rounds=rounds, evaluate_every=0)
        talked = {entry[:3] for entry in run.fed.ledger.entries if entry.phase in ("share", "offer")}
        counts.append(len(talked))
        errors.append(float((run.personal - best).norm() / best.norm()))
    settled = max((k for k, error in enumerate(errors) if error >= 0.1), default=-1) + 1
    needed = counts[settled] if settled < len(counts) else 10**6
    curve = {
        "split": "relative",
        "metric": "error",
        "x": "rounds with communication",
        "rounds": counts,
        "values": errors,
    }
    return {"error": errors[-1], "needed": needed, "curve": curve}


def insteval(seed: int) -> Federation:
    """Read ratings of lecturers (clients) in departments (clusters) by service, student and lecturer age."""
    frame = table("hierarchical/InstEval.csv").drop("rownames", "s")
    return _federation(frame, "d", "y", "dept", seed)


def math_achievement(seed: int) -> Federation:
    """Read mathematics scores of pupils in schools (clients) of two sectors (clusters) by SES, sex and minority."""
    pupils = table("hierarchical/MathAchieve.csv").drop("rownames", "MEANSES")
    schools = table("hierarchical/MathAchSchool.csv").select("School", "Sector")
    return _federation(pupils.join(schools, on="School"), "School", "MathAch", "Sector", seed)


def regression(experiment: Experiment, seed: int) -> Numbers:
    """Return the test RMSE over all rows of several methods on a table (settings: table), and of MixedLM."""
    name = experiment.plans[0].settings["table"]
    fed = {"insteval": insteval, "math": math_achievement}[name](seed)
    train = fed.runtime.rows("train")
    sums = _sums(fed)
    together = Sums(sums.xx, sums.xy, sums.yy, sums.rows, torch.zeros_like(sums.clusters))
    hierarchical = fit(fed, make("hierarchical", effects="intercept"), rounds=1)
    slopes = fit(fed, make("hierarchical", effects="each"), rounds=1)
    found = maximum_likelihood(sums, "intercept")
    owner = _owner(fed, "train")
    mixed = mixed_model(train.x, train.y, owner, known(fed.clusters))
    ours = found.models(sums)
    answers = {
        "local": linear_estimators.local_least_squares(sums.xx, sums.xy),
        "single": linear_estimators.single_least_squares(sums.xx, sums.xy).expand(fed.n, -1),
        "single_cluster": maximum_likelihood(together, "intercept").models(together),
        "hierarchical": hierarchical.personal,
        "hierarchical_each": slopes.personal,
        "mixedlm": mixed.models,
    }
    numbers = {method: _rmse(fed, weights) for method, weights in answers.items()}
    apart = (train.x * (ours - mixed.models)[owner]).sum(-1).abs().max()
    spread = mixed.models[:, -1].std()
    return {
        **numbers,
        "blup_gap": float(apart / spread),
        "ratio": numbers["hierarchical"] / numbers["mixedlm"],
        "to_local": numbers["hierarchical"] / numbers["local"],
        "to_single": numbers["hierarchical"] / numbers["single"],
        "noise": found.noise,
        "noise_mixedlm": mixed.noise,
        "within": float(found.within[0, -1]),
        "within_mixedlm": mixed.within,
        "between": float(found.between[-1]),
        "between_mixedlm": mixed.between,
    }


def _sums(fed: Federation) -> Sums:
    """Return the sums of every client's training rows."""
    rows = [fed.runtime.rows("train").of(i) for i in range(fed.n)]
    return Sums.of([x for x, _ in rows], [y for _, y in rows], known(fed.clusters))


def _rmse(fed: Federation, weights: Tensor) -> float:
    """Return the root mean squared error over all test rows, in units of the target."""
    test = fed.runtime.rows("test")
    predicted = (test.x * weights.to(test.x)[_owner(fed, "test")]).sum(-1)
    return float((predicted - test.y).square().mean().sqrt() * fed.table.target_scale)


def _owner(fed: Federation, split: str) -> Tensor:
    """Return the client of every row of a split."""
    return torch.repeat_interleave(torch.arange(fed.n), fed.runtime.rows(split).size)


def table(path: str) -> polars.DataFrame:
    """Read a table of the shared data."""
    return tables.read(shared_data(path))


def _federation(frame: Any, client: str, target: str, cluster: str, seed: int) -> Federation:
    """Build the federation of a regression table."""
    model = models.linear(intercept=True, reduction="sum")
    return Federation.from_table(
        frame, client, target, cluster=cluster, model=model, split=SPLIT, seed=seed, task="regression"
    )


def known(value: Tensor | None) -> Tensor:
    """Return a value that these data always have."""
    assert value is not None
    return value
