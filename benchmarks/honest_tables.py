"""Tables in which no client is bad: heavy tails, counts, many zeros, clients of 5 to 300 rows that honestly differ."""

from __future__ import annotations

import numpy as np
import polars as pl

SHAPES = ("normal", "t2", "t3", "t4", "lognormal", "pareto", "counts", "zeros")
COLUMNS = 4


def honest(seed: int, shape: str) -> tuple[pl.DataFrame, str]:
    """Return a table whose columns have one shape, and its task.

    Clients differ in centre (a standard deviation of up to one spread) and in spread (up to a factor of exp(0.5)), and
    in what their columns say about the target.
    """
    draw = np.random.default_rng([seed, SHAPES.index(shape)])
    clients = int(np.exp(draw.uniform(np.log(4), np.log(41))))
    low, high = np.sort(np.exp(draw.uniform(np.log(5), np.log(300), 2)))
    sizes = np.exp(draw.uniform(np.log(low), np.log(high + 1), clients)).astype(int)
    owner = np.repeat(np.arange(clients), np.maximum(sizes, 5))
    apart, wider = draw.uniform(0, 1), draw.uniform(0, 0.5)
    shift, width = (sd * draw.normal(size=(clients, COLUMNS))[owner] for sd in (apart, wider))
    x = _values(draw, shape, shift, width)
    slopes = np.array([1.0, -0.7, 0.4, 0.0]) + draw.uniform(0, 0.5) * draw.normal(size=(clients, COLUMNS))
    score = (np.tanh((x - np.median(x, 0)) / (2 * x.std(0) + 1e-9)) * 2 * slopes[owner]).sum(1)
    task = "binary" if draw.random() < 0.5 else "regression"
    if task == "binary":
        y = (draw.random(len(owner)) < 1 / (1 + np.exp(-score))).astype(float)
    else:
        noise = _values(draw, shape, shift[:, :1], width[:, :1])[:, 0]
        y = noise + score * np.median(np.abs(noise - np.median(noise)))
    columns = {f"x{k}": x[:, k] for k in range(COLUMNS)}
    return pl.DataFrame({"site": [f"s{k:02}" for k in owner], **columns, "y": y}), task


def _values(draw: np.random.Generator, shape: str, shift: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return values of one shape with these shifts (in spreads) and logarithms of factors, elementwise."""
    size = shift.shape
    if shape in ("counts", "zeros", "lognormal", "pareto"):  # positive: centre and spread grow together
        factor = np.exp((shift + width) / 2)
        if shape == "counts":
            rate = draw.uniform(0.5, 20) * factor
            found: np.ndarray = draw.poisson(rate * draw.gamma(4, 1 / 4, size)).astype(float)
            return found
        if shape == "pareto":
            found = (1 + draw.pareto(draw.uniform(1.5, 3), size)) * factor
            return found
        found = np.exp(draw.normal(size=size)) * factor
        if shape == "zeros":
            share = 1 / (1 + np.exp(-(draw.uniform(-1, 2) + shift / 2)))
            found = np.where(draw.random(size) < share, 0.0, found)
        return found
    noise = draw.normal(size=size) if shape == "normal" else draw.standard_t(int(shape[1:]), size)
    found = 10 + shift + np.exp(width) * noise
    return found
