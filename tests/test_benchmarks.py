"""The file that peers read holds the very minibatches of the engine, and exponents and pins are what they say."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks import __main__ as main
from benchmarks.__main__ import RESULTS
from benchmarks.environments import ALL, BUILT, OURS, ROOT, Peer
from benchmarks.race import difference
from benchmarks.scaling import CURVES, plot, slope
from benchmarks.table import _about
from benchmarks.workloads import WORKLOADS, as_module, describe, ragged
from coterie import fit, models
from coterie.algorithms import make


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_plain_torch_on_the_file_is_the_engine(share: float) -> None:
    fed = ragged(models.softmax(intercept=True), 6, (5,), classes=3, low=2)
    algorithm = make("fedavg", lr=0.1, steps=3, batch=4, weighting="uniform", participation=share)
    arrays = {name: torch.from_numpy(value) for name, value in describe(fed, algorithm, 2).items()}
    x = arrays["initial"]
    for cohort, draws in zip(arrays["cohorts"], arrays["draws"], strict=True):
        ends = []
        for client, drawn in zip(cohort.tolist(), draws, strict=True):
            w, first = x.clone().requires_grad_(), int(arrays["start"][client])
            for batch in drawn:
                inputs, labels = arrays["x"][first + batch], arrays["y"][first + batch]
                loss = cross_entropy(inputs @ w[:15].view(3, 5).T + w[15:], labels)
                (slope_,) = torch.autograd.grad(loss, w)
                w = (w - 0.1 * slope_).detach().requires_grad_()
            ends.append(w.detach())
        x = torch.stack(ends).mean(0)
    run = fit(fed, algorithm, 2, evaluate_every=0)
    torch.testing.assert_close(as_module(fed.model, run.state.x), x, rtol=1e-5, atol=1e-6)


def test_difference_is_relative_and_nothing_in_common_is_no_equality() -> None:
    one = {"x": torch.tensor([1.0, -4.0]).numpy()}
    assert difference(one, {"x": torch.tensor([1.0, -2.0]).numpy()}) == 1.0
    assert not difference(one, {"y": one["x"]}) < 1


def test_exponent_of_a_power() -> None:
    assert slope([1, 10, 100], [3, 3 * 10**1.5, 3 * 100**1.5]) == pytest.approx(1.5)


def test_curves_are_drawn(tmp_path: Path) -> None:
    """Every recorded curve is one that can be asked for, and the picture has a line for each of its quantities."""
    recorded = json.loads((RESULTS / "scaling.json").read_text())
    assert recorded.keys() == CURVES.keys()
    plot(recorded, tmp_path / "scaling.svg")
    lines = ElementTree.parse(tmp_path / "scaling.svg").iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 3 * len(CURVES)


def test_peers_have_drivers_pins_and_every_workload_or_a_reason() -> None:
    for peer in ALL:
        excused = re.findall(r"W\d", " ".join(peer.why_not))
        assert sorted([*peer.runs, *excused]) == sorted(WORKLOADS), peer.name
        assert peer.driver.exists()
        if peer.environment is not None:
            assert all(re.fullmatch(r"\S+==\S+", line) for line in peer.pins.read_text().split())


@pytest.mark.parametrize(("now", "code"), [(1.1, 0), (0.81, 0), (0.79, 1)])
def test_check_ends_with_1_where_a_fifth_is_lost(
    now: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tries, against an earlier revision."""
    tries = []

    def race(work: Any, peers: Any, repeats: int, seconds: float) -> dict[str, Any]:
        tries.append((work.name, peers))
        return {"peers": {"ours": {}, "earlier": {"ratio": now, "ratio_least": now - 0.1}}}

    monkeypatch.setattr(main, "earlier", lambda revision: f"at {revision}")
    monkeypatch.setattr(main, "race", race)
    arguments = argparse.Namespace(only=["W1"], base="abc", repeats=3, seconds=1.0)
    assert main.check(arguments) == code
    assert tries == [("W1", ["at abc"])] * (3 if code else 1)


def test_an_earlier_revision_runs_its_own_sources() -> None:
    before = Peer("earlier", "before", OURS.runs, script="ours", tree=Path("elsewhere"))
    assert OURS.path[0] == ROOT and OURS.driver.is_relative_to(ROOT)
    assert before.path[0] == Path("elsewhere", BUILT) and before.driver.parts[0] == "elsewhere"


def test_the_fastest_of_each_kind_is_named() -> None:
    peers = {
        "ours": {"ratio": 1.0},
        "loop": {"ratio": 9.0},
        "fedlab": {"ratio": 20.0},
        "fluke": {"failed": "differs"},
        "fedjax": {"ratio": 5.0},
    }
    text = _about("W1", {"title": "FedAvg", "date": "2026-11-16", "load": 0.0, "peers": peers})
    expected = "PyTorch library 20.0, PyTorch with ready-made minibatches 9.0, JAX 5.0."
    assert text.endswith(expected)
