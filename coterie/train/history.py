"""Metrics over rounds: a value per round, split, metric and client, and what algorithms show of their state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import polars

TRACE_BYTES = 1 << 26  # of a trace over the rounds; when they become more, half of it is dropped
FEWEST = 8  # rounds of a trace that are kept, whatever they take


@dataclass
class History:
    """Metrics of a run, and what its algorithm observed of its own state.

    Observed values have the split 'server': one value per client [n], one for the federation [], or anything else (such
    as a matrix of weights), which is a trace and not a metric. Large traces are thinned out over the rounds.

    Attributes
    ----------
    blocks : list of tuple
        Round, split, metric and value; NaN where a client has no rows in the split.
    """

    blocks: list[tuple[int, str, str, Tensor]] = field(default_factory=list)  # round, split, metric, value
    _trace_bytes: dict[tuple[str, str], int] = field(default_factory=dict, repr=False, compare=False)

    def add(self, t: int, split: str, values: dict[str, Tensor]) -> None:
        """Add metrics of round t on one split."""
        for metric, value in values.items():
            self.blocks.append((t, split, metric, value.cpu().double()))
            if value.dim() > 1:
                self._thin(split, metric)

    def _thin(self, split: str, metric: str) -> None:
        """Drop rounds of a trace that has become large, evenly over the rounds; the first and the last one stay."""
        held = self._trace_bytes.get((split, metric))
        new = self.blocks[-1][3].nbytes
        if held is not None and held + new <= TRACE_BYTES:
            self._trace_bytes[split, metric] = held + new
            return
        at = [k for k, (_, *name, _) in enumerate(self.blocks) if name == [split, metric]]
        size = sum(self.blocks[k][3].nbytes for k in at)
        gone: set[int] = set()
        while size > TRACE_BYTES / (2 if gone else 1) and len(at) > FEWEST:
            gaps = [self.blocks[c][0] - self.blocks[a][0] for a, c in zip(at, at[2:], strict=False)]
            gone.add(at.pop(1 + gaps.index(min(gaps))))
            size = sum(self.blocks[k][3].nbytes for k in at)
        if gone:
            self.blocks[:] = [block for k, block in enumerate(self.blocks) if k not in gone]
        self._trace_bytes[split, metric] = size

    def at(self, t: int, split: str, metric: str) -> Tensor | None:
        """Return a metric [n] after round t, or None if it was not measured."""
        for block_round, block_split, block_metric, value in reversed(self.blocks):
            if (block_round, block_split, block_metric) == (t, split, metric):
                return value
        return None

    def curve(self, split: str, metric: str) -> tuple[list[int], list[float]]:
        """Return the rounds at which a metric was measured, and its means over clients."""
        points = [(t, float(v.nanmean())) for t, s, m, v in self.blocks if (s, m) == (split, metric)]
        return [t for t, _ in points], [value for _, value in points]

    def frame(self, names: list[str]) -> polars.DataFrame:
        """Return a long table: round, client (null: the federation), split, metric, value. NaN has no line."""
        import polars

        n = len(names)
        shown = [block for block in self.blocks if block[3].dim() == 0 or block[3].shape == (n,)]
        value = np.concatenate([np.empty(0), *(value.reshape(-1).numpy() for *_, value in shown)])
        known = ~np.isnan(value)
        at = np.repeat(np.arange(len(shown)), [value.numel() for *_, value in shown])[known]
        clients = [np.arange(n) if value.dim() else np.array([n]) for *_, value in shown]
        who = np.concatenate([np.arange(0), *clients])[known]
        return polars.DataFrame(
            {
                "round": polars.Series([t for t, *_ in shown], dtype=polars.Int64).gather(at),
                "client": polars.Series([*names, None], dtype=polars.String).gather(who),
                "split": polars.Series([split for _, split, *_ in shown], dtype=polars.String).gather(at),
                "metric": polars.Series([name for _, _, name, _ in shown], dtype=polars.String).gather(at),
                "value": value[known],
            }
        )

    def traces(self, clients: int) -> dict[str, Tensor]:
        """Return observed values that are not metrics, by `name.round`."""
        return {
            f"{metric}.{t}": value.contiguous()
            for t, _, metric, value in self.blocks
            if value.dim() > 0 and value.shape != (clients,)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return all values, for a checkpoint."""
        return {f"history.{k}": block[3] for k, block in enumerate(self.blocks)}

    def index(self) -> list[list[object]]:
        """Return round, split and metric of all values, for a checkpoint."""
        return [[t, split, metric] for t, split, metric, _ in self.blocks]

    @classmethod
    def restore(cls, index: list[list[object]], tensors: dict[str, Tensor]) -> History:
        """Return the history that `index` and `tensors` wrote."""
        blocks = [
            (int(str(t)), str(split), str(metric), tensors[f"history.{k}"])
            for k, (t, split, metric) in enumerate(index)
        ]
        return cls(blocks)


def mean_over_clients(value: Tensor) -> float:
    """Return the mean over the clients that have rows, NaN if none has."""
    return float(torch.nanmean(value))


def interval(gain: Tensor) -> tuple[float | None, float | None]:
    """Return Student's 95 % interval of the mean gain over clients; None for a single client."""
    from scipy.special import stdtrit

    if len(gain) < 2:
        return None, None
    half = float(stdtrit(len(gain) - 1, 0.975) * gain.std() / math.sqrt(len(gain)))
    return float(gain.mean()) - half, float(gain.mean()) + half
