"""Metrics over rounds: a value per round, split, metric and client, and what algorithms show of their state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import polars


@dataclass
class History:
    """Blocks of one value per client; NaN where a client has no rows in a split.

    What an algorithm observes of its own state has the split 'server': one value per client [n], one for the
    federation [], or anything else (a matrix of weights), which is a trace and not a metric.
    """

    blocks: list[tuple[int, str, str, Tensor]] = field(default_factory=list)  # round, split, metric, value

    def add(self, t: int, split: str, values: dict[str, Tensor]) -> None:
        self.blocks += [(t, split, metric, value.cpu().double()) for metric, value in values.items()]

    def at(self, t: int, split: str, metric: str) -> Tensor | None:
        """A metric [n] after round t, if it was measured."""
        for block_round, block_split, block_metric, value in reversed(self.blocks):
            if (block_round, block_split, block_metric) == (t, split, metric):
                return value
        return None

    def curve(self, split: str, metric: str) -> tuple[list[int], list[float]]:
        """Rounds and the mean over clients."""
        points = [(t, float(v.nanmean())) for t, s, m, v in self.blocks if (s, m) == (split, metric)]
        return [t for t, _ in points], [value for _, value in points]

    def frame(self, names: list[str]) -> polars.DataFrame:
        """Long table: round, client (null: the federation), split, metric, value. NaN has no line."""
        import polars

        schema = {
            "round": polars.Int64,
            "client": polars.String,
            "split": polars.String,
            "metric": polars.String,
            "value": polars.Float64,
        }
        clients = polars.Series("client", names, dtype=polars.String)
        nobody = polars.Series("client", [None], dtype=polars.String)
        parts = [
            polars.DataFrame(
                {"client": nobody if value.dim() == 0 else clients, "value": value.reshape(-1).numpy()}
            )
            .filter(polars.col("value").is_not_nan())
            .select(
                polars.lit(t, polars.Int64).alias("round"),
                "client",
                polars.lit(split).alias("split"),
                polars.lit(metric).alias("metric"),
                "value",
            )
            for t, split, metric, value in self.blocks
            if value.dim() == 0 or value.shape == (len(names),)
        ]
        return polars.concat(parts) if parts else polars.DataFrame(schema=schema)

    def traces(self, clients: int) -> dict[str, Tensor]:
        """Observed values that are not metrics, as `name.round`, written out because readers go by their shapes."""
        return {
            f"{metric}.{t}": value.contiguous()
            for t, _, metric, value in self.blocks
            if value.dim() > 0 and value.shape != (clients,)
        }

    def tensors(self) -> dict[str, Tensor]:
        return {f"history.{k}": block[3] for k, block in enumerate(self.blocks)}

    def index(self) -> list[list[object]]:
        return [[t, split, metric] for t, split, metric, _ in self.blocks]

    @classmethod
    def restore(cls, index: list[list[object]], tensors: dict[str, Tensor]) -> History:
        blocks = [
            (int(str(t)), str(split), str(metric), tensors[f"history.{k}"])
            for k, (t, split, metric) in enumerate(index)
        ]
        return cls(blocks)


def mean_over_clients(value: Tensor) -> float:
    """Mean over the clients that have rows (NaN when none has)."""
    return float(torch.nanmean(value))


def interval(gain: Tensor) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean gain over clients; none for a single client."""
    from scipy.stats import t as student

    if len(gain) < 2:
        return None, None
    half = float(student.ppf(0.975, len(gain) - 1) * gain.std() / math.sqrt(len(gain)))
    return float(gain.mean()) - half, float(gain.mean()) + half
