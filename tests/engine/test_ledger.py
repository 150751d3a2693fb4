"""What a ledger adds up: kinds, phases and links apart, scores and refitting beside the training."""

import pytest

from coterie.engine.ledger import INSIDE, Entry, Ledger, Traffic

SERVER = "client-server"


@pytest.fixture
def ledger() -> Ledger:
    filled = Ledger()
    filled.add(Entry(0, "setup", "begin", SERVER), down=(2, 6, 24), up=(0, 0, 0))
    filled.add_rounds((1, 2), "train", [Traffic("train", SERVER, (2, 6, 24), (2, 4, 16))])
    filled.add(Entry(2, "train", "train", INSIDE), down=(0, 0, 0), up=(1, 1, 8))
    filled.add(Entry(2, "train", "train", SERVER), down=(1, 3, 12), up=(1, 3, 12))  # more of what was there
    filled.add(Entry(2, "evaluate", "deploy", SERVER), down=(2, 6, 1000), up=(2, 2, 1000))
    filled.add(Entry(3, "refit", "train", SERVER), down=(2, 6, 24), up=(2, 4, 16))
    return filled


def test_scores_are_counted_only_where_they_are_asked_for(ledger: Ledger) -> None:
    assert ledger.total("bytes_down") == 24 + 24 + 24 + 12 + 24
    assert ledger.total("bytes_up") == 16 + 16 + 8 + 12 + 16
    assert ledger.total("bytes_up", kind="evaluate") == 1000


def test_phases_links_and_kinds_apart(ledger: Ledger) -> None:
    assert ledger.total("messages_down", phase="begin") == 2
    assert ledger.total("floats_up", link=SERVER) == 4 + 4 + 3 + 4
    assert ledger.total("floats_up", kind="train", link=INSIDE) == 1


def test_megabytes_grow_by_what_training_sends(ledger: Ledger) -> None:
    found = {t: (up * 1e6, down * 1e6) for t, (up, down) in ledger.megabytes().items()}
    assert {t: pytest.approx(both) for t, both in found.items()} == {0: (0, 24), 1: (16, 48), 2: (52, 84)}


def test_what_comes_after_a_round_is_forgotten(ledger: Ledger) -> None:
    ledger.forget_after(1)
    assert ledger.total("messages_down") == 4
    assert ledger.total("bytes_up", kind="evaluate") == 0
