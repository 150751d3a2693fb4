"""`coterie plan` and `coterie fit --budget-mb` as a user gives them."""

import json

import polars
import pytest

HEART = ("heart_disease", "--client", "hospital", "--target", "sick")


@pytest.mark.slow
def test_plan_prints_the_choice_and_writes_plot_and_json(command, tmp_path):
    result = command(
        "plan",
        *HEART,
        "--accuracy",
        0.01,
        "--rounds",
        5,
        "--json",
        tmp_path / "p.json",
        "--plot",
        tmp_path / "p.html",
    )
    assert result.code == 0 and "Theory allows alpha" in result.out
    found = json.loads((tmp_path / "p.json").read_text())
    assert 0 < found["alpha"] < 1 and found["rounds"] <= 5 and len(found["options"]) == 21
    page = (tmp_path / "p.html").read_text()
    assert "bound" in page and "measured" in page


def test_plan_for_megabytes_and_diana_draws_diana_and_gives_a_command_that_runs(command, tmp_path):
    place = tmp_path / "p.html"
    result = command(
        "plan", *HEART, "--accuracy", 0.01, "--budget-mb", 0.2, "--solver", "diana", "--compressor", "natural",
        "--plot", place,
    )  # fmt: skip
    words = " ".join(result.out.split())
    assert result.code == 0 and "Theory allows alpha" in words
    assert "diana with natural" in place.read_text() and "bound on the mean" in place.read_text()
    asked = words.split("coterie fit ... ")[1].split()
    again = command("fit", *HEART, *asked, "--out", tmp_path / "run")
    assert again.code == 0, again.err
    ledger = polars.read_parquet(tmp_path / "run" / "ledger.parquet").filter(polars.col("kind") != "evaluate")
    spent = int(ledger["bytes_up"].sum() + ledger["bytes_down"].sum())
    assert f"{spent / 1e6:.4f} MB" in words and spent <= 0.2e6


def test_fit_keeps_the_budget_to_the_byte(command, tmp_path):
    spent = {}
    for budget in (0.02, 0.03):
        out = tmp_path / f"run-{budget}"
        result = command(
            "fit", *HEART, "--algorithm", "flix", "--l2", 0.1, "--budget-mb", budget, "--out", out,
            "--set", "solver=diana", "--set", "compressor=rand-3",
        )  # fmt: skip
        assert result.code == 0, result.err
        ledger = polars.read_parquet(out / "ledger.parquet").filter(polars.col("kind") != "evaluate")
        bytes_used = int(ledger["bytes_up"].sum() + ledger["bytes_down"].sum())
        last = ledger.filter(polars.col("round") == ledger["round"].max())
        one_more = int(last["bytes_up"].sum() + last["bytes_down"].sum())
        assert bytes_used <= 1e6 * budget < bytes_used + one_more
        spent[budget] = bytes_used
    assert spent[0.03] > spent[0.02]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--algorithm", "flix", "--budget-mb", 0.0001), "too small"),
        (("--algorithm", "ditto", "--budget-mb", 5), "is for flix"),
        (("--algorithm", "flix", "--budget-mb", 5, "--accuracy", 0.01), "both say when to stop"),
        (("--algorithm", "flix", "--set", "alpha=1.2"), "at most 1"),
        (("--algorithm", "flix", "--set", "solver=dcgd", "--set", "compressor=rand-99"), "choose k from 1"),
        (("--algorithm", "flix", "--l2", 0.1, "--set", "lr=1000"), "diverges"),
    ],
)
def test_bad_input_ends_with_code_2_and_a_sentence(command, tmp_path, arguments, message):
    result = command("fit", *HEART, "--out", tmp_path / "run", *arguments)
    assert result.code == 2 and message in " ".join(result.err.split())


def test_a_plan_without_strong_convexity_is_refused(command):
    result = command("plan", *HEART, "--accuracy", 1e-9, "--l2", 0)
    assert result.code == 2 and ("strongly convex" in result.err or "no minimiser" in result.err)
