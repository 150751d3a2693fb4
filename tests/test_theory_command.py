"""`coterie theory` as a user gives it."""

import json

import pytest

from coterie.theory import risk

NUMBERS = ("--gamma", 2, "--r2", 1, "--rho2", 2, "--noise", 0.25)


def test_risk_is_theorys_and_plots(command, tmp_path):
    result = command("theory", "risk", *NUMBERS, "--json", tmp_path / "r.json", "--plot", tmp_path / "r.html")
    assert result.code == 0 and "0.6404" in result.out and "lambda = 0.5" in result.out
    found = json.loads((tmp_path / "r.json").read_text())
    best = risk.rtfa(gamma=2.0, r2=1.0, sigma2=0.25)
    assert found["rtfa"] == pytest.approx({"bias": best.bias, "variance": best.variance})
    assert len(found) == 9 and "ridge-local" in (tmp_path / "r.html").read_text()


def test_risk_takes_a_spectrum_and_clients(command):
    result = command(
        "theory", "risk", *NUMBERS, "--spectrum", "0.4,1.6", "--clients", 20, "--over", "clients"
    )
    assert result.code == 0 and "fedavg" in result.out


def test_rounds_lists_all_solvers(command, tmp_path):
    asked = ("--smoothness", 4, "--convexity", 0.1, "--accuracy", 1e-4, "--json", tmp_path / "n.json")
    result = command("theory", "rounds", *asked, "--plot", tmp_path / "n.html")
    assert result.code == 0 and "scaffnew" in result.out
    found = {one["solver"]: one["rounds"] for one in json.loads((tmp_path / "n.json").read_text())}
    assert found["dgd"] == 364 and found["scaffnew"] < found["dgd"]


def test_crossover_names_the_point_and_who_is_better(command, tmp_path):
    asked = ("ftfa", "fedavg", *NUMBERS, "--json", tmp_path / "c.json", "--plot", tmp_path / "c.html")
    result = command("theory", "crossover", *asked)
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["points"] == pytest.approx([0.5], rel=1e-6) and found["clients_needed"] == pytest.approx(3.5)
    rows = [line.split() for line in result.out.splitlines() if line.startswith("│")]
    assert [row[5] for row in rows] == ["ftfa", "fedavg"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("crossover", "ftfa", "best", *NUMBERS), "no risk of 'best'"),
        (("crossover", "ftfa", "fedavg", *NUMBERS, "--over", "rows"), "cannot vary 'rows'"),
        (("risk", *NUMBERS, "--spectrum", "wide"), "not a list of numbers"),
        (("risk", "--gamma", 2, "--r2", 2, "--rho2", 1, "--noise", 1), "rho2 >= r2"),
        (("rounds", "--smoothness", 4, "--convexity", 0, "--accuracy", 1), "strongly convex"),
    ],
)
def test_what_cannot_be_computed_is_named(asked, message, command):
    result = command("theory", *asked)
    assert result.code == 2 and message in " ".join(result.err.split())
