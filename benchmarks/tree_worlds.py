"""Tables on which trees are compared: public ones from a data folder, and generated worlds with client effects."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from coterie.data import bundled, tables

DATA = Path(os.environ.get("COTERIE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
CLIENTS, ROWS = 40, 100  # of a generated world


@dataclass(frozen=True)
class World:
    """A table with its client and target columns."""

    name: str
    frame: Callable[[], pl.DataFrame]
    client: str
    target: str
    drop: tuple[str, ...] = ()
    task: str | None = None


def _file(*parts: str) -> Callable[[], pl.DataFrame]:
    return lambda: tables.read(DATA.joinpath(*parts))


def _lecturers() -> pl.DataFrame:
    """Return the ratings of the 200 lecturers with the most of them, as numbers."""
    frame = tables.read(DATA / "hierarchical" / "InstEval.csv")
    most = frame.group_by("d").len().sort("len", "d", descending=True).head(200)["d"]
    return frame.filter(pl.col("d").is_in(most.implode())).with_columns(pl.col("y").cast(pl.Float64))


def friedman(seed: int, effect: str, noise: str = "normal", sparse: bool = False) -> pl.DataFrame:
    """Return Friedman's function (1991) on ten uniform features for clients that differ in one part of it.

    10 sin(pi x1 x2) + 20 (x3 - 1/2)^2 + 10 x4 + 5 x5 + noise, with a client's own intercept (`intercept`), its own
    slope of x4 (`slope`), or its own strength of the product x1 x2 (`interaction`). Noise has variance one, or is a t
    with two degrees of freedom. `sparse`: 40 further features without effect, and a tenth of all values missing.
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(ROWS // 4, 2 * ROWS, CLIENTS)
    owner = np.repeat(np.arange(CLIENTS), sizes)
    x = draw.uniform(size=(len(owner), 50 if sparse else 10))
    own = draw.normal(size=CLIENTS)[owner]
    strength = 1 + (0.6 * own if effect == "interaction" else 0)
    slope = 10 + (5 * own if effect == "slope" else 0)
    mean = (
        10 * strength * np.sin(np.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5) ** 2
        + slope * x[:, 3]
        + 5 * x[:, 4]
    )
    mean = mean + (3 * own if effect == "intercept" else 0)
    y = mean + (draw.standard_t(2, len(owner)) if noise == "heavy" else draw.normal(size=len(owner)))
    if sparse:
        x[draw.uniform(size=x.shape) < 0.1] = np.nan
    columns = {f"x{k + 1}": x[:, k] for k in range(x.shape[1])}
    frame = pl.DataFrame({"client": [f"c{k:02d}" for k in owner], **columns, "y": y})
    return frame.fill_nan(None)


def binary(seed: int) -> pl.DataFrame:
    """Return the slope world with a label: whether the target exceeds its median, with noise."""
    frame = friedman(seed, "slope", "heavy")
    return frame.with_columns((pl.col("y") > pl.col("y").median()).cast(pl.Int64).alias("y"))


def _world(name: str, **options: Any) -> World:
    return World(name, lambda: friedman(1, **options), "client", "y")


WORLDS = (
    World("activity", _file("activity", "activity.csv"), "user", "activity"),
    World("donations", _file("donations", "pva97nk.csv"), "DemCluster", "TARGET_B", ("ID", "TARGET_D")),
    World("MathAchieve", _file("hierarchical", "MathAchieve.csv"), "School", "MathAch", ("rownames",)),
    World(
        "star",
        lambda: tables.read(DATA / "hierarchical" / "star.csv").drop_nulls(["math", "sch"]),
        "sch",
        "math",
        ("rownames", "id", "tch", "read", "birthq"),
        "regression",
    ),
    World("Exam", _file("hierarchical", "Exam.csv"), "school", "normexam", ("rownames", "student")),
    World("InstEval", _lecturers, "d", "y", ("rownames", "s"), "regression"),
    World("heart disease", lambda: tables.read(bundled.path("heart_disease")), "hospital", "sick"),
    _world("Friedman, intercepts", effect="intercept"),
    _world("Friedman, slopes", effect="slope"),
    _world("Friedman, interactions", effect="interaction"),
    _world("Friedman, sparse", effect="slope", sparse=True),
    _world("Friedman, heavy tails", effect="slope", noise="heavy"),
    World("Friedman, two classes", lambda: binary(1), "client", "y"),
    _world("Friedman, no effects", effect="none"),
)
BY_NAME = {world.name: world for world in WORLDS}
