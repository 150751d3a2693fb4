"""A server that was taken over, against a node with the strict policy: it gets no row and no personal model."""

from __future__ import annotations

import polars
import pytest
import torch

from coterie.algorithms import make
from coterie.data.federated import Roles
from coterie.deploy import disclosure
from coterie.deploy.audit import AuditLog, verify
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.deploy.transport import NodeCaller
from coterie.train.fit import fit
from tests.deploy.taken_over import (
    ENCODING,
    LOGISTIC,
    ROLES,
    RUN,
    SPEC,
    STRICT,
    TABLE,
    Server,
    X,
    leaked,
    node,
    patients,
    refused,
    with_policy,
)


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

    @pytest.mark.parametrize(
        "almost",
        [
            *({"seed": seed} for seed in (0.0, False, "0", [0], None, 2**64)),
            *({"split": split} for split in ((0.6, 0.2, 0.2, 0.0), (0.6, 0.4), (0.6, 0.2, 0.2 + 1e-15))),
            *(
                {"split": split}
                for split in (("0.6", "0.2", "0.2"), (True, False, False), ((0.6,), 0.2, 0.2))
            ),
            *({"ids": ids} for ids in ((-1,), (2**40,), (), (0, 1))),
            *({"numeric": [name, "weight"]} for name in ("age\u200b", "\uff41ge", "AGE", "age ", ["age"])),
        ],
    )
    def test_what_is_almost_allowed_tells_nothing_more(self, server, almost):
        """Numbers that equal others, texts that look like others: another split would be other rows."""
        first = server.statistics()["statistics"]
        found = server.statistics("b" * 8, **almost)
        assert "error" in found or found["statistics"] == first

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

    def invert(self, server, rows, **settings) -> int:
        """Count the rows that one gradient step gives away: a row is its gradient over that of the intercept."""
        if "error" in server.open("fedavg", settings={"steps": 1, "lr": 1.0, **settings}):
            return 0
        found = set()
        for call in range(200):
            tensors = {"shared.x": X, "welcome.x": X}
            answer, values = server.call("train", "fedavg", tensors, begins=True, round=1 + call)
            if "error" in answer:
                break
            step = values["value."].flatten()
            age, weight, female = (
                step[:3] / step[-1] * torch.tensor([20, 20, 1]) + torch.tensor([50, 80, 0])
            ).tolist()
            for row in rows.rows(named=True):
                same = abs(row["age"] - age) + abs(row["weight"] - weight) + abs((row["sex"] == "f") - female)
                found |= {row["ssn"]} if same < 1e-6 else set()
        return len(found)

    @pytest.mark.slow
    def test_gradients_of_a_client_with_few_rows_are_not_inverted(self, tmp_path):
        """The attack gives rows away where nobody forbids it; the strict policy leaves it with nothing."""
        few = TABLE[:8]
        naive = with_policy(min_rows=1, min_rows_per_statistic=1, settings={})
        assert self.invert(Server(node(tmp_path / "naive", naive, few)), few, batch=1) >= 3
        for k, (rows, batch) in enumerate([(few, 1), (few, 0), (TABLE, 1), (TABLE, 16), (TABLE, 0)]):
            server = Server(node(tmp_path / str(k), table=rows))
            assert self.invert(server, rows, batch=batch) == 0 and not leaked(server)

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
