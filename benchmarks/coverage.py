"""Do 90 % intervals of hierarchical models hold what they say? Simulated federations, counted.

    python -m benchmarks.coverage [--worlds gaussian logistic crossed ...] [--count 500] [--first 0]

Every federation is a new draw from a known model. An interval counts once for each variance, and as the share of those
that hold for effects of clients (and levels) and for predictions: of new values for numbers, of the probability for
classes. Finished federations are kept in results/coverage-draws.json, and the table is written anew from them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import polars as pl
import torch
from scipy.special import expit

import coterie
from coterie import Federation, models
from coterie.algorithms import make

HOME = Path(__file__).resolve().parent / "results"
DRAWS, TABLE = HOME / "coverage-draws.json", HOME / "coverage.md"
LEVEL, LOW, HIGH = 0.9, 0.87, 0.93
Hits = dict[str, float]


def _inside(lower, truth, upper) -> float:
    return float(np.mean((np.asarray(lower) <= truth) & (truth <= np.asarray(upper))))


def gaussian(rng: np.random.Generator, clients: int = 30, rows: int = 8) -> Hits:
    """Random intercept and slope, both with variance 1, noise 1."""
    truth = rng.normal(size=(clients, 2)) + np.array([0.5, 2.0])
    xs = [rng.normal(size=(rows + 4, 1)) for _ in range(clients)]
    ys = [x[:, 0] * t[0] + t[1] + rng.normal(size=len(x)) for x, t in zip(xs, truth, strict=True)]
    model = models.linear(intercept=True)
    fed = Federation.from_arrays([x[:rows] for x in xs], [y[:rows] for y in ys], model)
    run = coterie.fit(fed, make("hierarchical", grouping="one", effects="each"), rounds=1, evaluate_every=0)
    return _judged(run, truth, {"noise": 1.0, "client 0": 1.0, "client 1": 1.0}, xs, ys, rows)


def nested(rng: np.random.Generator, clusters: int = 12, clients: int = 6, rows: int = 6) -> Hits:
    """Random intercepts of clients in clusters, variances 1 and 1, noise 1."""
    label = np.repeat(np.arange(clusters), clients)
    level = rng.normal(size=clusters)[label] + rng.normal(size=len(label))
    truth = np.column_stack([np.full(len(label), 0.5), 2.0 + level])
    xs = [rng.normal(size=(rows + 4, 1)) for _ in label]
    ys = [x[:, 0] * t[0] + t[1] + rng.normal(size=len(x)) for x, t in zip(xs, truth, strict=True)]
    fed = Federation.from_arrays(
        [x[:rows] for x in xs],
        [y[:rows] for y in ys],
        models.linear(intercept=True),
        clusters=label.tolist(),
    )
    run = coterie.fit(fed, make("hierarchical", effects="intercept"), rounds=1, evaluate_every=0)
    return _judged(run, truth, {"noise": 1.0, "client 0": 1.0, "cluster 0": 1.0}, xs, ys, rows)


def logistic(rng: np.random.Generator, clients: int = 60, rows: int = 8) -> Hits:
    """A random intercept with variance 1."""
    level = 0.3 + rng.normal(size=clients)
    truth = np.column_stack([np.full(clients, 0.5), level])
    xs = [rng.normal(size=(rows + 4, 1)) for _ in range(clients)]
    chances = [expit(x[:, 0] * t[0] + t[1]) for x, t in zip(xs, truth, strict=True)]
    ys = [(rng.uniform(size=rows) < p[:rows]).astype(int) for p in chances]
    fed = Federation.from_arrays([x[:rows] for x in xs], ys, models.logistic(intercept=True))
    method = make("hierarchical", grouping="one", effects="intercept")
    run = coterie.fit(fed, method, rounds=30, evaluate_every=0)
    return _judged(run, truth, {"client 0": 1.0}, xs, chances, rows)


def _judged(run, truth, variances: dict[str, float], xs, ys, rows: int) -> Hits:
    """Return which intervals hold; the rows beyond the first are new ones, with what is to be predicted."""
    sizes = run.variances(LEVEL)
    hits = {
        f"variance: {one['variance']}": float(one["lower"] <= variances[one["variance"]] <= one["upper"])
        for one in sizes.to_dicts()
    }
    table = run.effects(LEVEL)
    hits["effects"] = _inside(table["lower"], truth.flatten(), table["upper"])
    known, shares = run.intervals(LEVEL), []
    for name, x, y in zip(run.fed.names, xs, ys, strict=True):
        ends = known.rows(name, torch.from_numpy(x[rows:])).numpy()
        shares.append(_inside(ends[:, 0], y[rows:], ends[:, 1]))
    return hits | {"predictions": float(np.mean(shares))}


def crossed(
    rng: np.random.Generator, kind: str = "linear", students: int = 30, lecturers: int = 15, rows: int = 10
) -> Hits:
    """Students rate lecturers: both have variance 1, and the noise 1."""
    student = np.repeat(np.arange(students), rows + 2)
    lecturer = rng.integers(0, lecturers, len(student))
    own, theirs = rng.normal(size=students), rng.normal(size=lecturers)
    score = 0.5 + own[student] + theirs[lecturer]
    if kind == "linear":
        y, aim = (value := score + rng.normal(size=len(score))), value
    else:
        y, aim = np.where(rng.uniform(size=len(score)) < expit(score), "yes", "no"), expit(score)
    new = np.arange(len(student)) % (rows + 2) >= rows
    frame = pl.DataFrame(
        {"student": [f"s{k:02d}" for k in student], "lecturer": [f"l{k:02d}" for k in lecturer], "y": y}
    )
    fed = Federation.from_table(
        frame.filter(~pl.Series(new)),
        "student",
        "y",
        cluster=["lecturer"],
        model=getattr(models, kind)(intercept=True),
        split=(1.0, 0.0, 0.0),
        task="regression" if kind == "linear" else "classification",
    )
    run = coterie.fit(fed, make("hierarchical", effects="intercept"), rounds=1, evaluate_every=0)
    scale = fed.table.target_scale if kind == "linear" else 1.0
    shift = fed.table.preprocessor.target_mean if kind == "linear" else 0.0
    hits = {
        f"variance: {one['variance']}": float(one["lower"] <= 1 / scale**2 <= one["upper"])
        for one in run.variances(LEVEL).to_dicts()
    }
    table = run.effects(LEVEL)
    clients = table.filter(pl.col("client") != "(all)")
    levels = table.filter(pl.col("client") == "(all)")
    place = [int(name.removeprefix("s")) for name in clients["client"]]
    hits["effects"] = _inside(clients["lower"], (0.5 + own[place] - shift) / scale, clients["upper"])
    place = [int(name.removeprefix("lecturer=l")) for name in levels["coefficient"]]
    hits["effects of levels"] = _inside(levels["lower"], theirs[place] / scale, levels["upper"])
    found = run.intervals(LEVEL).predict(frame.filter(pl.Series(new)))
    hits["predictions"] = _inside(found["lower"], aim[new], found["upper"])
    return hits


def crossed_logistic(rng: np.random.Generator) -> Hits:
    """Two classes, students and lecturers, by Laplace's approximation."""
    return crossed(rng, "logistic", 40, 20, 12)


WORLDS = {
    "gaussian": gaussian,
    "nested": nested,
    "logistic": logistic,
    "crossed": crossed,
    "crossed logistic": crossed_logistic,
}


def table(draws: dict[str, dict[str, Hits]]) -> str:
    """Return the shares that hold, as a Markdown table."""
    lines = [
        "| world | federations | interval | share that holds | standard error | 87 to 93 % |",
        "|---|---:|---|---:|---:|---|",
    ]
    for world, found in draws.items():
        names = list(dict.fromkeys(name for one in found.values() for name in one))
        for name in names:
            values = np.array([one[name] for one in found.values() if name in one])
            error = values.std() / len(values) ** 0.5
            ok = "yes" if LOW <= values.mean() <= HIGH else "no"
            lines.append(
                f"| {world} | {len(values)} | {name} | {100 * values.mean():.1f} % | {100 * error:.1f} % | {ok} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DRAWS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draws = json.loads(given.out.read_text()) if given.out.exists() else {}
    for world in given.worlds:
        mine = draws.setdefault(world, {})
        for seed in range(given.first, given.first + given.count):
            if str(seed) not in mine:
                mine[str(seed)] = WORLDS[world](np.random.default_rng([seed, 2026]))
                given.out.write_text(json.dumps(draws) + "\n")
    (TABLE if given.out == DRAWS else given.out.with_suffix(".md")).write_text(table(draws))
    print(table(draws))


if __name__ == "__main__":
    main()
