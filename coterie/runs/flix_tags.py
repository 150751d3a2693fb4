"""Figure 1 of the FLIX paper on Stack Exchange posts: recall@5 of a user's tags against alpha."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie import models
from coterie.algorithms import Algorithm, make
from coterie.data.xml_texts import stackexchange
from coterie.federation.federation import Federation
from coterie.runs.experiments import Experiment, shared_data
from coterie.runs.fit import fit
from coterie.runs.history import mean_over_clients

SPLIT = (0.6, 0.2, 0.2)
TOP = 5


def tags(experiment: Experiment, seed: int) -> dict[str, float]:
    """Recall@5 on test posts of FLIX for every alpha, and of FOMAML and Reptile tuned on validation posts.

    Settings: words, tags, min_posts, alphas, l2; the rounds are those of the run, for every method.
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
    for alpha in (0.0, *asked["alphas"], 1.0):
        scores[alpha] = _scores(fed, make("flix", alpha=alpha, local_tol=1e-4), plan.rounds)
        found[f"flix_{alpha:g}"] = scores[alpha][1]
    chosen = min(scores, key=lambda alpha: scores[alpha][0])
    found |= {"flix": scores[chosen][1], "alpha": chosen}
    for name, grid in GRIDS.items():
        tried = [_scores(fed, make(name, batch=0, **settings), plan.rounds) for settings in grid]
        found[name] = min(tried)[1]
        found[f"gain_over_{name}"] = found["flix"] - found[name]
    found["gain_over_local"] = found["flix"] - found["flix_0"]
    return found


GRIDS: dict[str, list[dict[str, float]]] = {
    "fomaml": [
        {"lr": lr, "inner_lr": inner, "tuning_steps": steps}
        for lr in (3.0, 10.0)
        for inner in (1.0, 5.0)
        for steps in (5, 50)
    ],
    "reptile": [
        {"lr": lr, "meta_lr": 1.0, "tuning_steps": steps} for lr in (1.0, 3.0, 10.0) for steps in (5, 50)
    ],
}


def _scores(fed: Federation, algorithm: Algorithm, rounds: int) -> tuple[float, float]:
    """Mean loss on validation rows, by which methods choose, and recall@5 on test rows."""
    run = fit(fed, algorithm, rounds, evaluate_every=0, score_test=False)
    return mean_over_clients(run.score("validation", "loss")), recall(fed, run.personal, "test")


def recall(fed: Federation, personal: Tensor, split: str, top: int = TOP) -> float:
    """Share of a client's rows whose target is among its model's `top` highest scores, the mean over clients."""
    values = []
    for k in range(fed.n):
        x, y = fed.runtime.splits[split].of(k)
        if len(y):
            best = fed.model.scores(personal[k], x).topk(top, -1).indices
            values.append((best == y.long().unsqueeze(-1)).any(-1).double().mean())
    return float(torch.stack(values).mean())
