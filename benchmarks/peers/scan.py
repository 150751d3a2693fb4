"""L2GD in JAX: one lax.scan over all iterations, compiled whole."""

from __future__ import annotations

from typing import Any

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import Clock, Problem, Run, serve  # noqa: E402


def prepare(problem: Problem) -> Run:
    pieces = [(problem.x[problem.rows(k)], problem.y[problem.rows(k)]) for k in range(len(problem.size))]
    squares = jnp.array(np.stack([a.T @ a / len(a) for a, _ in pieces]))
    targets = jnp.array(np.stack([a.T @ b / len(a) for a, b in pieces]))
    clusters, k = jnp.array(problem.clusters), int(problem.clusters.max()) + 1
    weights, pulls, rate, alpha = (
        jnp.array(getattr(problem, n)) for n in ("weights", "pulls", "rate", "alpha")
    )
    total = jax.ops.segment_sum(weights[:, :1], clusters, k)
    pace = problem.lr * rate

    def talk(x: Any) -> Any:
        sums = jax.ops.segment_sum(weights[:, :1] * x, clusters, k)
        common = (alpha * sums).sum(0) / (alpha * total).sum()
        inside = (sums / total)[clusters]
        return x - problem.lr * (pulls[:, :1] * (x - common) + pulls[:, 1:2] * (x - inside))

    def alone(x: Any) -> Any:
        return x - pace * (jnp.einsum("nij,nj->ni", squares, x) - targets)

    @jax.jit
    def train(x: Any, coins: Any) -> Any:
        return jax.lax.scan(lambda x, coin: (jax.lax.cond(coin, talk, alone, x), None), x, coins)[0]

    coins = jnp.array(problem.coins)
    start = jnp.zeros_like(targets)
    train(start, coins).block_until_ready()

    def run(clock: Clock) -> dict[str, Any]:
        clock.start()
        x = train(start, coins).block_until_ready()
        clock.tick(len(coins))
        return {"personal": np.asarray(x)}

    return run


serve(prepare, choose_threads=False)
