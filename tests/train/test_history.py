"""Metrics over rounds stay as they are; traces, which can be large, are thinned out over the rounds."""

from __future__ import annotations

import itertools

import pytest
import torch

from coterie.train import history
from coterie.train.history import History


def rounds(log: History, metric: str) -> list[int]:
    return [t for t, _, name, _ in log.blocks if name == metric]


def test_a_large_trace_is_thinned_evenly_and_metrics_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "TRACE_BYTES", 40 * 8 * 9)  # forty matrices of three clients
    log = History()
    for t in range(1, 1001):
        log.add(t, "server", {"weights": torch.full((3, 3), float(t)), "degree": torch.ones(3)})
    kept = rounds(log, "weights")
    assert rounds(log, "degree") == list(range(1, 1001))
    assert kept[0] == 1 and kept[-1] == 1000 and 15 <= len(kept) <= 40
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert max(gaps[:-20]) <= 150  # no part of the run is lost
    assert all(float(log.at(t, "server", "weights")[0, 0]) == t for t in kept)  # type: ignore[index]


def test_the_last_rounds_of_what_is_larger_than_the_limit_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "TRACE_BYTES", 8)
    log = History()
    for t in range(1, 101):
        log.add(t, "server", {"links": torch.ones(5, 3)})
    assert len(rounds(log, "links")) == history.FEWEST and rounds(log, "links")[-1] == 100


def test_a_history_that_was_restored_drops_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "TRACE_BYTES", 30 * 8 * 9)
    whole = History()
    for t in range(1, 201):
        whole.add(t, "server", {"weights": torch.ones(3, 3)})
        if t == 77:
            part = History.restore(whole.index(), whole.tensors())
        if t > 77:
            part.add(t, "server", {"weights": torch.ones(3, 3)})
    assert rounds(part, "weights") == rounds(whole, "weights")
