"""Flower behind one module: what is public, and which private parts we use."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import coterie
from coterie.deploy import flower_private

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def test_the_private_parts_are_where_they_were():
    """On the day when one moves this names it: change `flower_private.py`, and nothing else."""
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    assert flower_private.missing_parts() == []


def test_a_part_that_moved_is_named(monkeypatch):
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    monkeypatch.setitem(flower_private.PARTS, "Gone", "flwr.app")
    monkeypatch.setitem(flower_private.WHERE, "flwr.app", ("Gone",))
    assert flower_private.missing_parts() == ["flwr.app.Gone"]
    with pytest.raises(ImportError, match=r"flwr\.app has no Gone"):
        _ = flower_private.Gone


def test_requests_of_nodes_pass_by_what_is_for_operators():
    """And nothing else: who checks signatures and translates messages stays in their way."""
    pytest.importorskip("flwr", reason="a federation needs the extra 'flower'")
    from coterie.deploy.flower_link import APART, Shortcut, without

    app = flower_private.create_app()

    def names(layer):
        found = []
        while layer is not None:
            found.append(type(layer).__name__)
            layer = getattr(layer, "app", None)
        return found

    every, short = names(app.build_middleware_stack()), names(without(app, APART))
    assert len(every) - len(short) == 6 and {"NodeAuthMiddleware", "ProtobufTranslationMiddleware"} <= set(
        short
    )
    assert names(app.build_middleware_stack()) == every  # nothing is taken away from operators' requests
    went = []

    async def way(name):
        went.append(name)

    shortcut = Shortcut(lambda *about: way("long"), lambda *about: way("short"))
    for kind, path in (
        ("lifespan", ""),
        ("http", "/v1/control/start-run"),
        ("http", "/v1/fleet/pull-messages"),
    ):
        asyncio.run(shortcut({"type": kind, "path": path}, None, None))
    assert went == ["long", "long", "short"]


def test_only_one_file_names_private_parts():
    """All other files import Flower's public interface, or nothing of it."""
    for file in Path(coterie.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "flwr" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            private = [name for name in names if name.split(".")[0] == "flwr" and name not in PUBLIC]
            assert not private, f"{file}: {private}"
