"""Logs that nobody changes unnoticed: what leaves a node is written down before it leaves."""

from __future__ import annotations

import hashlib
import json

import pytest

from coterie._core import files
from coterie.deploy.audit import AuditError, AuditLog, verify
from tests.deploy.taken_over import ROLES, RUN


class TestAudit:
    def test_what_leaves_is_written_down_first(self, server):
        server.hello()
        server.statistics(numeric=["ssn"])
        entries = list(verify(server.node.audit.path))
        assert [entry["kind"] for entry in entries] == ["hello", "statistics"]
        assert "there is no numeric column" in entries[1]["refused"]
        assert entries[0]["bytes"] == len(server.heard[0])

    def test_nothing_leaves_if_it_cannot_be_written_down(self, server, monkeypatch):
        def full(*arguments):
            raise OSError(28, "No space left on device")

        server.hello()
        monkeypatch.setattr(files.os, "write", full)
        answer = server.statistics()
        assert "audit log" in answer["error"] and "statistics" not in answer
        monkeypatch.undo()
        assert len(list(verify(server.node.audit.path))) == 1  # no half line
        assert "statistics" in server.statistics("b" * 8)

    @pytest.mark.parametrize("harm", ["change", "remove", "insert", "swap", "cut a line"])
    def test_a_changed_log_is_noticed(self, server, harm):
        for _ in range(4):
            server.hello()
        path = server.node.audit.path
        lines = path.read_text().splitlines(keepends=True)
        changed = {
            "change": [lines[0], lines[1].replace("hello", "hullo"), *lines[2:]],
            "remove": [lines[0], *lines[2:]],
            "insert": [lines[0], lines[0], *lines[1:]],
            "swap": [lines[1], lines[0], *lines[2:]],
            "cut a line": [*lines[:-1], lines[-1][:40]],
        }[harm]
        path.write_text("".join(changed))
        with pytest.raises(AuditError, match="the chain is broken"):
            list(verify(path))
        with pytest.raises(AuditError):
            AuditLog(path)  # the node does not start with such a log

    def test_an_end_that_was_cut_off_or_a_log_written_anew_is_noticed_by_the_other_side(
        self, server, tmp_path
    ):
        heads = [server.hello()["audit"] for _ in range(4)]
        path = server.node.audit.path
        assert len(list(verify(path, heads))) == 4
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:1]))
        assert len(list(verify(path))) == 1  # whole in itself
        with pytest.raises(AuditError, match="that the other side has seen"):
            list(verify(path, heads))
        path.unlink()
        again = AuditLog(path)
        for _ in range(4):
            again.write(kind="hello", run=RUN, cost=1)
        with pytest.raises(AuditError, match="written anew"):
            list(verify(path, heads))

    def test_a_changed_line_with_a_hash_of_its_own_is_noticed(self, server):
        for _ in range(3):
            server.hello()
        path = server.node.audit.path
        first, second, third = path.read_text().splitlines()
        entry = {**json.loads(second), "kind": "hullo"}
        del entry["hash"]
        entry["hash"] = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
        path.write_text("\n".join([first, json.dumps(entry, sort_keys=True), third, ""]))
        with pytest.raises(AuditError, match="line 3: the chain is broken"):
            list(verify(path))

    def test_a_line_cannot_be_forged_by_text(self, server):
        server.ask('hello\n{"n": 2}', run=RUN, roles=ROLES.to_json())
        server.hello()
        assert len(list(verify(server.node.audit.path))) == 2
