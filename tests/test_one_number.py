"""One number, one place: console, JSON, run folder and report tell the same scores, rounds, bytes and seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from coterie._core.amounts import size
from coterie.report.numbers import show, show_gain
from coterie.report.page import contents

if TYPE_CHECKING:
    from tests.conftest import Command

HEART = ("heart_disease", "--client", "hospital", "--target", "sick")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.quick("division0")
@pytest.mark.parametrize("division", [("--folds", 3), ("--seeds", 2), ()])
def test_a_comparison_tells_the_same_everywhere(
    command: Command, tmp_path: Path, division: tuple[Any, ...]
) -> None:
    out = tmp_path / "out"
    shown = command(
        "compare", *HEART, "--rounds", 6, "--budget", 2, *division, "--json", tmp_path / "json", "--out", out
    )
    assert shown.code == 0, shown.err
    told = read(tmp_path / "json")
    assert told == read(out / "compare.json")
    assert told["verdict"] in shown.out
    page = contents([out])
    main = page["main"]
    sentence = told["verdict"].partition(". ")[2]
    assert sentence in page["summary"] and main.label in told["verdict"]
    by_client = pl.read_parquet(out / "clients.parquet")
    for row, column in zip(told["rows"], page["side_by_side"], strict=True):
        line = next(line for line in shown.out.splitlines() if row["algorithm"] in line.split())
        assert f"{row['mean']:.3f}" in line and column["mean"] == show("accuracy", row["mean"])
        mine = by_client.filter(algorithm=row["algorithm"]).group_by("client").agg(pl.col("accuracy").mean())
        assert row["mean"] == pytest.approx(mine["accuracy"].mean())
        assert column["rounds"] == f"{row['rounds']:.0f}" and column["seconds"] == f"{row['seconds']:.1f}"
        assert column["traffic"] == size(row["mb_up"] + row["mb_down"])
        if row["algorithm"] != "local":
            assert column["gain"] == show_gain("loss", row["gain"], unit=False)
            assert column["improved"] == f"{row['improved'] / 25:.0f}"


@pytest.mark.slow
def test_a_run_tells_the_same_everywhere(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = command(
        "fit", *HEART, "--algorithm", "auto", "--rounds", 9, "--json", tmp_path / "json", "--out", out
    )
    assert shown.code == 0, shown.err
    told, result, choice = read(tmp_path / "json"), read(out / "result.json"), read(out / "choice.json")
    assert told["deployed_round"] == result["deployed_round"]
    assert told["trained_on"] == result["trained_on"] == ["train", "validation"]
    assert round(told["seconds"], 3) == result["seconds"]
    ledger = pl.read_parquet(out / "ledger.parquet")
    ledger = ledger.filter(
        (pl.col("round") <= told["deployed_round"]) & pl.col("kind").is_in(["setup", "train"])
    )
    assert told["mb_up"] == pytest.approx(ledger["bytes_up"].sum() / 1e6)
    page = contents([out])
    said = " ".join(page["summary"])
    run = page["main"]
    assert run.price.rounds == told["deployed_round"] and f"{run.price.seconds:.1f} seconds" in said
    assert run.price.megabytes == pytest.approx(told["mb_up"] + told["mb_down"])
    race = sum(row["megabytes"] for row in choice["race"])
    rounds = sum(row["rounds"] for row in choice["race"])
    assert f"The race that chose them took {rounds:,} rounds and moved {size(race)}" in said
    assert any(f"{rounds} rounds and {size(race)} for all of them together" in line for line in choice["why"])
    assert all(line in shown.out for line in choice["why"])
    metrics = pl.read_parquet(out / "metrics.parquet").filter(split="test", metric="accuracy")
    assert dict(zip(metrics["client"], metrics["value"], strict=True)) == pytest.approx(told["clients"])
    assert told["mean"] == pytest.approx(metrics["value"].mean())
    assert re.search(rf"mean {told['mean']:.3f}", shown.out)
    assert f"{show('accuracy', told['mean'])} of the time" in said
