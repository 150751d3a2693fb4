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


def full(rng: np.random.Generator, clients: int = 40, rows: int = 8) -> Hits:
    """Intercept and slope that are correlated (.5), variances 1 and 1, noise 1."""
    root = np.linalg.cholesky([[1.0, 0.5], [0.5, 1.0]])
    truth = rng.normal(size=(clients, 2)) @ root.T + np.array([0.5, 2.0])
    xs, ys = _numbers(rng, truth, np.ones(clients), rows)
    run = _fitted(xs, ys, rows, effects="each", covariance="full")
    sizes = {"noise": 1.0, "client 0": 1.0, "client 1": 1.0, "correlation 0, 1": 0.5}
    return _judged(run, truth, sizes, xs, ys, rows)


def cluster_variances(rng: np.random.Generator, clients: int = 25, rows: int = 6) -> Hits:
    """Three clusters whose intercepts have variances .5, 1 and 2, noise 1."""
    label, sizes = np.repeat(np.arange(3), clients), np.array([0.5, 1.0, 2.0])
    level = 2.0 + rng.normal(size=3)[label] + np.sqrt(sizes)[label] * rng.normal(size=len(label))
    truth = np.column_stack([np.full(len(label), 0.5), level])
    xs, ys = _numbers(rng, truth, np.ones(len(label)), rows)
    run = _fitted(xs, ys, rows, label, effects="intercept", variances="cluster")
    known = {"noise": 1.0, **{f"cluster {k}: client 0": float(size) for k, size in enumerate(sizes)}}
    return _judged(run, truth, known, xs, ys, rows)


def cluster_noises(rng: np.random.Generator, clients: int = 12, rows: int = 6) -> Hits:
    """Three clusters with noises .5, 1 and 2, intercepts with variance 1."""
    label, noises = np.repeat(np.arange(3), clients), np.array([0.5, 1.0, 2.0])
    level = 2.0 + rng.normal(size=3)[label] + rng.normal(size=len(label))
    truth = np.column_stack([np.full(len(label), 0.5), level])
    xs, ys = _numbers(rng, truth, noises[label], rows)
    run = _fitted(xs, ys, rows, label, effects="intercept", noise="cluster")
    known = {"client 0": 1.0, **{f"noise {k}": float(size) for k, size in enumerate(noises)}}
    return _judged(run, truth, known, xs, ys, rows)


def client_noises(rng: np.random.Generator, clients: int = 40, rows: int = 10) -> Hits:
    """Noises of the clients are 5/Gamma(5) around 1, intercepts have variance 1."""
    noises = 5.0 / rng.gamma(5.0, size=clients)
    truth = np.column_stack([np.full(clients, 0.5), 2.0 + rng.normal(size=clients)])
    xs, ys = _numbers(rng, truth, noises, rows)
    run = _fitted(xs, ys, rows, effects="intercept", noise="client")
    return _judged(run, truth, {"client 0": 1.0}, xs, ys, rows)


def negative_binomial(rng: np.random.Generator, clients: int = 60, rows: int = 8) -> Hits:
    """Counts of dispersion 2 with a random intercept of variance 1; predictions are of the mean."""
    return _scores(rng, "negative_binomial", clients, rows)


def ordinal(rng: np.random.Generator, clients: int = 60, rows: int = 8) -> Hits:
    """Four ordered classes with a random intercept of variance 1; no intervals of predictions."""
    return _scores(rng, "ordinal", clients, rows)


def _scores(rng: np.random.Generator, kind: str, clients: int, rows: int) -> Hits:
    """Return hits of a random intercept (variance 1) beside a common slope, for counts or ordered classes."""
    truth = np.column_stack([np.full(clients, 0.5), 0.3 + rng.normal(size=clients)])
    xs = [rng.normal(size=(rows + 4, 1)) for _ in range(clients)]
    zs = [x[:, 0] * t[0] + t[1] for x, t in zip(xs, truth, strict=True)]
    if kind == "ordinal":
        ys = [np.digitize(z + rng.logistic(size=len(z)), [0.0, 1.0, 2.5]) for z in zs]
        model = models.ordinal(intercept=True, classes=4)
    else:
        ys = [rng.negative_binomial(2, 2 / (2 + np.exp(z))).astype(float) for z in zs]
        model = models.negative_binomial(intercept=True)
    fed = Federation.from_arrays([x[:rows] for x in xs], [y[:rows] for y in ys], model)
    method = make("hierarchical", grouping="one", effects="intercept")
    run = coterie.fit(fed, method, rounds=60, evaluate_every=0)
    return _judged(
        run, truth, {"client 0": 1.0}, xs, None if kind == "ordinal" else list(map(np.exp, zs)), rows
    )


def _numbers(rng: np.random.Generator, truth: np.ndarray, noises: np.ndarray, rows: int) -> tuple[list, list]:
    """Return features and targets of clients with these coefficients and noises, and four new rows of each."""
    xs = [rng.normal(size=(rows + 4, 1)) for _ in truth]
    ys = [
        x[:, 0] * t[0] + t[1] + s * rng.normal(size=len(x))
        for x, t, s in zip(xs, truth, np.sqrt(noises), strict=True)
    ]
    return xs, ys


def _fitted(xs, ys, rows: int, label=None, **settings: str):
    """Return the hierarchical model of the first rows, with known clusters if there is a label."""
    fed = Federation.from_arrays(
        [x[:rows] for x in xs],
        [y[:rows] for y in ys],
        models.linear(intercept=True),
        clusters=None if label is None else label.tolist(),
    )
    grouping = "one" if label is None else "known"
    return coterie.fit(fed, make("hierarchical", grouping=grouping, **settings), rounds=1, evaluate_every=0)


def _judged(run, truth, variances: dict[str, float], xs, ys, rows: int) -> Hits:
    """Return which intervals hold; the rows beyond the first are new ones, with what is to be predicted."""
    hits = {
        f"variance: {one['variance']}": float(one["lower"] <= variances[one["variance"]] <= one["upper"])
        for one in run.variances(LEVEL).to_dicts()
        if one["variance"] in variances
    }
    table = run.effects(LEVEL).filter(~pl.col("coefficient").str.starts_with("log "))
    hits["effects"] = _inside(table["lower"], truth.flatten(), table["upper"])
    if ys is None:
        return hits
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
    hits = {
        f"variance: {one['variance']}": float(one["lower"] <= 1.0 <= one["upper"])
        for one in run.variances(LEVEL).to_dicts()
    }
    table = run.effects(LEVEL)
    clients = table.filter(pl.col("client") != "(all)")
    levels = table.filter(pl.col("client") == "(all)")
    place = [int(name.removeprefix("s")) for name in clients["client"]]
    hits["effects"] = _inside(clients["lower"], 0.5 + own[place], clients["upper"])
    place = [int(name.removeprefix("lecturer=l")) for name in levels["coefficient"]]
    hits["effects of levels"] = _inside(levels["lower"], theirs[place], levels["upper"])
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
    "full covariance": full,
    "cluster variances": cluster_variances,
    "cluster noises": cluster_noises,
    "client noises": client_noises,
    "negative binomial": negative_binomial,
    "ordinal": ordinal,
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


def _complete(hits: Hits) -> bool:
    """Return False for a draw that is missing, or whose variances are to be judged again."""
    return any(name.startswith("variance") for name in hits)


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
            if not _complete(mine.get(str(seed), {})):
                mine[str(seed)] = WORLDS[world](np.random.default_rng([seed, 2026]))
                given.out.write_text(json.dumps(draws) + "\n")
    (TABLE if given.out == DRAWS else given.out.with_suffix(".md")).write_text(table(draws))
    print(table(draws))


if __name__ == "__main__":
    main()
