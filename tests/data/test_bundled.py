"""The bundled tables are what their README says they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie._core.errors import DataError
from coterie.data import bundled, tables

ORIGINALS = Path(__file__).parents[3] / "shared" / "data" / "heart_disease"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal".split()
WORDS = {
    "cp": {1: "typical", 2: "atypical", 3: "non-anginal", 4: "asymptomatic"},
    "restecg": {0: "normal", 1: "st-t-abnormality", 2: "hypertrophy"},
    "slope": {1: "upsloping", 2: "flat", 3: "downsloping"},
    "thal": {3: "normal", 6: "fixed-defect", 7: "reversible-defect"},
}


def rebuild(folder: Path) -> str:
    """The bundled heart disease table made again from the original files."""
    lines = [",".join(["hospital", *COLUMNS, "sick"])]
    for hospital in HOSPITALS:
        for line in (folder / f"processed.{hospital}.data").read_text().split():
            *values, diagnosis = line.split(",")
            cells = [cell(column, value) for column, value in zip(COLUMNS, values, strict=True)]
            lines.append(",".join([hospital, *cells, str(int(float(diagnosis) > 0))]))
    return "\n".join(lines) + "\n"


def cell(column: str, value: str) -> str:
    if value == "?":
        return ""
    if column in WORDS:
        return WORDS[column][int(float(value))]
    return f"{float(value):.10g}"


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="the original UCI files are not beside the repository")
def test_heart_disease_is_rebuilt_from_the_originals() -> None:
    assert bundled.path("heart_disease").read_text() == rebuild(ORIGINALS)


def test_heart_disease_is_ready_to_use() -> None:
    path = bundled.path("heart_disease")
    frame = tables.read(path)
    spec = tables.check(frame, "hospital", "sick", source=str(path))
    assert spec.task == "binary" and spec.classes == ("0", "1")
    assert set(spec.categories) == set(WORDS)
    assert set(spec.numeric) == set(COLUMNS) - set(WORDS)
    _, names, sizes = tables.by_client(frame, "hospital")
    assert dict(zip(names, sizes, strict=True)) == dict(zip(HOSPITALS, (303, 294, 123, 200), strict=True))


def test_names_and_unknown_name() -> None:
    assert bundled.names() == ["clinics", "heart_disease"]
    with pytest.raises(DataError, match=r"heart_diseas'.*Did you mean 'heart_disease'"):
        bundled.path("heart_diseas")


def test_every_table_is_attributed() -> None:
    readme = bundled.path("heart_disease").with_name("README.md").read_text()
    for name in bundled.names():
        assert f"{name}.csv" in readme


def test_a_bundled_table_is_given_and_remembered_by_name():
    from coterie import Federation

    fed = Federation.from_table("heart_disease", client="hospital", target="sick")
    assert fed.table.options["source"] == "heart_disease"
    assert bundled.recorded("other.csv").endswith("/other.csv")
