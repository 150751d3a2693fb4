"""What a node's policy allows: how much, to whom, after whose consent, and how the file says so."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.deploy import wire
from coterie.deploy.audit import verify
from coterie.deploy.consent import Consent, Refusal
from coterie.deploy.guard import Guard
from coterie.deploy.policy import Policy
from coterie.deploy.policy_words import explain
from tests.deploy.taken_over import ROLES, RUN, STRICT, Server, X, node, refused, with_policy


class TestLimits:
    def test_rounds_messages_and_runs_are_bounded(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(rounds=5, messages_per_run=8, runs_per_day=2)))
        server.open("fedavg")
        assert refused(server.call("train", "fedavg", {"shared.x": X}, round=6), "at most 5")
        answers = [server.call("train", "fedavg", {"shared.x": X})[0] for _ in range(10)]
        assert sum("error" not in answer for answer in answers) == 6
        assert refused(answers[-1], "at most 8 messages in a run")
        assert "error" not in server.hello("b" * 8)
        assert refused(server.hello("c" * 8), "new runs in a day")

    def test_many_visits_in_one_message_count_as_many(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(messages_per_run=50)))
        server.open("fedavg")
        visits = {"at": torch.zeros(60, dtype=torch.long), "nth": torch.arange(60), "shared.x": X}
        assert refused(server.call("train", "fedavg", visits), "at most 50 messages")

    def test_a_restart_or_a_changed_clock_brings_no_fresh_allowance(self, tmp_path):
        policy = with_policy(messages_per_day=3)
        for _ in range(2):
            server = Server(node(tmp_path / "s", policy))
            answers = [server.hello() for _ in range(3)]
        assert all(refused(answer, "messages in a day") for answer in answers)
        guard = Guard(policy, tmp_path)
        for at, fine in [("2030-01-02", 3), ("2030-01-01", 0), ("2029-12-31", 0), ("2030-01-03", 3)]:
            admitted = 0
            for _ in range(4):
                try:
                    guard.admit({"kind": "hello", "run": RUN, "roles": ROLES.to_json()}, {}, at, {})
                    admitted += 1
                except Refusal:
                    pass
            assert admitted == fine, at

    def test_refusals_beyond_the_allowance_do_not_fill_the_disk(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(messages_per_day=5)))
        for k in range(50):
            server.hello(f"{k:08d}")
        assert len(list(verify(tmp_path / "s" / "audit.log"))) == 5

    def test_a_message_is_good_once(self, server):
        message = wire.encode({"kind": "hello", "nonce": "one", "run": RUN, "roles": ROLES.to_json()}, {})
        assert "told" in server.raw(message)[0]
        assert refused(server.raw(message), "nonce already used")

    @pytest.mark.parametrize(
        "run", ["../../../etc", "a/b", "", "A" * 8, "a" * 65, "a\0bcdefgh", "..", "con:aux:x"]
    )
    def test_a_run_does_not_name_a_path(self, server, run):
        before = sorted(server.node.state.parent.rglob("*"))
        answer = server.open("fedavg", run=run)
        assert "error" in answer and sorted(server.node.state.parent.rglob("*")) <= [
            *before,
            server.node.state / "audit.log",
        ]

    @pytest.mark.parametrize(
        "kind", ["hello", "statistics", "open", "call", "deploy", "score", "finish", "rows", "KINDS"]
    )
    def test_a_message_without_its_parts_is_an_error_and_nothing_more(self, server, kind):
        for header in (
            {},
            {"run": RUN},
            {"run": [1]},
            {"run": RUN, "roles": 3},
            {"run": RUN, "roles": {"a": 1}},
        ):
            answer, values = server.ask(kind, **header)
            assert answer["error"] and not values


class TestConsent:
    PROPOSAL: ClassVar[dict[str, Any]] = {
        "algorithm": {"name": "ditto", "settings": {"batch": 0}},
        "rounds": 7,
    }

    def test_nothing_leaves_before_the_owner_approves(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        for _ in range(2):
            answer = server.hello(proposal=self.PROPOSAL)
            assert answer["code"] == "pending" and "told" not in answer
        assert server.statistics()["code"] == "pending" and server.open("ditto")["code"] == "pending"
        consent = Consent(tmp_path / "s")
        told = consent.pending()[RUN]
        assert told["algorithm"]["name"] == "ditto" and told["rounds"] == 7 and told["problems"] == []
        assert told["columns"] == STRICT.columns
        consent.approve(RUN)
        assert "told" in server.hello(proposal=self.PROPOSAL) and "error" not in server.open("ditto")
        said = [entry.get("approved") for entry in verify(tmp_path / "s" / "audit.log")]
        assert (
            said.count(True) == 1 and said.index(True) == 4
        )  # the log has when the owner's word first counted

    def test_another_method_than_the_approved_one_is_refused(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        server.hello(proposal=self.PROPOSAL)
        Consent(tmp_path / "s").approve(RUN)
        assert refused(server.open("fedavg"), "approved another method")
        assert refused(server.open("ditto", settings={"lam": 9.0}), "approved another method")
        assert refused(
            server.hello(proposal={**self.PROPOSAL, "algorithm": {"name": "fedavg", "settings": {}}})
        )

    def test_a_run_is_as_long_and_as_protected_as_the_approved_one(self, tmp_path):
        """The owner saw seven rounds, secure sums and a budget."""
        privacy = {"epsilon": 4.0, "delta": 1e-5, "unit": "row", "clip": 1.0, "rounds": 7}
        proposal = {**self.PROPOSAL, "secure": True, "privacy": privacy}
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        server.hello(proposal=proposal)
        Consent(tmp_path / "s").approve(RUN)
        sums = {"sums": {"secure": True}}
        for setup, told in (
            ({}, "with secure sums"),
            (sums, "another privacy budget"),
            ({**sums, "privacy": {**privacy, "epsilon": 400.0, "clients": 4}}, "another privacy budget"),
        ):
            assert refused(server.open("ditto", setup=setup), told)
        assert "error" not in server.open("ditto", setup={**sums, "privacy": {**privacy, "clients": 4}})
        assert refused(server.call("train", since=None, tensors={"shared.x": X}, round=8), "at most 7 rounds")

    def test_what_the_owner_is_shown_is_the_nodes_own(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        forged = {"roles": {"target": "nothing"}, "columns": [], "problems": []}
        server.hello(proposal={"algorithm": {"name": "cobo", "settings": {}}, "rounds": 1, **forged})
        told = Consent(tmp_path / "s").pending()[RUN]
        assert told["roles"]["target"] == "sick" and told["columns"] == STRICT.columns and told["problems"]

    def test_the_owner_sees_what_does_not_fit(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        server.hello(proposal={"algorithm": {"name": "cobo", "settings": {"batch": 1}}, "rounds": 10**6})
        problems = Consent(tmp_path / "s").pending()[RUN]["problems"]
        assert any("is not one of" in line for line in problems) and any(
            "rounds" in line for line in problems
        )


class TestFile:
    def test_a_policy_survives_its_file(self, tmp_path):
        for policy in (
            with_policy(settings={}, metrics=None, algorithms=None),
            with_policy(encoding={"age": [50.0, 20.0]}, approve=True),
        ):
            policy.write(tmp_path / "policy.toml")
            assert Policy.read(tmp_path / "policy.toml") == policy
        text = " ".join(explain(policy))
        for word in ("age (numeric)", "personal", "At most 1000 rounds", "approve", "fewer than 20 rows"):
            assert word in text, word
        assert "ssn" not in (tmp_path / "policy.toml").read_text()

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("[limits]\nround = 3", "Did you mean 'rounds'"),
            ("[limits]\nrounds = 0", "at least 1"),
            ("[methods]\nreveal = ['models']", "Did you mean 'model'"),
            ("[methods]\nalgorithms = ['dito']", "Did you mean 'ditto'"),
            ("[columns]\nage = 'integer'", 'write "numeric", "category" or'),
            ("[encoding]\nheight = [1.0, 2.0]", "is not in [columns]"),
            ("[data]\nsplit = [1.0, 1.0, 1.0]", "add up to 1"),
            ("[date]\nseed = 1", "Known: data"),
        ],
    )
    def test_a_mistake_in_the_file_is_named(self, tmp_path, line, told):
        table, entry = line.split("\n")
        text = '[data]\nclient = "hospital"\ntarget = "sick"\n'
        text = text + entry if table == "[data]" else f"{text}{line}"
        files.write_text(tmp_path / "policy.toml", text + "\n")
        with pytest.raises(SettingError, match=r"policy\.toml") as problem:
            Policy.read(tmp_path / "policy.toml")
        assert told in str(problem.value)
