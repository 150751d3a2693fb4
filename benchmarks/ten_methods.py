"""Ten methods in four libraries on one data set, time to finish side by side: `python -m benchmarks.ten_methods`.

20 clients with 60 training rows of the 8 x 8 digits each, most of two or three classes; a perceptron 64-64-10, one pass
in minibatches of 10 rows in every round. PFLlib and FL-bench are no packages: unpack commits d832e76
and 06e658b as .bench/PFLlib and .bench/FL-bench.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import coterie
from benchmarks import machine
from benchmarks.environments import BENCH, BY_NAME, PEERS
from coterie import Federation, models
from coterie.algorithms import make

CLIENTS, TRAIN, BATCH, WIDTH = 20, 60, 10, 64
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "scaffold": {},
    "feddyn": {"alpha": 0.1},
    "ditto": {"lam": 0.1},
    "apfl": {},
    "fedper": {},
    "fedrep": {"head_steps": TRAIN // BATCH},
    "fedbabu": {"tuning_steps": TRAIN // BATCH},
    "lg-fedavg": {},
}
FOLDERS = {"fluke": (), "pfllib": (BENCH / "PFLlib" / "system",), "flbench": (BENCH / "FL-bench",)}
RESULT = Path(__file__).parent / "results" / "ten_methods.json"


def rows() -> dict[str, np.ndarray]:
    """Return digits sorted by class, with some noise in the order, and dealt out to clients of equal size."""
    from sklearn.datasets import load_digits

    bunch, draw = load_digits(), np.random.default_rng(1)
    order = np.argsort(bunch.target + draw.uniform(0, 2, len(bunch.target)))
    each = len(order) // CLIENTS
    order = draw.permuted(order[: CLIENTS * each].reshape(CLIENTS, each), axis=1)
    x, y = (bunch.data / 16).astype(np.float32)[order], bunch.target.astype(np.int64)[order]
    return {"x": x[:, :TRAIN], "y": y[:, :TRAIN], "x_test": x[:, TRAIN:], "y_test": y[:, TRAIN:]}


def ours(data: dict[str, np.ndarray], rounds: int, lr: float) -> dict[str, Any]:
    """Return seconds of our methods: making clients, training, and one test at the end."""
    xs, ys = (np.concatenate([data[name], data[f"{name}_test"]], 1) for name in ("x", "y"))
    found, each = {}, xs.shape[1]

    def train(method: str, count: int) -> float:
        fed = Federation.from_arrays(
            xs, ys, models.mlp((WIDTH,)), split=(TRAIN / each, 0.0, 1 - TRAIN / each)
        )
        assert fed.rows["train"].tolist() == [TRAIN] * CLIENTS
        algorithm = make(method, lr=lr, steps=TRAIN // BATCH, batch=BATCH, **SETTINGS[method])
        run = coterie.fit(fed, algorithm, count, evaluate_every=0)
        return float(run.score_test()["accuracy"].mean())

    for method in SETTINGS:
        train(method, 2)
        start, used = time.perf_counter(), time.process_time()
        accuracy = train(method, rounds)
        seconds, used = time.perf_counter() - start, time.process_time() - used
        found[method] = {"seconds": seconds, "cpu": used, "accuracy": accuracy}
    return found


def peer(name: str, problem: Path) -> dict[str, Any]:
    """Return what a library's driver says of every method."""
    path = os.pathsep.join(str(one) for one in (PEERS / "shared", *FOLDERS[name]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [str(BY_NAME["fluke"].python), "-P", str(PEERS / f"ten_{name}.py"), str(problem)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=problem.parent)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"why": ended.stderr.strip().splitlines()[-1] if ended.stderr else "no answer"}
    return {line.pop("method"): line for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", type=lambda text: text.split(","), help="peers; all if not given")
    parser.add_argument("--json", type=Path, help=f"file for the figures, such as {RESULT.name} in results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    BY_NAME["fluke"].install()
    data, lr = rows(), 0.1
    meta = {"rounds": arguments.rounds, "batch": BATCH, "lr": lr, "width": WIDTH, "classes": 10}
    meta |= {"mu": 0.1, "alpha": 0.1, "lam": 0.1}
    found: dict[str, Any] = {"coterie": ours(data, arguments.rounds, lr)}
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "digits.npz"
        np.savez(problem, meta=json.dumps(meta), **data)  # type: ignore[arg-type]
        for name in arguments.only or FOLDERS:
            found[name] = peer(name, problem)
    for method in SETTINGS:
        cells = [found[name].get(method, found[name]) for name in found]
        told = [
            f"{cell['cpu']:7.2f} ({cell['accuracy']:.3f})" if "cpu" in cell else "      - " for cell in cells
        ]
        print(f"{method:10}", *told)
    if arguments.json:
        about = {"machine": machine.description(), "load": machine.load(), "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps({**about, "libraries": found}, indent=2) + "\n")
    for name, lines in found.items():
        for method, line in lines.items():
            if isinstance(line, dict) and "why" in line:
                print(name, method, line["why"])
        if "why" in lines:
            print(name, lines["why"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
