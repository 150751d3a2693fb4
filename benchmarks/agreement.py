"""Methods beside those of fluke on the same rows, minibatches and initial models: `python -m benchmarks.agreement`.

Six methods train a perceptron of five clients for ten rounds in double precision, here and in an environment of
fluke's own. The bar is a largest difference of 1e-5 between parameters of the models that clients deploy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from benchmarks.environments import BY_NAME, PEERS
from coterie import Federation, models
from coterie._core import randomness
from coterie.algorithms import Algorithm, make
from coterie.engine.protocol import Call, visit_keys

ROUNDS, STEPS, BATCH, WIDTH, CLASSES = 10, 4, 8, 6, 3
SIZES = (30, 47, 64, 25, 80)
BAR = 1e-5
METHODS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fedavg": ({}, ("",)),
    "fedprox": ({"mu": 0.3}, ("",)),
    "scaffold": ({"weighting": "uniform"}, ("",)),
    "ditto": ({"lam": 0.5}, ("", "personal")),
    "fedper": ({}, ("",)),
    "fedrep": ({"head_steps": STEPS}, ("head", "")),
}  # settings, and streams of minibatches in the order in which fluke passes through the rows
RESULT = Path(__file__).parent / "results" / "agreement.json"


def federation() -> Federation:
    """Five clients with classes of their own, normal inputs, double precision."""
    draw = torch.Generator().manual_seed(11)
    xs = [torch.randn(n, 4, generator=draw, dtype=torch.float64) + k / 4 for k, n in enumerate(SIZES)]
    turns = [torch.randn(4, CLASSES, generator=draw, dtype=torch.float64) for _ in SIZES]
    ys = [(x @ turn).argmax(1) for x, turn in zip(xs, turns, strict=True)]
    model = models.mlp((WIDTH,), activation="tanh", classes=CLASSES)
    return Federation.from_arrays(xs, ys, model)


def draws(fed: Federation, algorithm: Algorithm, streams: tuple[str, ...]) -> np.ndarray:
    """Return the rows of every step, [rounds, streams, clients, steps, batch]."""
    rows = fed.runtime.rows("train")

    def one(t: int, stream: str, client: int, step: int) -> np.ndarray:
        begun = int(t == 1 and algorithm.begin is not None)
        key = visit_keys(fed.seed, Call(algorithm, "train", t, begun, {}, {}), torch.tensor(client), None)
        key = randomness.fold(randomness.fold(key, stream) if stream else key, step)
        return rows.draw(torch.tensor(client), key, BATCH)[0].numpy()

    every = [
        [
            [[one(t, stream, k, step) for step in range(1, STEPS + 1)] for k in range(fed.n)]
            for stream in streams
        ]
        for t in range(1, ROUNDS + 1)
    ]
    return np.array(every)


def difference(method: str, folder: Path) -> float:
    """Return the largest difference between deployed models of both libraries."""
    settings, streams = METHODS[method]
    fed = federation()
    algorithm = make(method, lr=0.1, steps=STEPS, batch=BATCH, **settings)
    ours = coterie.fit(fed, algorithm, ROUNDS, evaluate_every=0).personal.numpy()
    rows = fed.runtime.rows("train")
    arrays = {
        "x": rows.x.numpy(),
        "y": rows.y.numpy(),
        "start": rows.start.numpy(),
        "size": rows.size.numpy(),
        "initial": fed.initial_model().numpy(),
        "draws": draws(fed, algorithm, streams),
    }
    meta = {"method": method, "width": WIDTH, "classes": CLASSES, **algorithm.settings()}
    meta["weighted"] = meta.get("weighting") != "uniform"
    problem, result = folder / f"{method}.npz", folder / f"{method}-fluke.npz"
    np.savez(problem, meta=json.dumps(meta), **arrays)
    command = [str(BY_NAME["fluke"].python), "-P", str(PEERS / "agree.py"), str(problem), str(result)]
    path = {
        "PYTHONPATH": str(PEERS / "shared")
    }  # not the folder of the drivers, which are named like libraries
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | path)
    with np.load(result) as theirs:
        return float(np.abs(ours - theirs["personal"]).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print only")
    arguments = parser.parse_args()
    BY_NAME["fluke"].install()
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for method in METHODS:
            found[method] = difference(method, Path(folder))
            print(f"{method:10} {found[method]:.1e}", flush=True)
    if not arguments.dry:
        told = {"peer": "fluke-fl 0.8.1", "rounds": ROUNDS, "bar": BAR, "largest difference": found}
        RESULT.write_text(json.dumps(told, indent=2) + "\n")
    return int(max(found.values()) > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
