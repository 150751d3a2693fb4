"""`auto` against every method in hindsight, on ten data sets: python -m benchmarks.auto [name ...] [--rounds N].

Prints for each the mean test metric over clients of `auto`, of the best method chosen in hindsight, and of training
alone and one model for all; the bar is within 1 % of the best, and not below the better of the two extremes by more
than the 95 % interval of the difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from coterie import models
from coterie.data import generate, partition
from coterie.federation.federation import Federation
from coterie.models.metrics import HIGHER_IS_BETTER
from coterie.runs.compare import compare
from coterie.runs.experiments import shared_data
from coterie.runs.history import interval
from coterie.runs.jobs import digits

SPLIT = (0.6, 0.2, 0.2)
BESIDE = ["ditto", "rtfa", "ifca", "cobo", "auto"]


def _table(path: str, client: str, target: str, drop: tuple[str, ...] = ()) -> Federation:
    """A shared table; rows whose target is missing are left out."""
    import polars

    frame = polars.read_csv(shared_data(path), infer_schema_length=None, null_values=["NA", ""])
    kept = frame.filter(polars.col(target).is_not_null())
    return Federation.from_table(kept, client=client, target=target, drop=list(drop))


def _clusters() -> Federation:
    data = generate.clustered_regression(clusters=4, clients=6, rows=40, features=10, seed=0)
    return Federation.from_clients(data, models.linear(), split=SPLIT)


def _effects(clients: int, rows: int) -> Federation:
    data = generate.hierarchical_linear(clusters=4, clients=clients // 4, rows=rows, seed=1)
    return Federation.from_clients(data, models.linear(), split=SPLIT)


def _digits() -> Federation:
    clients = partition.dirichlet(digits(), 20, 0.5, min_rows=20, seed=0)
    return Federation.from_clients(clients, models.softmax(), split=SPLIT, dtype=torch.float32)


WORLDS: dict[str, Callable[[], Federation]] = {
    "hospitals": lambda: Federation.from_table("heart_disease", client="hospital", target="sick"),
    "schools": lambda: _table("hierarchical/MathAchieve.csv", "School", "MathAch", ("rownames",)),
    "exams": lambda: _table("hierarchical/Exam.csv", "school", "normexam", ("rownames", "student")),
    "stars": lambda: _table(
        "hierarchical/star.csv", "sch", "math", ("rownames", "id", "read", "tch", "birthq", "trace", "birthy")
    ),
    "lecturers": lambda: _table("hierarchical/InstEval.csv", "d", "y", ("rownames", "s", "dept")),
    "donors": lambda: _table(
        "donations/pva97nk.csv", "DemCluster", "TARGET_B", ("ID", "TARGET_D", "DemMedHomeValue")
    ),
    "digits": _digits,
    "clusters": _clusters,
    "hierarchy, few rows": lambda: _effects(40, 15),
    "hierarchy, many rows": lambda: _effects(40, 100),
}


def judge(fed: Federation, rounds: int) -> dict[str, Any]:
    """One data set: every method tuned, and auto, on the same split."""
    beside = [name for name in BESIDE if fed.n >= 6 or name not in ("ifca", "cobo")]
    if fed.n > 300:
        beside.remove("cobo")
    started = time.process_time()
    found = compare(fed, algorithms=beside, seeds=1, rounds=rounds)
    sign = 1.0 if HIGHER_IS_BETTER[found.metric] else -1.0
    test = {trial.algorithm: trial.test for trial in found.trials}
    means = {name: float(values.nanmean()) for name, values in test.items()}
    best = max((name for name in means if name != "auto"), key=lambda name: sign * means[name])
    extreme = max(("local", "fedavg"), key=lambda name: sign * means[name])
    behind = sign * (test[extreme] - test["auto"])
    low, _ = interval(behind[~behind.isnan()])
    chosen = next(trial.run.algorithm.name for trial in found.trials if trial.algorithm == "auto")
    return {
        "clients": fed.n,
        "metric": found.metric,
        "auto": means["auto"],
        "chosen": chosen,
        "best": best,
        "means": means,
        "behind_best_percent": 100 * sign * (means[best] - means["auto"]) / abs(means[best]),
        "within_interval_of_extremes": low is None or low <= 0,
        "cpu_seconds": time.process_time() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WORLDS))
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name in given.names:
        rows[name] = row = judge(WORLDS[name](), given.rounds)
        print(
            f"{name:22s} {row['clients']:5d} clients  {row['metric']:8s} auto {row['auto']:.4g} ({row['chosen']})"
            f"  best {row['means'][row['best']]:.4g} ({row['best']})  behind {row['behind_best_percent']:+.2f} %"
            f"  not worse than the extremes: {row['within_interval_of_extremes']}  {row['cpu_seconds']:.0f} CPU-s",
            flush=True,
        )
    mean = sum(row["behind_best_percent"] for row in rows.values()) / len(rows)
    print(json.dumps({"mean_behind_best_percent": mean, "data_sets": rows}))


if __name__ == "__main__":
    main()
