"""What columns hold: formats of numbers and dates, identifiers, free text, leaks; decided from sums of clients."""

from __future__ import annotations

import functools
import json
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie._core.errors import DataError
from coterie.data import column_formats, federated, tables
from coterie.data.column_facts import ColumnFacts, facts
from coterie.data.column_readings import read
from coterie.data.describe import describe
from coterie.data.federated import Roles
from coterie.data.preprocess import Preprocessor, local_statistics
from coterie.deploy import descriptions
from coterie.deploy.wire import WireError
from coterie.train.export import export

ROWS = 400


def hospital(**more: Any) -> pl.DataFrame:
    """Rows of five clients with one column of every kind."""
    draw = random.Random(3)
    rows = range(ROWS)
    age = [draw.gauss(60, 15) for _ in rows]
    sick = [int(draw.random() < (0.8 if one > 60 else 0.2)) for one in age]
    words = "patient reports pain in the left leg and no fever today".split()
    return tables.read(
        {
            "site": [f"h{k % 5}" for k in rows],
            "patient": [f"P-{k:04}" for k in rows],
            "mrn": [draw.randrange(10**7, 10**8) for _ in rows],
            "line": list(rows),
            "admitted": [f"{draw.randint(1, 28):02}/{draw.randint(1, 12):02}/2023" for _ in rows],
            "cost": [f"${draw.randrange(500, 90_000):,}" for _ in rows],
            "rate": [f"{draw.randrange(100)} %" for _ in rows],
            "crp": [draw.choice(("<0.3", str(round(9 * draw.random(), 1)))) for _ in rows],
            "weight": [f"{draw.randrange(40, 120)},{draw.randrange(10)}" for _ in rows],
            "note": [" ".join(draw.choice(words) for _ in range(8)) for _ in rows],
            "ward": [draw.choice(("er", "icu")) if k % 50 else f"room {k}" for k in rows],
            "died": [("alive", "dead")[one] for one in sick],
            "number": [k % 5 + 1 for k in rows],
            "postcode": [f"{draw.randrange(300)} Road" for _ in rows],
            "age": age,
            "sick": sick,
            **more,
        }
    )


def test_a_column_of_every_kind() -> None:
    spec = tables.check(hospital(), "site", "sick")
    assert {one.column: one.kind for one in spec.readings} == {
        "patient": "identifier",
        "mrn": "identifier",
        "line": "identifier",
        "admitted": "date",
        "cost": "number",
        "rate": "number",
        "crp": "number",
        "weight": "number",
        "note": "free text",
        "ward": "category",
        "died": "target copy",
        "number": "client code",
        "postcode": "category",
        "age": "number",
    }
    assert spec.formats == {
        "admitted": "dd/mm/yyyy",
        "cost": "number $",
        "rate": "number %",
        "crp": "number",
        "weight": "decimal comma",
    }
    assert set(spec.left_out) == {"patient", "mrn", "line", "note", "died", "number"}
    assert any("identifiers of rows: 'patient', 'mrn', 'line'" in warning for warning in spec.warnings)
    kept = tables.check(hospital(), "site", "sick", keep=["mrn", "note", "died"], drop=["age"])
    assert {"mrn"} <= set(kept.numeric) and {"note", "died"} <= set(kept.categories)
    assert "age" not in kept.numeric
    with pytest.raises(DataError, match="no kept column 'nmr'"):
        tables.check(hospital(), "site", "sick", keep=["nmr"])
    with pytest.raises(DataError, match="'age' was given two roles"):
        tables.check(hospital(), "site", "sick", keep=["age"], drop=["age"])


def test_rare_levels_and_identifiers_are_in_no_file(tmp_path: Path) -> None:
    fed = coterie.Federation.from_table(hospital(), "site", "sick")
    assert fed.d < 60
    coterie.fit(fed, "ditto", rounds=2, out=tmp_path / "run")
    for to in ("csv", "safetensors", "torchscript", "onnx"):
        export(tmp_path / "run", "h1", to)
    for path in (tmp_path / "run").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for word in (b"P-0", b"room ", b"patient reports", b"left leg"):
            assert word not in data, (path, word)
    frame = fed.table.preprocessor
    (ward,) = (choice for choice in frame.choices if choice.name == "ward")
    assert ward.levels == ("er", "icu") and ward.other and "ward=other" in frame.feature_names
    new = hospital().head(3).with_columns(ward=pl.Series(["icu", "room 77", None]))
    place = frame.feature_names.index("ward=er")
    assert frame.encode(new)[:, place : place + 3].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_levels_need_rows_and_clients() -> None:
    column = ["both"] * 10 + ["few"] * 8 + ["one client"] * 12
    site = ["a", "b"] * 5 + ["a", "b"] * 4 + ["a"] * 12
    frame = tables.read(
        {"site": site, "word": column, "x": list(np.arange(30) / 7), "y": list(np.arange(30) % 2)}
    )
    spec = tables.check(frame, "site", "y")

    def levels(*fewest: int) -> tuple[str, ...]:
        fitted = Preprocessor.from_statistics(
            spec, local_statistics(frame, spec), fewest=(fewest[0], fewest[1])
        )
        return fitted.choices[0].levels

    assert levels(5, 2) == ("both", "few") and levels(9, 2) == ("both",)
    assert levels(9, 1) == ("both", "one client") and levels(1, 1) == ("both", "few", "one client")


def parts(frame: pl.DataFrame) -> list[pl.DataFrame]:
    return frame.partition_by("site", maintain_order=True)


def test_nodes_that_send_sums_decide_like_one_table() -> None:
    frame, roles = hospital(), Roles("site", "sick", keep=("mrn",))
    told = {part["site"][0]: federated.describe(part, roles, "x") for part in parts(frame)}
    told = json.loads(json.dumps(told))
    merged, whole = federated.merge(told, roles), tables.check(frame, "site", "sick", keep=["mrn"])
    assert merged == whole and merged.formats == whole.formats and merged.left_out == whole.left_out
    sums = [
        federated.statistics_from_json(
            json.loads(json.dumps(federated.statistics_to_json(local_statistics(part, merged)))), merged
        )
        for part in parts(frame)
    ]
    together = Preprocessor.from_statistics(merged, functools.reduce(lambda a, b: a.merge(b), sums))
    pooled = Preprocessor.from_statistics(whole, local_statistics(frame, whole))
    assert together.feature_names == pooled.feature_names
    torch.testing.assert_close(together.encode(frame), pooled.encode(frame), rtol=1e-9, atol=1e-9)


def test_facts_add_up_and_nonsense_is_refused() -> None:
    frame = hospital()
    owner, target = np.arange(ROWS) % 5, frame["sick"].to_numpy().astype(float)
    for name in frame.columns[1:-1]:
        whole = facts(frame, name, owner, target, True)
        some = [
            facts(frame[np.flatnonzero(owner == k)], name, np.zeros(80, int), target[owner == k], True)
            for k in range(5)
        ]
        merged = functools.reduce(ColumnFacts.merge, some)
        for field, value in whole.to_json().items():
            close = value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-6)
            assert merged.to_json()[field] == close, (name, field)
        assert read({name: merged}) == read({name: whole})
        stored = whole.to_json()
        assert ColumnFacts.from_json(json.loads(json.dumps(stored))) == whole
        wrong_formats = {"formats": {"number": "x"}}
        for wrong in ({"rows": -1}, {"rows": 2**63}, {"xy": float("nan")}, {"kind": "evil"}, wrong_formats):
            with pytest.raises(ValueError, match="facts of a column"):
                ColumnFacts.from_json(stored | wrong)
    with pytest.raises(ValueError, match="malformed"):
        ColumnFacts.from_json({"kind": "numeric"})


@pytest.mark.parametrize(
    ("values", "chosen", "parsed"),
    [
        (["1,005", "2,300", "7"], "number", [1005.0, 2300.0, 7.0]),
        (["1.005,5", "2,25"], "decimal comma", [1005.5, 2.25]),
        (["5 %", "7%", "3"], "number %", [5.0, 7.0, 3.0]),
        (["<0.3", "0.5", ">= 10"], "number", [0.3, 0.5, 10.0]),
        (["$3", "$ 4.50", "-5"], "number $", [3.0, 4.5, -5.0]),
        (["3 €", "1.000 €", "2,5 €"], "decimal comma €", [3.0, 1000.0, 2.5]),
        (["1'000", "2\u202f000.5"], "number", [1000.0, 2000.5]),
        (["<50", ">=50", "<50"], None, []),
        (["$3", "€4"], None, []),
        (["120/80", "130/85"], None, []),
        (["10:30", "1:30 PM"], "hh:mm", [10.5 / 24, 13.5 / 24]),
        (["31/02/2024", "01/02/2024"], None, []),
        (["ward 3", "ward 4"], None, []),
    ],
)
def test_formats(values: list[str], chosen: str | None, parsed: list[float]) -> None:
    found = column_formats.choose(column_formats.count(pl.Series(values)), len(values))
    assert (found and found[0]) == chosen
    if chosen:
        assert column_formats.parse(pl.Series(values), chosen).to_list() == pytest.approx(parsed)


def test_a_time_with_a_zone_is_the_moment() -> None:
    written = ["2024-03-01T01:30:00+02:00", "2024-02-29 18:30 -05:00", "2024-02-29T23:30:00Z"]
    found = column_formats.parse(pl.Series(written), "yyyy-mm-dd").to_list()
    assert found == pytest.approx([19783 - 0.5 / 24] * 3, rel=0, abs=1e-6)


@settings(max_examples=40)
@given(
    st.lists(st.datetimes(datetime(1950, 1, 1), datetime(2049, 12, 31)), min_size=25, max_size=40),
    st.sampled_from(
        [
            ("%d/%m/%Y", {"dd/mm/yyyy"}),
            ("%m/%d/%Y %H:%M", {"mm/dd/yyyy"}),
            ("%d.%m.%Y %H:%M:%S", {"dd.mm.yyyy"}),
            ("%Y/%m/%d", {"yyyy/mm/dd"}),
            ("%d %b %Y", {"dd Mon yyyy"}),
            ("%B %d, %Y", {"Mon dd, yyyy"}),
            ("%Y-%m-%dT%H:%M:%SZ", {"yyyy-mm-dd"}),
        ]
    ),
)
def test_dates_come_back(moments: list[datetime], written: tuple[str, set[str]]) -> None:
    code, names = written
    texts = [moment.strftime(code) for moment in moments]
    found = column_formats.choose(column_formats.count(pl.Series(texts)), len(texts))
    assert found is not None
    name, exchangeable = found
    if exchangeable:
        return  # no day after the 12th: nobody can tell
    assert name in names
    back = [datetime.strptime(text, code) for text in texts]
    expected = [(moment - datetime(1970, 1, 1)) / timedelta(days=1) for moment in back]
    assert column_formats.parse(pl.Series(texts), name).to_list() == pytest.approx(expected, abs=1e-9)


def test_a_date_that_cannot_be_told_is_said_and_words_among_numbers_are_missing() -> None:
    few = [f"{k % 12 + 1:02}/{k % 11 + 1:02}/2024" for k in range(ROWS)]
    almost = ["pending" if k % 100 == 0 else f"{k % 37}.5" for k in range(ROWS)]
    spec = tables.check(hospital(seen=few, lab=almost), "site", "sick")
    assert spec.formats["seen"] == "dd/mm/yyyy" and spec.formats["lab"] == "number"
    said = " ".join(spec.warnings)
    assert "Column 'seen': day and month could be exchanged; dd/mm/yyyy is assumed" in said
    assert "Column 'lab': 4 values are not written so and count as missing" in said


def test_a_column_that_is_mostly_numbers_is_no_category_of_many_levels() -> None:
    """A laboratory value in one decimal sign, with a fifth of the values in words; codes that repeat stay levels."""
    draw = random.Random(5)
    crp = [draw.choice(("neg", "<0.3")) if k % 5 == 0 else f"{90 * draw.random():.2f}" for k in range(ROWS)]
    crp = [one if one == "<0.3" else one.replace(".", ",") for one in crp]
    codes = [draw.choice(("428.0", "V45.8", "250.1", "401.9", "E11")) for _ in range(ROWS)]
    spec = tables.check(hospital(crp=crp, codes=codes), "site", "sick")
    readings = {one.column: one for one in spec.readings}
    assert (readings["crp"].kind, readings["crp"].format) == ("number", "decimal comma")
    assert readings["codes"].kind == "category"
    unread = sum(one in ("neg", "<0.3") for one in crp)
    assert any("'crp'" in said and f"{unread} values" in said for said in spec.warnings)


def test_a_description_says_what_is_a_bound_unreadable_or_left_out() -> None:
    bounds = ["<0.3" if k % 5 == 0 else f"{k % 37}.5" for k in range(ROWS)]
    almost = ["pending" if k % 100 == 0 else f"{k % 37}.5" for k in range(ROWS)]
    frame = hospital(crp=bounds, lab=almost).with_columns(code=pl.col("site").cast(pl.String) + "x")
    told = describe(frame, tables.check(frame, "site", "sick"))
    found = {one["column"]: one for one in told["columns"]}
    assert f"{ROWS // 5} written as bounds" in found["crp"]["why"] and found["crp"]["missing_percent"] == 0
    assert found["lab"]["missing_percent"] == pytest.approx(100 * 4 / ROWS)
    assert found["code"]["used"] is False and "of one client only" in found["code"]["why"]


def test_dates_are_described_as_dates_however_they_are_written() -> None:
    moments = [datetime(2024, 1, 1) + timedelta(hours=5 * k) for k in range(ROWS)]
    frame = hospital(
        stamp=[f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in moments], day=[f"{one:%d.%m.%Y}" for one in moments]
    )
    told = {one["column"]: one for one in describe(frame, tables.check(frame, "site", "sick"))["columns"]}
    assert (told["stamp"]["read_as"], told["day"]["read_as"]) == ("date", "date dd.mm.yyyy")
    assert (told["age"]["read_as"], told["cost"]["read_as"]) == ("number", "number $")
    assert told["stamp"]["mean"] == pytest.approx(told["day"]["mean"], abs=1)


def test_an_id_of_few_values_is_a_category_and_long_numbers_stay_apart() -> None:
    wards = hospital(ward_id=[f"w{k % 7}" for k in range(ROWS)])
    assert "ward_id" in tables.check(wards, "site", "sick").categories
    long = tables.read({"site": ["90071992547409930001", "90071992547409930002"], "y": [0, 1]})
    assert tables.by_client(long, "site")[1] == ["90071992547409930001", "90071992547409930002"]


def test_a_format_is_remembered_for_new_rows(tmp_path: Path) -> None:
    run = coterie.fit(coterie.Federation.from_table(hospital(), "site", "sick"), "local", rounds=2)
    new = (
        hospital()
        .head(2)
        .with_columns(admitted=pl.Series(["01/02/2023", "2023-02-01"]), cost=pl.Series([7, 8]))
    )
    found = run.predict(new)
    assert found.columns[:5] == ["row", "patient", "mrn", "line", "site"] and found["row"].to_list() == [1, 2]
    assert found["patient"].to_list() == ["P-0000", "P-0001"]


@pytest.mark.parametrize(("values", "hinted"), [(range(11), True), (range(3), False), ("abcdefg", False)])
def test_a_target_of_whole_numbers_gets_a_hint(values: Any, hinted: bool) -> None:
    target = [list(values)[k % len(values)] for k in range(ROWS)]
    frame = hospital(sick=target)
    said = " ".join(tables.check(frame, "site", "sick", drop=["died"]).warnings)
    assert ("--task regression" in said) == hinted
    if hinted:
        assert "--task" not in " ".join(tables.check(frame, "site", "sick", task="regression").warnings)


def euros(value: float) -> str:
    return f"{value:,.2f} €".replace(",", "x").replace(".", ",").replace("x", ".")


def test_a_target_that_is_written_as_amounts_is_a_quantity() -> None:
    amounts = [400 + 7.35 * k for k in range(ROWS)]
    plain = hospital(sick=amounts).drop("died")
    written = plain.with_columns(sick=pl.Series([euros(value) for value in amounts]))
    spec = tables.check(written, "site", "sick")
    assert spec.task == "regression" and spec.formats["sick"] == "decimal comma €"
    assert any("'sick' is read as a quantity, written as decimal comma €" in said for said in spec.warnings)
    usual = tables.check(plain, "site", "sick")
    assert (spec.numeric, spec.left_out) == (usual.numeric, usual.left_out)
    one, other = (
        Preprocessor.from_statistics(these, local_statistics(frame, these))
        for these, frame in ((spec, written), (usual, plain))
    )
    one = Preprocessor.from_json(json.loads(json.dumps(one.to_json())))
    assert one.encode_target(written).tolist() == pytest.approx(other.encode_target(plain).tolist())
    assert one.encode_target(written[200:201]).tolist() == pytest.approx(
        other.encode_target(plain[200:201]).tolist()
    )
    assert describe(written, spec)["per_client"][0]["target_mean"] == pytest.approx(
        describe(plain, usual)["per_client"][0]["target_mean"]
    )
    assert tables.check(written[:300], "site", "sick", task="classification").task == "multiclass"
    categorical = written.with_columns(pl.col("sick").cast(pl.Categorical))
    assert tables.check(categorical, "site", "sick") == spec
    assert one.encode_target(categorical).equal(one.encode_target(written))


def test_nodes_agree_on_how_a_target_is_written() -> None:
    written = hospital(sick=[euros(400 + 7.35 * k) for k in range(ROWS)]).drop("died")
    roles = Roles("site", "sick")
    told = {part["site"][0]: federated.describe(part, roles, "x") for part in parts(written)}
    told = json.loads(json.dumps(told))
    assert federated.merge(told, roles) == tables.check(written, "site", "sick")
    for one in told.values():
        descriptions.require(one)
    told["h3"]["target"]["formats"] = ["number $"]
    notes: list[str] = []
    assert "h3" not in descriptions.agreed(told, {}, roles, notes.append)
    assert notes == [
        "h3 is left out: its target 'sick' is written as number $, and as decimal comma € at most nodes"
    ]
    told["h3"]["target"]["formats"] = ["evil"]
    with pytest.raises(WireError, match="formats of the target"):
        descriptions.require(told["h3"])


@pytest.mark.parametrize(
    ("values", "task", "said"),
    [
        (["10 %", "20 %", "30 %"], "multiclass", ""),
        (["10 %", "20 %", "30 %", "40 %", "50 %"], "multiclass", "5 whole numbers"),
        (
            [*(str(k) for k in range(30)), "7 days"],
            "multiclass",
            "31 classes, because 12 values are not written as",
        ),
        (["<50", ">=50", ">90"], "multiclass", ""),
        (["31.12.2023 8:30", "01.02.2024 9:15", "15.06.2024 23:59"], "regression", "dd.mm.yyyy"),
        (["1,005", "2,310.5", "950"], "regression", "number"),
        (["1,005", "2,000e100", "9,999"], "regression", "number"),
        (["<0.3", "1,005", "7.25", "12"], "regression", "number, 100 of them bounds such as <0.3"),
    ],
)
def test_text_in_a_target_is_classes_unless_a_format_reads_all(
    values: list[str], task: str, said: str
) -> None:
    spec = tables.check(
        hospital(sick=[values[k % len(values)] for k in range(ROWS)]).drop("died"), "site", "sick"
    )
    assert spec.task == task
    about = [one for one in spec.warnings if "Target column" in one]
    assert said in " ".join(about) and bool(about) == bool(said)


def test_years_of_a_panel_are_no_identifier_and_numbers_that_are_all_there_is_are_used() -> None:
    states, years = 6, range(1950, 2020)
    rows = [(f"state {k}", year, (7 * year + k) % 11) for k in range(states) for year in years]
    panel = pl.DataFrame(rows, schema=["state", "year", "deaths"], orient="row")
    numbered = panel.with_columns(number=pl.Series([(37 * k) % 421 for k in range(len(panel))]))
    fed = coterie.Federation.from_table(numbered, "state", "deaths")
    assert fed.table.preprocessor.feature_names == ["year"]
    assert any("'number'" in said for said in fed.table.warnings)
    alone = coterie.Federation.from_table(numbered.drop("year"), "state", "deaths")
    assert alone.table.preprocessor.feature_names == ["number"]
    assert any("no other column is left" in said for said in alone.table.warnings)


@pytest.mark.filterwarnings("error")
def test_numbers_too_large_to_square_are_named_without_a_warning_of_numpy() -> None:
    huge = [1e200 * (-1) ** k for k in range(40)]
    rows = {"site": ["a", "b"] * 20, "x": huge, "z": list(range(40)), "y": [one / 2 for one in huge]}
    with pytest.raises(DataError, match="too large to square"):
        coterie.Federation.from_table(rows, "site", "y", task="regression")
