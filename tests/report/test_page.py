"""The report as text: what it says, what it refuses, how large it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import coterie
from coterie._core.errors import RunError
from coterie.report.numbers import show_gain
from coterie.report.page import contents, report, write_report

if TYPE_CHECKING:
    from tests.conftest import Command


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_comparison_is_scored_by_the_mean_over_its_seeds(comparison: Path) -> None:
    page = contents([comparison])
    rows = {row["algorithm"]: row for row in json.loads((comparison / "compare.json").read_text())["rows"]}
    for shown in page["side_by_side"]:
        row = rows[shown["label"]]
        assert shown["mean"] == f"{100 * row['mean']:.1f} %"
        assert shown["worst"] == f"{100 * row['worst']:.1f} %"
        if shown["label"] != "local":
            assert shown["improved"] == f"{row['improved'] / 25:.0f}"
            assert shown["gain"] == show_gain("loss", row["gain"], unit=False)
            assert shown["interval"].startswith(show_gain("loss", row["gain_low"], unit=False))
    assert (
        page["main"].algorithm
        == min(
            (run for run in page["runs"] if not run.alone), key=lambda run: run.validation_cost()
        ).algorithm
    )


def test_one_file_without_network_and_one_plotly(comparison: Path) -> None:
    page = report([comparison])
    assert page.count("plotly.js v") == 1
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", ours)
    assert "default-src 'none'" in page


def test_names_cannot_break_the_page(twelve: Path) -> None:
    page = report([twelve / "cobo"])
    assert page.count("</script>") == 3
    assert "</script><b>7</b> & 'co'" in embedded(page)["names"]


def test_a_run_alone_beside_is_found(twelve: Path) -> None:
    page = contents([twelve / "cobo"])
    assert [run.label for run in page["runs"]] == ["cobo", "local"]
    data = json.loads(str(page["data"]))
    together, alone = page["runs"]
    gain = np.array(data["runs"][0]["gain"])
    difference = together.scores - alone.scores
    assert np.ptp(gain) < np.ptp(difference), "drawn together"
    assert gain.mean() == pytest.approx(difference.mean(), abs=0.03)


def test_without_a_run_alone_it_says_what_is_missing(tmp_path: Path, command: Command) -> None:
    table = ("heart_disease", "--client", "hospital", "--target", "sick", "--rounds", 3)
    shown = command("fit", *table, "--out", tmp_path / "ditto" / "run")
    assert shown.code == 0 and "report.html" in shown.out
    page = (tmp_path / "ditto" / "run" / "report.html").read_text(encoding="utf-8")
    assert "not yet compared with training alone" in page
    command_shown = re.search(r"coterie fit heart_disease [^,]*--algorithm local --out FOLDER", page)
    assert command_shown is not None
    missing = command_shown[0].replace("FOLDER", str(tmp_path / "alone")).split()[1:]
    assert command(*missing).code == 0
    page = contents([tmp_path / "ditto" / "run", tmp_path / "alone"])
    said = " ".join(page["summary"])
    assert "Ditto is worse than training alone for these clients: the log-loss rises by" in said
    assert "trained again on training and validation rows" in said


def test_the_command_to_repeat_gives_the_same_models(tmp_path: Path, command: Command) -> None:
    fed = coterie.Federation.from_table(
        "heart_disease", "hospital", "sick", drop=["age"], seed=3, dropout=0.2
    )
    method = coterie.algorithms.find("flix")(alpha=(0.1, 0.2, 0.3, 0.4), lr=0.1)
    coterie.fit(fed, method, 3, tmp_path / "first", select="best")
    again = contents([tmp_path / "first"])["repeat"][0]["command"]
    assert command(*again.replace("FOLDER", str(tmp_path / "again")).split()[1:]).code == 0
    models = [(tmp_path / name / "models" / "models.safetensors").read_bytes() for name in ("first", "again")]
    assert models[0] == models[1]


def test_regression_is_in_the_units_of_the_target(tmp_path: Path) -> None:
    table = {"c": [k % 3 for k in range(90)], "x": [float(k % 17) for k in range(90)]}
    table["y"] = [1000 + 50.0 * x + 300 * c + 0.5 for x, c in zip(table["x"], table["c"], strict=True)]
    fed = coterie.Federation.from_table(table, "c", "y")
    for name in ("local", "ditto"):
        coterie.fit(fed, name, 5, tmp_path / name)
    page = contents([tmp_path / "ditto", tmp_path / "local"])
    assert "typically off by" in " ".join(page["summary"])
    assert "lower is better" in page["direction"]
    gains = json.loads(str(page["data"]))["runs"][0]["gain"]
    better = page["runs"][1].scores - page["runs"][0].scores
    assert gains == pytest.approx(better.tolist(), abs=6), "drawn together a little, in units of the target"
    assert "<html" in report([tmp_path / "ditto"])


@pytest.mark.slow
def test_why_auto_chose_is_told(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    coterie.fit(fed, "auto", rounds=3, out=tmp_path / "run")
    why = json.loads((tmp_path / "run" / "choice.json").read_text())["why"]
    shown = contents([tmp_path / "run"])
    assert shown["main"].why == why and why
    assert "Why this method" in report([tmp_path / "run"])


@pytest.mark.slow
def test_auto_in_a_comparison_keeps_its_name(tmp_path: Path) -> None:
    coterie.compare(
        "heart_disease",
        "hospital",
        "sick",
        algorithms=["auto"],
        seeds=1,
        rounds=2,
        budget=1,
        out=tmp_path / "c",
    )
    shown = contents([tmp_path / "c"])
    assert [run.label for run in shown["runs"]] == ["local", "fedavg", "fine-tuned", "auto"]
    assert sum(run.alone for run in shown["runs"]) == 1


def test_trouble_is_in_the_summary(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    coterie.fit(fed, coterie.algorithms.find("local")(lr=1e200), rounds=5, out=tmp_path / "run")
    page = report([tmp_path / "run"])
    assert "not finite numbers" in page and "NaN" not in str(embedded(page)["runs"])


def test_runs_of_other_clients_do_not_share_a_page(comparison: Path, twelve: Path) -> None:
    with pytest.raises(RunError, match="one by one"):
        contents([comparison, twelve / "cobo"])


def test_an_unfinished_run_and_a_wrong_folder(tmp_path: Path, twelve: Path, command: Command) -> None:
    done = command("report", tmp_path / "nothing")
    assert done.code == 2 and "does not exist" in done.err
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "config.toml").write_bytes((twelve / "cobo" / "config.toml").read_bytes())
    done = command("report", copy)
    assert done.code == 2 and "coterie resume" in done.err


def test_report_command_takes_several_runs(twelve: Path, tmp_path: Path, command: Command) -> None:
    done = command(
        "report", twelve / "cobo", twelve / "ifca", twelve / "flix", "--out", tmp_path / "page.html"
    )
    assert done.code == 0 and "page.html" in done.out
    data = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert [run["label"] for run in data["runs"]] == ["cobo", "ifca", "flix", "local"]


@pytest.mark.slow
def test_a_thousand_clients_make_a_small_page(thousand: Path, tmp_path: Path) -> None:
    page = write_report([thousand / "ifca"], tmp_path / "page.html")
    assert page.stat().st_size < 10e6
