"""How long does a logistic mixed model of many clients take, and does it find the truth?

    python -m benchmarks.mixed_scale [--clients 10000] [--rows 100] [--features 10] [--threads 2]

A random intercept and two random slopes. Prints and keeps (results/mixed_scale.json) seconds of wall clock and of all
cores, the rounds it took, and every variance with its interval and its true value. The bar of the defaults is 60 s on
two cores.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from coterie import Federation, models
from coterie.algorithms import make

HOME = Path(__file__).resolve().parent / "results"
TRUTH = {"client 0": 1.0, "client 1": 0.5, "client 2": 0.25}  # of the intercept and of the first two slopes


def world(
    clients: int, rows: int, features: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return features [clients, rows, features], classes [clients, rows], and the variances of the effects drawn."""
    rng = np.random.default_rng([seed, 2026])
    common = rng.normal(size=features) / 2
    own = np.tile(np.append(common, 0.3), (clients, 1))
    effects = rng.normal(size=(clients, 3)) * np.sqrt(list(TRUTH.values()))
    own[:, [-1, 0, 1]] += effects
    x = rng.normal(size=(clients, rows, features))
    scores = np.einsum("nbd,nd->nb", x, own[:, :-1]) + own[:, -1:]
    y = rng.uniform(size=scores.shape) < 1 / (1 + np.exp(-scores))
    drawn = dict(zip(TRUTH, effects.var(0).round(4).tolist(), strict=True))
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)), drawn


def measure(clients: int, rows: int, features: int, rounds: int, seed: int) -> dict[str, Any]:
    """Fit one federation and return its seconds, rounds and variances."""
    x, y, drawn = world(clients, rows, features, seed)
    wall, processor = time.perf_counter(), time.process_time()
    fed = Federation.from_arrays(list(x), list(y), models.logistic(intercept=True))
    method = make("hierarchical", grouping="one", effects="intercept", slopes="0,1")
    run = coterie.fit(fed, method, rounds=rounds, evaluate_every=0)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {
        "clients": clients,
        "rows": rows,
        "features": features,
        "wall": round(wall, 1),
        "processor": round(processor, 1),
        "rounds": len({entry.round for entry in run.fed.ledger.entries}),
        "converged": bool(run.state.done),
        "variances": {
            one["variance"]: {"truth": TRUTH[one["variance"]], "drawn": drawn[one["variance"]]}
            | {key: round(one[key], 4) for key in ("estimate", "lower", "upper")}
            for one in run.variances(0.9).to_dicts()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--features", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = measure(given.clients, given.rows, given.features, given.rounds, given.seed)
    found = {"threads": given.threads, **found}
    print(json.dumps(found, indent=1))
    (HOME / "mixed_scale.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
