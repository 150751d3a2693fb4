"""Experiment flix/tags: figure 1 of the FLIX paper on Stack Exchange posts, recall@5 of a user's tags by alpha."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from coterie import models
from coterie.algorithms import Algorithm, make
from coterie.algorithms.flix import FLIX
from coterie.data.xml_texts import stackexchange
from coterie.engine.federation import Federation
from coterie.experiments.flix_networks import mixed
from coterie.experiments.spec import Experiment, shared_data
from coterie.select.flix_runs import local_models
from coterie.train.fit import fit
from coterie.train.history import mean_over_clients

SPLIT = (0.6, 0.2, 0.2)
TOP = 5


def tags(experiment: Experiment, seed: int) -> dict[str, float]:
    """Return recall@5 on test posts of FLIX for every alpha, and of FOMAML and Reptile, all tuned on validation posts.

    Settings: words, tags, min_posts, l2, alphas, flix (settings), local_steps (to try), and the grids fomaml and
    reptile. Every method trains for the rounds of the run. `flix` may choose alpha = 0 or 1 too.
    """
    plan = experiment.plans[0]
    asked = dict(plan.settings)
    clients = stackexchange(
        shared_data("stackexchange.tar.xz"), asked["words"], asked["tags"], asked["min_posts"]
    )
    model = models.softmax(l2=asked["l2"], classes=asked["tags"])
    fed = Federation.from_clients(clients, model, split=SPLIT, seed=seed)
    found = {"clients": float(fed.n), "rows": float(sum(len(y) for y in clients.ys))}
    scores: dict[float, tuple[float, float]] = {}
    for steps in asked["local_steps"]:
        settings = {**asked["flix"], "local_steps": steps}
        own = local_models(fed, FLIX(alpha=0.5, **settings))
        for alpha in (0.0, *asked["alphas"], 1.0):
            if alpha < 1.0 or alpha not in scores:
                score = _scores(fed, mixed(fed, own, FLIX(alpha=alpha, **settings), plan.rounds))
                scores[alpha] = min(score, scores.get(alpha, score))
    found |= {f"flix_{alpha:g}": score[1] for alpha, score in scores.items()}
    chosen = min(scores, key=lambda alpha: scores[alpha])
    found |= {"alpha": chosen, "flix": scores[chosen][1]}
    for name in ("fomaml", "reptile"):
        grid = asked[name]
        tried = (dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values()))
        found[name] = min(_trained(fed, make(name, batch=0, **one), plan.rounds) for one in tried)[1]
    rivals = {"local": scores[0.0][1], "shared": scores[1.0][1]}
    rivals |= {name: found[name] for name in ("fomaml", "reptile")}
    return found | {f"gain_over_{name}": found["flix"] - value for name, value in rivals.items()}


def _trained(fed: Federation, algorithm: Algorithm, rounds: int) -> tuple[float, float]:
    """Train a method and return its scores."""
    return _scores(fed, fit(fed, algorithm, rounds, evaluate_every=0, score_test=False).personal)


def _scores(fed: Federation, personal: Tensor) -> tuple[float, float]:
    """Return the mean validation loss, by which settings are chosen, and recall@5 on test rows."""
    return mean_over_clients(fed.score(personal, "validation")["loss"]), recall(fed, personal, "test")


def recall(fed: Federation, personal: Tensor, split: str, top: int = TOP) -> float:
    """Return the mean over clients of the share of rows whose target is among the `top` highest scores."""
    values = []
    for k in range(fed.n):
        x, y = fed.runtime.rows(split).of(k)
        if len(y):
            best = fed.model.scores(personal[k], x).topk(top, -1).indices
            values.append((best == y.long().unsqueeze(-1)).any(-1).double().mean())
    return float(torch.stack(values).mean())
