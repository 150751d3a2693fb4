"""Fast paths: faster ways to compute the same numbers, in one table, with the function that chooses among them.

A *fast path* computes what the plain code computes, for the models, rows and devices it supports. Callers ask `find`
for an operation and run the plain code when it returns None. To add a path, write one file here and add one line to
`PATHS`.

The environment variable `COTERIE_FAST` chooses among them: `none` switches all of them off, and a list of names with
commas leaves only those on.

| operation | asked by | arguments of `supports` and `run` |
|---|---|---|
| sgd | `client.sgd` | an `SgdJob`: local SGD of a stack of clients |
| client sgd | parallel-clients | model, w [d], minibatches, lr, prox, anchor, linear: local SGD of one client |
| gradient | `Network.grad` | model, w [k, d], x, y, weight: gradients of a stack of clients |
| row gradient | `client.grad_on`, `full_grad` | model, w [k, d], x, y, weight: gradients of linear models |
| minibatch gradient | `client.grad`, `sgd` | model, w [k, d], rows, then drawn, weight [k, B]: the same on some rows |
| span | `client.along_rows` | model, rows, models [k, d], rows drawn in all: models of which sums stay in a span |
| noisy gradient | `client.grad_with_noise` | model, rows, x [k, d], most rows: gradients, noise, dimensions |
| errors | `client.errors` | model, rows, models [k, m, d]: the mean losses [k, m] of all rows |
| features | `Network.hidden_features`, `feature_grad` | model, w [k, d], then x: what reaches the last layer |
| client gradient | `Network.grad` | model, w [d], x, y, weight: the gradient of one client |
| statistics | `client.full_grad`, `loss`, `solve` | model, rows: sums over rows that replace the rows |
| group norm | blocks of `resnet9` | images, channels, groups, pool: norm, rectifier and pool at once |
| tree leaves | `histograms.assign` | binned rows, then splits: the leaf of each row |
| tree walk | `tree_walk.leaves` | rows, then the tables of `Walk`: the leaf of each row in finished trees |
| tree histograms | `histograms.histograms` | binned rows, then derivatives, leaves, nodes: sums by feature and bin |
| tree splits | `tree_growth.best_splits` | histograms and signs, then what `run` needs: the best split of each node |
| descent | `client.descent` | statistics, step sizes: many full-batch steps at once |
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coterie._core.errors import SettingError, nearest
from coterie.models.fast import (
    batched_layers,
    compiled_graphs,
    cuda_graphs,
    dual_sgd,
    glm_kernel,
    group_norm,
    manual_backprop,
    mlp_kernel,
    parallel_clients,
    quadratic_descent,
    row_span,
    row_statistics,
    tree_kernel,
    vmap,
)

VARIABLE = "COTERIE_FAST"


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class FastPath:
    """Faster way to compute one operation.

    `supports` says whether `run` can compute the given arguments and is expected to be faster. Gradient paths of one
    `family` are alternatives of which the first that fits is taken; families are measured against each other.
    `in_parts(model, rows)` says whether one stack of clients is computed by several threads, `unlocked(model, rows)`
    whether they compute without Python's lock. The first call of a path that `prepares` is not timed. A path that is
    `late` is measured once training has lasted for a while.
    """

    name: str
    operation: str
    supports: Callable[..., bool]
    run: Callable[..., Any]
    family: str = ""
    in_parts: Callable[..., bool] = _never
    unlocked: Callable[..., bool] = _never
    prepares: bool = False
    late: bool = False

    @property
    def summary(self) -> str:
        """What the path does: the first sentence of its file."""
        text = sys.modules[self.supports.__module__].__doc__ or ""
        return text.partition("\n")[0].removeprefix("Fast path: ").rstrip(".")


PATHS = (
    FastPath(
        "dual-sgd",
        "sgd",
        dual_sgd.supports,
        dual_sgd.run,
        in_parts=dual_sgd.in_parts,
        unlocked=dual_sgd.compiles,
    ),
    FastPath("parallel-clients", "sgd", parallel_clients.supports, parallel_clients.run),
    FastPath("manual-backprop", "client sgd", manual_backprop.supports_sgd, manual_backprop.sgd),
    FastPath("manual-backprop", "client gradient", manual_backprop.supports, manual_backprop.gradient),
    FastPath("glm-kernel", "row gradient", glm_kernel.supports, glm_kernel.run),
    FastPath("glm-kernel", "minibatch gradient", glm_kernel.supports_drawn, glm_kernel.run_drawn),
    FastPath("mlp-kernel", "gradient", mlp_kernel.supports, mlp_kernel.run, family="stacked", prepares=True),
    FastPath("batched-layers", "gradient", batched_layers.supports, batched_layers.run, family="stacked"),
    FastPath("batched-layers", "features", batched_layers.supports_features, batched_layers.features),
    FastPath("vmap", "gradient", vmap.supports, vmap.run, family="stacked"),
    FastPath("cuda-graphs", "gradient", cuda_graphs.supports, cuda_graphs.run, family="captured"),
    FastPath(
        "compiled-graphs",
        "gradient",
        compiled_graphs.supports,
        compiled_graphs.run,
        family="compiled",
        late=True,
    ),
    FastPath("group-norm", "group norm", group_norm.takes, group_norm.normalised),
    FastPath("row-span", "span", row_span.supports, row_span.run),
    FastPath("row-span", "noisy gradient", row_span.supports_noise, row_span.noise),
    FastPath("row-span", "errors", row_span.supports_errors, row_span.errors),
    FastPath("row-statistics", "statistics", row_statistics.supports, row_statistics.run),
    FastPath("tree-kernel", "tree leaves", tree_kernel.supports, tree_kernel.leaves),
    FastPath("tree-kernel", "tree walk", tree_kernel.supports_walk, tree_kernel.walk),
    FastPath("tree-kernel", "tree histograms", tree_kernel.supports, tree_kernel.histograms),
    FastPath("tree-kernel", "tree splits", tree_kernel.supports_splits, tree_kernel.splits),
    FastPath("quadratic-descent", "descent", quadratic_descent.supports, quadratic_descent.run),
)


def chosen() -> str | None:
    """Return the value of `COTERIE_FAST`."""
    return os.environ.get(VARIABLE)


def explain(name: str) -> str:
    """Return what a fast path, or plain code that is counted beside them, computes."""
    plain = {
        "plain steps": "local SGD, one gradient for each step",
        "loop": "gradients of one client after the other",
        "plain histograms": "histograms of boosted trees in torch",
    }
    return plain.get(name) or next((path.summary for path in PATHS if path.name == name), name)


def find(operation: str, *arguments: Any) -> FastPath | None:
    """Return the first enabled path that supports an operation on these arguments, or None for the plain code."""
    return next((path for path in enabled(operation) if path.supports(*arguments)), None)


def enabled(operation: str) -> tuple[FastPath, ...]:
    """Return the paths of an operation that `COTERIE_FAST` leaves on, in the order in which they are tried."""
    return _enabled(operation, chosen())


@functools.lru_cache(maxsize=64)
def _enabled(operation: str, chosen: str | None) -> tuple[FastPath, ...]:
    names = {path.name for path in PATHS}
    wanted = names if chosen is None else {name.strip() for name in chosen.split(",")} - {"", "none"}
    unknown = wanted - names
    if unknown:
        name = min(unknown)
        raise SettingError(f"{VARIABLE}={chosen}: there is no fast path {name!r}.{nearest(name, names)}")
    return tuple(path for path in PATHS if path.operation == operation and path.name in wanted)
