"""Rows that were held out train again only where the owner of a node allows it."""

from __future__ import annotations

import json

import polars
import pytest

from coterie.algorithms import make
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.policy import Policy
from coterie.deploy.transport import NodeCaller
from coterie.train.fit import fit
from tests.deploy.taken_over import ROLES, RUN, STRICT, Server, node, patients, refused, with_policy


def test_each_node_decides_whether_validation_rows_train(tmp_path):
    policies = {"north": STRICT, "east": STRICT, "west": with_policy(refit="none")}
    nodes = {
        name: node(tmp_path / name, policy, patients(seed=k).with_columns(hospital=polars.lit(name)))
        for k, (name, policy) in enumerate(policies.items())
    }
    notes: list[str] = []
    caller = NodeCaller(InProcessTransport(nodes), note=notes.append)
    plan = survey(caller, {name: [] for name in nodes}, RunRequest(ROLES), RUN)
    algorithm = make("ditto")
    run = fit(connect(caller, plan, algorithm), algorithm, 3, refit="validation")
    assert notes == ["west is left out: policy: validation rows do not train here ([data] refit = 'none')"]
    assert run.refitted is not None and run.refitted.rows["train"].tolist() == [
        48,
        48,
        0,
    ]  # east, north, west
    assert fit(connect(caller, plan, algorithm), algorithm, 3, refit="all").trained_on == ("train",)
    for place in (run.fed, run.refitted):
        place.runtime.finish(3, run.common())
    seen = {name: json.loads((tmp_path / name / RUN / "run/models/model.json").read_text()) for name in nodes}
    assert [seen[name]["trained_on"] for name in nodes] == [["train", "validation"]] * 2 + [["train"]]


class TestRefitting:
    """More rows in training than the owner allows."""

    @pytest.mark.parametrize(
        ("run", "refit"), [(RUN, "validation"), (RUN + "refit", "all"), (RUN + "refit", "none")]
    )
    def test_more_rows_than_the_policy_allows_are_refused(self, server, run, refit):
        assert refused(server.open(run=run, refit=refit), "rows")

    def test_a_client_with_few_rows_held_out_does_not_train_on_them(self, tmp_path):
        small = Server(node(tmp_path / "state", with_policy(min_rows_per_statistic=13)))
        rows = small.ask_open(RUN + "refit", "validation")
        assert rows["rows.train"].tolist() == [36] and rows["rows.validation"].tolist() == [12]
        enough = Server(node(tmp_path / "other", with_policy(min_rows_per_statistic=12)))
        assert enough.ask_open(RUN + "refit", "validation")["rows.train"].tolist() == [48]

    def test_an_owner_approves_refitting_with_the_run(self, tmp_path):
        server = Server(node(tmp_path / "state", with_policy(approve=True)))
        told = {"algorithm": {"name": "ditto", "settings": {"batch": 0}}, "rounds": 3}
        assert server.hello(proposal=told)["code"] == "pending"
        server.node.guard.consent.approve(RUN)
        assert "error" not in server.open()
        assert refused(server.open(run=RUN + "refit", refit="validation"), "validation rows do not train")
        other = "b" * 8
        assert server.hello(other, proposal={**told, "refit": "validation"})["code"] == "pending"
        server.node.guard.consent.approve(other)
        assert "error" not in server.open(run=other + "refit", refit="validation")

    def test_a_policy_from_before_there_was_a_choice_allows_none(self, tmp_path):
        STRICT.write(tmp_path / "policy.toml")
        assert Policy.read(tmp_path / "policy.toml").refit == "validation"
        lines = (tmp_path / "policy.toml").read_text().splitlines()
        (tmp_path / "policy.toml").write_text(
            "\n".join(line for line in lines if not line.startswith("refit"))
        )
        assert Policy.read(tmp_path / "policy.toml").refit == "none"
