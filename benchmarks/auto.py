"""`auto` against every method in hindsight, on ten data sets: python -m benchmarks.auto [name ...] [--seeds N].

A seed is another split of a table, and other data where they are generated. Prints for each data set the mean test
metric over clients and seeds of `auto` and of the best single method chosen in hindsight. The bar is within 1 % of the
best, and not below the better of training alone and one model for all by more than the 95 % interval of the difference
between clients. Which method is best is known from the test rows themselves, and chance helps the best of many: "each
seed" takes another method for every seed, which is the strict reading, the other figure the one that is best over all
seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import models
from coterie.algorithms import Algorithm
from coterie.algorithms.hierarchical import Hierarchical
from coterie.data import generate, partition
from coterie.federation.federation import Federation
from coterie.models.metrics import HIGHER_IS_BETTER
from coterie.runs.compare import compare
from coterie.runs.experiments import shared_data
from coterie.runs.history import interval
from coterie.runs.jobs import digits

SPLIT = (0.6, 0.2, 0.2)
BESIDE = ["ditto", "rtfa", "ifca", "cobo"]
NOISE = 50.0  # of the clusters' targets, whose signal has a standard deviation of about 200


def _table(path: str, client: str, target: str, drop: tuple[str, ...] = (), seed: int = 0) -> Federation:
    """A shared table; rows whose target is missing are left out."""
    import polars

    frame = polars.read_csv(shared_data(path), infer_schema_length=None, null_values=["NA", ""])
    kept = frame.filter(polars.col(target).is_not_null())
    return Federation.from_table(kept, client=client, target=target, drop=list(drop), seed=seed)


def _clusters(seed: int) -> Federation:
    data = generate.clustered_regression(clusters=4, clients=6, rows=40, features=10, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    ys = [y + NOISE * torch.randn(len(y), generator=draw, dtype=y.dtype) for y in data.ys]
    return Federation.from_clients(replace(data, ys=ys), models.linear(), split=SPLIT, seed=seed)


def _effects(rows: int, seed: int) -> Federation:
    data = generate.hierarchical_linear(clusters=4, clients=10, rows=rows, seed=seed + 1)
    return Federation.from_clients(data, models.linear(), split=SPLIT, seed=seed)


def _digits(seed: int) -> Federation:
    clients = partition.dirichlet(digits(), 20, 0.5, min_rows=20, seed=seed)
    return Federation.from_clients(clients, models.softmax(), split=SPLIT, dtype=torch.float32, seed=seed)


def _hospitals(seed: int) -> Federation:
    return Federation.from_table("heart_disease", client="hospital", target="sick", seed=seed)


SCHOOLS = ("hierarchical/MathAchieve.csv", "School", "MathAch", ("rownames",))
EXAMS = ("hierarchical/Exam.csv", "school", "normexam", ("rownames", "student"))
STARS_LEFT_OUT = ("rownames", "id", "read", "tch", "birthq", "trace", "birthy")
STARS = ("hierarchical/star.csv", "sch", "math", STARS_LEFT_OUT)
LECTURERS = ("hierarchical/InstEval.csv", "d", "y", ("rownames", "s", "dept"))
DONORS = ("donations/pva97nk.csv", "DemCluster", "TARGET_B", ("ID", "TARGET_D", "DemMedHomeValue"))

WORLDS: dict[str, Callable[[int], Federation]] = {
    "hospitals": _hospitals,
    "schools": lambda seed: _table(*SCHOOLS, seed=seed),
    "exams": lambda seed: _table(*EXAMS, seed=seed),
    "stars": lambda seed: _table(*STARS, seed=seed),
    "lecturers": lambda seed: _table(*LECTURERS, seed=seed),
    "donors": lambda seed: _table(*DONORS, seed=seed),
    "digits": _digits,
    "clusters": _clusters,
    "hierarchy, few rows": lambda seed: _effects(15, seed),
    "hierarchy, many rows": lambda seed: _effects(100, seed),
}


@dataclass
class Season:
    """One data set with one seed: the test metric of every client, by method."""

    metric: str
    clients: int
    test: dict[str, Tensor]
    chosen: str
    cpu_seconds: float


def beside(fed: Federation) -> list[Algorithm | str]:
    """The methods that auto is compared with, beside the baselines: all that it can choose, tuned one by one."""
    few, many = fed.n < 6, fed.n > 300
    asked: list[Algorithm | str] = [
        name for name in BESIDE if not (few and name in ("ifca", "cobo")) and not (many and name == "cobo")
    ]
    if Hierarchical().newton(fed):
        asked.append(Hierarchical(grouping="one" if fed.clusters is None else "known"))
    return [*asked, *(["oracle"] if fed.clusters is not None else []), "auto"]


def season(fed: Federation, rounds: int) -> Season:
    """Every method tuned, and auto, on the same split."""
    started = time.process_time()
    found = compare(fed, algorithms=beside(fed), seeds=1, rounds=rounds)
    test = {trial.algorithm: trial.test for trial in found.trials}
    chosen = next(trial.run.algorithm.name for trial in found.trials if trial.algorithm == "auto")
    return Season(found.metric, fed.n, test, chosen, time.process_time() - started)


def judge(seasons: list[Season]) -> dict[str, Any]:
    """One data set: auto against the best single method, over seeds and seed by seed."""
    metric = seasons[0].metric
    sign = 1.0 if HIGHER_IS_BETTER[metric] else -1.0
    scores = {
        name: torch.tensor([float(one.test[name].nanmean()) for one in seasons]) for name in seasons[0].test
    }
    means = {name: float(value.mean()) for name, value in scores.items()}
    rivals = [name for name in means if name != "auto"]
    best = max(rivals, key=lambda name: sign * means[name])
    extreme = max(("local", "fedavg"), key=lambda name: sign * means[name])
    behind = torch.cat([sign * (one.test[extreme] - one.test["auto"]) for one in seasons])
    low, _ = interval(behind[~behind.isnan()])
    each = torch.stack([sign * scores[name] for name in rivals]).amax(0)
    return {
        "clients": seasons[0].clients,
        "metric": metric,
        "seeds": len(seasons),
        "auto": means["auto"],
        "chosen": [one.chosen for one in seasons],
        "best": best,
        "means": means,
        "behind_best_percent": 100 * sign * (means[best] - means["auto"]) / abs(means[best]),
        "behind_best_of_each_seed_percent": float((100 * (each - sign * scores["auto"]) / each.abs()).mean()),
        "within_interval_of_extremes": low is None or low <= 0,
        "cpu_seconds": sum(one.cpu_seconds for one in seasons),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WORLDS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name in given.names:
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        rows[name] = row = judge([season(WORLDS[name](seed), given.rounds) for seed in seeds])
        print(
            f"{name:20s} {row['clients']:5d} clients  {row['metric']:8s} auto {row['auto']:.4g} "
            f"({', '.join(sorted(set(row['chosen'])))})  best {row['means'][row['best']]:.4g} ({row['best']})  "
            f"behind {row['behind_best_percent']:+.2f} %, each seed {row['behind_best_of_each_seed_percent']:+.2f} %  "
            f"not worse than the extremes: {row['within_interval_of_extremes']}  {row['cpu_seconds']:.0f} CPU-s",
            flush=True,
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
