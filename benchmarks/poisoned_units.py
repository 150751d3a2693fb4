"""One client of twelve in other units (x 1000): how much does the error of the others change?

    python -m benchmarks.poisoned_units [--targets numbers classes] [--worlds 10] [--first 0]

Features, targets or both of the last client are multiplied, for numbers and for two classes (features only), with all
clients in one group and in three known clusters. Rows are given as arrays, so that nothing but the method can notice.
Written to results/poisoned_units.md: root mean squared error (log-loss for classes) of the eleven others on new
rows, as a ratio to that without the odd client's units; the bar is 1.05. Lines of targets that are not run stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from coterie import Federation, fit, models
from coterie.algorithms import make

HOME = Path(__file__).resolve().parent / "results"
UNITS = {"features": (1000.0, 1.0), "targets": (1.0, 1000.0), "both": (1000.0, 1000.0)}


def world(seed: int, classes: bool, clustered: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return 60 rows of each of twelve clients, whose coefficients vary."""
    rng = np.random.default_rng([seed, 1225])
    truth = 0.5 * rng.normal(size=(12, 4)) + rng.normal(size=4)
    truth += np.repeat(rng.normal(size=(3, 4)), 4, 0) if clustered else 0.0
    xs = [rng.normal(size=(60, 3)) for _ in truth]
    zs = [x @ t[:3] + t[3] for x, t in zip(xs, truth, strict=True)]
    if classes:
        return xs, [(rng.uniform(size=60) < 1 / (1 + np.exp(-z))).astype(int) for z in zs]
    return xs, [z + 0.4 * rng.normal(size=60) for z in zs]


def error(xs: list[np.ndarray], ys: list[np.ndarray], classes: bool, clustered: bool) -> float:
    """Return the error of the first eleven on the last 40 rows, after training on the first 20."""
    model = models.logistic(intercept=True) if classes else models.linear(intercept=True)
    clusters = [0] * 4 + [1] * 4 + [2] * 4 if clustered else None
    fed = Federation.from_arrays([x[:20] for x in xs], [y[:20] for y in ys], model, clusters=clusters)
    method = make("hierarchical", grouping="known" if clustered else "one")
    run = fit(fed, method, rounds=15 if classes else 1, evaluate_every=0)
    scores = np.array([np.c_[x[20:], np.ones(40)] @ w for x, w in zip(xs, run.personal.numpy(), strict=True)])
    y = np.array([one[20:] for one in ys])
    if classes:
        return float(np.logaddexp(0, (1 - 2 * y) * scores)[:11].mean())
    return float(np.sqrt(np.square(scores - y)[:11].mean()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets", nargs="+", choices=("numbers", "classes"), default=["numbers", "classes"]
    )
    parser.add_argument("--worlds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| target | clients | what is x 1000 | worlds | mean ratio | largest ratio | largest below 1.05 |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    known = (HOME / "poisoned_units.md").read_text().splitlines()[2:]
    for classes in (False, True):
        kind = "classes" if classes else "numbers"
        if kind not in given.targets:
            lines += [line for line in known if line.startswith(f"| {kind} ")]
            continue
        for clustered in (False, True):
            found: dict[str, list[float]] = {}
            for seed in range(given.first, given.first + given.worlds):
                xs, ys = world(seed, classes, clustered)
                clean = error(xs, ys, classes, clustered)
                for name, (x, y) in UNITS.items():
                    if classes and name != "features":
                        continue
                    odd = [*xs[:-1], x * xs[-1]], [*ys[:-1], y * ys[-1] if y != 1 else ys[-1]]
                    found.setdefault(name, []).append(error(*odd, classes, clustered) / clean)
            for name, ratios in found.items():
                group = "three clusters" if clustered else "one group"
                ok = "yes" if max(ratios) < 1.05 else "no"
                lines.append(
                    f"| {kind} | {group} | {name} | {len(ratios)} | {np.mean(ratios):.3f} | {max(ratios):.3f} | {ok} |"
                )
                print(lines[-1], flush=True)
    (HOME / "poisoned_units.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
