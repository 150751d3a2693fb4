"""Commands for after training: report, predict, export and adapt."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie._core import files
from coterie._core.errors import CoterieError, SettingError
from coterie.cli import console
from coterie.cli.arguments import (
    JsonOption,
    RunArgument,
    TableArgument,
    find_table,
    require_place,
    write_json,
)
from coterie.report.page import write_report
from coterie.report.tables import adapted_table, prediction_notes
from coterie.train.adapt import adapt as find_models
from coterie.train.export import export as write
from coterie.train.folder import RunFolder
from coterie.train.predict import Predictor


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="folders written by `coterie fit --out` or `coterie compare --out`"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="page to write; report.html in the first folder if not given"),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="show quality by the values of this column too (may be repeated)"
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(metavar="P", help="two classes: probability from which a row is called positive")
    ] = 0.5,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="also print it to PDF with an installed browser")
    ] = False,
) -> None:
    """Write a web page about one or more runs: how good, who gained, who lost, who is served worse, and the cost.

    The page needs no network. Gains are relative to a run of the method `local`.

    Name one, or keep it beside the first run, where it is found by itself.
    """
    require_place(out)
    page = write_report(runs, out, by=by or (), threshold=threshold, pdf=pdf)
    printed = f" and {page.with_suffix('.pdf').name}" if pdf else ""
    console.show(f"Report written to {page}{printed}")


def predict(
    run: RunArgument,
    table: TableArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV or Parquet file; printed as CSV if not given")
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            metavar="T,T,...", help="survival: times at which to tell the probability of no event yet"
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Predict new rows, each with its client's model.

    A client not seen in training gets the common model and a warning.
    """
    source = find_table(table)
    for place in (out, json):
        require_place(place, other_than=source)
    if out is not None and out.suffix not in (".csv", ".parquet", ".pq"):
        raise SettingError(f"--out {out}: give it a name that ends in .csv or .parquet")
    predictor = Predictor.load(run)
    predictions = predictor(source, None if times is None else _times(times))
    console.notes(prediction_notes(predictions, predictor.client_output))
    write_json(json, [_json_row(row) for row in predictions.iter_rows(named=True)])
    if out is None:
        typer.echo(predictions.write_csv(), nl=False)
        return
    files.write_with(out, predictions.write_csv if out.suffix == ".csv" else predictions.write_parquet)
    console.show(f"{len(predictions)} predictions written to {out}")


def _json_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with null for numbers that JSON has not."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _times(text: str) -> list[float]:
    """Parse the value of `--times`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"--times {text!r}: write numbers with commas, such as 30,365") from None


def export(
    run: RunArgument,
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="safetensors, onnx, torchscript, csv or lightgbm")
    ],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="client whose model to export; the common model if not given"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write; in the run's folder if not given")
    ] = None,
) -> None:
    """Export a client's model with its preprocessing; csv is for linear models, lightgbm for trees."""
    require_place(out)
    console.show(
        f"{f'Model of {client}' if client else 'Common model'} written to {write(run, client, to, out)}"
    )


def adapt(
    run: RunArgument,
    table: TableArgument,
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="name of the new client if the table has no client column"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder to write; in the run's folder if not given")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Give clients not seen in training their own models, without retraining the others.

    The new folder works with `coterie predict` and `coterie export` for old and new clients.
    """
    require_place(json)
    source = find_table(table)
    place = run / "adapted" / Path(source).name.partition(".")[0] if out is None else out
    RunFolder.require_free(place)
    found = find_models(run, source, client)
    console.show(adapted_table(found), f"Models of old and new clients: {found.save(place, run)}")
    write_json(json, found.frame().to_dicts())


def report_beside(folder: Path) -> None:
    """Write report.html into a folder that has none, if plotly and jinja2 are installed."""
    if not (folder / "report.html").exists() and all(
        importlib.util.find_spec(name) for name in ("plotly", "jinja2", "polars")
    ):
        try:
            console.show(f"Report: {write_report([folder])}")
        except CoterieError as problem:
            console.notes([f"No report was written: {problem}"])
