"""A server that was taken over subtracts answers that differ by one row; a budget of the node's owner prevents that."""

from __future__ import annotations

import pytest
import torch

from coterie.deploy.policy import Policy
from coterie.deploy.policy_words import explain
from tests.deploy.taken_over import RUN, TABLE, Server, X, node, refused, with_policy

pytest.importorskip("dp_accounting", reason="budgets need the extra 'privacy'")
OTHER = "b" * 8


def budget(epsilon=4.0, **more):
    return {
        "epsilon": epsilon,
        "delta": 1e-6,
        "unit": "row",
        "clip": 1.0,
        "rounds": 900,
        "clients": 1,
        **more,
    }


class Subtracting(Server):
    """Lets each training row fall on either side of a steep slope: two gradients then differ by the rows in between."""

    steep, rows, lr = 3e4, 36, 1.0

    def gradient(self, weight: float) -> torch.Tensor:
        x = torch.tensor([0.0, self.steep, 0.0, -self.steep * weight], dtype=torch.float64)
        self.asked = getattr(self, "asked", 0) + 1
        tensors = {"shared.x": x, "welcome.x": x}
        answer, values = self.call("train", "fedavg", tensors, begins=True, round=self.asked)
        assert "error" not in answer, answer
        return self.rows * (x - values["value."].flatten()) / self.lr

    def between(self, low, high, first, last) -> list[torch.Tensor]:
        """Return the rows whose weight is between two values, as far as they can be told apart."""
        sums = first - last
        count = round(float(sums[-1]))
        if count < 1 or high - low < 1e-6 or self.asked > 400:
            return []
        if count == 1:
            return [sums]
        middle = (low + high) / 2
        here = self.gradient(middle)
        return self.between(low, middle, first, here) + self.between(middle, high, here, last)

    def stolen(self) -> int:
        """Count the rows of the table that were found with all their values."""
        found = self.between(-3.0, 3.0, self.gradient(-3.0), self.gradient(3.0))
        told = {
            (round(float(r[0]) * 20 + 50), round(float(r[1]) * 20 + 80, 1), round(float(r[2]))) for r in found
        }
        return sum(
            (row["age"], row["weight"], int(row["sex"] == "f")) in told for row in TABLE.rows(named=True)
        )


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [None, 1.0, 8.0])
def test_rows_are_computed_from_gradients_unless_the_owner_asks_for_noise(tmp_path, epsilon):
    """Without a budget it is not promised that no row can be computed, and none need be found to be safe with one."""
    policy = with_policy() if epsilon is None else with_policy(epsilon=epsilon)
    server = Subtracting(node(tmp_path / "s", policy))
    more = {} if epsilon is None else {"privacy": budget(epsilon)}
    assert "error" not in server.open("fedavg", settings={"steps": 1, "lr": 1.0}, setup=more)
    assert server.stolen() >= 30 if epsilon is None else server.stolen() <= 1  # by chance


class TestBudget:
    """The owner's budget holds whatever the server says."""

    def opened(self, server, given, run=RUN):
        return server.open("fedavg", run=run, setup={} if given is None else {"privacy": given})

    def test_runs_without_noise_are_refused(self, tmp_path):
        server = Server(node(tmp_path / "s", with_policy(epsilon=8.0)))
        assert refused(self.opened(server, None), "with noise only")
        assert refused(self.opened(server, budget(unit="client")), "with noise only")
        assert refused(server.statistics(), "with noise only")
        assert "error" not in self.opened(server, budget())
        assert refused(server.ask("score", run=RUN, round=1, split="train", metrics=["loss"]), "not scored")
        assert refused(server.call("deploy", "fedavg", split="train", metrics=["loss"]), "not scored")

    @pytest.mark.parametrize(
        "wrong", [{"epsilon": float("nan")}, {"epsilon": -1.0}, {"epsilon": 0}, {"delta": 0.5}]
    )
    def test_a_budget_that_is_none_is_refused(self, tmp_path, wrong):
        server = Server(node(tmp_path / "s", with_policy(epsilon=8.0)))
        try:
            answer = self.opened(server, budget(**wrong))
        except ValueError:
            return  # no message can say it
        assert answer["code"] == "refused"

    def test_budgets_of_runs_add_up_over_restarts(self, tmp_path):
        policy = with_policy(epsilon=8.0)
        assert "error" not in self.opened(Server(node(tmp_path / "s", policy)), budget(5.0))
        for _ in range(2):
            server = Server(node(tmp_path / "s", policy))
            assert refused(self.opened(server, budget(4.0), OTHER), "5 is spent")
            assert "error" not in self.opened(server, budget(5.0))  # the same run, once more
        assert "error" not in self.opened(server, budget(3.0), OTHER)
        assert refused(self.opened(server, budget(0.1), "c" * 8), "8 is spent")

    def test_a_run_keeps_its_budget(self, tmp_path):
        """Otherwise its noise could be made small after the owner has seen a small epsilon."""
        for policy in (with_policy(), with_policy(epsilon=100.0)):
            server = Server(node(tmp_path / str(policy.epsilon), policy))
            assert "error" not in self.opened(server, budget(1.0))
            assert refused(self.opened(server, budget(50.0)), "keeps the privacy budget")
            assert refused(self.opened(server, None), "keeps the privacy budget")

    def test_the_file_and_the_words_have_it(self, tmp_path):
        for policy, words in (
            (with_policy(epsilon=8.0, delta=1e-6), "epsilon 8"),
            (with_policy(), "taken over"),
        ):
            policy.write(tmp_path / "policy.toml")
            assert Policy.read(tmp_path / "policy.toml") == policy
            assert words in " ".join(explain(policy))


def test_what_a_run_stores_is_bounded(tmp_path):
    """A server that never lets go of an old state fills the disk of a node."""
    server = Server(node(tmp_path / "s", with_policy(megabytes=1)))
    server.open("ditto")
    run = server.node.runs[RUN]
    run.state_files.save((0, 0), {"ballast": torch.zeros(124_700, dtype=torch.float64)})
    answers = [
        server.call("train", "ditto", {"shared.x": X, "welcome.x": X}, begins=True, lasting=True, round=t)[0]
        for t in range(1, 12)
    ]
    assert "error" not in answers[0] and refused(answers[-1], "at most 1 MB")
    assert sum(path.stat().st_size for path in run.folder.rglob("*")) < 1.05e6
    answer, _ = server.call(
        "train", "ditto", {"shared.x": X, "welcome.x": X}, begins=True, lasting=True, round=20, floor=[1, 0]
    )
    assert "error" not in answer  # a server that lets go may go on
