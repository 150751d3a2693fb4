"""Experiments known-clusters/donors and donors-grid: who answers a donation mailing, in cells of income and age."""

from __future__ import annotations

import dataclasses
from itertools import product

import torch
from torch import Tensor

from coterie.algorithms import make
from coterie.engine.federation import Federation
from coterie.experiments.known_clusters import SPLIT, Numbers, over_gammas, table
from coterie.experiments.spec import Experiment
from coterie.models.glm import Glm
from coterie.train.fit import fit

GAMMAS = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)
LAMBDAS = (0.01, 1.0, 100.0, 10_000.0)
RIDGES = (
    1.0,
    3.0,
    10.0,
    30.0,
    100.0,
    300.0,
    1000.0,
)  # how strongly training alone pulls a cell's model to zero
BINS = torch.linspace(
    0.4, 1.6, 25, dtype=torch.float64
)  # of ratios of losses; the outer ones take all beyond
QUARTILES = {"q25": 0.25, "median": 0.5, "q75": 0.75}


def donors(seed: int) -> Federation:
    """Read whether donors replied to a mailing; clients are cells of income, age, gender and home, clusters incomes."""
    import polars as pl

    frame = table("donations/pva97nk.csv").drop("ID", "TARGET_D", "DemCluster")
    income = pl.col("DemMedIncome")
    bands = [(0, "unknown"), (30_000, "to 30"), (40_000, "to 40"), (50_000, "to 50"), (65_000, "to 65")]
    band = pl.lit("above 65")
    for limit, name in reversed(bands):
        band = pl.when(income <= limit).then(pl.lit(name)).otherwise(band)
    age = pl.col("DemAge").cast(pl.Float64, strict=False)
    known = (
        pl.when(age < 50).then(pl.lit("young")).when(age < 70).then(pl.lit("middle")).otherwise(pl.lit("old"))
    )
    ages = pl.when(age.is_null()).then(pl.lit("?")).otherwise(known)
    frame = frame.with_columns(band.alias("band"), ages.alias("age"))
    cell = pl.concat_str(["band", "age", "DemGender", "DemHomeOwner"], separator=", ").alias("cell")
    frame = frame.with_columns(cell).drop("age", "DemMedIncome", "DemGender", "DemHomeOwner", "DemAge")
    return Federation.from_table(
        frame, "cell", "TARGET_B", cluster="band", split=SPLIT, seed=seed, task="classification"
    )


def responses(experiment: Experiment, seed: int) -> Numbers:
    """Return test log-loss and accuracy of the donor cells for one method (settings: method).

    Over cells: mean, sd, quartiles, worst. `loss_rows` is the mean over test rows, `train_loss` over training rows.
    `ratio` is a cell's test loss divided by that of training alone, `ratio_single` by that of one model for all; their
    shares by size are the curve and the plot.
    """
    fed, method = donors(seed), experiment.plans[0].settings["method"]
    weights, chosen = trained(fed, method)
    found = cell_scores(fed, weights, "test")
    numbers: Numbers = {**chosen, "train_loss": _over_rows(fed, weights, "train")}
    for metric, values in found.items():
        numbers |= {metric: float(values.mean()), f"{metric}_sd": float(values.std())}
        numbers |= {f"{metric}_{name}": float(values.quantile(at)) for name, at in QUARTILES.items()}
        numbers[f"{metric}_worst"] = float(values.max() if metric == "loss" else values.min())
    numbers["loss_rows"] = _over_rows(fed, weights, "test")
    shares = {}
    for other, name in (("local", "ratio"), ("single", "ratio_single")):
        ratios = found["loss"] / cell_scores(fed, trained(fed, other)[0], "test")["loss"]
        numbers |= {f"{name}_{part}": float(ratios.quantile(at)) for part, at in QUARTILES.items()}
        numbers[f"{name}_below"] = float((ratios < 1 - 1e-6).double().mean())
        shares[other] = _histogram(ratios)
    middles = ((BINS[1:] + BINS[:-1]) / 2).tolist()
    panels = [
        {
            "x": f"ratio to {'alone' if other == 'local' else 'one model'}",
            "y": "share of cells",
            "log": False,
            "curves": {method: (middles, values)},
        }
        for other, values in shares.items()
    ]
    if method != "local":
        numbers["curve"] = {
            "split": "share of",
            "metric": "cells",
            "log": False,
            "x": "test loss of a cell / that of training alone",
            "rounds": middles,
            "values": shares["local"],
        }
    return {**numbers, "plots": {"ratios": {"title": f"Donor cells, {method}", "panels": panels}}}


def grid(experiment: Experiment, seed: int) -> Numbers:
    """Return the test loss over rows for every gamma at one lambda (settings: lambda_, gammas)."""
    settings, fed = experiment.plans[0].settings, donors(seed)
    losses = [
        _over_rows(fed, pulled(fed, gamma, settings["lambda_"]), "test") for gamma in settings["gammas"]
    ]
    single = _over_rows(fed, trained(fed, "single")[0], "test")
    return {
        "smallest": min(losses),
        "strongest": losses[-1],
        "to_single": losses[-1] - single,
        "weakest": losses[0],
        **over_gammas(settings["gammas"], losses, "test loss"),
    }


def trained(fed: Federation, method: str) -> tuple[Tensor, Numbers]:
    """Return every cell's model [n, d] and the strengths of the pull that validation rows chose."""
    if method == "single":
        rows = fed.runtime.rows("train")
        weight = torch.full((len(rows.y),), 1 / len(rows.y), dtype=torch.float64)
        zero = torch.zeros(fed.d, dtype=torch.float64)
        return fed.model.solve(zero, rows.x, rows.y, weight, 1e-9).expand(fed.n, -1), {}
    if method == "local":
        tried = {(ridge, 0.0): alone(fed, ridge) for ridge in RIDGES}
    elif method == "grid":
        tried = {pair: pulled(fed, *pair) for pair in product(GAMMAS, LAMBDAS)}
    else:
        grouping = "one" if method == "single_cluster" else "known"
        settings = {"grouping": grouping, "effects": "same"}
        run = fit(fed, make("hierarchical", **settings), rounds=15, evaluate_every=0)
        return run.personal, {}
    gamma, lambda_ = min(tried, key=lambda pair: _over_rows(fed, tried[pair], "validation"))
    return tried[gamma, lambda_], {"gamma": gamma, "lambda": lambda_}


def alone(fed: Federation, ridge: float) -> Tensor:
    """Return the minimisers of every cell's summed loss plus ridge/2 |t|^2, [n, d]."""
    assert isinstance(fed.model, Glm)
    plain, found = dataclasses.replace(fed.model, l2=0.0), []
    for cell in range(fed.n):
        x, y = fed.runtime.rows("train").of(cell)
        weight = torch.full((len(y),), 1 / len(y), dtype=torch.float64)
        zero = torch.zeros(fed.d, dtype=torch.float64)
        found.append(plain.solve(zero, x, y, weight, 1e-9, ridge / len(y)))
    return torch.stack(found)


def pulled(fed: Federation, gamma: float, lambda_: float) -> Tensor:
    """Return the models [n, d] that minimise the penalised loss at given strengths."""
    method = make("hierarchical", choose="given", gamma=gamma, lambda_=lambda_)
    return fit(fed, method, rounds=20, evaluate_every=0).personal


def cell_scores(fed: Federation, weights: Tensor, split: str) -> dict[str, Tensor]:
    """Return log-loss and accuracy of every cell that has rows in the split."""
    rows, n = fed.runtime.rows(split), fed.n
    owner = torch.repeat_interleave(torch.arange(n), rows.size)
    scores = (rows.x.double() * weights.double()[owner]).sum(-1)
    hit = (scores > 0) == (rows.y > 0.5)
    losses = torch.nn.functional.softplus(scores * (1 - 2 * rows.y.double()))
    count = torch.bincount(owner, minlength=n)
    here = count > 0
    means = {
        name: (torch.zeros(n, dtype=torch.float64).index_add(0, owner, values.double()) / count)[here]
        for name, values in (("loss", losses), ("accuracy", hit))
    }
    return means


def _over_rows(fed: Federation, weights: Tensor, split: str) -> float:
    """Return the mean log-loss over the rows of a split."""
    rows = fed.runtime.rows(split)
    owner = torch.repeat_interleave(torch.arange(fed.n), rows.size)
    scores = (rows.x.double() * weights.double()[owner]).sum(-1)
    return float(torch.nn.functional.softplus(scores * (1 - 2 * rows.y.double())).mean())


def _histogram(ratios: Tensor) -> list[float]:
    """Return the share of ratios in every bin; those beyond the outer bins are in them."""
    counts = torch.histogram(ratios.clamp(float(BINS[0]), float(BINS[-1])), BINS)[0]
    return (counts / counts.sum()).tolist()
