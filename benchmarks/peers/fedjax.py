"""FedJAX: its federated averaging with its compiled trainer of many clients."""

from __future__ import annotations

from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from common import Clock, Problem, Run, serve


def scores(problem: Problem, p: dict[str, Any], x: Any) -> Any:
    if problem.module == "linear":
        return x @ p["w"].T + p["b"]
    layout = ("NCHW", "OIHW", "NCHW")
    h = x[:, None]
    for name in ("c1", "c2"):
        h = jax.lax.conv_general_dilated(h, p[name], (1, 1), "VALID", dimension_numbers=layout)
        h = jax.nn.relu(h + p[name + "b"][:, None, None])
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID").reshape(
        len(x), -1
    )
    h = jax.nn.relu(h @ p["d1"].T + p["d1b"])
    return h @ p["d2"].T + p["d2b"]


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    if problem.module == "linear":
        return {"w": (10, 784), "b": (10,)}
    body: dict[str, tuple[int, ...]] = {"c1": (32, 1, 3, 3), "c1b": (32,), "c2": (64, 32, 3, 3), "c2b": (64,)}
    return body | {"d1": (128, 9216), "d1b": (128,), "d2": (62, 128), "d2b": (62,)}


def prepare(problem: Problem) -> Run:
    def loss(p: dict[str, Any], batch: dict[str, Any], rng: Any) -> Any:
        logs = jax.nn.log_softmax(scores(problem, p, batch["x"]))
        return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()

    def drawn(t: int, place: int, client: int) -> fedjax.ClientDataset:
        """The rows of the round's draws, one batch after the other."""
        at = problem.start[client] + problem.draws[t, place].reshape(-1)
        return fedjax.ClientDataset({"x": problem.x[at], "y": problem.y[at]})

    hparams = fedjax.ShuffleRepeatBatchHParams(
        batch_size=problem.batch, num_steps=problem.steps, skip_shuffle=True
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(problem.lr), fedjax.optimizers.sgd(1.0), hparams
    )
    layout = shapes(problem)
    cuts = np.cumsum([int(np.prod(shape)) for shape in layout.values()])[:-1]

    rng = jax.random.PRNGKey(0)

    def run(clock: Clock) -> dict[str, Any]:
        parts = np.split(problem.initial, cuts)
        start = {
            name: jnp.array(part.reshape(shape))
            for (name, shape), part in zip(layout.items(), parts, strict=True)
        }
        state = algorithm.init(start)
        clock.start()
        for t, cohort in enumerate(problem.cohorts):
            clients = [(k, drawn(t, place, k), rng) for place, k in enumerate(cohort.tolist())]
            state, _ = algorithm.apply(state, clients)
            jax.block_until_ready(state.params)
            clock.tick()
        return {"x": np.concatenate([np.asarray(state.params[name]).reshape(-1) for name in layout])}

    run(Clock())  # compiles
    return run


serve(prepare, choose_threads=False)
