"""A server that was taken over, and what must be true after every attack of it."""

from __future__ import annotations

import pytest

from tests.deploy.taken_over import Server, leaked, node


@pytest.fixture
def server(tmp_path):
    yield (found := Server(node(tmp_path / "state")))
    assert not leaked(found), "a value of a row left the node"
