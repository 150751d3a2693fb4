"""How long answers are waited for, where one of them stops on its way."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from coterie.deploy import wire
from coterie.deploy.transport import Late, NodeCaller, Undelivered


class Halting:
    """Two nodes: the answer of `first` stops on its way, that of `second` comes `after` so many seconds."""

    def __init__(self, after: float) -> None:
        self.after, self.envelopes, self.began, self.waits = after, {}, time.monotonic(), []

    def send(self, envelopes: Mapping[str, bytes], lasts: float) -> dict[str, str]:
        self.envelopes, self.began = dict(envelopes), time.monotonic()
        return {name: name for name in envelopes}

    def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
        self.waits.append(wait)
        found: dict[str, bytes | Undelivered] = {}
        if "second" in tickets and time.monotonic() - self.began >= self.after:
            nonce = wire.decode(self.envelopes["second"])[0]["nonce"]
            found["second"] = wire.encode({"nonce": nonce}, {})
        if "first" in tickets:
            time.sleep(wait)
            found["first"] = Undelivered("parts are missing")
        return found


@pytest.mark.parametrize("after", [0.0, 0.1])
def test_nobody_is_lost_because_another_halts(after: float) -> None:
    """Also if it answers while the halting one is waited for."""
    transport = Halting(after)
    answers = NodeCaller(transport, deadline=0.3).ask({"first": ({}, {}), "second": ({}, {})})
    assert isinstance(answers["first"], Late) and "no answer within 0.3 s" in str(answers["first"])
    assert not isinstance(answers["second"], wire.WireError)
    assert transport.waits[0] <= 0.3 and transport.waits[-1] == 0


def test_who_answers_too_late_is_left_out() -> None:
    answers = NodeCaller(Halting(after=5.0), deadline=0.2).ask({"first": ({}, {}), "second": ({}, {})})
    assert all("no answer within 0.2 s" in str(answer) for answer in answers.values())


def test_what_cannot_be_delivered_is_said_at_once() -> None:
    class Refusing(Halting):
        def fetch(self, tickets: Collection[str], wait: float) -> dict[str, bytes | Undelivered]:
            return {ticket: Undelivered("no such node") for ticket in tickets}

    began = time.monotonic()
    answers = NodeCaller(Refusing(0.0), deadline=20.0).ask({"first": ({}, {})})
    assert "no such node" in str(answers["first"]) and time.monotonic() - began < 5


def test_flower_does_not_wait_longer_for_parts_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers whose parts never come take as long as one."""
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    import flwr.superlink.grid.http_grid as http_grid
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

    from coterie.deploy.flower import FlowerTransport

    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)  # put back afterwards
    tried: list[str] = []

    def missing(part: str) -> bytes:
        tried.append(part)
        raise ObjectUnavailableError(part)

    class Grid:
        def pull_messages(self, tickets: list[str]) -> list[Any]:
            for ticket in tickets:
                with pytest.raises(ObjectPullError):
                    http_grid.pull_objects(object_ids=[ticket], pull_object_fn=missing)
            return []

    began = time.monotonic()
    assert FlowerTransport(Grid()).fetch(["a", "b"], 0.4) == {}  # type: ignore[arg-type]
    assert 0.4 <= time.monotonic() - began < 2.0
    assert tried.count("a") > 3 and tried.count("b") == 1
