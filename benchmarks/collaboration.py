"""Do clients find their group, and is nobody worse off?

`python -m benchmarks.collaboration [shape ...] [--seeds N]`.

A shape is a federation drawn anew for each seed. Methods run with their defaults for the same number of rounds; only
`oracle` knows the clusters. `--set development` draws the seeds on which defaults were chosen, `--set report` (the
default) others. A gap is counted in spreads: the standard deviation, inside a cluster, of what clients fit alone.

Two bars, both on the mean error of a shape: no more than 2 % above training alone; and no more than 10 % above the
oracle where clusters are 3 or more spreads apart and some client has company. Errors are root mean squared distances to
the true function on fresh rows, log-loss for logistic regression, and the rate of wrong classes for classes. Lying
clients are scored on nothing, and the bars hold for those who do not lie. --out FILE.json keeps the errors of every
seed, adds to those that are there, and writes the table FILE.md beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie import fit, models
from coterie._core.errors import Diverged
from coterie.algorithms import make
from coterie.engine.federation import Federation
from coterie.models.base import Model
from coterie.models.metrics import Metric, find

ROUNDS = 60
FRESH = 200  # rows on which a client's model is scored
FIRST_SEED = {"development": 0, "report": 2000}
REFERENCES = ("local", "fedavg", "oracle")
JUDGED = ("pfl-tc", "ifca", "cobo", "pdl-tc")
METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in (*REFERENCES, *JUDGED)},
    "ifca, K known, 5 restarts": {"restarts": 5},
}
HARM, BEHIND = 0.02, 0.10


@dataclass(frozen=True)
class Shape:
    """Sizes of the clusters, what separates them, and what the clients' rows are like.

    `inside` is the spread of true parameters in a cluster in units of the standard error of a client's own fit, for
    all clusters or for each; a gap is counted in the largest. `noise` is the standard deviation of targets.
    """

    sizes: tuple[int, ...]
    gap: float
    rows: tuple[int, int]
    kind: str = "linear"
    features: int = 5
    inside: float | tuple[float, ...] = 0.3
    liars: tuple[str, ...] = ()
    noise: float | None = None

    @property
    def held_to_oracle(self) -> bool:
        return self.gap >= 3 and max(self.sizes) > 1


SHAPES = {
    "6+6, gap 6, 30 rows": Shape((6, 6), 6.0, (30, 30)),
    "12+6, gap 4, 15 rows": Shape((12, 6), 4.0, (15, 15)),
    "12+6, gap 10, 5–100 rows": Shape((12, 6), 10.0, (5, 100)),
    "12+4+4, gap 5, 20 rows": Shape((12, 4, 4), 5.0, (20, 20), features=3),
    "12+4+4, gap 3, logistic, 100 rows": Shape((12, 4, 4), 3.0, (100, 100), "logistic"),
    "18+9+6+3, gap 8, 5 rows": Shape((18, 9, 6, 3), 8.0, (5, 5), features=3),
    "8+4+1+1+1, gap 5, 30 rows": Shape((8, 4, 1, 1, 1), 5.0, (30, 30)),
    "12 singletons, gap 4, 40 rows": Shape((1,) * 12, 4.0, (40, 40)),
    "one cluster of 12, 10 rows": Shape((12,), 0.0, (10, 10), features=4, inside=0.0),
    "6+6 that differ inside, gap 3, 100 rows": Shape((6, 6), 3.0, (100, 100), inside=3.0),
    "6+6, gap 3, mlp, 40 rows": Shape((6, 6), 3.0, (40, 40), "mlp"),
    "8+4+4, classes renamed, mlp, 40 rows": Shape((8, 4, 4), 3.0, (40, 40), "classes"),
    "12+6, gap 6, 20 rows, 3 liars agree": Shape((12, 6), 6.0, (20, 20), liars=("shift",) * 3),
    "12+6, gap 6, 20 rows, 3 liars flip": Shape(
        (12, 6), 6.0, (20, 20), liars=("sign-flip", "large", "random")
    ),
    "9+5+2, gap 4, 8 features, loud, 20–80 rows": Shape((9, 5, 2), 4.0, (20, 80), features=8, noise=2.0),
    "6+1+1+1+1, gap 5, logistic, 150 rows": Shape((6, 1, 1, 1, 1), 5.0, (150, 150), "logistic", features=4),
    "8 alike + 8 that differ, gap 6, 50 rows": Shape((8, 8), 6.0, (50, 50), features=6, inside=(0.0, 2.5)),
}


def centres(count: int, features: int, gap: float, draw: torch.Generator) -> Tensor:
    """Return points whose nearest neighbours are `gap` apart, [count, features], around a random point."""
    points = torch.randn(count, features, generator=draw, dtype=torch.float64)
    if count > 1:
        points = points * (gap / torch.pdist(points).min())
    away = torch.randn(features, generator=draw, dtype=torch.float64)
    return points - points.mean(0) + away


def drawn(shape: Shape, seed: int) -> tuple[Federation, Federation, Metric, Tensor]:
    """Return the federation, one with fresh rows, the metric, and who is honest, [n]."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(shape.sizes)), torch.tensor(shape.sizes))
    n, d = len(labels), shape.features
    low, high = shape.rows
    sizes = torch.randint(low, high + 1, (n,), generator=draw)
    noise = shape.noise or {"linear": 0.5, "mlp": 0.3}.get(shape.kind, 1.0)
    differ = torch.tensor(shape.inside, dtype=torch.float64).expand(len(shape.sizes))
    information = float(sizes.double().log().mean().exp()) * (0.2 if shape.kind == "logistic" else 1.0)
    alone = noise * math.sqrt(d / max(1.0, information))
    spread = alone * math.sqrt(1 + float(differ.max()) ** 2)
    inside = torch.randn(n, d, generator=draw, dtype=torch.float64) * (differ * alone / math.sqrt(d))[
        labels
    ].unsqueeze(1)
    theta = centres(len(shape.sizes), d, shape.gap * spread, draw)[labels] + inside
    names = torch.stack([torch.randperm(4, generator=draw) for _ in shape.sizes])[labels]
    blobs = 1.5 * torch.randn(4, d, generator=draw, dtype=torch.float64)

    def rows(count: int, i: int, fresh: bool) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, d, generator=draw, dtype=torch.float64)
        if shape.kind == "classes":
            kind = torch.randint(4, (count,), generator=draw)
            return (x + blobs[kind]).float(), names[i][kind]
        score = x @ theta[i]
        if shape.kind == "logistic":
            return x, (torch.rand(count, generator=draw) < torch.sigmoid(score)).double()
        mean = torch.tanh(score) + 0.5 * score if shape.kind == "mlp" else score
        y = mean if fresh else mean + noise * torch.randn(count, generator=draw, dtype=torch.float64)
        return (x.float(), y.float()) if shape.kind == "mlp" else (x, y)

    model: Model = {"linear": models.linear, "logistic": models.logistic}.get(
        shape.kind, lambda: models.mlp(hidden=(16,))
    )()
    train = [rows(int(sizes[i]), i, False) for i in range(n)]
    fresh = [rows(FRESH, i, True) for i in range(n)]
    liars = dict(enumerate(shape.liars))  # the first of the largest cluster
    fed = Federation.from_arrays(
        [x for x, _ in train],
        [y for _, y in train],
        model,
        clusters=labels.tolist(),
        seed=seed,
        byzantine=liars,
    )
    scored = Federation.from_arrays([x for x, _ in fresh], [y for _, y in fresh], fed.model, seed=seed)
    metric = find({"logistic": "loss", "classes": "accuracy"}.get(shape.kind, "rmse"))
    return fed, scored, metric, torch.arange(n) >= len(liars)


def error(fed: Federation, scored: Federation, metric: Metric, honest: Tensor, method: str) -> dict[str, Any]:
    """Return the mean error of one method over the honest clients, and what it found."""
    name = method.partition(",")[0]
    settings = METHODS.get(method, {})
    if "K known" in method:
        settings = {**settings, "clusters": int(fed.known_clusters().max()) + 1}
    started = time.process_time()
    try:
        run = fit(fed, make(name, **settings), ROUNDS, evaluate_every=0)
    except Diverged:  # nothing keeps liars out of a plain mean
        return {"error": math.inf, "ari": math.nan, "cpu_s": round(time.process_time() - started, 2)}
    value = scored.score(run.personal, "train", [metric])[metric.name].double()[honest]
    value = 1 - value if metric.name == "accuracy" else value
    seconds = time.process_time() - started
    found = run.algorithm.observe(run.fed, run.state)
    ari = found["ari"] if "ari" in found else torch.tensor(torch.nan)
    return {"error": float(value.mean()), "ari": round(float(ari), 3), "cpu_s": round(seconds, 2)}


def judge(shape: Shape, seeds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return mean errors by method, and for each judged one how it stands beside local and oracle."""
    means = {
        method: sum(one[method]["error"] for one in seeds) / len(seeds)
        for method in seeds[0]
        if all(method in one for one in seeds)
    }
    bars = {}
    for method in JUDGED:
        if method in means:
            harm = means[method] / means["local"] - 1
            behind = means[method] / means["oracle"] - 1
            kept = harm <= HARM and (not shape.held_to_oracle or behind <= BEHIND)
            bars[method] = {"harm": harm, "behind": behind, "kept": kept}
    return {"errors": means, "bars": bars, "seeds": len(seeds)}


def table(results: dict[str, dict[str, Any]], which: str) -> str:
    """Return the table: mean errors, those that miss a bar in bold."""
    methods = [method for method in METHODS if any(method in row["errors"] for row in results.values())]
    lines = [
        f"Mean errors over clients and seeds ({which} seeds); **bold**: above a bar.",
        "",
        "| shape | seeds | " + " | ".join(methods) + " |",
        "|---|---|" + "---|" * len(methods),
    ]
    for name, row in results.items():
        cells = []
        for method in methods:
            text = f"{row['errors'][method]:.4f}" if method in row["errors"] else ""
            missed = method in row["bars"] and not row["bars"][method]["kept"]
            cells.append(f"**{text}**" if missed else text)
        lines.append(f"| {name} | {row['seeds']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def save(out: Path, which: str, found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Add results to a file, by shape, seed and method, and write the table of one set of seeds beside it."""
    before = json.loads(out.read_text()) if out.exists() else {}
    kept = before.setdefault(which, {})
    for name, seeds in found.items():
        for seed, one in seeds.items():
            kept.setdefault(name, {}).setdefault(seed, {}).update(one)
    out.write_text(json.dumps(before, indent=1) + "\n")
    ordered = {
        name: judge(shape, list(kept[name].values())) for name, shape in SHAPES.items() if name in kept
    }
    text = table(ordered, which)
    out.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="those whose name begins so; all by default")
    parser.add_argument("--methods", help="names with semicolons between them; all by default")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--set", dest="which", choices=FIRST_SEED, default="report")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    methods = given.methods.split(";") if given.methods else list(METHODS)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, shape in SHAPES.items():
        if given.shapes and not any(map(name.startswith, given.shapes)):
            continue
        for seed in range(FIRST_SEED[given.which], FIRST_SEED[given.which] + given.seeds):
            parts = drawn(shape, seed)
            found.setdefault(name, {})[str(seed)] = {method: error(*parts, method) for method in methods}
        if given.out:
            save(given.out, given.which, {name: found[name]})
        seeds = list(found[name].values())
        means = {m: sum(one[m]["error"] for one in seeds) / len(seeds) for m in methods}
        aris = {m: sum(one[m]["ari"] for one in seeds) / len(seeds) for m in methods}
        cpu = {m: sum(one[m]["cpu_s"] for one in seeds) for m in methods}
        print(
            name,
            *(f"{m} {means[m]:.4f} ({aris[m]:.2f}, {cpu[m]:.0f}s)" for m in methods),
            sep="\n   ",
            flush=True,
        )


if __name__ == "__main__":
    main()
