"""A node that stands still holds nobody up, and what it answers late is used."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import polars
import pytest

from coterie.algorithms import make
from coterie.deploy import federation_folder
from coterie.engine.late import Lateness

if TYPE_CHECKING:
    from conftest import Live

pytestmark = pytest.mark.e2e
PAUSE = 10.0  # seconds that the node stands still at most; after 20 Flower gives it up, and what it was sent


def test_a_stopped_node_holds_nobody_up_and_its_answer_is_used(live: Live) -> None:
    """While n1 stands still the others take rounds; its answer of before joins a round after it goes on."""
    job = live.job(
        "buffered",
        make("fedavg", lr=0.1, batch=4),
        40,
        deadline=60.0,
        plan=Lateness(buffer=4, staleness=100).to_plan(),
    )
    stopped: list[float] = []

    def watch(told: dict[str, Any]) -> None:
        t = told.get("round", 0)
        if t >= 5 and not stopped:
            live.kill("n1", signal.SIGSTOP)
            stopped.append(time.monotonic())
        if len(stopped) == 1 and (t >= 13 or time.monotonic() - stopped[0] > PAUSE):
            live.kill("n1", signal.SIGCONT)
            stopped.append(time.monotonic())

    try:
        live.run(job, watch=watch)
    finally:
        live.kill("n1", signal.SIGCONT)
    assert len(stopped) == 2
    result = live.result(job)
    assert result["lost_rounds"] == 0 and not result["left_out"]
    assert not any("left out" in line for line in federation_folder.notes(job))
    ledger = polars.read_parquet(live.folder.path / "runs" / "buffered" / "ledger.parquet")
    train = ledger.filter(polars.col("kind") == "train").sort("round")
    down, up = train["messages_down"].to_list(), train["messages_up"].to_list()
    on_their_way = [sum(down[: k + 1]) - sum(up[: k + 1]) for k in range(len(down))]
    # a round ends with four of six answers: more than two on their way would mean that one was lost
    assert all(0 <= count <= 2 for count in on_their_way), on_their_way
    assert any(down[k] < 6 and on_their_way[k - 1] for k in range(1, len(down))), "the others waited for n1"
    assert set(live.models(job)) == {name for node in ("n0", "n1", "n2") for name in live.folder.nodes[node]}
