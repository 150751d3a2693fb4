"""`auto` against every method in hindsight, on ten data sets: python -m benchmarks.auto [name ...] [--seeds N].

A seed is another split of a table, and other data where they are generated. The bar: the mean test metric over clients
within 1 % of the best single method chosen in hindsight, and not below the better of training alone and one model for
all by more than the 95 % interval of the difference between clients. "Best over seeds" is the one method with the best
mean; "best elsewhere" is for every seed the method that is best on the other seeds, which chance does not help; "best
of each seed" takes another method for every seed, known from the very rows it is scored on. --out FILE.json keeps the
figures of every seed, adds to those that are there, and writes the table FILE.md beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie import models
from coterie.algorithms import Algorithm
from coterie.algorithms.hierarchical import Hierarchical
from coterie.data import generate, partition
from coterie.data.small_images import digits
from coterie.engine.federation import Federation
from coterie.experiments.spec import shared_data
from coterie.models.metrics import find
from coterie.select.compare import compare

SPLIT = (0.6, 0.2, 0.2)
EXTREMES = ("local", "fedavg")
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


def beside(fed: Federation) -> list[Algorithm | str]:
    """The methods that auto is compared with, beside the baselines: all that it can choose, tuned one by one."""
    few, many = fed.n < 6, fed.n > 300
    asked: list[Algorithm | str] = [
        name for name in BESIDE if not (few and name in ("ifca", "cobo")) and not (many and name == "cobo")
    ]
    if Hierarchical().newton(fed):
        asked.append(Hierarchical(grouping="one" if fed.clusters is None else "known", choose="reml"))
    return [*asked, *(["oracle"] if fed.clusters is not None else []), "auto"]


def season(fed: Federation, rounds: int) -> dict[str, Any]:
    """Every method tuned, and auto, on the same split: mean test metrics, and auto's gaps to the extremes."""
    started = time.process_time()
    found = compare(fed, algorithms=beside(fed), seeds=1, rounds=rounds)
    test = {trial.algorithm: trial.test.double() for trial in found.trials}
    sign = find(found.metric).sign
    gaps = {}
    for name in EXTREMES:
        gap = sign * (test[name] - test["auto"])
        gap = gap[~gap.isnan()]
        gaps[name] = [len(gap), float(gap.sum()), float(gap.square().sum())]
    return {
        "metric": found.metric,
        "clients": fed.n,
        "test": {name: float(value.nanmean()) for name, value in test.items()},
        "chosen": next(trial.run.algorithm.name for trial in found.trials if trial.algorithm == "auto"),
        "gaps": gaps,
        "cpu_seconds": time.process_time() - started,
    }


def judge(seasons: list[dict[str, Any]]) -> dict[str, Any]:
    """One data set: how far auto is behind the best single method, in percent, in three readings of "best"."""
    sign = find(seasons[0]["metric"]).sign
    rivals = [name for name in seasons[0]["test"] if name != "auto"]
    auto = torch.tensor([sign * one["test"]["auto"] for one in seasons], dtype=torch.float64)
    scores = torch.tensor(
        [[sign * one["test"][name] for name in rivals] for one in seasons], dtype=torch.float64
    )
    best = int(scores.mean(0).argmax())
    elsewhere = (scores.sum(0) - scores).argmax(1) if len(seasons) > 1 else torch.tensor([best])
    readings = {
        "over_seeds": scores[:, best],
        "elsewhere": scores.gather(1, elsewhere.unsqueeze(1)).squeeze(1),
        "each_seed": scores.amax(1),
    }
    behind = {name: 100 * (value - auto) / abs(float(value.mean())) for name, value in readings.items()}
    better = max(EXTREMES, key=lambda name: float(scores[:, rivals.index(name)].mean()))
    return {
        "clients": seasons[0]["clients"],
        "metric": seasons[0]["metric"],
        "seeds": len(seasons),
        "auto": sign * float(auto.mean()),
        "chosen": dict(Counter(one["chosen"] for one in seasons).most_common()),
        "best": rivals[best],
        "best_mean": sign * float(scores[:, best].mean()),
        "behind_percent": {name: float(value.mean()) for name, value in behind.items()},
        "standard_error": {
            name: float(value.std()) / math.sqrt(len(value)) if len(value) > 1 else None
            for name, value in behind.items()
        },
        "better_extreme": better,
        "behind_extreme": _pooled([one["gaps"][better] for one in seasons]),
        "cpu_seconds": sum(one["cpu_seconds"] for one in seasons),
    }


def _pooled(gaps: list[list[float]]) -> list[float]:
    """Mean gap over clients and seeds, and half of its 95 % interval, from counts, sums and sums of squares."""
    from scipy.stats import t as student

    count, total, squares = (sum(column) for column in zip(*gaps, strict=True))
    mean = total / count
    variance = max(0.0, squares - count * mean**2) / (count - 1)
    return [mean, float(student.ppf(0.975, count - 1)) * math.sqrt(variance / count)]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""

    def percent(row: dict[str, Any], name: str) -> str:
        error = row["standard_error"][name]
        return f"{row['behind_percent'][name]:+.2f}" + ("" if error is None else f" ± {error:.2f}")

    lines = [
        "| data | clients | seeds | metric | auto | best single | behind, % | best elsewhere, % | each seed, % |"
        " gap to the better extreme | chosen |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        gap, half = row["behind_extreme"]
        chosen = ", ".join(f"{method} {count}" for method, count in row["chosen"].items())
        lines.append(
            f"| {name} | {row['clients']} | {row['seeds']} | {row['metric']} | {row['auto']:.4g} | "
            f"{row['best_mean']:.4g} {row['best']} | {percent(row, 'over_seeds')} | {percent(row, 'elsewhere')} | "
            f"{row['behind_percent']['each_seed']:+.2f} | {gap:+.3g} ± {half:.2g} {row['better_extreme']} | {chosen} |"
        )
    return "\n".join(lines)


def save(path: Path, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds seeds to the file, and returns the rows of all that it holds."""
    held = json.loads(path.read_text())["seasons"] if path.exists() else {}
    for name, seasons in found.items():
        held.setdefault(name, {}).update(seasons)
    held = {name: held[name] for name in WORLDS if name in held}
    rows = {name: judge(list(seasons.values())) for name, seasons in held.items()}
    path.write_text(json.dumps({"rows": rows, "seasons": held}, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(rows) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(WORLDS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file that keeps the figures of every seed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.names:
        seasons: dict[str, Any] = {}
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            seasons[str(seed)] = season(WORLDS[name](seed), given.rounds)
            rows = save(given.out, {name: seasons}) if given.out else {name: judge(list(seasons.values()))}
        print(table({name: rows[name]}).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
