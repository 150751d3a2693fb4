"""A server that was taken over, against a node with the strict policy: it gets no row, no personal model, no choice."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any, ClassVar

import polars
import pytest
import torch

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import audit, disclosure, wire
from coterie.deploy.audit import AuditError, AuditLog, verify
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.guard import Guard, Refusal
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.deploy.transport import NodeCaller
from coterie.train.fit import fit

ROLES = Roles("hospital", "sick")
RUN = "a" * 8
LOGISTIC = {"model": "logistic", "l2": 0.0, "intercept": True, "reduction": "mean", "features": 3}
SPEC = {
    "client": "hospital",
    "target": "sick",
    "cluster": None,
    "task": "binary",
    "classes": ["no", "yes"],
    "numeric": ["age", "weight"],
    "categories": ["sex"],
    "warnings": [],
}
ENCODING = {
    "spec": SPEC,
    "scales": [
        {"name": "age", "mean": 50.0, "sd": 20.0, "missing": False},
        {"name": "weight", "mean": 80.0, "sd": 20.0, "missing": False},
    ],
    "choices": [{"name": "sex", "levels": ["f"], "missing": False}],
    "target_mean": 0.0,
    "target_sd": 1.0,
}


def patients(count: int = 60, seed: int = 1) -> polars.DataFrame:
    """Rows with identifiers and notes that must never leave."""
    draw = random.Random(seed)
    return polars.DataFrame(
        {
            "hospital": ["north"] * count,
            "ssn": [f"{draw.randint(100, 999)}-{draw.randint(10, 99)}-{k:04d}" for k in range(count)],
            "age": [draw.randint(20, 90) for _ in range(count)],
            "weight": [round(draw.uniform(45, 120), 1) for _ in range(count)],
            "sex": ["x" if k == 7 else draw.choice("fm") for k in range(count)],
            "note": [f"patient {k} HIV {'pos' if draw.random() < 0.3 else 'neg'}" for k in range(count)],
            "sick": [draw.choice(["yes", "no"]) for _ in range(count)],
        }
    )


class Server:
    """Sends whatever it likes to one node and remembers everything that came back."""

    def __init__(self, node: NodeService) -> None:
        self.node, self.heard, self.count = node, [], itertools.count()

    def ask(self, kind, tensors=None, **header):
        message = {"kind": kind, "nonce": f"n{next(self.count)}", **header}
        return self.raw(wire.encode(message, tensors or {}))

    def raw(self, message: bytes):
        answer = self.node.answer(message)
        self.heard.append(answer)
        return wire.decode(answer)

    def hello(self, run=RUN, roles=ROLES, **more):
        return self.ask("hello", run=run, roles=roles.to_json(), **more)[0]

    def statistics(self, run=RUN, seed=0, split=(0.6, 0.2, 0.2), ids=(0,), roles=ROLES, **spec):
        return self.ask(
            "statistics",
            {"ids": torch.tensor(ids)},
            run=run,
            roles=roles.to_json(),
            spec={**SPEC, **spec},
            split=list(split),
            seed=seed,
        )[0]

    def open(self, algorithm="ditto", run=RUN, settings=None, model=LOGISTIC, encoding=ENCODING, **more):
        setup = {
            "algorithm": {"name": algorithm, "settings": {"batch": 0, **(settings or {})}},
            "preprocessor": json.dumps(encoding),
            "model": model,
        }
        header = {"roles": ROLES.to_json(), "seed": 0, "split": [0.6, 0.2, 0.2], "clients": ["north"], **more}
        ids = header.pop("ids", (0,))
        return self.ask("open", {"ids": torch.tensor(ids)}, run=run, setup=setup, **header)[0]

    def call(self, phase, algorithm="ditto", tensors=None, begins=False, **more):
        header = {
            "run": RUN,
            "algorithm": algorithm,
            "phase": phase,
            "round": 1,
            "call": 0,
            "numbers": {},
            "begins": begins,
            "welcome_numbers": {},
            "lasting": False,
            "split": "",
            "metrics": [],
            "compress": "",
            "since": None,
            "floor": None,
        }
        return self.ask("call", {"at": torch.tensor([0]), **(tensors or {})}, **{**header, **more})


TABLE = patients()
STRICT = Policy.strict(TABLE, Roles("hospital", "sick", drop=("ssn", "note")))
X = torch.zeros(4, dtype=torch.float64)


def node(path: Path, policy: Policy = STRICT, table: polars.DataFrame = TABLE, **more) -> NodeService:
    path.mkdir(exist_ok=True)
    return NodeService(table, path, policy=policy, audit=AuditLog(path / "audit.log"), **more)


def with_policy(**changes) -> Policy:
    return Policy.strict(TABLE, Roles("hospital", "sick", drop=("ssn", "note")), **changes)


@pytest.fixture
def server(tmp_path):
    yield (found := Server(node(tmp_path / "state")))
    assert not leaked(found), "a value of a row left the node"


def leaked(server: Server) -> list[str]:
    """Values of identifiers, notes and weights in anything the node said."""
    heard = b"".join(server.heard)
    secrets = [*TABLE["ssn"], *TABLE["note"], *(repr(weight) for weight in TABLE["weight"])]
    found = [
        value
        for value in secrets
        if re.search(rb"(?<![\d.])" + re.escape(value.encode()) + rb"(?!\d)", heard)
    ]
    exact = torch.tensor(TABLE["weight"].to_list(), dtype=torch.float64)
    return found + [
        str(value) for value in exact.tolist() if torch.tensor([value]).double().numpy().tobytes() in heard
    ]


def refused(answer, text: str = "policy") -> bool:
    header = answer[0] if isinstance(answer, tuple) else answer
    return header.get("code") == "refused" and text in header["error"]


def test_an_honest_run_fits_the_strict_policy(tmp_path):
    nodes = {
        name: NodeService(
            patients(seed=k).with_columns(hospital=polars.lit(name)),
            tmp_path / name,
            policy=STRICT,
            audit=AuditLog(tmp_path / f"{name}.log"),
        )
        for k, name in enumerate(("north", "east", "west"))
    }
    notes: list[str] = []
    caller = NodeCaller(InProcessTransport(nodes), note=notes.append)
    plan = survey(caller, {name: [] for name in nodes}, RunRequest(ROLES), RUN)
    algorithm = make("ditto")
    run = fit(connect(caller, plan, algorithm), algorithm, 3)
    assert not notes and torch.isfinite(run.score("test", "accuracy")).all()
    assert "ssn" not in plan.preprocessor and "note" not in plan.preprocessor
    for name in nodes:
        entries = list(verify(tmp_path / f"{name}.log"))
        assert [entry["kind"] for entry in entries[:3]] == ["hello", "statistics", "open"]


class TestRows:
    """S1: rows one at a time, dropped columns, values in errors."""

    def test_a_split_of_one_row_is_refused_for_every_seed(self, server):
        for seed in range(40):
            assert refused(server.statistics(f"{seed:08d}"[:8], seed, (0.0, 0.0, 1.0)))
            assert refused(server.statistics("b" * 8, seed + 1))

    def test_another_numbering_of_clients_is_another_split_and_is_refused(self, server):
        assert "statistics" in server.statistics()
        assert refused(server.statistics("b" * 8, ids=(5,)), "numbered")
        assert refused(server.open("fedavg", ids=(5,)), "numbered")

    def test_statistics_are_answered_once_per_run(self, server):
        first = server.statistics()
        assert server.statistics()["statistics"] == first["statistics"]  # the same bytes tell nothing new
        assert refused(server.statistics(numeric=["age"]), "once per run")

    @pytest.mark.parametrize("target", ["ssn", "note", "age", "hospital"])
    def test_another_target_is_refused(self, server, target):
        assert refused(server.hello(roles=Roles("hospital", target)))

    def test_a_client_column_that_the_server_chooses_is_refused(self, server):
        assert refused(server.hello(roles=Roles("ssn", "sick")))
        assert refused(server.hello(roles=Roles("hospital", "sick", cluster="note")), "cluster")

    @pytest.mark.parametrize("part", ["numeric", "categories"])
    @pytest.mark.parametrize("column", ["ssn", "note", "hospital", "sick", "nothing"])
    def test_columns_that_the_owner_did_not_name_do_not_exist(self, server, part, column):
        assert refused(server.statistics(**{part: [column]}), "there is no")
        encoding = {**ENCODING, "spec": {**SPEC, part: [column]}}
        assert refused(server.open("fedavg", encoding=encoding), "there is no")

    def test_numbers_are_not_listed_as_levels(self, server):
        assert refused(
            server.statistics(numeric=[], categories=["age", "weight"]), "no category column 'age'"
        )

    def test_a_description_names_the_owners_columns_only(self, server):
        told = server.hello()["told"]
        assert [name for name, _ in told["columns"]] == ["age", "weight", "sex"]

    def test_a_level_of_one_row_stays(self, server, tmp_path):
        levels, _ = server.statistics()["statistics"]["categories"]["sex"]
        assert [level for level, _, _ in levels] == ["f", "m"]
        choices = [{"name": "sex", "levels": ["x"], "missing": False}]
        assert "error" not in server.open("fedavg", encoding={**ENCODING, "choices": choices})
        rows = server.node.runs[RUN].runtime.splits
        assert all((part.x[:, 2] == 0).all() for part in rows.values())  # nobody is singled out

    def test_a_column_with_few_values_has_no_moments(self):
        few = disclosure.Moments(3, 50.0, 1.0, 57)
        one = disclosure.ClientSums(("north",), torch.full((1, 2, 7), 3.0).numpy(), ("",))
        sums = disclosure.Statistics({"age": few}, {}, disclosure.Moments(), one)
        left = disclosure.statistics(STRICT, sums, TABLE)
        assert left.numeric["age"] == disclosure.Moments(missing=60)
        assert not left.by_client.sums.any()

    def test_a_lone_outlier_cannot_be_told_from_sums_of_its_client(self, tmp_path):
        """The sum of all values less the sum of those that are no outliers would be the outlier."""
        wild = TABLE.with_columns(weight=polars.Series([7777.7, *TABLE["weight"][1:]]))
        for least, shown in ((1, True), (4, False)):
            policy = with_policy(min_rows_per_statistic=least)
            found = Server(node(tmp_path / str(least), policy, wild)).statistics()
            sums = torch.tensor(found["statistics"]["clients"]["sums"])[0, 1]
            count, mean, _, outliers, inner = sums[:5].tolist()
            assert (outliers == 1) == shown
            if shown:
                assert count * mean - (count - 1) * inner == pytest.approx(7777.7)
            else:
                assert inner == mean

    def test_few_values_of_a_client_count_as_missing(self, tmp_path):
        """Facts and sums of a column with three values would be about these rows."""
        rare = TABLE.with_columns(weight=polars.Series([81.25, 82.5, 83.75, *[None] * 57]))
        server = Server(node(tmp_path / "s", table=rare))
        assert server.hello()["told"]["facts"]["weight"]["rows"] == 0
        assert server.statistics()["statistics"]["numeric"]["weight"] == [0, 0.0, 0.0, 36]

    def test_facts_say_nothing_of_a_column_with_a_fixed_encoding(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(encoding={"age": [50.0, 20.0]})))
        told = server.hello()["told"]["facts"]
        assert {name for name, value in told["age"].items() if value} == {"kind", "rows"}
        assert told["sex"]["equal"] > 0

    def test_texts_that_identify_rows_do_not_exist_for_a_server(self, tmp_path):
        kept = Policy.strict(TABLE, Roles("hospital", "sick"))
        assert "ssn" not in kept.columns and "note" not in kept.columns
        assert "ssn" in Policy.strict(TABLE, Roles("hospital", "sick", keep=("ssn",))).columns

    def test_errors_hold_no_value_of_a_row(self, tmp_path):
        """A note where a number should be: the owner reads which, the server does not."""
        log: list[str] = []
        broken = TABLE.with_columns(
            weight=polars.Series([*TABLE["note"][:1], *map(str, TABLE["weight"][1:])])
        )
        policy = with_policy()
        server = Server(node(tmp_path / "state", policy, broken, log=log.append))
        assert "its own log says why" in server.statistics()["error"]
        assert not leaked(server) and any("weight" in line for line in log)

    def test_clients_with_few_rows_take_no_part(self, tmp_path):
        small = TABLE.with_columns(hospital=polars.Series(["tiny"] * 5 + ["north"] * 55))
        told = Server(node(tmp_path / "a", table=small)).hello()["told"]
        assert told["clients"] == ["north"] and told["rows"] == [55]
        assert refused(
            Server(node(tmp_path / "b", table=TABLE[:12])).hello(), "no client of this node has 20 rows"
        )

    def test_a_fixed_encoding_is_all_that_is_told_of_a_column(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(encoding={"age": [50.0, 20.0], "sex": ["f", "m"]})))
        sums = server.statistics()["statistics"]
        assert sums["numeric"]["age"] == pytest.approx([36, 50.0, 36 * 400.0, 0])
        assert sums["categories"]["sex"] == [[["f", 36, 1], ["m", 36, 1]], False]
        assert refused(server.open("fedavg"), "'sex' is fixed")
        scales = [{**ENCODING["scales"][0], "mean": 0.0}, ENCODING["scales"][1]]
        choices = [{"name": "sex", "levels": ["f", "m"], "missing": False}]
        assert refused(
            server.open("fedavg", encoding={**ENCODING, "scales": scales, "choices": choices}),
            "'age' is fixed",
        )
        assert "error" not in server.open("fedavg", encoding={**ENCODING, "choices": choices})


class TestModels:
    """S2 and S6: personal models, gradients of single rows, other models."""

    def opened(self, server, algorithm="ditto", **more):
        assert "error" not in server.open(algorithm, **more)
        return server.call("train", algorithm, {"shared.x": X, "welcome.x": X}, begins=True, lasting=True)

    def test_a_personal_model_cannot_be_fetched(self, server):
        assert "error" not in self.opened(server)[0]
        for phase in ("deploy", "round", "common", "start", "settings", "replace", "__class__", "traffic"):
            answer, values = server.call(phase, since=[1, 0], tensors={"shared.x": X})
            assert answer["code"] == "refused" and not values

    def test_what_is_not_deployed_is_not_scored(self, server):
        self.opened(server)
        answer = server.call("train", since=[1, 0], tensors={"shared.x": X}, split="test", metrics=["loss"])
        assert refused(answer, "only deployed models are scored")
        answer, values = server.call("deploy", since=[1, 0], split="test", metrics=["loss"])
        assert "error" not in answer and set(values) == {"value.loss", "value.rows"}

    @pytest.mark.parametrize(
        ("algorithm", "phase"), [("cobo", "slope"), ("flix", "local_model"), ("fc", "own_slope")]
    )
    def test_phases_that_reveal_personal_models_do_not_run(self, tmp_path, algorithm, phase):
        server = Server(node(tmp_path / "strict"))
        assert refused(server.open(algorithm), "is not one of")
        wide = Server(node(tmp_path / "wide", with_policy(algorithms=(algorithm,))))
        assert "error" not in wide.open(algorithm)
        answer, values = wide.call(phase, algorithm, {"each.x": X.unsqueeze(0)})
        assert refused(answer, "reveals personal") and not values

    def test_a_forbidden_kind_of_phase_does_not_run(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(reveal=("nothing", "aggregate"))))
        server.open("fedavg")
        assert refused(server.call("train", "fedavg", {"shared.x": X}), "reveals model")

    @pytest.mark.parametrize(
        "settings", [{"batch": 1}, {"batch": 15}, {"steps": 10**9}, {"steps": 0}, {"lr": 1e9}]
    )
    def test_settings_outside_their_range_are_refused(self, server, settings):
        """A batch of one row would make every gradient a row."""
        assert refused(server.open("fedavg", settings=settings), "outside what is allowed")

    @pytest.mark.parametrize(
        "model",
        [
            {"model": "causal_lm", "path_or_name": "/etc"},
            {"model": "mlp", "hidden": [20000, 20000], "classes": 2, "inputs": [2]},
            {**LOGISTIC, "l2": 1e300},
            {"model": "../../model"},
            {},
        ],
    )
    def test_other_models_are_refused_before_anything_is_read_or_made(self, server, model):
        assert refused(server.open("fedavg", model=model))
        assert not (server.node.state / RUN).exists()

    def test_a_run_has_one_method(self, server):
        """Another method's name in a message would bring that method's exceptions."""
        assert "error" not in server.open("fedavg")
        edge = torch.full((4,), float(torch.finfo(torch.float32).max), dtype=torch.float64)
        assert refused(server.call("train", "trees", {"shared.x": edge}), "")
        assert refused(server.call("train", "fedavg", {"shared.x": edge}), "finite and at most")

    @pytest.mark.parametrize("x", [1e9, float("inf"), float("nan")])
    def test_weights_that_trap_single_rows_are_refused(self, server, x):
        """Huge weights saturate a logistic model for all rows but those on a hyperplane of the server's choice."""
        self.opened(server)
        assert refused(server.call("train", since=[1, 0], tensors={"shared.x": X + x}), "finite and at most")

    def test_a_histogram_of_predictions_is_refused(self, server):
        self.opened(server)
        assert refused(server.call("deploy", since=[1, 0], split="test", metrics=["auc"]), "metric auc")

    def test_scores_of_few_rows_are_hidden(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(min_rows_per_statistic=13)))
        self.opened(server)
        _, values = server.call("deploy", since=[1, 0], split="test", metrics=["loss"])
        assert values["value.loss"].isnan().all() and values["value.rows"].tolist() == [[12.0]]
        _, values = server.call("deploy", since=[1, 0], split="train", metrics=["loss"])
        assert values["value.loss"].isfinite().all()


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
        monkeypatch.setattr(audit.os, "write", full)
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

    def test_a_line_cannot_be_forged_by_text(self, server):
        server.ask('hello\n{"n": 2}', run=RUN, roles=ROLES.to_json())
        server.hello()
        assert len(list(verify(server.node.audit.path))) == 2


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
        guard = Guard(with_policy(approve=True), tmp_path / "s")
        told = guard.pending()[RUN]
        assert told["algorithm"]["name"] == "ditto" and told["rounds"] == 7 and told["problems"] == []
        assert told["columns"] == STRICT.columns
        guard.approve(RUN)
        assert "told" in server.hello(proposal=self.PROPOSAL) and "error" not in server.open("ditto")

    def test_another_method_than_the_approved_one_is_refused(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        server.hello(proposal=self.PROPOSAL)
        Guard(with_policy(approve=True), tmp_path / "s").approve(RUN)
        assert refused(server.open("fedavg"), "approved another method")
        assert refused(server.open("ditto", settings={"lam": 9.0}), "approved another method")
        assert refused(
            server.hello(proposal={**self.PROPOSAL, "algorithm": {"name": "fedavg", "settings": {}}})
        )

    def test_the_owner_sees_what_does_not_fit(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(approve=True)))
        server.hello(proposal={"algorithm": {"name": "cobo", "settings": {"batch": 1}}, "rounds": 10**6})
        problems = Guard(with_policy(approve=True), tmp_path / "s").pending()[RUN]["problems"]
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
        text = " ".join(policy.explain())
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
