"""Experiment known-clusters/crossed: ratings of lecturers by students, with crossed effects as in lme4."""

from __future__ import annotations

import math
from typing import Any

import torch

from coterie import models
from coterie.algorithms import make
from coterie.data import tables
from coterie.engine.federation import Federation
from coterie.experiments.spec import Experiment, shared_data
from coterie.train.fit import fit


def ratings(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Return standard deviations, coefficients and deviance of all ratings, by maximum likelihood.

    Settings: `features`, the columns with common coefficients, and `cluster`, the grouping columns; students are the
    clients. All rows are training rows, since published estimates are of all rows.
    """
    settings = experiment.plans[0].settings
    pairs = [part for name in settings["cluster"] for part in name.split(":")]
    columns = list(dict.fromkeys(["s", "y", *settings["features"], *pairs]))
    frame = tables.read(shared_data("hierarchical/InstEval.csv")).select(columns)
    fed = Federation.from_table(
        frame,
        "s",
        "y",
        cluster=settings["cluster"],
        split=(1.0, 0.0, 0.0),
        task="regression",
        model=models.linear(intercept=True),
        seed=seed,
    )
    run = fit(fed, make("hierarchical", effects="intercept"), rounds=1, evaluate_every=0)
    assert fed.table is not None
    scale = fed.table.target_scale
    found: dict[str, Any] = {
        name: float(value)
        for name, value in run.algorithm.observe(run.fed, run.state).items()
        if torch.as_tensor(value).numel() == 1
    }
    found["deviance"] = run.state.deviance + 2 * frame.height * math.log(scale)
    for scaled in fed.table.preprocessor.scales:
        place = fed.table.preprocessor.feature_names.index(scaled.name)
        found[f"slope {scaled.name}"] = float(run.state.x[place]) * scale / scaled.sd
    return found
