"""Processor time per gradient of every method on the clients of W1, beside FedAvg's: `python -m benchmarks.methods`.

A method trains W1's softmax regression, or, where it needs hidden layers, a perceptron on the same rows; FedAvg then
trains that too. Each takes 5 local steps of 20 rows where it has such settings. Gradients are counted without fast
paths, in rows: a minibatch of 20 rows is one, all rows of a client as many as fit in them, a loss or scores the share
of a gradient that its products are (1/2 in a linear model, 1/3 in a network), a product with the Hessian two.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import machine
from benchmarks.workloads import ragged
from coterie import Federation, fit, models
from coterie._core.errors import CoterieError
from coterie.algorithms import Algorithm, all_algorithms, find, make
from coterie.models.base import Model
from coterie.models.glm import Glm
from coterie.models.network import Network

RESULT = Path(__file__).parent / "results" / "methods.json"
STEPS, BATCH, ROUNDS = 5, 20, 10
BAR = 2.0
EVERY_GRADIENT = 0.05  # of FedAvg's gradients in a round, below which a method is not one of gradients
COSTS: dict[type[Model], dict[str, float]] = {
    Glm: {"grad": 1.0, "loss": 1 / 2, "scores": 1 / 2, "scores_each": 1 / 2, "hvp": 2.0, "score_grad": 1 / 2},
    Network: {
        "grad": 1.0,
        "loss": 1 / 3,
        "scores": 1 / 3,
        "hvp": 2.0,
        "feature_grad": 1.0,
        "score_grad": 1.0,
    },
}  # of calls, in gradients of as many rows


def settings(name: str) -> Algorithm:
    """Return the method with the steps and minibatches of W1, where it has such settings."""
    known = {field.name: field.metadata.get("options") for field in dataclasses.fields(find(name))}
    wanted = {"steps": STEPS, "batch": BATCH, "weighting": "uniform"}
    suits = {key for key, options in known.items() if options is None or wanted.get(key) in options}
    return make(name, **{key: value for key, value in wanted.items() if key in suits})


@functools.cache
def clients(kind: str) -> Federation:
    """Return W1's clients with its model or another one."""
    model = {
        "softmax": models.softmax(intercept=True),
        "mlp": models.mlp((64,)),
        "adapters": models.mlp((64,), adapters=4),
        "batch norm": models.mlp((64,), norm="batch"),
    }[kind]
    return ragged(model, 100)


def first_fit(algorithm: Algorithm) -> tuple[Federation, Federation, float]:
    """Return clients with the first model that a method trains, those that FedAvg trains beside it, and gradients."""
    own = algorithm.own_model(ROUNDS)
    if own is not None:
        return ragged(own, 100), clients("mlp"), gradients(ragged(own, 100), algorithm)
    for kind in ("softmax", "mlp", "adapters", "batch norm"):
        try:
            return clients(kind), clients(kind), gradients(clients(kind), algorithm)
        except (CoterieError, NotImplementedError) as problem:
            last = problem
    raise last


@contextmanager
def counted() -> Iterator[Callable[[], float]]:
    """Count gradients of 20 rows inside the block."""
    rows, inside = 0.0, False

    def wrap(function: Callable[..., Any], cost: float) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(self: Model, w: torch.Tensor, *given: torch.Tensor) -> Any:
            nonlocal rows, inside
            outer, inside = inside, True
            try:
                if not outer:
                    rows += cost * _scored(w, *given)
                return function(self, w, *given)
            finally:
                inside = outer

        return call

    patches = [
        patch.object(kind, name, wrap(getattr(kind, name), cost))
        for kind, costs in COSTS.items()
        for name, cost in costs.items()
    ]
    before = os.environ.get("COTERIE_FAST")
    os.environ["COTERIE_FAST"] = "none"
    try:
        for one in patches:
            one.start()
        yield lambda: rows / BATCH
    finally:
        for one in patches:
            one.stop()
        if before is None:
            del os.environ["COTERIE_FAST"]
        else:
            os.environ["COTERIE_FAST"] = before


def _scored(w: torch.Tensor, *given: torch.Tensor) -> int:
    """Return how many rows are scored: those of a minibatch [k, B, ...], by each of the models w [..., d]."""
    inputs = next(
        one for one in given if one.dim() > 2
    )  # a product with the Hessian has a vector before them
    return w.shape[:-1].numel() * inputs.shape[1]


def gradients(fed: Federation, algorithm: Algorithm) -> float:
    """Return gradients of 20 rows in a round, the mean of those that are timed.

    They must be the same rounds: what a method does in every fifth only, as `fedsoft` does, is otherwise timed but not
    counted.
    """

    def count(rounds: int) -> float:
        with counted() as read:
            fit(fed, algorithm, rounds, evaluate_every=0)
            return read()

    return (count(1 + ROUNDS) - count(1)) / ROUNDS


@functools.cache
def _averaging(fed: Federation) -> float:
    """Return the gradients of a round of FedAvg."""
    return gradients(fed, settings("fedavg"))


def seconds(fed: Federation, algorithm: Algorithm) -> float:
    """Return processor seconds that a round adds on one thread, so that start and end do not count."""

    def clock(rounds: int) -> float:
        started = time.process_time()
        fit(fed, algorithm, rounds, evaluate_every=0)
        return time.process_time() - started

    return (clock(1 + ROUNDS) - clock(1)) / ROUNDS


def compared(name: str, repeats: int) -> dict[str, Any]:
    """Return milliseconds and gradients of a round, and time per gradient in those of FedAvg on the same model."""
    algorithm, average = settings(name), settings("fedavg")
    fed, usual, work = first_fit(algorithm)
    reference = _averaging(usual)
    line = {"model": "network" if isinstance(fed.model, Network) else "softmax", "gradients": round(work, 1)}
    if work < EVERY_GRADIENT * reference:
        return line | {"why": "it takes no steps along gradients"}
    for one, method in ((usual, average), (fed, algorithm)):
        fit(one, method, 2, evaluate_every=0)  # inner products of rows, compiled functions
    ratios, times = [], []
    for _ in range(repeats):
        alone, ours = seconds(usual, average), seconds(fed, algorithm)
        times.append(1e3 * ours)
        ratios.append(ours / work / (alone / reference))
    return line | {
        "ms": round(min(times), 2),
        "ratio": round(statistics.median(ratios), 2),
        "load": machine.load(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="methods; all if not given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the figures, such as benchmarks/results/methods.json; other methods in it are kept",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines: dict[str, Any] = {}
    for name in arguments.only or all_algorithms():
        try:
            lines[name] = compared(name, arguments.repeats)
        except CoterieError as problem:
            lines[name] = {"why": str(problem)}
        print(name, lines[name], flush=True)
    if arguments.json:
        known = json.loads(arguments.json.read_text())["methods"] if arguments.json.exists() else {}
        every = dict(sorted((known | lines).items()))
        found = {"machine": machine.description(), "bar": BAR, "methods": every}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    slow = {name: line["ratio"] for name, line in lines.items() if line.get("ratio", 0) > BAR}
    print(f"above {BAR}: {slow}" if slow else f"none above {BAR}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
