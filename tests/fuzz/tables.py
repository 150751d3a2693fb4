"""Random tables: sound, odd and damaged ones, each made from a number, so that any of them can be made again."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import random
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl

TEXTS = [
    *(
        "",
        " ",
        "NA",
        "null",
        "nan",
        "None",
        "?",
        "-",
        ".",
        "0",
        "1",
        "01",
        "1.0",
        "-0",
        "1e400",
        "0x10",
        "True",
    ),
    *(
        "é",
        "日本",
        "🙂",
        "e\u0301",
        "\u202eevil",
        "\ufeffbom",
        "\u00a0",
        "ß",
        "İ",
        "\x07",
        "\x1b[31mred",
        "a\x00b",
    ),
    *(
        "a,b",
        'say "hi"',
        "new\nline",
        "a\rb",
        "tab\there",
        ";",
        "|",
        "'",
        "x" * 400,
        "=1+1",
        "--out",
        "../../x",
    ),
    *("<script>alert(1)</script>", "[bold]rich[/bold]", "[/x]", "{{7*7}}", "%s%n", "$(touch pwned)", "con"),
    *("other", "missing", "row", "client", "prediction", "warning", "y_missing"),
]
DATES = (
    "%Y-%m-%d",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d.%m.%Y",
    "%d %b %Y",
    "%Y-%m-%dT%H:%M:%S",
    "%Y%m%d",
    "%m/%d/%y",
)
Cell = Callable[[random.Random, int], str]


def _date(code: str) -> Cell:
    return lambda draw, _: (date(2020, 1, 1) + timedelta(days=draw.randrange(2000))).strftime(code)


CELLS: dict[str, Cell] = {
    "number": lambda draw, _: repr(round(draw.gauss(0, 10), 3)),
    "whole": lambda draw, _: str(draw.randint(-5, 5)),
    "large": lambda draw, _: repr(draw.gauss(0, 1) * 10 ** draw.randint(-300, 300)),
    "level": lambda draw, _: draw.choice("abcde"),
    "flag": lambda draw, _: draw.choice(("true", "false")),
    "yes": lambda draw, _: draw.choice(("yes", "no")),
    "key": lambda _, k: f"P-{k:05}",
    "row": lambda _, k: str(k),
    "text": lambda draw, _: " ".join(draw.choice(("the", "pain", "left", "no", "of")) for _ in range(9)),
    "wild": lambda draw, _: draw.choice(TEXTS),
    "mixed": lambda draw, _: draw.choice(("1", "x", "", "2.5", "NA", "<3")),
    "huge": lambda draw, _: draw.choice(("1e308", "-1e308", "1e-320", "5", "inf", "-inf", "nan", "9" * 40)),
    "same": lambda *_: "7",
    "nothing": lambda *_: "",
    "thousands": lambda draw, _: f"{draw.randrange(10**6):,}",
    "percent": lambda draw, _: f"{draw.randrange(100)} %",
    "money": lambda draw, _: f"${draw.randrange(10**4) / 100}",
    "bound": lambda draw, _: draw.choice(("", "<", ">=")) + str(draw.randrange(9)),
    "comma": lambda draw, _: f"{draw.randrange(10**4) / 100}".replace(".", ","),
    "time": lambda draw, _: f"{draw.randrange(26):02}:{draw.randrange(60):02}",
    **{f"date {code}": _date(code) for code in DATES},
}
USUAL = ("number", "number", "whole", "level", "flag")
TARGETS = ("yes", "yes", "level", "number", "whole", "flag")


def rows(draw: random.Random, wild: bool) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a table with the columns `site` and `y`."""
    count = draw.choice((1, 2, 3, 5, 10, 30, 60) if wild else (12, 24, 48, 96))
    clients = draw.choice((1, 2, 3, 4, 6, count))
    sites = [draw.choice(TEXTS) if draw.random() < 0.3 * wild + 0.05 else f"c{k}" for k in range(clients)]
    names, kinds = [], []
    for k in range(draw.choice((0, 1, 2, 3, 4, 6) if wild else (1, 2, 3, 4))):
        names.append(draw.choice(TEXTS) if draw.random() < 0.15 else f"f{k}")
        kinds.append(draw.choice(list(CELLS)) if draw.random() < 0.2 + 0.5 * wild else draw.choice(USUAL))
    target = draw.choice(list(CELLS)) if draw.random() < 0.3 * wild else draw.choice(TARGETS)
    gap = draw.choice((0.0, 0.0, 0.05, 0.5))
    skew = draw.random() < 0.3

    def cell(kind: str, k: int) -> str:
        return "" if draw.random() < gap else CELLS[kind](draw, k)

    table = []
    for k in range(count):
        site = sites[0 if skew and k > clients else k % clients]
        table.append([site, *(cell(kind, k) for kind in kinds), CELLS[target](draw, k)])
    if not wild and draw.random() < 0.3:
        table = [[site, *(other_units(draw, row) if site == sites[0] else row)] for site, *row in table]
    return ["site", *names, "y"], table


def other_units(draw: random.Random, row: list[str]) -> list[str]:
    """The row of a client in other units."""
    return [
        f"{float(cell) * 1000}" if cell.lstrip("-").replace(".", "", 1).isdigit() else cell for cell in row
    ]


def as_text(draw: random.Random, header: list[str], table: list[list[str]], wild: bool) -> bytes:
    """Delimited text in some dialect and encoding, sometimes damaged."""
    delimiter = draw.choice(",,,,;\t|") if wild else ","
    stream = io.StringIO()
    if wild and draw.random() < 0.15:
        stream.write("\n".join(delimiter.join(row) for row in (header, *table)))
    else:
        ending = draw.choice(("\n", "\n", "\r\n"))
        quoting = draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        csv.writer(stream, delimiter=delimiter, lineterminator=ending, quoting=quoting).writerows(
            (header, *table)
        )
    encoding = draw.choice(("utf-8",) * 8 + ("utf-8-sig", "latin-1", "utf-16", "cp1252")) if wild else "utf-8"
    data = stream.getvalue().encode(encoding, "replace")
    return damaged(draw, data) if wild and draw.random() < 0.2 else data


def damaged(draw: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, put in, taken out or cut off."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at, kind = draw.randrange(len(found) + 1), draw.random()
        if kind < 0.5 and at < len(found):
            found[at] = draw.randrange(256)
        elif kind < 0.7:
            found[at:at] = bytes([draw.choice((0, 10, 13, 34, 44, 255))] * draw.choice((1, 1, 500)))
        elif kind < 0.9:
            del found[at : at + draw.randint(1, 30)]
        else:
            del found[at:]
    return bytes(found)


def as_frame(draw: random.Random, header: list[str], table: list[list[str]]) -> pl.DataFrame:
    """A frame whose columns have all sorts of types."""
    columns: dict[str, pl.Series] = {}
    for k, name in enumerate(header):
        while name in columns:
            name += "_"
        cells, kind = [row[k] for row in table], draw.random()
        series = pl.Series(name, cells)
        if kind < 0.5:
            number = series.cast(pl.Float64, strict=False)
            series = number if number.null_count() < len(number) else series
        elif kind < 0.62:
            odd: list[Any] = [[1, 2], {"a": 1}, b"\x00\xff", None, timedelta(days=k), date(2024, 1, 1)]
            series = pl.Series(name, [draw.choice(odd)] * len(cells))
        elif kind < 0.7:
            series = series.cast(pl.Categorical)
        columns[name] = series.alias(name)
    return pl.DataFrame(list(columns.values()))


def make(folder: Path, number: int) -> Path:
    """Write table `number` into a folder and return its path."""
    draw = random.Random(f"table {number}")
    wild = draw.random() < 0.5
    header, table = rows(draw, wild)
    kind = draw.random()
    if kind < 0.7:
        path, data = folder / f"t{number}.csv", as_text(draw, header, table, wild)
    elif kind < 0.82:
        suffix, pack = draw.choice(((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)))
        path, data = folder / f"t{number}.csv{suffix}", pack(as_text(draw, header, table, wild))
    else:
        path, stream = folder / f"t{number}.parquet", io.BytesIO()
        as_frame(draw, header, table).write_parquet(stream)
        data = stream.getvalue()
    packed = path.suffix != ".csv"
    path.write_bytes(damaged(draw, data) if packed and draw.random() < 0.25 else data)
    return path
